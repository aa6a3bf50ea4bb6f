"""Communication between the operator and the agent in a pod.

A pod waits for its binding. The operator writes it as an annotation, which the pod reads as a file; the plan that it
names is next to it, from the attempt's ConfigMap. The pod reports at its end: its container's termination message is a
`penstock.core.supervision.AttemptReport`. Until then its agent answers any caller by HTTP on `AGENT_PORT`, with the
state of the attempt (`AgentReport`) and its measurement. Either side may read late, or repeatedly, without any effect
on the other.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated

from penstock.core.errors import UserError
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.limits import EXACT, MOST_RANKS, one_to, up_to
from penstock.core.manifest import Checked, Manifest, require_limits
from penstock.core.supervision import AttemptReport

MEASURE_EPOCH = 0
TRAIN_EPOCH = 1

ATTEMPT_FILES = "/etc/penstock/attempt"
"""The folder of its attempt's ConfigMap in a pod: JOB_FILE and ADDRESS_FILE from the start, PLAN_FILE once it is
planned.
"""

JOB_FILE = "job.json"
ADDRESS_FILE = "address.json"
CA_FILE = "ca.crt"
PLAN_FILE = "plan.json.gz"
"""The plan in the form that ranks receive (`penstock.core.plan.Plan.for_ranks`)."""

CONFIDENCE_FILE = "confidence.json.gz"
"""The rest of the plan, for the service to show."""

POD_FILES = "/etc/penstock/pod"
"""The folder of a pod's own annotations; a file is empty until its annotation is set."""

BINDING_FILE = "binding"
STOP_FILE = "stop"

TOKEN_FILE = "/var/run/secrets/penstock/token"
POD_UID_VARIABLE = "PENSTOCK_POD_UID"
NODE_NAME_VARIABLE = "PENSTOCK_NODE_NAME"
"""The identity of the pod, and its node: a measurement is valid for nodes, which pods' host names do not identify."""

AGENT_PORT = 8472
AGENT_ADDRESS_VARIABLE = "PENSTOCK_POD_ADDRESS"
"""The pod's own address, on which its agent listens."""

AGENT_REPORT, AGENT_MEASUREMENT = "report.json.gz", "measurement.json.gz"
"""The documents that the agent serves, packed (`penstock.core.packing`): an `AgentReport`, and in the pod of the first
rank a `penstock.core.profile.Profile` once there is one.
"""

MOST_AGENT_BYTES = 2**20
"""Largest answer of an agent. A ConfigMap, which stores the measurement, holds no more."""

TERMINATION_FILE = "/dev/termination-log"
MOST_REPORT_BYTES = 4096
"""The kubelet keeps no more of a termination message."""

MEASURES_LABEL = "penstock.dev/measures"
"""On a job that only measures for the ClusterProfile of that name: it has no data and no plan."""

_MOST_LINE_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class PodBinding(Manifest):
    """A pod's place in an attempt: it is node ``node_rank`` of ``num_nodes``, whose first listens at ``master``.

    Epoch 0 measures; epoch 1 trains by the plan with ``plan_digest``. A pod only accepts a binding with its own
    ``pod_uid``. Its devices are ``ranks_per_pod`` consecutive ones from ``node_rank * ranks_per_pod`` on; the profile's
    ranks are these, and the plan's placement assigns its ranks to them. Shards of a pipeline rank have adjacent
    devices, so a pod holds all of them if ``ranks_per_pod`` is a multiple of tp. Pods on one node should have adjacent
    ranks.
    """

    pod_uid: str
    attempt: int
    epoch: Annotated[int, up_to(EXACT)]
    node_rank: Annotated[int, up_to(EXACT)]
    num_nodes: Annotated[int, one_to(MOST_RANKS)]
    ranks_per_pod: Annotated[int, one_to(MOST_RANKS)]
    master: str
    port: int
    plan_digest: str = ""

    def __post_init__(self) -> None:
        require_limits(self)
        if self.node_rank >= self.num_nodes:
            raise UserError(what=f"{self.node_rank} is none of {self.num_nodes} nodes", where="nodeRank")

    @property
    def meeting_port(self) -> int:
        """The port on which ranks connect in this epoch. It differs from the previous epoch's, on which a process may
        still listen.
        """
        return self.port + self.epoch

    @property
    def devices(self) -> range:
        """The pod's devices, numbered over all pods."""
        first = self.node_rank * self.ranks_per_pod
        return range(first, first + self.ranks_per_pod)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointName(Checked):
    """A complete checkpoint of the job: ``out://UID/ATTEMPT/STEP``."""

    attempt: Annotated[int, up_to(EXACT), "the attempt that wrote it"]
    step: Annotated[int, up_to(EXACT), "finished steps of this checkpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentReport(Checked):
    """The identity of a pod, and the state of its attempt, while it runs.

    ``done`` of ``total`` points are measured. ``measurement`` is the SHA-256 of the measurement as the agent serves it,
    empty until there is one. ``checkpoint`` is the newest complete one, of any attempt.
    """

    pod_uid: str
    job_uid: str
    attempt: Annotated[int, up_to(EXACT)]
    state: AttemptState
    profile: Step = Step.MISSING
    done: Annotated[int, up_to(EXACT)] = 0
    total: Annotated[int, up_to(EXACT)] = 0
    measurement: str = ""
    checkpoint: CheckpointName | None = None


def termination_message(report: AttemptReport) -> str:
    """The report as JSON of at most `MOST_REPORT_BYTES`: the last output is shortened first, from its oldest line on,
    then the message, in its middle.
    """
    last_output = tuple(line[:_MOST_LINE_CHARACTERS] for line in report.last_words)
    while (text := _text(report, last_output, report.message)) is None and last_output:
        last_output = last_output[1:]
    most_characters = len(report.message)
    while text is None:
        most_characters = most_characters * 3 // 4
        text = _text(report, last_output, _shortened(report.message, most_characters))
    return text


def _text(report: AttemptReport, last_output: tuple[str, ...], message: str) -> str | None:
    """The report as JSON; None if it is too long. JSON escapes leave only ASCII, a byte each."""
    shorter = dataclasses.replace(report, last_words=last_output, message=message)
    text = json.dumps(shorter.to_manifest(), separators=(",", ":"))
    return text if len(text) <= MOST_REPORT_BYTES else None


def _shortened(message: str, most_characters: int) -> str:
    """The beginning and the end of a message; a remedy is at the end."""
    return f"{message[: most_characters // 2]} ... {message[len(message) - most_characters // 2 :]}"
