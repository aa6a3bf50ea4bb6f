"""Calls to a cluster's API over HTTP. Objects go in and come out as plain dictionaries, as the cluster writes them.

Each component has one module with all its calls to a cluster, and makes none elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar
from urllib.parse import urlencode

from kubernetes.client import ApiClient
from urllib3 import BaseHTTPResponse, Timeout
from urllib3.exceptions import HTTPError

from penstock.core.errors import PenstockError
from penstock.kube.resources import Resource

P = ParamSpec("P")
T = TypeVar("T")

REQUEST = Timeout(connect=5.0, read=20.0)
WATCH_SECONDS = 60
"""Requested duration of one watch; the next continues at its resource version. An apiserver that loads another version
of a CustomResourceDefinition may leave a watch open that gets no more events; this bounds the time it goes unnoticed.
"""

WATCHED = Timeout(connect=5.0, read=WATCH_SECONDS + 15.0)
"""The cluster ends a watch when its time is over; one that is silent for longer is broken."""

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

Object = Mapping[str, Any]
"""An object as the cluster writes it in JSON."""


class KubeError(PenstockError):
    """The cluster refused a call, or could not be reached (``status`` 0). ``reason`` is as in the API, ``causes`` are
    (field, message) pairs of the fields that it rejected.
    """

    def __init__(self, status: int, reason: str, message: str, causes: tuple[tuple[str, str], ...] = ()) -> None:
        self.status, self.reason, self.message, self.causes = status, reason, message, causes
        super().__init__(f"{reason}: {message}" if message else reason)

    @property
    def is_missing(self) -> bool:
        """Whether the object does not exist, or no longer."""
        return self.status == 404

    @property
    def is_taken(self) -> bool:
        """Whether an object of that name exists already."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def is_conflict(self) -> bool:
        """Whether the object has changed since it was read, or was replaced by another of its name."""
        return self.status == 409 and self.reason == "Conflict"

    @property
    def is_refusal(self) -> bool:
        """Whether the cluster rejected the call itself, so that a retry fails until something changes."""
        return self.status in (400, 403, 404, 409, 422) and not self.is_conflict

    @property
    def is_denial(self) -> bool:
        """Whether the cause is the caller or the request, not the state of the cluster."""
        return self.status in (400, 403, 413, 422)

    @property
    def is_expired(self) -> bool:
        """Whether the resource version is too old for a watch, which has to re-list."""
        return self.status == 410


class Reads(Protocol):
    """A cluster that objects can be read from."""

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Read the current object; raises `KubeError`."""


def unless_missing(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call a cluster; return the answer, or none if the object or its kind does not exist."""
    try:
        return call(*args, **kwargs)
    except KubeError as error:
        if error.is_missing:
            return None
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """All objects of a selection, at one moment of the cluster's history."""

    objects: tuple[Object, ...]
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An object that was added, modified or removed, or none for a bookmark; ``version`` is the resource version."""

    version: str
    object: Object | None = None
    removed: bool = False


class Transport:
    """A real cluster, through the official client's connections. Threads may share it; all calls raise `KubeError`."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """The object as it is now."""
        return self.call("GET", resource.path(namespace, name))

    def list(self, resource: Resource, namespace: str = "", selector: str = "") -> Listing:
        """All objects with the labels that ``selector`` names. The cluster leaves ``kind`` out of items."""
        query = {"labelSelector": selector} if selector else {}
        document = self.call("GET", resource.path(namespace), query=query)
        return Listing(objects=tuple(document["items"]), version=document["metadata"]["resourceVersion"])

    def watch(self, resource: Resource, version: str, namespace: str = "", selector: str = "") -> Iterator[Change]:
        """Changes after ``version``, for a minute at most."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        query["allowWatchBookmarks"] = "true"
        if selector:
            query["labelSelector"] = selector
        response = self._send("GET", resource.path(namespace), query=query, timeout=WATCHED)
        try:
            for line in _lines(response):
                yield _change(json.loads(line))
        except (HTTPError, ValueError) as error:
            raise KubeError(0, "Unreachable", str(error)) from None
        finally:
            response.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON,
    ) -> dict[str, Any]:
        """One call, and the document that answers it."""
        response = self._send(method, path, body=body, query=query, content_type=content_type)
        try:
            document: dict[str, Any] = json.loads(response.read())
            return document
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
        content_type: str = JSON,
        timeout: Timeout = REQUEST,
    ) -> BaseHTTPResponse:
        """Send a request and return the answer with its body unread. The official client's own calls would read a watch
        to its end, and build model objects.
        """
        headers = {"Accept": JSON, "Content-Type": content_type}
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._client.configuration.host}{path}{'?' + urlencode(query) if query else ''}"
        text = None if body is None else written(body)
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


_ESCAPED = re.compile("[\x7f-\uffff]")


def written(body: Any) -> bytes:
    """Return a body as JSON that is YAML as well: the apiserver reads what is applied as YAML.

    JSON writes a character beyond U+FFFF as two escapes, which YAML refuses, and YAML refuses control characters that
    JSON leaves as they are. So the former are not escaped, and the latter are. A lone surrogate, which is no character,
    becomes U+FFFD.
    """
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return _ESCAPED.sub(_escape, text).encode()


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return "\\ufffd" if 0xD800 <= number <= 0xDFFF else f"\\u{number:04x}"


def _lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    """Whole lines of a stream, as soon as each is there."""
    rest = b""
    while chunk := response.read1():
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line for line in whole if line)


def _change(notice: Mapping[str, Any]) -> Change:
    item = notice["object"]
    if notice["type"] == "ERROR":
        raise KubeError(int(item.get("code", 500)), str(item.get("reason")), str(item.get("message")))
    version = item["metadata"]["resourceVersion"]
    if notice["type"] == "BOOKMARK":
        return Change(version=version)
    return Change(version=version, object=item, removed=notice["type"] == "DELETED")


def _refusal(response: BaseHTTPResponse) -> KubeError:
    body = response.read()
    response.release_conn()
    try:
        status = json.loads(body)
        causes = tuple(
            (str(cause.get("field", "")), str(cause.get("message", "")))
            for cause in (status.get("details") or {}).get("causes") or ()
        )
        return KubeError(response.status, str(status.get("reason", "")), str(status.get("message", "")), causes)
    except (ValueError, AttributeError):
        return KubeError(response.status, str(response.reason or ""), body[:200].decode(errors="replace").strip())
