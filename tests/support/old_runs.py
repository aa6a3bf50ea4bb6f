"""Runs of commit 16853cd, the code of version 0.1.0: folders as ``penstock run`` left them.

``tests/fixtures/runs_16853cd`` was made from a work tree of that commit, with this file and ``old_files.py`` copied
into it, as root:

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
import sys
from pathlib import Path
from typing import Any

from penstock.core.run.folder import RunDir
from penstock.core.serialization import yamltext
from tests.support import old_files
from tests.support.command import Command, losses, wait_for_step

FOLDER = Path(__file__).parents[1] / "fixtures" / "runs_16853cd"
NAMES = FINISHED, KILLED = ("finished", "killed")
STEPS, EVERY = 24, 8
_MADE_IN = Path("/tmp/release-0.1.0/runs")
_TEXT = "\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(100))


# Using


def restored(folder: Path) -> dict[str, Any]:
    """Put the runs, their text and the cache into ``folder``; what is expected of them."""
    old_files.put(FOLDER / "folder", folder)
    expected: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
    return expected


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
    folder, command = _MADE_IN, Command(_MADE_IN)
    folder.mkdir(parents=True)
    try:
        job, runs = _manifest(folder), {name: RunDir(folder / name) for name in (*NAMES, "resumed")}
        command("run", job, "--run-dir", runs[FINISHED].root)
        process = command.start("run", job, "--run-dir", runs[KILLED].root)
        wait_for_step(runs[KILLED], EVERY + 2, attempt=1)
        _kill_all_of(folder)
        process.communicate()
        shutil.copytree(runs[KILLED].root, runs["resumed"].root)
        command("resume", runs["resumed"].root)
        expected = {name: losses(run) for name, run in runs.items()}
        _keep(folder, target, expected)
    finally:
        _kill_all_of(folder)
        shutil.rmtree(folder.parent)


def _kill_all_of(folder: Path) -> None:
    """Kill what works in the folder: the command, and all that it started."""
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.resolve().is_relative_to(folder):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _keep(folder: Path, target: Path, expected: dict[str, Any]) -> None:
    """Copy what is kept, with nothing of this machine in it."""
    shutil.rmtree(target, ignore_errors=True)
    ignored = ("state", "*.lock", "resumed", "report.html", "trace.json", "*-progress.json")
    old_files.keep(folder, target / "folder", *ignored)
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    _make(Path(sys.argv[1]).absolute())
