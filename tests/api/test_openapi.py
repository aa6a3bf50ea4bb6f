"""The OpenAPI document: complete, true, and the one that is committed.

Schemathesis makes requests of it, valid and not: none may fail the service, and every answer must be a documented one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS

from penstock.api.app import create_app
from penstock.api.auth.identity import Role
from penstock.api.auth.throttle import Rate
from tests.support.repository import ROOT
from tests.support.service import SHORT_STREAMS, Clock, add_job, client_of, new_service

COMMITTED = ROOT / "docs" / "openapi.json"
RENEW = "PENSTOCK_RENEW"

ROLES = (Role.ADMIN, Role.VIEWER, Role.INGEST)

UNHURRIED = replace(SHORT_STREAMS, requests=Rate(per_second=1e6, burst=10**6))

schema = schemathesis.openapi.from_dict(json.loads(COMMITTED.read_text()))
NOT_OURS = ["positive_data_acceptance"]
"""A job may be well-formed and still have heads that do not divide its width: the schema cannot say all of it."""


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


@schema.parametrize()
@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("role", [*ROLES, None])
def test_no_request_fails_the_service(case: Any, role: Role | None, subject: Subject) -> None:
    headers = {"Host": "localhost", **({"Authorization": subject.bearers[role]} if role else {})}
    excluded = [CHECKS.get_one(name) for name in NOT_OURS]
    case.call_and_validate(app=subject.app, headers=headers, excluded_checks=excluded)


def test_the_committed_document_is_the_service_s(subject: Subject) -> None:
    """``PENSTOCK_RENEW=1`` writes it anew."""
    document = json.dumps(subject.app.openapi(), indent=1, sort_keys=True) + "\n"
    if os.environ.get(RENEW):
        COMMITTED.write_text(document)
    assert COMMITTED.read_text() == document


def test_every_operation_is_named_and_described(subject: Subject) -> None:
    operations = [each for path in subject.app.openapi()["paths"].values() for each in path.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)
    assert all(each.get("description") for each in operations)
    assert all(each.get("tags") for each in operations)
