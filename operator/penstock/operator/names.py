"""What the operator calls things in a cluster: labels, annotations, and the names of what belongs to a job.

Names of children follow from the job's and the attempt's number, so that making one twice is refused by the cluster.
"""

from __future__ import annotations

GROUP = "penstock.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
JOB_KIND = "PipelineJob"
JOB_PLURAL = "pipelinejobs"

OPERATOR_MANAGER = "penstock-operator"
"""Who owns what the operator applies."""

JOB_LABEL = f"{GROUP}/job"
UID_LABEL = f"{GROUP}/job-uid"
ATTEMPT_LABEL = f"{GROUP}/attempt"

BINDING_ANNOTATION = f"{GROUP}/binding"
STOP_ANNOTATION = f"{GROUP}/stop"

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
HOST_LABEL = "kubernetes.io/hostname"

RANKS_JOB = "ranks"
"""The one replicated job of an attempt's JobSet."""

TRAINER_CONTAINER = "trainer"
INGEST_AUDIENCE = "penstock-ingest"


def attempt_name(job: str, attempt: int) -> str:
    """The name of an attempt's JobSet and ConfigMap."""
    return f"{job}-a{attempt}"
