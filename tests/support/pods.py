"""Pods of an attempt as processes of this machine: their files, written as an operator and a kubelet would."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.agent.pod_files import PodFolders
from penstock.core.host.ports import LOOPBACK, free_port
from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.core.pod import (
    ADDRESS_FILE,
    BINDING_FILE,
    JOB_FILE,
    MEASURE_EPOCH,
    NODE_NAME_VARIABLE,
    PLAN_FILE,
    POD_UID_VARIABLE,
    STOP_FILE,
    TRAIN_EPOCH,
    PodBinding,
)
from penstock.core.run.folder import RunDir
from penstock.core.supervision import Address, AttemptReport
from tests.support.repository import ROOT

UID = "11111111-2222-3333-4444-555555555555"
PATIENCE_SECONDS = 280.0
_POLL_SECONDS = 0.05


def identified(job: PipelineJob, uid: str = UID) -> PipelineJob:
    """The job as a cluster has it."""
    return dataclasses.replace(job, metadata=dataclasses.replace(job.metadata, uid=uid))


class PodFolder:
    """The files of one pod; ``place`` below ``root`` is where everything of its attempt lies."""

    def __init__(self, attempt: Path, uid: str) -> None:
        self.uid = uid
        self.attempt_files = attempt / "attempt"
        self.pod_files = attempt / uid / "pod"
        self.local = attempt / uid / "local"
        self.token = attempt / uid / "token"
        self.termination = attempt / uid / "termination-log"
        self.log = attempt / uid / "log"
        for folder in (self.attempt_files, self.pod_files, self.local):
            folder.mkdir(parents=True, exist_ok=True)
        for path in (self.pod_files / BINDING_FILE, self.pod_files / STOP_FILE, self.termination):
            path.touch()
        self.token.write_text("secret\n")

    def bind(self, binding: PodBinding) -> None:
        """Write it as a kubelet does, at once."""
        partial = self.pod_files / ".binding"
        partial.write_text(json.dumps(binding.to_manifest()))
        partial.replace(self.pod_files / BINDING_FILE)

    def ask_to_stop(self) -> None:
        """As the operator does."""
        (self.pod_files / STOP_FILE).write_text("Suspended")

    def report(self) -> AttemptReport:
        """What the container said at its end."""
        return AttemptReport.from_manifest(json.loads(self.termination.read_text()))

    def options(self, attempt: int, out: Path, data: Path) -> list[str]:
        """Of ``penstock pod``."""
        named = {
            "attempt": attempt,
            "out": out,
            "data": data,
            "local": self.local,
            "attempt-files": self.attempt_files,
            "pod-files": self.pod_files,
            "termination-log": self.termination,
        }
        return [f"--{name}={value}" for name, value in named.items()]

    def folders(self, attempt: int, out: Path) -> PodFolders:
        """Who it is, in that attempt."""
        return PodFolders(uid=self.uid, attempt=attempt, out=out, local=self.local)


class Attempt:
    """The pods of attempt ``number`` of ``job``, each of ``ranks_per_pod`` ranks; the test is their operator."""

    def __init__(
        self, root: Path, job: PipelineJob, *, number: int = 1, num_pods: int = 2, ranks_per_pod: int = 1
    ) -> None:
        self.number, self.ranks_per_pod = number, ranks_per_pod
        self.out, self.data = root / "out", root / "data"
        self.master, self.port = LOOPBACK, free_port(count=2)  # an epoch each
        self.pods = [PodFolder(root / f"attempt-{number}", f"pod-{number}-{k}") for k in range(num_pods)]
        (self.pods[0].attempt_files / JOB_FILE).write_text(json.dumps(job.to_manifest()))
        self.run = RunDir(self.out / job.metadata.uid / f"a{number}")

    def binding(self, node_rank: int, epoch: int, plan: Plan | None = None) -> PodBinding:
        """That of one pod."""
        return PodBinding(
            pod_uid=self.pods[node_rank].uid,
            attempt=self.number,
            epoch=epoch,
            node_rank=node_rank,
            num_nodes=len(self.pods),
            ranks_per_pod=self.ranks_per_pod,
            master=self.master,
            port=self.port,
            plan_digest=plan.digest if plan else "",
        )

    def measure(self) -> None:
        """Bind all pods to epoch 0."""
        for node_rank, pod in enumerate(self.pods):
            pod.bind(self.binding(node_rank, MEASURE_EPOCH))

    def give(self, plan: Plan) -> None:
        """Put the plan where pods find it."""
        text = json.dumps(plan.to_manifest()).encode()
        (self.pods[0].attempt_files / PLAN_FILE).write_bytes(gzip.compress(text))

    def train(self, plan: Plan) -> None:
        """Give the plan and bind all pods to epoch 1."""
        self.give(plan)
        for node_rank, pod in enumerate(self.pods):
            pod.bind(self.binding(node_rank, TRAIN_EPOCH, plan))

    def serve_at(self, url: str) -> None:
        """There is a service."""
        (self.pods[0].attempt_files / ADDRESS_FILE).write_text(json.dumps(Address(server=url).to_manifest()))

    @contextmanager
    def started(
        self, prefixes: Sequence[Sequence[str]] = (), *, first: int = 0
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """The pods' processes from the ``first`` on, of which none is left; each behind the words of its prefix."""
        command = [sys.executable, "-m", "penstock.agent", "pod"]
        processes = []
        try:
            for k, pod in enumerate(self.pods[first:], start=first):
                environment = {**os.environ, "PYTHONPATH": _python_path(), POD_UID_VARIABLE: pod.uid}
                environment |= {NODE_NAME_VARIABLE: f"node-{k}"}
                options = pod.options(self.number, self.out, self.data)
                with pod.log.open("ab") as log:
                    words = [*(prefixes[k] if prefixes else ()), *command, *options]
                    processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            yield processes
        finally:
            for process in processes:
                _end(process)

    def wait_until(self, condition: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Until then no pod may end."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert all(process.poll() is None for process in processes), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(_POLL_SECONDS)

    def ended(
        self, processes: Sequence[subprocess.Popen[bytes]], seconds: float = PATIENCE_SECONDS
    ) -> list[AttemptReport]:
        """What the pods say at their end; they must come to it."""
        deadline = time.monotonic() + seconds
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                raise AssertionError(self.said()) from None
        return [pod.report() for pod in self.pods]

    def said(self) -> str:
        """What the pods and their ranks printed."""
        logs = [*(pod.log for pod in self.pods), *sorted(self.run.root.glob("hosts/*/logs/**/*.log"))]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())


def _end(process: subprocess.Popen[bytes]) -> None:
    """If killed, it leaves ranks that end with torchrun, which gets the parent-death signal."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
