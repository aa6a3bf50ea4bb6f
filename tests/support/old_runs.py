"""Runs of commit 16853cd, the code of version 0.1.0: folders as ``penstock run`` left them.

``tests/fixtures/runs_16853cd`` was made from a work tree of that commit, with this file copied into it, as root:

    unshare --uts sh -c 'hostname node-1; exec python -m tests.support.old_runs tests/fixtures/runs_16853cd'

``finished`` was measured, planned and trained to its end. ``killed`` is the same job, of which every process was killed
with SIGKILL after a checkpoint: what ranks recorded lies in its outbox, which no service ever read. ``expected.json``
has the losses of both, and those of the steps that ``penstock resume`` of that commit took in a copy of ``killed``.
@FOLDER@ stands for the folder of the runs, their text, and the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.planner import yamltext
from penstock.trainer.rundir import RunDir

FOLDER = Path(__file__).parents[1] / "fixtures" / "runs_16853cd"
NAMES = FINISHED, KILLED = ("finished", "killed")
STEPS, EVERY = 24, 8
PLACE = "@FOLDER@"
_MADE_IN = Path("/tmp/release-0.1.0/runs")
_TEXT = "\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(100))
_PAUSE_SECONDS, _PATIENCE_SECONDS = 0.01, 300.0


# Using


def restored(folder: Path) -> dict[str, Any]:
    """Put the runs, their text and the cache into ``folder``; what is expected of them."""
    shutil.copytree(FOLDER / "folder", folder, dirs_exist_ok=True)
    for path in _texts(folder):
        path.write_text(path.read_text().replace(PLACE, str(folder)))
    expected: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
    return expected


def losses(run: RunDir) -> list[float]:
    """Of every step, the newest entry."""
    return [entry.loss for entry in run.read_metrics()]


# Making


def _manifest(folder: Path) -> Path:
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(_TEXT)
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": "old"},
        "spec": {
            "model": {"family": "llama", "layers": 2, "hidden": 8, "heads": 2, "kvHeads": 1},
            "data": {"source": "text", "tokenizer": {"train": "bytes"}, "sequenceLength": 32},
            "training": {"globalBatch": 8, "steps": STEPS, "optimizer": {"learningRate": 1e-2}},
            "parallelism": {"pp": 2, "slices": 2},
            "resources": {"ranks": 2, "memoryPerRank": "1Gi"},
            "checkpoint": {"everySteps": EVERY, "keep": 1},
        },
    }
    path = folder / "job.yaml"
    path.write_text(yamltext.dump(manifest))
    return path


def _make(target: Path) -> None:
    folder = _MADE_IN
    folder.mkdir(parents=True)
    try:
        job, runs = _manifest(folder), {name: RunDir(folder / name) for name in (*NAMES, "resumed")}
        assert _start(folder, "run", job, "--run-dir", runs[FINISHED].root).wait() == 0
        process = _start(folder, "run", job, "--run-dir", runs[KILLED].root)
        _wait_for_step(runs[KILLED], EVERY + 2)
        _kill_all_of(folder)
        process.wait()
        shutil.copytree(runs[KILLED].root, runs["resumed"].root)
        assert _start(folder, "resume", runs["resumed"].root).wait() == 0
        expected = {name: losses(run) for name, run in runs.items()}
        _keep(folder, target, expected)
    finally:
        _kill_all_of(folder)
        shutil.rmtree(folder.parent)


def _start(folder: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "penstock.cli", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **own})


def _wait_for_step(run: RunDir, step: int) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while len(run.read_metrics()) <= step:
        assert time.monotonic() < end, "waited in vain"
        time.sleep(_PAUSE_SECONDS)


def _kill_all_of(folder: Path) -> None:
    """Kill what works in the folder: the command, and all that it started."""
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.resolve().is_relative_to(folder):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _keep(folder: Path, target: Path, expected: dict[str, Any]) -> None:
    """Copy what is kept, with nothing of this machine in it."""
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("state", "*.lock", "resumed", "report.html", "trace.json", "*-progress.json")
    shutil.copytree(folder, target / "folder", ignore=ignored)
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for path in _texts(target / "folder"):
        path.write_text(_neutral(path.read_text(), folder))


def _neutral(content: str, folder: Path) -> str:
    content = content.replace(str(folder), PLACE)
    for path, name in ((str(Path(__file__).parents[2]), "/source"), (sys.base_prefix, "/python")):
        content = content.replace(path, name.ljust(len(path), "/"))
    return content


def _texts(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(UnicodeDecodeError):
            if path.is_file() and path.read_text():
                yield path


if __name__ == "__main__":
    _make(Path(sys.argv[1]).absolute())
