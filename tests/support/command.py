"""The `penstock` command as a process of its own, with a tiny job to run, and eyes on its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import RankStatus, read_status, status_path
from penstock.core.schedule import ScheduleSpec
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.planner.compile import program_of

PATIENCE_SECONDS = 300.0
LOOK_SECONDS = 0.003
LOWEST_PRIORITY = 19
STEPS = 120
EVERY = 40
LENGTH = 32
TEXT = "\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(900))


def tiny_job(folder: Path, **spec: Any) -> Path:
    """A manifest of a model that takes milliseconds per step, on text in the same folder."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    (folder / "text" / "a.py").write_text(TEXT)
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "kvHeads": 1},
            "data": {"source": "text", "tokenizer": {"train": "bytes"}, "sequenceLength": LENGTH},
            "training": {"globalBatch": 2, "steps": STEPS, "optimizer": {"learningRate": 1e-2}},
            "resources": {"ranks": 2, "memoryPerRank": "2Gi"},
            "checkpoint": {"everySteps": EVERY, "keep": 3},
            **spec,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yamltext.dump(manifest))
    return path


def tiny_plan() -> Plan:
    """Two stages, two micro-batches, two unequal slices: what the tiny job is run by, so that nothing is measured."""
    plan = Plan(
        model=ModelSpec(family=Family.LLAMA, layers=2, hidden=32, heads=2, kv_heads=1, vocab=257),
        precision=Precision.FP32,
        pp=2,
        microbatch=1,
        num_microbatches=2,
        slices=(20, 12),
        stages=((0, 3), (3, 6)),
        schedule=ScheduleSpec(generator="1f1b"),
    )
    return Plan.from_manifest({**plan.to_manifest(), "programDigest": program_of(plan).digest})


@dataclass
class Command:
    """Starts `penstock` with a cache of its own below ``folder``, and with the machine to itself."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    """A program that starts the command that follows its own arguments."""

    def start(self, *arguments: str | Path, log: Path | None = None) -> subprocess.Popen[str]:
        """Start it. A process that may print more than a pipe holds, while nobody reads, appends to ``log`` instead."""
        with log.open("a") if log else contextlib.nullcontext(subprocess.PIPE) as out:
            return subprocess.Popen(
                [*self.wrapper, sys.executable, "-m", "penstock.cli", *map(str, arguments)],
                cwd=self.folder,
                env={**os.environ, **self._own, **self.environment},
                stdout=out,
                stderr=out,
                text=True,
            )

    @property
    def _own(self) -> dict[str, str]:
        folders = {"XDG_CACHE_HOME": str(self.folder / "cache"), "XDG_STATE_HOME": str(self.folder / "state")}
        return {**folders, "COLUMNS": "200"}

    def __call__(self, *arguments: str | Path, code: int = 0) -> tuple[str, str]:
        """What it prints on stdout and stderr; it must end with ``code``."""
        return ended(self.start(*arguments), code)


def ended(process: subprocess.Popen[str], code: int, seconds: float = PATIENCE_SECONDS) -> tuple[str, str]:
    """What the process printed; it must end with ``code`` within ``seconds``."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s\n{out}\n{err}") from None
    assert process.returncode == code, f"exit code {process.returncode}, not {code}\n{out}\n{err}"
    return out, err


def laid_out(root: Path) -> RunDir:
    """A run directory with the tiny job's plan in it."""
    run = RunDir(root)
    run.create()
    write_json(run.plan, tiny_plan().to_manifest())
    return run


def losses(run: RunDir) -> list[float]:
    """The loss of every step, by its newest entry."""
    return [entry.loss for entry in run.read_metrics()]


def wait_for_step(run: RunDir, step: int, attempt: int) -> None:
    """Until ``attempt`` has taken ``step``."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        entries = run.read_metrics()
        if entries and entries[-1].attempt == attempt and entries[-1].step >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"attempt {attempt} never came to step {step}")


def rank_status(run: RunDir, rank: int) -> RankStatus:
    """What the rank says of itself."""
    status = read_status(status_path(run.status, rank))
    assert status is not None
    return status


def give_way(run: RunDir) -> None:
    """Have its two ranks take only what no other process wants, so that a run without end slows nobody down."""
    for rank in range(2):
        os.setpriority(os.PRIO_PROCESS, rank_status(run, rank).pid, LOWEST_PRIORITY)


def kill_in_step(run: RunDir, rank: int) -> None:
    """Kill the rank while it is inside of a step, which a tiny step seldom is: it is stopped each time to look."""
    pid = rank_status(run, rank).pid
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        os.kill(pid, signal.SIGSTOP)
        while _state(Path(f"/proc/{pid}")) != "T":
            time.sleep(LOOK_SECONDS)
        if rank_status(run, rank).action:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGCONT)
        assert time.monotonic() < deadline, f"rank {rank} is never inside of a step"
        time.sleep(LOOK_SECONDS)


def processes_of(run: RunDir) -> list[int]:
    """The live processes whose command line names the run directory, this one's children excepted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(run.root).encode() in path.read_bytes() and _state(path.parent) != "Z":
                found.append(int(path.parent.name))
    return found


def _state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def wait_until_gone(run: RunDir) -> None:
    """Until no process works on the run any more."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while processes_of(run):
        assert time.monotonic() < deadline, f"still alive: {processes_of(run)}"
        time.sleep(0.05)


@contextlib.contextmanager
def no_orphans(run: RunDir) -> Iterator[None]:
    """Nothing of the run is alive after the block, and nothing stays behind a test that failed."""
    try:
        yield
        assert processes_of(run) == []
    finally:
        for pid in processes_of(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
