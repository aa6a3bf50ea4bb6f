"""Whether a caller may submit a job: by the role in its namespace, and by all resources that it names."""

from __future__ import annotations

from sqlalchemy import Connection

from penstock.api.auth.identity import Identity, Role
from penstock.api.http.dependencies import forbidden
from penstock.api.store import jobs
from penstock.core.job import PipelineJob
from penstock.core.names import require_labels
from penstock.core.run.locations import Locations


def require_editor(identity: Identity, job: PipelineJob) -> None:
    """Do nothing for a job that ``identity`` may make where it belongs.

    Raises:
        Problem: they may not.
        UserError: its labels are none that a Kubernetes object may have.
    """
    namespace = job.metadata.namespace
    require_labels(job.metadata.labels, "metadata.labels")
    if not identity.may(Role.EDITOR, namespace, "create"):
        raise forbidden(Role.EDITOR, namespace)


def require_acceptable(connection: Connection, locations: Locations, identity: Identity, job: PipelineJob) -> None:
    """Do nothing for a job that ``identity`` may submit as it is.

    Raises:
        Problem: its namespace is none where they may.
        UserError: it names a resource that is forbidden or missing, or a checkpoint that the caller may not read.
    """
    require_editor(identity, job)

    def readable(uid: str) -> bool:
        return identity.may(Role.VIEWER, jobs.namespace_of(connection, uid))

    locations.resolved(job, readable)
