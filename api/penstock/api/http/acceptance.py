"""Whether somebody may hand a job over: their role where it belongs, and all that it names."""

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
        UserError: it names what it may not, or what is not there, or a checkpoint that is not theirs to see.
    """
    require_editor(identity, job)

    def readable(uid: str) -> bool:
        return identity.may(Role.VIEWER, jobs.namespace_of(connection, uid))

    locations.resolved(job, readable)
