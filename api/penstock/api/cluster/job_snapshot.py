"""Conversion of a PipelineJob of the cluster into a snapshot for the store. Nothing is read or written here."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from penstock.api.store.sanitize import cleaned, is_nested_beyond
from penstock.api.store.snapshots import JobSnapshot
from penstock.core.errors import UserError
from penstock.core.instants import parse_instant
from penstock.core.job import PipelineJob
from penstock.core.status import JobStatus
from penstock.kube.names import API_VERSION, JOB_KIND, SUBMITTER_ANNOTATION
from penstock.kube.transport import Object

KEPT = ("name", "namespace", "labels", "annotations", "uid")
MOST_DEPTH = 64
"""Limit of nested lists and objects; the cluster's ``managedFields`` have about 20."""
COUNTS, MOST_COUNTED = ("attempt", "failures", "ranks"), 2**31 - 1
"""Fields of the status that are stored in 32-bit columns, and the largest value of such a column."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation of kubectl with a copy of the manifest."""


def job_snapshot(item: Object, cluster: str) -> JobSnapshot:
    """Return the job for the store, with text that every database accepts.

    Raises `UserError` if its status is not one that an operator writes, or if it is nested too deeply to be passed on.
    """
    require_flat(item)
    item = cleaned(item)
    metadata = item["metadata"]
    return JobSnapshot(
        cluster=cluster,
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        version=int(metadata.get("resourceVersion") or 0),  # a dry run has none
        generation=int(metadata.get("generation", 1)),
        created_at=parse_instant(metadata.get("creationTimestamp"), "metadata.creationTimestamp") or 0.0,
        manifest=_manifest(item),
        status=_status(item),
        delete_requested_at=parse_instant(metadata.get("deletionTimestamp"), "metadata.deletionTimestamp"),
    )


def require_flat(item: Object) -> None:
    """Raise `UserError` for a job that is nested too deeply to be serialized in an answer."""
    if is_nested_beyond(item, MOST_DEPTH):
        raise UserError(
            what=f"is nested more than {MOST_DEPTH} deep",
            where="the job",
            remedy="write the job as its CustomResourceDefinition allows: kubectl explain pipelinejob.spec",
        )


def _status(item: Object) -> JobStatus:
    """Parse the status. Raises `UserError` also for counts that no operator reaches and no column holds."""
    status = JobStatus.from_manifest(item.get("status") or {}, "status")
    for name in COUNTS:
        if abs(getattr(status, name)) > MOST_COUNTED:
            raise UserError(
                what=f"is beyond {MOST_COUNTED}",
                where=f"status.{name}",
                remedy="remove the field: only the operator writes the status",
            )
    return status


def submitter(item: Object) -> str:
    """Return the user for whom the service created the job; empty if another client created it."""
    return str(cleaned((item["metadata"].get("annotations") or {}).get(SUBMITTER_ANNOTATION, "")))


def gist(item: Object) -> bytes:
    """Return a digest of the job without its progress and the cluster's bookkeeping."""
    metadata = {name: value for name, value in item["metadata"].items() if name not in VOLATILE}
    status = {name: value for name, value in (item.get("status") or {}).items() if name != "progress"}
    text = json.dumps([metadata, item.get("spec"), status], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


VOLATILE = ("resourceVersion", "managedFields")


def _manifest(item: Object) -> dict[str, Any]:
    """Return the manifest without defaults. An invalid one is kept: the operator reports the error."""
    metadata = {name: item["metadata"][name] for name in KEPT if name in item["metadata"]}
    notes = {name: text for name, text in metadata.pop("annotations", {}).items() if name != LAST_APPLIED}
    if notes:
        metadata["annotations"] = notes
    manifest = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": metadata, "spec": item.get("spec", {})}
    try:
        return {**PipelineJob.from_manifest(manifest).to_manifest(), "metadata": metadata}
    except UserError:
        return manifest
