"""The only module of the operator that calls Kubernetes: its requests, and their form.

Applies are server-side, under the operator's field manager
(https://kubernetes.io/docs/reference/using-api/server-side-apply). An annotation or a deletion names the object's uid,
so that it never hits a new object of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from penstock.kube.names import JOB_KIND, OPERATOR_MANAGER, PROFILE_KIND
from penstock.kube.resources import CLAIMS, CLUSTER_PROFILES, CONFIG_MAPS, EVENTS, JOBS, JOBSETS, PODS, Resource
from penstock.kube.transport import APPLY, MERGE, KubeError, Object, Reads, Transport
from penstock.kube.watching import Watches

KINDS = {
    JOB_KIND: JOBS,
    PROFILE_KIND: CLUSTER_PROFILES,
    "JobSet": JOBSETS,
    "ConfigMap": CONFIG_MAPS,
    "PersistentVolumeClaim": CLAIMS,
    "Event": EVENTS,
}


class Kube(Reads, Watches, Protocol):
    """The operator's calls to a cluster. All raise `KubeError`."""

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """Create an object that does not exist yet."""
        ...

    def apply(self, manifest: Mapping[str, Any], subresource: str = "") -> Object:
        """Set the fields of ``manifest``, and remove those of the operator's last apply that it lacks. Create the
        object if it does not exist.
        """
        ...

    def annotate(self, pod: tuple[str, str, str], annotations: Mapping[str, str]) -> Object:
        """Write annotations of the pod with this namespace, name and uid."""
        ...

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Remove the object with that uid, and in the background its dependents; do nothing if it is gone already."""
        ...


class HttpKube(Transport):
    """A real cluster. Threads may share it."""

    def create(self, manifest: Mapping[str, Any]) -> Object:
        resource, namespace = KINDS[manifest["kind"]], manifest["metadata"].get("namespace", "")
        return self.call("POST", resource.path(namespace), body=manifest, query={"fieldManager": OPERATOR_MANAGER})

    def apply(self, manifest: Mapping[str, Any], subresource: str = "") -> Object:
        resource, metadata = KINDS[manifest["kind"]], manifest["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"], subresource)
        query = {"fieldManager": OPERATOR_MANAGER, "force": "true"}
        return self.call("PATCH", path, body=manifest, query=query, content_type=APPLY)

    def annotate(self, pod: tuple[str, str, str], annotations: Mapping[str, str]) -> Object:
        namespace, name, uid = pod
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        query = {"fieldManager": OPERATOR_MANAGER}
        return self.call("PATCH", PODS.path(namespace, name), body=body, query=query, content_type=MERGE)

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            self.call("DELETE", resource.path(namespace, name), body=body)
        except KubeError as error:
            if not error.is_missing and error.status != 409:  # 409: the name belongs to another object by now
                raise
