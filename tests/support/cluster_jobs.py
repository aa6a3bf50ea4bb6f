"""Small real jobs on an installed cluster, and all that can be seen of them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.core.lifecycle import Phase
from penstock.core.records import StepMetrics
from penstock.core.run.folder import RunDir
from penstock.core.serialization import yamltext
from penstock.core.status import ConditionType, JobStatus
from penstock.kube.names import ATTEMPT_LABEL, UID_LABEL, attempt_name
from penstock.kube.resources import CONFIG_MAPS, EVENTS, JOBS, JOBSETS, NODES, PODS, Resource
from penstock.trainer.checkpoint import CorruptError, find_checkpoints, verify
from tests.support.command import Command, ended
from tests.support.installed import OUT, PAIR, PAIR_NODES, SPARE_NODE, TEXT, JobSpace, components
from tools.lab import lab, processes
from tools.lab.console import LabError

PATIENCE_SECONDS = 600.0
HERE_SECONDS = 900.0
SEQUENCE = 128
PACE = "20mbit"
PINNED = {"pp": 2, "microBatch": 1, "slices": [72, 56], "schedule": "1f1b", "stages": [1, 1]}
"""So that every attempt goes by the same plan, whatever was measured, and adds numbers in the same order."""


def small_spec(image: str, **changes: Any) -> dict[str, Any]:
    """Two blocks of width 64, whose steps take milliseconds; ``changes`` replace whole fields.

    The rate of learning depends on no number of steps, so a shorter job is the beginning of a longer one.
    """
    kubernetes = {
        "image": image,
        "nodeSelector": PAIR,
        "volumes": {OUT: {"claim": OUT}, f"data/{TEXT}": {"claim": TEXT}},
        "env": [{"name": "PYTHONPATH", "value": os.pathsep.join(components())}],
    }
    return {
        "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 2, "kvHeads": 1},
        "data": {"source": f"data://{TEXT}", "tokenizer": {"train": "bytes"}, "sequenceLength": SEQUENCE},
        "training": small_training(60),
        "resources": {"ranks": 2, "memoryPerRank": "2Gi"},
        "checkpoint": {"everySteps": 20, "keep": 3},
        **changes,
        "kubernetes": {**kubernetes, **changes.get("kubernetes", {})},
    }


def small_training(steps: int) -> dict[str, Any]:
    """That many steps."""
    return {"globalBatch": 4, "steps": steps, "schedule": "constant", "optimizer": {"learningRate": 1e-3}}


@dataclass(frozen=True)
class ClusterJob:
    """A job that was submitted."""

    on: JobSpace
    name: str
    uid: str

    def get(self) -> dict[str, Any]:
        """The object as the apiserver has it."""
        return self.on.cluster.get(JOBS, self.name, self.on.namespace)

    def status(self) -> JobStatus:
        """Its status."""
        return JobStatus.from_manifest(self.get().get("status") or {})

    def wait(
        self, happened: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS, pause_seconds: float = 0.2
    ) -> Any:
        """What is not nothing, as soon as there is something; the status is told where it takes too long."""
        end = time.monotonic() + seconds
        while not (found := happened()):
            assert time.monotonic() < end, f"{what}: {self.get()['status']}"
            time.sleep(pause_seconds)
        return found

    def wait_for(
        self, *phases: Phase, attempt: int = 0, seconds: float = PATIENCE_SECONDS, pause_seconds: float = 0.2
    ) -> JobStatus:
        """The status once it is in one of these phases, at that attempt or a later one; fails if it ends otherwise."""

        def current() -> JobStatus | None:
            status = self.status()
            if status.phase in phases and status.attempt >= attempt:
                return status
            assert not status.phase.terminal, status
            return None

        said = f"{self.name} is not {' or '.join(phases)} at attempt {attempt}"
        status: JobStatus = self.wait(current, said, seconds, pause_seconds)
        return status

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        """Until that attempt has taken the step."""
        self.wait(lambda: step in self.losses_of(attempt), f"attempt {attempt} does not come to step {step}")

    def wait_for_condition(self, wanted: ConditionType, says: str, seconds: float = PATIENCE_SECONDS) -> str:
        """The message of a condition, or of the status itself, once it holds these words."""

        def current() -> str:
            status = self.status()
            condition = status.condition(wanted)
            return condition.message if condition and says in condition.message else ""

        message: str = self.wait(current, f"{wanted} never says {says!r}", seconds)
        return message

    def suspend(self, wanted: bool) -> None:
        """Ask for it, or for going on."""
        patch = json.dumps({"spec": {"runPolicy": {"suspend": wanted}}})
        self.on.kubectl("patch", "pj", self.name, "--type=merge", "--patch", patch)

    # Its objects

    def pods(self, attempt: int | None = None) -> list[dict[str, Any]]:
        """Those there are, of one attempt or of all."""
        return self._children(PODS, attempt)

    def has_left(self) -> bool:
        """Whether its pods hold no place any more; that they have ended is seen earlier."""
        return all(each["status"].get("phase") in ("Succeeded", "Failed") for each in self.pods())

    def jobsets(self) -> list[dict[str, Any]]:
        """Those there are, oldest attempt first."""
        return sorted(self._children(JOBSETS), key=lambda each: int(each["metadata"]["labels"][ATTEMPT_LABEL]))

    def config_maps(self) -> list[str]:
        """The names of those that attempts have."""
        return sorted(each["metadata"]["name"] for each in self._children(CONFIG_MAPS))

    def _children(self, resource: Resource, attempt: int | None = None) -> list[dict[str, Any]]:
        selector = f"{UID_LABEL}={self.uid}" + (f",{ATTEMPT_LABEL}={attempt}" if attempt is not None else "")
        return self.on.cluster.all(resource, self.on.namespace, selector)

    def jobset_made_at(self, attempt: int) -> float:
        """When that attempt was asked for, in whole seconds as the apiserver keeps them."""
        name = attempt_name(self.name, attempt)
        found = self.wait(
            lambda: [each for each in self.jobsets() if each["metadata"]["name"] == name], f"{name} is not made"
        )
        return instant(found[0]["metadata"]["creationTimestamp"])

    def events(self) -> list[tuple[str, str]]:
        """Reasons and messages that people were told, in order."""
        found = self.on.cluster.all(EVENTS, self.on.namespace)
        own = [each for each in found if each["involvedObject"].get("uid") == self.uid]
        own.sort(key=lambda each: int(each["metadata"]["resourceVersion"]))
        return [(each["reason"], each["message"]) for each in own]

    # What it leaves

    @property
    def root(self) -> Path:
        """Where all that it leaves lies."""
        return self.on.out / self.uid

    def run(self, attempt: int) -> RunDir:
        """The run directory of an attempt."""
        return RunDir(self.root / f"a{attempt}")

    def metrics(self, attempt: int) -> list[StepMetrics]:
        """What an attempt has told so far."""
        path = self.run(attempt).metrics
        return self.run(attempt).read_metrics() if path.exists() else []

    def losses_of(self, attempt: int) -> dict[int, float]:
        """By step, what an attempt has told so far."""
        return {each.step: each.loss for each in self.metrics(attempt)}

    def losses(self) -> list[float]:
        """Of every step so far, by the newest attempt that took it."""
        newest: dict[int, float] = {}
        for path in sorted(self.root.glob("a*"), key=lambda path: int(path.name[1:])):
            newest |= self.losses_of(int(path.name[1:]))
        assert sorted(newest) == list(range(len(newest))), "steps are missing"
        return [newest[step] for step in range(len(newest))]

    def checkpoints(self) -> list[tuple[int, int]]:
        """Attempt and step of those that are whole, newest first."""
        return [(each.attempt, each.step) for each in find_checkpoints(self.root / "checkpoints")]

    def verify_checkpoints(self) -> None:
        """Fails unless each holds what was written; one that a running job removes meanwhile, manifest first, is passed
        over.
        """
        for each in find_checkpoints(self.root / "checkpoints"):
            try:
                verify(each.folder)
            except CorruptError:
                if each in find_checkpoints(self.root / "checkpoints"):
                    raise

    def ranks(self, attempt: int) -> list[int]:
        """The processes of this machine that are the attempt's training ranks."""
        return [each for each in processes.pids() if self._is_rank(each, attempt)]

    def _is_rank(self, pid: int, attempt: int) -> bool:
        words = command_line(pid)
        trains = _name(pid).startswith("rank ") and {"penstock.trainer", "train"} <= set(words)
        return trains and any(word.endswith(f"{self.uid}/a{attempt}") for word in words)

    def stop_rank(self, attempt: int) -> None:
        """Let one of the attempt's ranks hang."""
        os.kill(self.ranks(attempt)[0], signal.SIGSTOP)

    @contextmanager
    def silenced(self, attempt: int) -> Iterator[None]:
        """The reporter next to rank 0, which tells of steps, is held up for as long as the block.

        At its end all processes of that rank's container are killed, as the kernel does with one that has taken more
        memory than it may (`memory.oom.group`).
        """
        [rank] = [each for each in self.ranks(attempt) if _name(each) == "rank 0"]
        trainer = _sharing(rank, "mnt")
        [reporter] = [each for each in _sharing(rank, "pid") if "report-pod" in command_line(each)]
        os.kill(reporter, signal.SIGSTOP)
        try:
            yield
            for each in trainer:
                os.kill(each, signal.SIGKILL)
        finally:
            os.kill(reporter, signal.SIGCONT)


