"""Authorization of submitted jobs: the caller's role in the namespace, and all resources that the job names."""

from __future__ import annotations

from sqlalchemy import Connection

from penstock.api.auth.identity import Identity, Role
from penstock.api.http.dependencies import require_role
from penstock.api.store import jobs
from penstock.core.job import PipelineJob
from penstock.core.names import require_labels
from penstock.core.run.locations import Locations


def require_editor(identity: Identity, job: PipelineJob) -> None:
    """Raise unless ``identity`` may create the job in its namespace.

    Raises:
        Problem: the identity lacks the role.
        UserError: its labels are not valid for a Kubernetes object.
    """
    require_labels(job.metadata.labels, "metadata.labels")
    require_role(identity, Role.EDITOR, job.metadata.namespace, "create")


def require_acceptable(connection: Connection, locations: Locations, identity: Identity, job: PipelineJob) -> None:
    """Raise unless ``identity`` may submit the job.

    Raises:
        Problem: the identity lacks the role in its namespace.
        UserError: it names a resource that is forbidden or missing, or a checkpoint that the caller may not read.
    """
    require_editor(identity, job)

    def readable(uid: str) -> bool:
        return identity.may(Role.VIEWER, jobs.namespace_of(connection, uid))

    locations.resolved(job, readable)
