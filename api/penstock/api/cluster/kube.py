"""The service's requests to Kubernetes; no other module of the service sends any.

A change of an existing job contains the job's uid, so that it never applies to a new job of that name. The apiserver
ignores the uid in changes of the status, so these contain the resource version too. Of a job's status, the service
writes only ``progress``, by server-side apply (https://kubernetes.io/docs/reference/using-api/server-side-apply).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from penstock.core.status import JobProgress
from penstock.kube.names import API_VERSION, JOB_KIND, SERVICE_MANAGER
from penstock.kube.resources import (
    ACCESS_REVIEWS,
    CONFIG_MAPS,
    JOBS,
    LEASES,
    NAMESPACES,
    TOKEN_REVIEWS,
    Resource,
)
from penstock.kube.transport import APPLY, MERGE, Change, Listing, Object, Transport

OWNED = {"fieldManager": SERVICE_MANAGER}
ObjectKey = tuple[str, str, str]
"""Namespace, name and uid of an object."""


class Cluster(Protocol):
    """The service's calls to a cluster. All raise `penstock.kube.transport.KubeError`."""

    def identity(self) -> str:
        """The unique and permanent identity of this cluster."""

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Read the current object."""

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        """Return the objects that match the label selector, in the namespace or, if it is empty, in all."""

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        """Changes after ``version``, for a minute at most."""

    def submit(self, job: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Create the PipelineJob; a dry run only returns the result."""

    def set_suspend(self, job: ObjectKey, suspend: bool, version: str | None = None) -> Object:
        """Set ``suspend`` of the job. If a resource ``version`` is given, fail if the job has another one."""

    def delete(self, job: ObjectKey, version: str | None = None) -> None:
        """Delete the PipelineJob, and its dependents in the background; ``version`` as in `set_suspend`."""

    def report(self, job: ObjectKey, progress: JobProgress, version: str) -> None:
        """Apply ``progress``, the service's part of the job's status. Fails if the job has another ``version``."""

    def create_config_map(self, config_map: Mapping[str, Any]) -> Object:
        """Create the ConfigMap."""

    def write_lease(self, lease: Mapping[str, Any]) -> Object:
        """Create the Lease, or replace it at its resource version."""

    def review_token(self, token: str, audiences: Sequence[str]) -> Object:
        """Return the status of a TokenReview: the token's user, and those of ``audiences`` for which it is valid."""

    def review_access(self, user: Mapping[str, Any], verb: str, namespace: str) -> bool:
        """Whether the user may use the verb on PipelineJobs in the namespace, or in all if it is empty."""


class HttpCluster(Transport):
    """A real cluster. Threads may share it."""

    def identity(self) -> str:
        """The uid of the namespace kube-system, which by convention identifies a cluster and never changes."""
        return str(self.get(NAMESPACES, "", "kube-system")["metadata"]["uid"])

    def submit(self, job: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        query = {**OWNED, "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self.call("POST", JOBS.path(job["metadata"]["namespace"]), body=job, query=query)

    def set_suspend(self, job: ObjectKey, suspend: bool, version: str | None = None) -> Object:
        namespace, name, uid = job
        metadata = {"uid": uid, **({"resourceVersion": version} if version else {})}
        body = {"metadata": metadata, "spec": {"runPolicy": {"suspend": suspend}}}
        return self.call("PATCH", JOBS.path(namespace, name), body=body, query=OWNED, content_type=MERGE)

    def delete(self, job: ObjectKey, version: str | None = None) -> None:
        namespace, name, uid = job
        conditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        body = {"propagationPolicy": "Background", "preconditions": conditions}
        self.call("DELETE", JOBS.path(namespace, name), body=body)

    def report(self, job: ObjectKey, progress: JobProgress, version: str) -> None:
        namespace, name, uid = job
        metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": version}
        body = {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": metadata}
        body["status"] = {"progress": progress.to_manifest()}
        query = {**OWNED, "force": "true"}
        self.call("PATCH", JOBS.path(namespace, name, "status"), body=body, query=query, content_type=APPLY)

    def create_config_map(self, config_map: Mapping[str, Any]) -> Object:
        namespace = config_map["metadata"]["namespace"]
        return self.call("POST", CONFIG_MAPS.path(namespace), body=config_map, query=OWNED)

    def write_lease(self, lease: Mapping[str, Any]) -> Object:
        metadata = lease["metadata"]
        if "resourceVersion" in metadata:
            return self.call("PUT", LEASES.path(metadata["namespace"], metadata["name"]), body=lease, query=OWNED)
        return self.call("POST", LEASES.path(metadata["namespace"]), body=lease, query=OWNED)

    def review_token(self, token: str, audiences: Sequence[str]) -> Object:
        body = {"apiVersion": TOKEN_REVIEWS.api_version, "kind": "TokenReview"}
        spec = {"token": token, "audiences": list(audiences)}
        review: Object = self.call("POST", TOKEN_REVIEWS.path(), body={**body, "spec": spec}).get("status", {})
        return review

    def review_access(self, user: Mapping[str, Any], verb: str, namespace: str) -> bool:
        group = API_VERSION.partition("/")[0]
        attributes = {"group": group, "resource": JOBS.plural, "verb": verb}
        if namespace:
            attributes["namespace"] = namespace
        body = {"apiVersion": ACCESS_REVIEWS.api_version, "kind": "SubjectAccessReview"}
        spec = {**user, "resourceAttributes": attributes}
        status = self.call("POST", ACCESS_REVIEWS.path(), body={**body, "spec": spec}).get("status", {})
        return bool(status.get("allowed"))
