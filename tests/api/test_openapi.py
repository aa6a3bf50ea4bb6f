"""The OpenAPI document: complete, true, and the one that is committed.

Schemathesis makes requests of it, valid and not: none may fail the service, and every answer must be a documented one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS

from penstock.api.app import create_app
from penstock.api.auth.identity import Role
from penstock.api.auth.throttle import Rate
from penstock.api.http.credentials import COOKIE
from penstock.api.schemas.examples import EXAMPLE_RECORD, EXAMPLES
from penstock.core.records import Record
from tests.support import openapi_linters
from tests.support.repository import ROOT
from tests.support.service import SHORT_STREAMS, Clock, add_job, client_of, new_service

COMMITTED = ROOT / "docs" / "openapi.json"
RENEW = "PENSTOCK_RENEW"

ROLES = (Role.ADMIN, Role.VIEWER, Role.INGEST)

UNHURRIED = replace(SHORT_STREAMS, requests=Rate(per_second=1e6, burst=10**6))

schema = schemathesis.openapi.from_dict(json.loads(COMMITTED.read_text()))
schema.config.generation.update(with_security_parameters=False)  # a role's token goes with each request instead
_rejection = schema.config.checks.negative_data_rejection
_rejection.expected_statuses = [*_rejection.expected_statuses, "413"]  # too many items may be too large a body first
NOT_OURS = ["positive_data_acceptance", "ignored_auth"]
"""A job may be well-formed and still have heads that do not divide its width: the schema cannot say all of it. And
`test_access.py` asks every route without a proof, while this check would ask by a network that is not there.
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The application, and an Authorization header of each role."""

    app: FastAPI
    bearers: dict[Role, str]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    service = new_service(tmp_path_factory.mktemp("openapi"), clock=Clock(), limits=UNHURRIED)
    add_job(service, "tiny")
    add_job(service, "tiny", namespace="team")
    bearers = {role: client_of(service, role).headers["Authorization"] for role in ROLES}
    yield Subject(app=create_app(service), bearers=bearers)
    service.close()


THOROUGH = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@schema.parametrize()
@settings(THOROUGH, max_examples=8)
def test_no_request_fails_the_service(case: Any, subject: Subject) -> None:
    no_failure(case, subject, Role.ADMIN)


@schema.parametrize()
@settings(THOROUGH, max_examples=3)
@pytest.mark.parametrize("role", [*(role for role in ROLES if role is not Role.ADMIN), None])
def test_no_request_of_others_fails_the_service(case: Any, role: Role | None, subject: Subject) -> None:
    """Fewer requests: bodies of jobs take seconds to make, and an admin sends the same kinds of body."""
    no_failure(case, subject, role)


def no_failure(case: Any, subject: Subject, role: Role | None) -> None:
    """Send the request by this role, and check the answer against the document."""
    headers = {"Host": "localhost", **({"Authorization": subject.bearers[role]} if role else {})}
    excluded = [CHECKS.get_one(name) for name in NOT_OURS]
    case.call_and_validate(app=subject.app, headers=headers, excluded_checks=excluded)


def test_the_committed_document_is_the_service_s(subject: Subject) -> None:
    """``PENSTOCK_RENEW=1`` writes it again."""
    document = json.dumps(subject.app.openapi(), indent=1, sort_keys=True) + "\n"
    if os.environ.get(RENEW):
        COMMITTED.write_text(document)
    assert COMMITTED.read_text() == document


@pytest.fixture
def document(subject: Subject) -> dict[str, Any]:
    return subject.app.openapi()


@pytest.fixture
def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By their ids."""
    return {each["operationId"]: each for path in document["paths"].values() for each in path.values()}


def test_every_operation_is_named_and_described(document: dict[str, Any], operations: dict[str, Any]) -> None:
    assert len(operations) == sum(map(len, document["paths"].values()))
    assert all(re.fullmatch("[a-z]+([A-Z][a-z]+)*", name) for name in operations)
    assert all(each.get("description") for each in operations.values())
    assert all(each.get("tags") for each in operations.values())


def test_every_operation_says_what_proves_who_asks(document: dict[str, Any], operations: dict[str, Any]) -> None:
    schemes = document["components"]["securitySchemes"]
    assert (schemes["token"]["scheme"], schemes["session"]["name"]) == ("bearer", COOKIE)
    proofs = {name: [proof for each in told["security"] for proof in each] for name, told in operations.items()}
    exceptions = {name: proof for name, proof in proofs.items() if proof != ["token", "session"]}
    assert {name for name, proof in exceptions.items() if not proof} == {"healthz", "readyz", "version"}
    one = {name: proof for name, proof in exceptions.items() if proof}
    assert one == {"ingest": ["token"], "createLoginLink": ["token"], "logout": ["session"]}


