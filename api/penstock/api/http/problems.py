"""Problem documents (RFC 9457): one form for all refused requests, with a remedy.

`PROBLEMS` lists every kind. A route names the kinds that it may answer with, so the OpenAPI document is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

MEDIA_TYPE = "application/problem+json"
TYPES = "https://penstock.dev/problems/"


class ProblemDocument(BaseModel):
    """Reason and remedy of a refused request."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="Names the kind of problem; stable.", examples=[f"{TYPES}not-found"])
    title: str = Field(description="The kind of problem in a few words.", examples=["Not found"])
    status: int = Field(description="The HTTP status.", examples=[404])
    detail: str = Field(description="The specific error.", examples=["there is no job default/llama"])
    where: str = Field(default="", description="The field, header or parameter.", examples=["spec.model.heads"])
    remedy: str = Field(description="The remedy.", examples=["list the jobs with GET /v1/jobs"])


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problem: its name in URLs, its title and HTTP status."""

    name: str
    title: str
    status: int


PROBLEMS = {
    kind.name: kind
    for kind in (
        Kind("bad-request", "The request cannot be read", 400),
        Kind("unauthenticated", "A valid token is needed", 401),
        Kind("forbidden", "The token does not allow this", 403),
        Kind("not-allowed", "The policy for jobs does not allow this", 403),
        Kind("cross-origin", "The request comes from another site", 403),
        Kind("not-found", "Not found", 404),
        Kind("method-not-allowed", "The path has no such method", 405),
        Kind("timeout", "The request arrived too slowly", 408),
        Kind("name-taken", "The name is taken", 409),
        Kind("stale-attempt", "The attempt is closed", 409),
        Kind("conflict", "Not in this state", 409),
        Kind("changed-meanwhile", "Changed meanwhile", 412),
        Kind("too-large", "The body is too large", 413),
        Kind("unsupported-media-type", "The body is of an unknown type", 415),
        Kind("out-of-range", "The file has no such part", 416),
        Kind("misdirected", "The host is not this service", 421),
        Kind("elsewhere", "Another service has the files", 421),
        Kind("invalid", "Something in the body is wrong", 422),
        Kind("early-attempt", "The attempt is not known yet", 425),
        Kind("too-many-requests", "Too many requests", 429),
        Kind("internal", "The service failed", 500),
        Kind("unavailable", "Not available now", 503),
        Kind("storage-full", "The disk is full", 507),
    )
}


class Problem(HTTPException):
    """Ends a request with a problem document; FastAPI handles an HTTPException that is raised anywhere in a route."""

    def __init__(
        self, *, kind: str, detail: str, remedy: str, where: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(PROBLEMS[kind].status, detail, headers=dict(headers or {}))
        self.kind, self.where, self.remedy = kind, where, remedy

    def document(self) -> ProblemDocument:
        """Return the document for the client."""
        kind = PROBLEMS[self.kind]
        return ProblemDocument(
            type=TYPES + kind.name,
            title=kind.title,
            status=kind.status,
            detail=self.detail,
            where=self.where,
            remedy=self.remedy,
        )


ANY = ("bad-request", "timeout", "misdirected", "too-many-requests", "unavailable")
"""Problems of every route."""


def answers(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """Return the problems of a route, including those of every route, in FastAPI's form."""
    return refusals((*ANY, *kinds))


def refusals(kinds: Sequence[str]) -> dict[int | str, dict[str, Any]]:
    """Return only these problems; several with one status are described together."""
    responses: dict[int | str, dict[str, Any]] = {}
    for name in dict.fromkeys(kinds):
        kind = PROBLEMS[name]
        titles = [responses[kind.status]["description"]] if kind.status in responses else []
        responses[kind.status] = {
            "description": "; ".join([*titles, kind.title]),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
        }
    return responses


READS = answers("unauthenticated", "forbidden", "not-found")
"""Problems of a route that reads one resource."""
LARGEST_NUMBER = 2**31 - 1
"""Largest number in a path or query: columns have 32 bits."""
