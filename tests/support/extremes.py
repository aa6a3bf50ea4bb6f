"""Plans at the limits of what may be written: each in a process with little memory and little time.

python -m tests.support.extremes SECONDS < cases.json > outcomes.jsonl
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.manifest import declarations
from penstock.planner.worker.__main__ import answer
from penstock.planner.worker.protocol import Answer, PlanningRequest

MOST_BYTES = 2 * 2**30

JOB: dict[str, Any] = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "PipelineJob",
    "metadata": {"name": "extreme"},
    "spec": {
        "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 512},
        "data": {"source": "python-stdlib", "tokenizer": {"train": "bpe", "vocab": 512}, "sequenceLength": 256},
        "training": {"globalBatch": 4, "steps": 10},
        "resources": {"ranks": 4, "memoryPerRank": "4Gi"},
    },
}
CLUSTER: dict[str, Any] = {
    "name": "lab",
    "device": {"name": "card", "peakFlops": 1e14, "memoryBytes": "16Gi"},
    "numNodes": 2,
    "devicesPerNode": 4,
    "intraNode": {"latencySeconds": 1e-6, "bytesPerSecond": 1e11},
    "interNode": {"latencySeconds": 1e-5, "bytesPerSecond": 1e9},
}
LEFT_OUT = ("kubernetes", "checkpoint", "runPolicy")
"""Parts of a job's spec that planning never reads."""

Change = tuple[str, Any]
"""A dotted path below ``job`` or ``cluster``, and what is written there."""


def maxima() -> Iterator[Change]:
    """Every number of a job and of described hardware at its maximum, and speeds next to nothing."""
    for root, owner in (("job.spec", JobSpec), ("cluster", ClusterSpec)):
        for path, limit in _limited(owner, root):
            if "maximum" in limit:
                yield path, limit["maximum"]
            if "exclusiveMinimum" in limit:
                yield path, 1e-300
            elif limit.get("minimum") == 0:
                yield path, 0


def _limited(owner: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, field in declarations(owner).items():
        if dataclasses.is_dataclass(field.annotation) and name not in LEFT_OUT:
            yield from _limited(field.annotation, f"{path}.{name}")
        elif field.limit:
            yield f"{path}.{name}", field.limit


def outcome(changes: Sequence[Change], most_seconds: float) -> dict[str, Any]:
    """What a process says of the job and cluster with ``changes``: a plan, a refusal, or that it took too long."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        _answered(changes, writing)
    os.close(writing)
    reply, late, ends_at = b"", False, time.monotonic() + most_seconds
    while (left := ends_at - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
        part = os.read(reading, 65_536)
        if not part:
            break
        reply += part
    else:
        late = True
        os.kill(process, signal.SIGKILL)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return json.loads(reply) if reply and not late else {"late": late, "status": status}


def _answered(changes: Sequence[Change], writing: int) -> None:
    """Write the outcome, and end: nothing of the parent is to run on here."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        reply = _planned(changes)
    except BaseException as error:  # also MemoryError: none may leave as a traceback
        reply = {"traceback": repr(error)[:300]}
    os.write(writing, json.dumps(reply).encode())
    os._exit(0)


def _planned(changes: Sequence[Change]) -> dict[str, Any]:
    written = {"job": copy.deepcopy(JOB), "cluster": copy.deepcopy(CLUSTER)}
    for path, value in changes:
        *parents, name = path.split(".")
        place: Any = written
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    try:
        job = PipelineJob.from_manifest(written["job"])
        cluster = ClusterSpec.from_manifest(written["cluster"], "cluster")
    except UserError as mistake:
        return {"what": str(mistake)}
    return _figures(answer(PlanningRequest(spec=job.spec, cluster=cluster)))


def _figures(answered: Answer) -> dict[str, Any]:
    if answered.plan is None or answered.plan.prediction is None:
        return {"what": answered.error}
    step = answered.plan.prediction
    seconds = (step.compute_seconds, step.bubble_seconds, step.communication_seconds, step.reduction_seconds)
    parts = (*seconds, step.optimizer_seconds, *step.peak_bytes, *step.slot_bytes)
    return {"least": min(parts), "step": step.step_seconds}


def main() -> None:
    """An outcome per case on stdin, in order."""
    warm = _planned(())
    assert "step" in warm, warm  # and what is compiled is compiled once, for all
    for changes in json.load(sys.stdin):
        sys.stdout.write(json.dumps(outcome(changes, float(sys.argv[1]))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
