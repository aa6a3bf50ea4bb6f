"""Names that penstock uses in a cluster: labels, annotations, and the names of a job's objects.

Names of children follow from the job's name and the attempt's number, so the cluster refuses to create one twice.
"""

from __future__ import annotations

from penstock.core import cluster_profile, job
from penstock.core.job import PipelineJob

API_VERSION = job.API_VERSION
GROUP, _, VERSION = API_VERSION.partition("/")
JOB_KIND, PROFILE_KIND = job.KIND, cluster_profile.KIND

OPERATOR_MANAGER = "penstock-operator"
"""Field manager of the operator's applies."""

SERVICE_MANAGER = "penstock-service"
"""Field manager of the service's applies."""

SERVICE_LEASE = "penstock-service"
"""Renewed as long as a service runs; its holder is the instance that mirrors the cluster."""

JOB_LABEL = f"{GROUP}/job"
UID_LABEL = f"{GROUP}/job-uid"
ATTEMPT_LABEL = f"{GROUP}/attempt"

BINDING_ANNOTATION = f"{GROUP}/binding"
STOP_ANNOTATION = f"{GROUP}/stop"
REMINDER_ANNOTATION = f"{GROUP}/reminder"
"""Name of the annotation above that was set last. No program reads it; the change makes the kubelet rewrite the files
of both annotations at once.
"""

SUBMITTER_ANNOTATION = f"{GROUP}/submitted-by"
REQUEST_ANNOTATION = f"{GROUP}/request"
"""On a job that the service made: its submitter, and the request's key if it had one."""

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Labels that Kueue reads on a JobSet, https://kueue.sigs.k8s.io/docs/tasks/run/jobsets; the second also on a job."""

HOST_LABEL = "kubernetes.io/hostname"

BATCH_GROUP, JOBSET_GROUP = "batch", "jobset.x-k8s.io"
BATCH_JOB_KIND, JOBSET_KIND = "Job", "JobSet"
"""An attempt's JobSet controls a Job, which controls the pods."""

RANKS_JOB = "ranks"
"""The one replicated job of an attempt's JobSet."""

TRAINER_CONTAINER = "trainer"
REPORTER_CONTAINER = "reporter"
"""The two containers of every pod: one runs its ranks, one ships their records to the service."""

INGEST_AUDIENCE = "penstock-ingest"
PEOPLE_AUDIENCE = "penstock"
"""Required audiences of tokens: of a pod that reports, and of a person."""

PROFILE_FILE = "profile.json.gz"
"""The key of a ConfigMap under which it holds a profile."""


def attempt_name(job: str, attempt: int) -> str:
    """The name of an attempt's JobSet and ConfigMap."""
    return f"{job}-a{attempt}"


def ranks_job_name(job: str, attempt: int) -> str:
    """The name of the Job that the JobSet controller makes of an attempt's JobSet."""
    return f"{attempt_name(job, attempt)}-{RANKS_JOB}-0"


def profile_prefix(job: str) -> str:
    """Prefix of the names of a job's profiles."""
    return f"{job}-profile-a"


def profile_name(job: str, attempt: int) -> str:
    """The name of the ConfigMap that holds the profile of an attempt."""
    return f"{profile_prefix(job)}{attempt}"


def claim_name(job: PipelineJob, root: str) -> str:
    """The claim behind a root: the one that the job names, or the one made for it from its template."""
    named = job.spec.kubernetes.volumes[root].claim
    return named or f"{job.metadata.name}-{root.replace('/', '-').lower()}"
