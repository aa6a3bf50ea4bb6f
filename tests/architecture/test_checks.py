"""`./dev check` as tests, so that one run of the suite says whether a change may land."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tools.dev import verbs


@pytest.mark.timeout(600)  # types of a whole tree with a cold cache
@pytest.mark.parametrize("check", sorted(verbs.CHECKS))
def test_clean(check: str) -> None:
    program, *arguments = verbs.CHECKS[check]
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