def test_every_refusal_is_a_problem(document: dict[str, Any], operations: dict[str, Any]) -> None:
    for name, told in operations.items():
        refusals = {int(status): each for status, each in told["responses"].items() if int(status) >= 400}
        assert refusals.keys() >= {400, 408, 421, 429, 500, 503}, name
        assert bool(told["security"]) == (refusals.keys() >= {401, 403}), name
        assert {media for each in refusals.values() for media in each["content"]} == {"application/problem+json"}, name
    assert "ValidationError" not in json.dumps(document)


OWN_DOCUMENTS = {"PlanPage", "ProfileView", "TimelineView"}
"""Answers without an example: they hold a plan, a profile or a timeline, which are long."""


def test_what_is_sent_and_answered_has_an_example(document: dict[str, Any], operations: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, told in operations.items():
        answers = [each for status, each in told["responses"].items() if status < "300"]
        for body in [*answers, told.get("requestBody", {})]:
            media = body.get("content", {}).get("application/json", {})
            for found in re.findall(r"#/components/schemas/(\w+)", json.dumps(media.get("schema", {}))):
                assert "example" in media or found in OWN_DOCUMENTS or schemas[found].get("examples"), (name, found)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_it_is_an_example_of(document: dict[str, Any], name: str) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema_rs.validate(schema, EXAMPLES[name])


def test_an_example_of_a_record_is_one() -> None:
    assert Record.from_manifest(EXAMPLE_RECORD).to_manifest() == EXAMPLE_RECORD


def nodes(value: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the document, by its place."""
    if isinstance(value, dict):
        yield path, value
        for name, each in value.items():
            yield from nodes(each, f"{path}/{name}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from nodes(each, f"{path}/{number}")


NEEDED = ("operationId", "description", "tags")


def findings(document: dict[str, Any]) -> list[str]:
    """What `spectral:oas` and Redocly's recommended rules would say, of the rules that such a document can break.

    Both need Node, which a contributor may lack; where it is there, both are run.
    """
    info = document["info"]
    found = [f"info.{name} is missing" for name in ("title", "version", "description", "contact") if not info.get(name)]
    if not {"identifier", "url"} & info.get("license", {}).keys():
        found.append("info.license has neither identifier nor url")
    servers = [server["url"] for server in document.get("servers", [])]
    if not servers or any((url.endswith("/") and url != "/") or "example.com" in url for url in servers):
        found.append(f"servers are {servers}")
    tags = [tag["name"] for tag in document.get("tags", []) if tag.get("description")]
    ids: set[str] = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            place = f"{method} {path}"
            found += [
                f"{place} has no {name}" for name in ("operationId", "description", "tags") if not operation.get(name)
            ]
            found += [f"{place} has tag {tag}, which is not described" for tag in operation["tags"] if tag not in tags]
            found += [f"{place} has an id twice"] * (operation["operationId"] in ids)
            found += [f"{place} has no success"] * (not any(status[0] in "23" for status in operation["responses"]))
            ids.add(operation["operationId"])
    found += [f"{tag} is no operation's" for tag in tags if f'"{tag}"' not in json.dumps(document["paths"])]
    for place, node in nodes(document):
        if node.get("type") == "array" and not node.get("items"):
            found.append(f"{place} has no items")
        if (
            isinstance(node.get("$ref"), str)
            and node["$ref"].rpartition("/")[2] not in document["components"]["schemas"]
        ):
            found.append(f"{place} refers to what is not there")
    return [*found, *untrue_examples(document)]


def untrue_examples(document: dict[str, Any]) -> Iterator[str]:
    """Examples that are not what their schema says."""
    for name, schema in document["components"]["schemas"].items():
        whole = {"components": document["components"], **schema}
        for example in schema.get("examples", []):
            for error in jsonschema_rs.validator_for(whole).iter_errors(example):
                yield f"{name}: {error.message}"


def test_linters_would_find_nothing(subject: Subject) -> None:
    assert findings(subject.app.openapi()) == []


@pytest.mark.timeout(900)
def test_spectral_and_redocly_find_nothing(tmp_path: Path) -> None:
    """In the committed document; both find what is wrong in a changed one."""
    for name, (code, output) in openapi_linters.lint(COMMITTED).items():
        assert code == 0, f"{name}:\n{output}"
    changed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    [operation, *_] = changed["paths"]["/healthz"].values()
    operation["responses"] = {"200": {"$ref": "#/components/responses/Missing"}}
    (tmp_path / "openapi.json").write_text(json.dumps(changed))
    for name, (code, output) in openapi_linters.lint(tmp_path / "openapi.json").items():
        assert code != 0, f"{name} accepted it:\n{output}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"servers": []}, "servers are []"),
        ({"tags": []}, "which is not described"),
        ({"info": {"title": "t", "version": "1"}}, "info.contact is missing"),
        ({"components": {"schemas": {"A": {"type": "array"}}}}, "#/components/schemas/A has no items"),
        ({"components": {"schemas": {"A": {"type": "string", "examples": [1]}}}}, "A: 1 is not of type"),
    ],
)
def test_the_lint_finds_what_is_wrong(subject: Subject, change: dict[str, Any], said: str) -> None:
    assert any(said in each for each in findings({**subject.app.openapi(), **change}))
