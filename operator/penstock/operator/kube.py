"""The only file of the operator that calls Kubernetes: what it asks, and how that is asked.

What is applied is applied by the server, under the operator's name (https://kubernetes.io/docs/reference/using-api/server-side-apply);
every write that changes or removes something names the uid it means, so that it never strikes a namesake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from penstock.kube.names import OPERATOR_MANAGER
from penstock.kube.resources import CLAIMS, CLUSTER_PROFILES, CONFIG_MAPS, EVENTS, JOBS, JOBSETS, PODS, Resource
from penstock.kube.transport import APPLY, MERGE, Change, KubeError, Listing, Object, Transport

KINDS = {
    "PipelineJob": JOBS,
    "ClusterProfile": CLUSTER_PROFILES,
    "JobSet": JOBSETS,
    "ConfigMap": CONFIG_MAPS,
    "PersistentVolumeClaim": CLAIMS,
    "Event": EVENTS,
}


class Kube(Protocol):
    """What the operator asks of a cluster. All calls raise `KubeError`."""

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """The object as it is now."""
        ...

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        """All objects with the labels that ``selector`` names."""
        ...

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        """What changes after ``version``, for some minutes."""
        ...

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """Make what is not there yet."""
        ...

    def apply(self, manifest: Mapping[str, Any], subresource: str = "") -> Object:
        """Have the fields of ``manifest`` be as it says, and those that it said before and no longer says be gone."""
        ...

    def annotate(self, pod: tuple[str, str, str], annotations: Mapping[str, str]) -> Object:
        """Write annotations of the pod with this namespace, name and uid."""
        ...

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Remove the object with that uid, and in the background what it owns; nothing if it is gone already."""
        ...


class HttpKube(Transport):
    """A real cluster. Threads may share it."""

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """See `Kube`."""
        resource, namespace = KINDS[manifest["kind"]], manifest["metadata"].get("namespace", "")
        return self.call("POST", resource.path(namespace), body=manifest, query={"fieldManager": OPERATOR_MANAGER})

    def apply(self, manifest: Mapping[str, Any], subresource: str = "") -> Object:
        """See `Kube`."""
        resource, metadata = KINDS[manifest["kind"]], manifest["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"], subresource)
        query = {"fieldManager": OPERATOR_MANAGER, "force": "true"}
        return self.call("PATCH", path, body=manifest, query=query, content_type=APPLY)

    def annotate(self, pod: tuple[str, str, str], annotations: Mapping[str, str]) -> Object:
        """See `Kube`."""
        namespace, name, uid = pod
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        query = {"fieldManager": OPERATOR_MANAGER}
        return self.call("PATCH", PODS.path(namespace, name), body=body, query=query, content_type=MERGE)

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """See `Kube`."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            self.call("DELETE", resource.path(namespace, name), body=body)
        except KubeError as error:
            if not error.is_missing and error.status != 409:  # another of that name is there: the one meant is gone
                raise
