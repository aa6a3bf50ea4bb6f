"""What penstock calls things in a cluster: labels, annotations, and the names of what belongs to a job.

Names of children follow from the job's and the attempt's number, so that making one twice is refused by the cluster.
"""

from __future__ import annotations

from penstock.core.job import PipelineJob

GROUP = "penstock.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
JOB_KIND = "PipelineJob"
PROFILE_KIND = "ClusterProfile"

OPERATOR_MANAGER = "penstock-operator"
"""Who owns what the operator applies."""

SERVICE_MANAGER = "penstock-service"
"""Who owns what the service applies."""

SERVICE_LEASE = "penstock-service"
"""Renewed as long as a service is there; its holder is the one that mirrors."""

JOB_LABEL = f"{GROUP}/job"
UID_LABEL = f"{GROUP}/job-uid"
ATTEMPT_LABEL = f"{GROUP}/attempt"

BINDING_ANNOTATION = f"{GROUP}/binding"
STOP_ANNOTATION = f"{GROUP}/stop"
REMINDER_ANNOTATION = f"{GROUP}/reminder"
"""Which of the two above a pod was reminded of. Nobody reads it; that it changes makes a kubelet write both again."""

SUBMITTER_ANNOTATION = f"{GROUP}/submitted-by"
REQUEST_ANNOTATION = f"{GROUP}/request"
"""On a job that the service made: for whom, and by which request if that had a key."""

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""What Kueue reads of a JobSet, https://kueue.sigs.k8s.io/docs/tasks/run/jobsets; the second also of a PipelineJob."""

HOST_LABEL = "kubernetes.io/hostname"

BATCH_GROUP, JOBSET_GROUP = "batch", "jobset.x-k8s.io"
BATCH_JOB_KIND, JOBSET_KIND = "Job", "JobSet"
"""What an attempt's pods are controlled by, and what that is controlled by."""

RANKS_JOB = "ranks"
"""The one replicated job of an attempt's JobSet."""

TRAINER_CONTAINER = "trainer"
REPORTER_CONTAINER = "reporter"
"""In every pod: where its ranks run, and what brings their records to the service."""

INGEST_AUDIENCE = "penstock-ingest"
PEOPLE_AUDIENCE = "penstock"
"""What a token has to be meant for: a pod's that reports, and a person's."""

PROFILE_FILE = "profile.json.gz"
"""Where a ConfigMap holds a measurement."""


def attempt_name(job: str, attempt: int) -> str:
    """The name of an attempt's JobSet and ConfigMap."""
    return f"{job}-a{attempt}"


def ranks_job_name(job: str, attempt: int) -> str:
    """The name of the Job that the JobSet controller makes of an attempt's JobSet."""
    return f"{attempt_name(job, attempt)}-{RANKS_JOB}-0"


def profile_prefix(job: str) -> str:
    """With what the names of a job's measurements begin."""
    return f"{job}-profile-a"


def profile_name(job: str, attempt: int) -> str:
    """The name of the ConfigMap that holds what an attempt measured."""
    return f"{profile_prefix(job)}{attempt}"


def claim_name(job: PipelineJob, root: str) -> str:
    """The claim behind a root: the one that the job names, or the one made for it from its template."""
    named = job.spec.kubernetes.volumes[root].claim
    return named or f"{job.metadata.name}-{root.replace('/', '-').lower()}"
