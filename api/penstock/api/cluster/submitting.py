"""Requests of users that change PipelineJobs on the cluster.

The cluster decides. The store is updated before the answer, so that the next read is consistent with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from penstock.api.cluster.job_snapshot import job_snapshot
from penstock.api.cluster.kube import Cluster, ObjectKey
from penstock.api.store import attempts, snapshots
from penstock.api.store.idempotency import KeyedRequest
from penstock.api.store.jobs import ChangedMeanwhileError, NoSuchJobError, StoredJob
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.job_policy import JobPolicy, combined
from penstock.core.kubernetes_spec import Reclaim, VolumeSpec
from penstock.core.run.locations import OUT
from penstock.kube.allowing import refusals_on
from penstock.kube.names import REQUEST_ANNOTATION, SUBMITTER_ANNOTATION, claim_name
from penstock.kube.resources import JOBS
from penstock.kube.transport import KubeError, Object, unless_missing

TRIES = 8
"""Limit of tries of a change, which conflicts with other writers fail although they do not affect the request."""


def require_allowed(kube: Cluster, job: PipelineJob, policy: JobPolicy) -> None:
    """Raise `NotAllowedError` for a job that the operator would hold: the service submits it with permissions of its
    own.
    """
    if reasons := refusals_on(kube, job, policy):
        raise combined(reasons)


def submitted(kube: Cluster, job: PipelineJob, by: str, keyed: KeyedRequest | None, *, dry_run: bool = False) -> Object:
    """Create the PipelineJob for ``by``. A repeated request does not create it again, also if its answer was lost."""
    manifest = _annotated_manifest(job, by, keyed)
    try:
        return kube.submit(manifest, dry_run=dry_run)
    except KubeError as error:
        if error.is_missing and error.message.startswith("namespaces "):
            raise UserError(
                what="does not exist on the cluster",
                where="metadata.namespace",
                remedy="use one of kubectl get namespaces, or let an administrator create it",
            ) from None
        if not error.is_taken or keyed is None:
            raise
        item = kube.get(JOBS, job.metadata.namespace, job.metadata.name)
        if (item["metadata"].get("annotations") or {}).get(REQUEST_ANNOTATION) != _mark(keyed):
            raise
        return item


def proposed(connection: Connection, item: Object, cluster: str, by: str, now: float) -> StoredJob:
    """Return the job as the store would hold it, without storing it."""
    trial = connection.begin_nested()
    try:
        return kept(connection, item, cluster, by, now)
    finally:
        trial.rollback()


def kept(connection: Connection, item: Object, cluster: str, by: str, now: float) -> StoredJob:
    """Store the job, and return it."""
    return snapshots.put(connection, job_snapshot(item, cluster), now, by)


def changed(
    kube: Cluster,
    store: Callable[[Object], StoredJob | None],
    namespace: str,
    name: str,
    version: int | None,
    change: Callable[[ObjectKey, str | None, StoredJob], Object],
) -> Object:
    """Change the job if it has that ``version`` in the store, or any if none is given; return the result.

    Raises:
        NoSuchJobError: no job has that name.
        ChangedMeanwhileError: it has another version.
    """
    for _ in range(TRIES):
        item, stored = _read_current(kube, store, namespace, name)
        if version is not None and stored.version != version:
            raise ChangedMeanwhileError(f"version {stored.version}, not {version}")
        guard = str(item["metadata"]["resourceVersion"]) if version is not None else None
        try:
            return change((namespace, name, stored.uid), guard, stored) or item
        except KubeError as error:
            if error.is_missing:
                raise NoSuchJobError(f"{namespace}/{name}") from None
            if error.status != 409 or error.is_taken:
                raise
    raise ChangedMeanwhileError("a version that other writers change continuously")


def _read_current(
    kube: Cluster, store: Callable[[Object], StoredJob | None], namespace: str, name: str
) -> tuple[Object, StoredJob]:
    """Read the job from the cluster, and store it; return both forms."""
    item = unless_missing(kube.get, JOBS, namespace, name)
    if item is None:
        raise NoSuchJobError(f"{namespace}/{name}")
    stored = store(item)
    if stored is None:
        raise KubeError(422, "Invalid", "the status of the job cannot be read; the service's log has the field")
    return item, stored


def begin(connection: Connection, old: StoredJob) -> tuple[int, str] | None:
    """Return step and URI of the job's newest checkpoint; none without one."""
    newest = attempts.newest_checkpoint(connection, old.uid)
    return None if newest is None else (newest[1], f"{OUT}{old.uid}/{newest[0]}/{newest[1]}")


def on_the_same_storage(retry: PipelineJob, old: PipelineJob) -> PipelineJob:
    """Return the retry with the volume claims of the old job that outlive it: they hold its checkpoints."""
    volumes = {
        root: VolumeSpec(claim=claim_name(old, root)) if _stays(volume) else volume
        for root, volume in retry.spec.kubernetes.volumes.items()
    }
    return retry.with_spec(kubernetes=dataclasses.replace(retry.spec.kubernetes, volumes=volumes))


def _stays(volume: VolumeSpec) -> bool:
    return volume.template is not None and volume.reclaim is Reclaim.RETAIN


def _annotated_manifest(job: PipelineJob, by: str, keyed: KeyedRequest | None) -> dict[str, Any]:
    """Return the manifest for the cluster, without the metadata that the cluster sets."""
    manifest = job.to_manifest()
    notes = {SUBMITTER_ANNOTATION: by, **({REQUEST_ANNOTATION: _mark(keyed)} if keyed else {})}
    others = {key: text for key, text in job.metadata.annotations.items() if key != REQUEST_ANNOTATION}
    metadata = {**manifest["metadata"], "namespace": job.metadata.namespace, "annotations": {**others, **notes}}
    metadata.pop("uid", None)
    return {**manifest, "metadata": metadata}


def _mark(keyed: KeyedRequest) -> str:
    """Return a digest of a request and its key, which discloses neither."""
    return hashlib.sha256(f"{keyed.identity}\n{keyed.key}\n{keyed.request}".encode()).hexdigest()
