"""What the operator and the agent in a pod tell each other.

A pod waits for its binding. The operator writes it as an annotation, which the pod reads as a file; the plan that it
names lies beside, from the attempt's ConfigMap. The pod answers once: its container's termination message is an
`penstock.core.supervision.AttemptReport`. Either side may read late, or again, and the other needs nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.manifest import Manifest
from penstock.core.ranges import require_not_negative, require_positive

MEASURE_EPOCH = 0
TRAIN_EPOCH = 1

ATTEMPT_FILES = "/etc/penstock/attempt"
"""Where a pod finds its attempt's ConfigMap: JOB_FILE and ADDRESS_FILE from the start, PLAN_FILE once it is planned."""

JOB_FILE = "job.json"
ADDRESS_FILE = "address.json"
CA_FILE = "ca.crt"
PLAN_FILE = "plan.json.gz"

POD_FILES = "/etc/penstock/pod"
"""Where a pod finds what is written to it alone; a file is empty until it is."""

BINDING_FILE = "binding"
STOP_FILE = "stop"

TOKEN_FILE = "/var/run/secrets/penstock/token"
MOST_REPORT_BYTES = 4096
"""Of a termination message the kubelet keeps as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodBinding(Manifest):
    """A pod's place in an attempt: it is node ``node_rank`` of ``num_nodes``, whose first listens at ``master``.

    Epoch 0 measures, for what ``profile_key`` names; epoch 1 trains by the plan with ``plan_digest``. A pod heeds the
    binding with its own ``pod_uid`` alone. Its ranks are ``node_rank * ranks_per_pod`` and those that follow.
    """

    pod_uid: str
    attempt: int
    epoch: int
    node_rank: int
    num_nodes: int
    ranks_per_pod: int
    master: str
    port: int
    plan_digest: str = ""
    profile_key: str = ""

    def __post_init__(self) -> None:
        require_not_negative(self.epoch, "epoch")
        require_not_negative(self.node_rank, "nodeRank")
        require_positive(self.num_nodes, "numNodes", "count the pods")
        require_positive(self.ranks_per_pod, "ranksPerPod", "write at least 1")
