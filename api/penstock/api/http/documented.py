"""Additions to FastAPI's OpenAPI document: authentication, manifests, and examples."""

from __future__ import annotations

from typing import Any

from penstock.api.http.credentials import COOKIE
from penstock.api.http.problems import ProblemDocument
from penstock.api.schemas.bodies import schemas
from penstock.api.schemas.examples import EXAMPLES

Document = dict[str, Any]

SCHEMES: Document = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token, as `penstock token create` makes it."},
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": "A browser's session. Its writes must come from a page of this service, by `Origin`.",
    },
}
BY_TOKEN: Document = {"token": []}
BY_SESSION: Document = {"session": []}
ONLY_BY_TOKEN: Document = {"security": [BY_TOKEN]}
ONLY_BY_SESSION: Document = {"security": [BY_SESSION]}
OPEN_TO_ALL: Document = {"security": []}
"""``openapi_extra`` of routes that take only a token, only a session, or need neither. All others take either."""

INFO: Document = {
    "description": "Jobs, plans and profiles of penstock: submit, observe, plan, report.",
    "contact": {"name": "The penstock authors"},
    "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
}
SERVERS: tuple[Document, ...] = ({"url": "/", "description": "The service that answered with this document."},)
TAGS: Document = {
    "audit": "Log of changes and their authors.",
    "files": "Files of jobs: artifacts, checkpoints, exports.",
    "health": "Whether the service works.",
    "ingest": "Reports of ranks.",
    "jobs": "Jobs: submit, change, observe.",
    "live": "Streams of events.",
    "plans": "Requests for plans, and profiles of machines.",
    "sessions": "A browser's sign-in.",
    "tokens": "Tokens that authenticate callers.",
}
"""Every tag that an operation has."""

NEVER_GIVEN = {"$ref": "#/components/schemas/HTTPValidationError"}
"""FastAPI documents this answer wherever there is a parameter; this service answers with a problem document."""


def completed(document: Document) -> Document:
    """Correct and complete FastAPI's document."""
    paths = {
        path: {method: _operation(operation) for method, operation in operations.items()}
        for path, operations in document["paths"].items()
    }
    return {
        **document,
        "info": {**document["info"], **INFO},
        "servers": list(SERVERS),
        "tags": [{"name": name, "description": description} for name, description in TAGS.items()],
        "paths": paths,
        "components": _whole(_components(document["components"]["schemas"])),
    }


def _whole(schema: Any) -> Any:
    """Add ``items`` to lists of a fixed length, for tools without ``prefixItems``."""
    if isinstance(schema, list):
        return [_whole(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _whole(value) for name, value in schema.items()}
    if "prefixItems" in made and "items" not in made:
        first, *rest = made["prefixItems"]
        made["items"] = first if all(item == first for item in rest) else {"anyOf": [first, *rest]}
    return made


def _operation(operation: Document) -> Document:
    responses = {
        status: response for status, response in operation["responses"].items() if _schema(response) != NEVER_GIVEN
    }
    return {"security": [BY_TOKEN, BY_SESSION], **operation, "responses": responses}


def _schema(response: Document) -> Document | None:
    schema: Document | None = response.get("content", {}).get("application/json", {}).get("schema")
    return schema


def _components(components: Document) -> Document:
    named = {**components, "ProblemDocument": ProblemDocument.model_json_schema(), **schemas()}
    for never_given in ("HTTPValidationError", "ValidationError"):
        named.pop(never_given, None)
    for name, example in EXAMPLES.items():
        named[name] = {**named[name], "examples": [example]}
    return {"schemas": named, "securitySchemes": SCHEMES}
