"""`./dev check` as tests, so that one run of the suite says whether a change may land."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT, load_dev

dev = load_dev()


@pytest.mark.timeout(600)  # types of a whole tree with a cold cache
@pytest.mark.parametrize("check", sorted(dev.CHECKS))
def test_clean(check: str) -> None:
    program, *arguments = dev.CHECKS[check]
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
