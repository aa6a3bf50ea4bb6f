"""Dependencies of routes: the service, the caller, and validated bodies."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from penstock.api.auth.identity import Caller, Identity, Role
from penstock.api.auth.origin import SAFE_METHODS, same_origin
from penstock.api.cluster.reviews import ClusterUser
from penstock.api.http.credentials import Credential
from penstock.api.http.problems import Problem
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.api.store.jobs import StoredJob
from penstock.api.store.sanitize import require_storable
from penstock.core import jsontext
from penstock.core.errors import PenstockError
from penstock.core.serialization import yamltext

T = TypeVar("T")

JSON_TYPES = frozenset({"application/json", ""})
YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml"})
MOST_YAML_CHARACTERS = 128 * 2**10
MOST_VALUES = 2_000_000
"""Largest number of values in a JSON body. A value takes up to 100 bytes of memory, and as few as two of text."""
LARGE_BYTES = 2**16
"""Bytes from which a document counts as large. Smaller ones hold too few values to take much memory."""
LOGIN = {"WWW-Authenticate": 'Bearer realm="penstock"'}


async def service_of(request: Request) -> Service:
    """Return the service of the application.

    A coroutine, like the other dependencies, or each would wait for a thread.
    """
    service: Service = request.app.state.service
    return service


ServiceIn = Annotated[Service, Depends(service_of)]


def authenticated(request: Request) -> Caller:
    """Return the authenticated caller; raises `Problem` without one, and for a write from another site."""
    caller: Caller | None = request.state.caller
    if caller is None:
        raise _unknown(request.state.credential)
    if caller.session is not None and request.method not in SAFE_METHODS:
        require_same_origin(request)
    return caller


def require_same_origin(request: Request) -> None:
    """Raise `Problem` unless the request comes from a page of this service."""
    origin = request.headers.get("origin")
    if not same_origin(origin, request.url.scheme, request.headers.get("host", "")):
        raise Problem(
            kind="cross-origin",
            detail=f"the origin {origin} is not this service" if origin else "the request has no Origin header",
            where="Origin",
            remedy="use a page of this service, or send Authorization: Bearer TOKEN instead of the cookie",
        )


def _unknown(credential: Credential | None) -> Problem:
    if credential is not None and credential.session:
        return Problem(
            kind="unauthenticated",
            detail="the session has ended",
            where="Cookie",
            remedy="sign in again with a link that penstock ui makes",
            headers=LOGIN,
        )
    known = credential is not None and credential.secret
    return Problem(
        kind="unauthenticated",
        detail="the token is unknown, expired or revoked" if known else "the request has no token",
        where="Authorization",
        remedy="send Authorization: Bearer TOKEN; penstock token create makes a new token",
        headers=LOGIN,
    )


def credential_of(request: Request, caller: Annotated[Caller, Depends(authenticated)]) -> Credential:
    """Return the sender's credential."""
    credential: Credential = request.state.credential
    return credential


CallerIn = Annotated[Caller, Depends(authenticated)]
CredentialIn = Annotated[Credential, Depends(credential_of)]


def identify(caller: CallerIn) -> Identity:
    """Return the caller's identity, from a token or a session."""
    return caller.identity


IdentityIn = Annotated[Identity, Depends(identify)]


def require(role: Role, *, everywhere: bool = False) -> Callable[[Request, Identity], Awaitable[Identity]]:
    """Return a dependency that requires ``role`` in the namespace of the path.

    Without a namespace in the path, the role is required ``everywhere``, or in any namespace, which the route checks.
    """

    async def required(request: Request, identity: IdentityIn) -> Identity:
        if isinstance(identity, ClusterUser):
            return await run_in_threadpool(let_pass, request, identity, role, everywhere=everywhere)
        return let_pass(request, identity, role, everywhere=everywhere)

    return required


def let_pass(request: Request, identity: Identity, role: Role, *, everywhere: bool = False) -> Identity:
    """Return the identity, if it has the role where the request needs it; raises `Problem` otherwise."""
    namespace, verb = request.path_params.get("namespace"), verb_of(request)
    named = namespace or everywhere
    allowed = identity.may(role, namespace, verb) if named else identity.may_anywhere(role, verb)
    if not allowed:
        raise forbidden(role, namespace)
    return identity


WRITES = {
    "createJob": "create",
    "requestPlan": "create",
    "cancelPlanRequest": "create",
    "retryJob": "create",
    "suspendJob": "update",
    "resumeJob": "update",
    "exportCheckpoint": "update",
    "deleteJob": "delete",
}
"""Verbs of operations on jobs, as in Kubernetes' roles."""


def verb_of(request: Request) -> str:
    """Return the verb of the request; empty if there are several, or none."""
    if request.method not in SAFE_METHODS:
        return WRITES.get(getattr(request.scope.get("route"), "operation_id", None) or "", "")
    return "get" if request.path_params else "list"


def forbidden(role: Role, namespace: str | None) -> Problem:
    """Return the problem of a caller without the role."""
    place, option = (f" in namespace {namespace}", f" --namespace {namespace}") if namespace else ("", "")
    return Problem(
        kind="forbidden",
        detail=f"this operation needs the role {role}{place}",
        where="Authorization",
        remedy=f"ask an administrator for a token: penstock token create NAME --role {role}{option}",
    )


