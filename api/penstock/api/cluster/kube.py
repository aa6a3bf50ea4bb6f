"""The service's requests to Kubernetes; no other module of the service sends any.

A change of an existing job contains the job's uid, so that it never applies to a new job of that name. The apiserver
ignores the uid in changes of the status, so these contain the resource version too. Of a job's status, the service
writes only ``progress``, by server-side apply (https://kubernetes.io/docs/reference/using-api/server-side-apply).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.status import JobProgress
from penstock.kube.names import API_VERSION, JOB_KIND, SERVICE_MANAGER
from penstock.kube.resources import (
    ACCESS_REVIEWS,
    CONFIG_MAPS,
    JOBS,
    LEASES,
    NAMESPACES,
    TOKEN_REVIEWS,
)
from penstock.kube.transport import APPLY, MERGE, Object, Transport

OWNED = {"fieldManager": SERVICE_MANAGER}
ObjectKey = tuple[str, str, str]
"""Namespace, name and uid of an object."""


class Cluster(Transport):
    """The service's calls to a cluster. All raise `penstock.kube.transport.KubeError`. Threads may share it."""

    def identity(self) -> str:
        """The uid of the namespace kube-system, which by convention identifies a cluster and never changes."""
        return str(self.get(NAMESPACES, "", "kube-system")["metadata"]["uid"])

    def submit(self, job: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Create the PipelineJob; a dry run only returns the result."""
        query = {**OWNED, "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self.call("POST", JOBS.path(job["metadata"]["namespace"]), body=job, query=query)

    def set_suspend(self, job: ObjectKey, suspend: bool, version: str | None = None) -> Object:
        """Set ``suspend`` of the job. If a resource ``version`` is given, fail if the job has another one."""
        namespace, name, uid = job
        metadata = {"uid": uid, **({"resourceVersion": version} if version else {})}
        body = {"metadata": metadata, "spec": {"runPolicy": {"suspend": suspend}}}
        return self.call("PATCH", JOBS.path(namespace, name), body=body, query=OWNED, content_type=MERGE)

    def delete(self, job: ObjectKey, version: str | None = None) -> None:
        """Delete the PipelineJob, and its dependents in the background; ``version`` as in `set_suspend`."""
        namespace, name, uid = job
        conditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        body = {"propagationPolicy": "Background", "preconditions": conditions}
        self.call("DELETE", JOBS.path(namespace, name), body=body)

    def report(self, job: ObjectKey, progress: JobProgress, version: str) -> None:
        """Apply ``progress``, the service's part of the job's status. Fails if the job has another ``version``."""
        namespace, name, uid = job
        metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": version}
        body = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": metadata}
        body["status"] = {"progress": progress.to_manifest()}
        query = {**OWNED, "force": "true"}
        self.call("PATCH", JOBS.path(namespace, name, "status"), body=body, query=query, content_type=APPLY)

    def create_config_map(self, config_map: Mapping[str, Any]) -> Object:
        """Create the ConfigMap."""
        namespace = config_map["metadata"]["namespace"]
        return self.call("POST", CONFIG_MAPS.path(namespace), body=config_map, query=OWNED)

    def write_lease(self, lease: Mapping[str, Any]) -> Object:
        """Create the Lease, or replace it at its resource version."""
        metadata = lease["metadata"]
        if "resourceVersion" in metadata:
            return self.call("PUT", LEASES.path(metadata["namespace"], metadata["name"]), body=lease, query=OWNED)
        return self.call("POST", LEASES.path(metadata["namespace"]), body=lease, query=OWNED)

    def review_token(self, token: str, audiences: Sequence[str]) -> Object:
        """Return the status of a TokenReview: the token's user, and those of ``audiences`` for which it is valid."""
        body = {"apiVersion": TOKEN_REVIEWS.api_version, "kind": "TokenReview"}
        spec = {"token": token, "audiences": list(audiences)}
        review: Object = self.call("POST", TOKEN_REVIEWS.path(), body={**body, "spec": spec}).get("status", {})
        return review

    def review_access(self, user: Mapping[str, Any], verb: str, namespace: str) -> bool:
        """Whether the user may use the verb on PipelineJobs in the namespace, or in all if it is empty."""
        group = API_VERSION.partition("/")[0]
        attributes = {"group": group, "resource": JOBS.plural, "verb": verb}
        if namespace:
            attributes["namespace"] = namespace
        body = {"apiVersion": ACCESS_REVIEWS.api_version, "kind": "SubjectAccessReview"}
        spec = {**user, "resourceAttributes": attributes}
        status = self.call("POST", ACCESS_REVIEWS.path(), body={**body, "spec": spec}).get("status", {})
        return bool(status.get("allowed"))