def submitted(on: JobSpace, name: str, *, labels: Mapping[str, str] | None = None, **changes: Any) -> ClusterJob:
    """A job of that name; ``changes`` replace whole fields of its spec, but add to ``kubernetes``."""
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": small_spec(on.cluster.image, **changes),
    }
    return made(on, manifest)


def made(on: JobSpace, manifest: dict[str, Any]) -> ClusterJob:
    """The job of a manifest."""
    name = manifest["metadata"]["name"]
    on.cluster.create(on.namespace, manifest)
    return ClusterJob(on, name, on.cluster.get(JOBS, name, on.namespace)["metadata"]["uid"])


def local_losses(on: JobSpace, folder: Path, spec: dict[str, Any], plan: RunDir) -> list[float]:
    """What `penstock run` has on this machine for every step of such a job, by the plan of another run."""
    data = {**spec["data"], "source": str(on.text)}
    return [each.loss for each in run_here(folder, {**spec, "data": data}, plan)]


def run_here(folder: Path, spec: dict[str, Any], plan: RunDir) -> list[StepMetrics]:
    """What `penstock run` tells of every step of a job on this machine, by the plan of another run."""
    run = RunDir(folder / "run")
    run.create()
    run.plan.write_text(plan.plan.read_text())
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": "local"},
        "spec": {key: value for key, value in spec.items() if key != "kubernetes"},
    }
    path = folder / "job.yaml"
    path.write_text(yamltext.dump(manifest))
    ended(Command(folder).start("run", path, "--run-dir", run.root), 0, HERE_SECONDS)
    found = run.read_metrics()
    begun = found[0].step
    assert [each.step for each in found] == list(range(begun, begun + len(found)))
    return found


