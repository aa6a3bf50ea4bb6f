"""Users' requests, carried out on the cluster: jobs are made, changed and removed there, and stored at once here.

The cluster decides. The store follows before the answer, so that the next read is consistent with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from penstock.api.cluster.kube import Cluster, Place
from penstock.api.cluster.job_snapshot import job_snapshot
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
from penstock.kube.transport import KubeError, Object

TRIES = 8
"""Retries of a change after conflicts with other writers, whose changes do not affect the request."""


def require_allowed(kube: Cluster, job: PipelineJob, policy: JobPolicy) -> None:
    """Raise `NotAllowedError` for a job that the operator would hold: the service submits it with rights of its own."""
    if reasons := refusals_on(kube, job, policy):
        raise combined(reasons)


def submitted(kube: Cluster, job: PipelineJob, by: str, keyed: KeyedRequest | None, *, dry_run: bool = False) -> Object:
    """The PipelineJob, made for ``by``. The same request made it only once, also if its answer was lost."""
    manifest = _noted(job, by, keyed)
    try:
        return kube.submit(manifest, dry_run=dry_run)
    except KubeError as error:
        if error.is_missing and error.message.startswith("namespaces "):
            remedy = "have an administrator make it, or name another"
            raise UserError(what="is no namespace of the cluster", where="metadata.namespace", remedy=remedy) from None
        if not error.is_taken or keyed is None:
            raise
        item = kube.get(JOBS, job.metadata.namespace, job.metadata.name)
        if (item["metadata"].get("annotations") or {}).get(REQUEST_ANNOTATION) != _mark(keyed):
            raise
        return item


def proposed(connection: Connection, item: Object, cluster: str, by: str, now: float) -> StoredJob:
    """The job as the store would have it; nothing of it stays."""
    trial = connection.begin_nested()
    try:
        return kept(connection, item, cluster, by, now)
    finally:
        trial.rollback()


def kept(connection: Connection, item: Object, cluster: str, by: str, now: float) -> StoredJob:
    """The job as the store has it from now on."""
    return snapshots.put(connection, job_snapshot(item, cluster), now, by)


def changed(
    kube: Cluster,
    see: Callable[[Object], StoredJob | None],
    namespace: str,
    name: str,
    version: int | None,
    change: Callable[[Place, str | None, StoredJob], Object],
) -> Object:
    """The job after ``change``, if it has that ``version`` in the store or none is given.

    Raises:
        NoSuchJobError: there is none of that name.
        ChangedMeanwhileError: it is of another version.
    """
    for _ in range(TRIES):
        item, stored = _read_current(kube, see, namespace, name)
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
    raise ChangedMeanwhileError("a version that changes all the time")


def _read_current(
    kube: Cluster, see: Callable[[Object], StoredJob | None], namespace: str, name: str
) -> tuple[Object, StoredJob]:
    """The job as it is on the cluster, and as the store has it then."""
    try:
        item = kube.get(JOBS, namespace, name)
    except KubeError as error:
        if not error.is_missing:
            raise
        raise NoSuchJobError(f"{namespace}/{name}") from None
    stored = see(item)
    if stored is None:
        raise KubeError(422, "Invalid", "the status of the job cannot be read; see the service's log")
    return item, stored


def begin(connection: Connection, old: StoredJob) -> tuple[int, str] | None:
    """Step and URI of the job's newest checkpoint; none if it has none."""
    newest = attempts.newest_checkpoint(connection, old.uid)
    return None if newest is None else (newest[1], f"{OUT}{old.uid}/{newest[0]}/{newest[1]}")


def on_the_same_storage(again: PipelineJob, old: PipelineJob) -> PipelineJob:
    """A retry, with the claims that were made for the job and stay: its checkpoints are there."""
    volumes = {
        root: VolumeSpec(claim=claim_name(old, root)) if _stays(volume) else volume
        for root, volume in again.spec.kubernetes.volumes.items()
    }
    return again.with_spec(kubernetes=dataclasses.replace(again.spec.kubernetes, volumes=volumes))


def _stays(volume: VolumeSpec) -> bool:
    return volume.template is not None and volume.reclaim is Reclaim.RETAIN


def _noted(job: PipelineJob, by: str, keyed: KeyedRequest | None) -> dict[str, Any]:
    """The manifest for the cluster, without the metadata that the cluster sets."""
    manifest = job.to_manifest()
    notes = {SUBMITTER_ANNOTATION: by, **({REQUEST_ANNOTATION: _mark(keyed)} if keyed else {})}
    others = {key: text for key, text in job.metadata.annotations.items() if key != REQUEST_ANNOTATION}
    metadata = {**manifest["metadata"], "namespace": job.metadata.namespace, "annotations": {**others, **notes}}
    metadata.pop("uid", None)
    return {**manifest, "metadata": metadata}


def _mark(keyed: KeyedRequest) -> str:
    """A digest of a request and its key, which discloses neither."""
    return hashlib.sha256(f"{keyed.identity}\n{keyed.key}\n{keyed.request}".encode()).hexdigest()