def require_role(identity: Identity, role: Role, namespace: str, verb: str) -> None:
    """Raise `Problem` unless the identity has the role in the namespace."""
    if not identity.may(role, namespace, verb):
        raise forbidden(role, namespace)


Viewer = Annotated[Identity, Depends(require(Role.VIEWER))]
Editor = Annotated[Identity, Depends(require(Role.EDITOR))]
Admin = Annotated[Identity, Depends(require(Role.ADMIN, everywhere=True))]


def by_name(namespace: str, name: str) -> None:
    """Document the parameters of a path below a job's name; `job_of` reads them."""


def by_uid(uid: str) -> None:
    """Document the parameter of a path below a job's uid; `job_of` reads it."""


def job_of(request: Request, service: ServiceIn, identity: Viewer) -> StoredJob:
    """Return the job of the path: any job by its uid; by its name the existing one, else the latest deleted one.

    Raises:
        NoSuchJobError: no job has that uid or name.
        Problem: the identity may not read its namespace.
    """
    path = request.path_params
    if "uid" not in path:
        return service.read(lambda connection: jobs.find(connection, path["namespace"], path["name"]))
    stored = service.read(lambda connection: jobs.get(connection, path["uid"]))
    require_role(identity, Role.VIEWER, stored.namespace, "get")
    return stored


JobIn = Annotated[StoredJob, Depends(job_of)]


async def read_aside(read: Callable[..., T], *arguments: Any, limiter: CapacityLimiter | None = None) -> T:
    """Return the result of ``read`` on a body, in a thread: meanwhile the event loop serves other requests.

    Bodies that may take much memory share a ``limiter``, so that few are read concurrently. An error is raised without
    the frames of ``read``: they hold the parsed body, and would keep it until a garbage collection.
    """
    try:
        return await to_thread.run_sync(read, *arguments, limiter=limiter)
    except (PenstockError, Problem) as refusal:
        refusal.__context__ = None
        raise refusal.with_traceback(None) from None


async def read_document(request: Request) -> Any:
    """Return the body as plain data, JSON or YAML by its content type."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media not in JSON_TYPES | YAML_TYPES:
        raise Problem(
            kind="unsupported-media-type",
            detail=f"{media} is not supported",
            where="Content-Type",
            remedy="send application/json or application/yaml",
        )
    body, service = await request.body(), await service_of(request)
    is_large = media in JSON_TYPES and len(body) > LARGE_BYTES  # YAML has a lower limit, and takes longer
    return await read_aside(_document, body, media, limiter=service.bodies if is_large else None)


def _document(body: bytes, media: str) -> Any:
    if media in YAML_TYPES:
        text = decode(body)
        if len(text) > MOST_YAML_CHARACTERS:
            raise Problem(
                kind="too-large",
                detail=f"more than {MOST_YAML_CHARACTERS} characters of YAML",
                remedy=f"send it as application/json, of which {MOST_VALUES:,} values are read",
            )
        document = yamltext.load(text, "body")
    else:
        document = load_json(body)
    require_storable(document)
    return document


def decode(body: bytes) -> str:
    """Decode the body from UTF-8, the encoding of JSON and YAML."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Problem(
            kind="bad-request",
            detail=f"the body is not UTF-8 at byte {error.start}",
            where="body",
            remedy="encode it: iconv -t UTF-8",
        ) from None


def load_json(body: bytes) -> Any:
    """Parse JSON of at most `MOST_VALUES` values, without NaN and infinities."""
    _require_few_values(body)
    try:
        return jsontext.load(decode(body), parse_constant=_refuse_constant)
    except ValueError as error:
        what = "a number has thousands of digits" if "digits" in str(error) else str(error)
        raise Problem(
            kind="bad-request",
            detail=f"the body is not JSON: {what}",
            where="body",
            remedy="send JSON, or YAML with Content-Type: application/yaml",
        ) from None


def _require_few_values(body: bytes) -> None:
    """Check the number of values before any is built, by counting commas and opening brackets, also in strings."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise Problem(
            kind="too-large",
            detail=f"the body may hold more than {MOST_VALUES:,} values",
            where="body",
            remedy="split it into several requests",
        )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def decompress(body: bytes, most_bytes: int) -> bytes:
    """Decompress a gzip body; raises `Problem` if it is not gzip, or exceeds the limit."""
    machine, where = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), "Content-Encoding"
    try:
        text = machine.decompress(body, most_bytes)
    except zlib.error:
        raise Problem(
            kind="bad-request",
            detail="the body is not gzip",
            where=where,
            remedy="compress the body with gzip, or leave Content-Encoding out",
        ) from None
    if machine.unconsumed_tail:
        raise Problem(
            kind="too-large",
            detail=f"more than {most_bytes} bytes after decompression",
            remedy="send fewer records at once",
        )
    if not machine.eof:
        raise Problem(
            kind="bad-request",
            detail="the gzip body is truncated",
            where=where,
            remedy="send the complete output of gzip",
        )
    return text


Document = Annotated[Any, Depends(read_document)]