@contextmanager
def paced(on: JobSpace) -> Iterator[None]:
    """Cards so slow that a step takes about as long on every machine, and little of this one: ranks wait for them."""
    with shaped(on, dict.fromkeys((*PAIR_NODES, SPARE_NODE), PACE)):
        yield


@contextmanager
def shaped(on: JobSpace, rates: Mapping[str, str]) -> Iterator[None]:
    """Nodes' cards are as fast as these rates say."""
    try:
        for node, rate in rates.items():
            lab.shape(on.lab, node, rate)
        yield
    finally:
        for node in rates:
            lab.shape(on.lab, node, "none")


@contextmanager
def offering(on: JobSpace, num_cores: int) -> Iterator[None]:
    """Each node of the pair has at least so many cores for pods, whatever this machine has. What fails meanwhile is
    told, whatever becomes of the nodes.
    """
    own = _offered(on)
    more = max(num_cores, os.cpu_count() or 1)
    try:
        _offer(on, more, [str(more)] * len(own))
        yield
    except BaseException as error:
        try:
            _offer(on, None, own)
        except (LabError, AssertionError) as another:
            error.add_note(f"and then: {another}")
        raise
    _offer(on, None, own)


def _offer(on: JobSpace, num_cores: int | None, wanted: list[str]) -> None:
    for node in PAIR_NODES:
        lab.declare_cores(on.lab, node, num_cores)

    def is_offered() -> bool:
        return _offered(on) == wanted and set(PAIR_NODES) <= on.cluster.ready()

    on.cluster.wait(is_offered, f"{' and '.join(PAIR_NODES)} do not offer {' and '.join(wanted)} cores")


def _offered(on: JobSpace) -> list[str]:
    """The cores of each node of the pair for pods."""
    return [str(on.cluster.get(NODES, node)["status"]["allocatable"]["cpu"]) for node in PAIR_NODES]


def _sharing(pid: int, namespace: str) -> list[int]:
    """The processes that are in the same namespace of that kind; fails if this one is gone."""
    own = _namespace(pid, namespace)
    assert own, f"process {pid} is gone"
    return [each for each in processes.pids() if _namespace(each, namespace) == own]


def _namespace(pid: int, kind: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return ""


def command_line(pid: int) -> list[str]:
    """What a process was started with; nothing if it is gone."""
    return _words(pid, "cmdline")


def _name(pid: int) -> str:
    """What the process calls itself."""
    return "".join(_words(pid, "comm")).strip()


def _words(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().split("\0")
    except OSError:
        return []


def instant(text: str) -> float:
    """Seconds since the epoch of a time as the apiserver writes it."""
    return datetime.fromisoformat(text).timestamp()
