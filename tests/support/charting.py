"""The chart, rendered by helm: the one on the PATH, or the one of the lab cluster."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

from penstock.core.serialization import yamltext
from tests.support import not_run
from tests.support.repository import ROOT
from tools.lab import build, cache
from tools.lab.console import LabError

CHART = ROOT / "helm" / "penstock"
KUBE_VERSION = "1.36.3"
NAMESPACE = "penstock-system"


@functools.cache
def helm() -> Path:
    """The program, built as the lab builds it if there is none; the test is not run where it cannot be built."""
    found = shutil.which("helm")
    if found is not None:
        return Path(found)
    try:
        with cache.locked():
            return build.built(build.HELM) / "helm"
    except LabError as error:
        not_run.missing("cluster", f"helm is not on the PATH and cannot be built ({error}); the chart is not rendered")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What helm says to these."""
    command = [helm(), *arguments, CHART, "--kube-version", KUBE_VERSION]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def render(*values: str, name: str = "penstock") -> list[dict[str, Any]]:
    """The objects of a release with ``--set`` values (``--set-json`` for those whose value is JSON)."""
    return copy.deepcopy(_rendered(name, values))


@functools.cache
def _rendered(name: str, values: tuple[str, ...]) -> list[dict[str, Any]]:
    flags = [flag for each in values for flag in (_flag(each), each)]
    done = run("template", name, "--namespace", NAMESPACE, *flags)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("\n---\n")
    documents = (yamltext.load(part.removeprefix("---\n")) for part in parts)
    return [document for document in documents if document]


def refusal(*values: str) -> str:
    """Why these values are refused."""
    done = run("template", "penstock", *(flag for each in values for flag in (_flag(each), each)))
    assert done.returncode != 0, "helm takes them"
    return done.stderr


def _flag(value: str) -> str:
    return "--set-json" if value.partition("=")[2][:1] in ("[", "{") else "--set"
