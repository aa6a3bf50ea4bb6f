"""The only file that calls Kubernetes. Objects go in and come out as plain dictionaries, as the cluster writes them.

What is applied is applied by the server, under the operator's name (https://kubernetes.io/docs/reference/using-api/server-side-apply);
every write that changes or removes something names the uid it means, so that it never strikes a namesake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

from kubernetes.client import ApiClient
from urllib3 import BaseHTTPResponse, Timeout
from urllib3.exceptions import HTTPError

from penstock.core.errors import PenstockError
from penstock.operator.names import OPERATOR_MANAGER
from penstock.operator.seen import Object

REQUEST = Timeout(connect=5.0, read=20.0)
WATCH_SECONDS = 290
"""How long one watch is asked for; it is asked for again then."""

WATCHED = Timeout(connect=5.0, read=150.0)
"""A bookmark comes every minute or so; a watch that is silent for much longer is broken."""

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class KubeError(PenstockError):
    """The cluster refused a call, or could not be reached (``status`` 0). ``reason`` is its word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(f"{reason}: {message}" if message else reason)

    @property
    def is_missing(self) -> bool:
        """Whether what was meant is not there, or no longer."""
        return self.status == 404

    @property
    def is_taken(self) -> bool:
        """Whether something of that name is there already."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def is_expired(self) -> bool:
        """Whether a watch has to begin anew, from a list."""
        return self.status == 410


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """A kind of object and where the cluster serves it."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of one object, or of all of a namespace or the cluster if no ``name`` is given."""
        root = "/api" if "/" not in self.api_version else "/apis"
        scope = ["namespaces", namespace] if self.namespaced and namespace else []
        parts = [root, self.api_version, *scope, self.plural, name, subresource]
        return "/".join(part for part in parts if part)


JOBS = Resource(api_version="penstock.dev/v1alpha1", plural="pipelinejobs")
JOBSETS = Resource(api_version="jobset.x-k8s.io/v1alpha2", plural="jobsets")
CONFIG_MAPS = Resource(api_version="v1", plural="configmaps")
CLAIMS = Resource(api_version="v1", plural="persistentvolumeclaims")
PODS = Resource(api_version="v1", plural="pods")
NODES = Resource(api_version="v1", plural="nodes", namespaced=False)
EVENTS = Resource(api_version="v1", plural="events")
LEASES = Resource(api_version="coordination.k8s.io/v1", plural="leases")

KINDS = {
    "PipelineJob": JOBS,
    "JobSet": JOBSETS,
    "ConfigMap": CONFIG_MAPS,
    "PersistentVolumeClaim": CLAIMS,
    "Event": EVENTS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """All objects of a selection, at one moment of the cluster's history."""

    objects: tuple[Object, ...]
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An object that was added, modified or removed, or none if only time went by; ``version`` is the moment's."""

    version: str
    found: Object | None = None
    removed: bool = False


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


class HttpKube:
    """A real cluster, through the official client's connections. Threads may share it."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """See `Kube`."""
        return self._call("GET", resource.path(namespace, name))

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        """See `Kube`. Kinds are left out of items by the cluster, and nobody here needs them."""
        query = {"labelSelector": selector} if selector else {}
        found = self._call("GET", resource.path(namespace), query=query)
        return Listing(objects=tuple(found["items"]), version=found["metadata"]["resourceVersion"])

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        """See `Kube`."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        query["allowWatchBookmarks"] = "true"
        if selector:
            query["labelSelector"] = selector
        response = self._send("GET", resource.path(namespace), query=query, timeout=WATCHED)
        try:
            for line in _lines(response):
                yield _change(json.loads(line))
        except HTTPError as error:
            raise KubeError(0, "Unreachable", str(error)) from None
        finally:
            response.close()

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """See `Kube`."""
        resource, namespace = KINDS[manifest["kind"]], manifest["metadata"].get("namespace", "")
        return self._call("POST", resource.path(namespace), body=manifest, query={"fieldManager": OPERATOR_MANAGER})

    def apply(self, manifest: Mapping[str, Any], subresource: str = "") -> Object:
        """See `Kube`."""
        resource, metadata = KINDS[manifest["kind"]], manifest["metadata"]
        path = resource.path(metadata.get("namespace", ""), metadata["name"], subresource)
        query = {"fieldManager": OPERATOR_MANAGER, "force": "true"}
        return self._call("PATCH", path, body=manifest, query=query, content_type=APPLY)

    def annotate(self, pod: tuple[str, str, str], annotations: Mapping[str, str]) -> Object:
        """See `Kube`."""
        namespace, name, uid = pod
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        query = {"fieldManager": OPERATOR_MANAGER}
        return self._call("PATCH", PODS.path(namespace, name), body=body, query=query, content_type=MERGE)

    def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """See `Kube`."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            self._call("DELETE", resource.path(namespace, name), body=body)
        except KubeError as error:
            if not error.is_missing and error.status != 409:  # another of that name is there: the one meant is gone
                raise

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        response = self._send(method, path, body=body, query=query, content_type=content_type)
        try:
            return json.loads(response.read())
        except (HTTPError, ValueError) as error:
            raise KubeError(0, "Unreachable", str(error)) from None
        finally:
            response.release_conn()

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout: Timeout = REQUEST,
    ) -> BaseHTTPResponse:
        """The answer, its body unread: the client's own calls read watches whole and build classes."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._client.configuration.host}{path}{'?' + urlencode(query) if query else ''}"
        text = None if body is None else json.dumps(body, separators=(",", ":"))
        try:
            pool = self._client.rest_client.pool_manager
            response: BaseHTTPResponse = pool.request(
                method, url, body=text, headers=headers, timeout=timeout, retries=False, preload_content=False
            )
            if response.status >= 400:
                raise _refusal(response)
        except (HTTPError, OSError) as error:
            raise KubeError(0, "Unreachable", str(error)) from None
        return response


def _lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    """Whole lines of a stream, as soon as each is there."""
    rest = b""
    while chunk := response.read1():
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line for line in whole if line)


def _change(told: Mapping[str, Any]) -> Change:
    found = told["object"]
    if told["type"] == "ERROR":
        raise KubeError(int(found.get("code", 500)), str(found.get("reason")), str(found.get("message")))
    version = found["metadata"]["resourceVersion"]
    if told["type"] == "BOOKMARK":
        return Change(version=version)
    return Change(version=version, found=found, removed=told["type"] == "DELETED")


def _refusal(response: BaseHTTPResponse) -> KubeError:
    body = response.read()
    response.release_conn()
    try:
        told = json.loads(body)
        return KubeError(response.status, str(told.get("reason", "")), str(told.get("message", "")))
    except (ValueError, AttributeError):
        return KubeError(response.status, str(response.reason or ""), body[:200].decode(errors="replace"))
