"""The OpenAPI document: complete, true, and the one that is committed.

Schemathesis makes requests of it, valid and not: none may fail the service, and every answer must be a documented one.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS

from penstock.api.app import create_app
from penstock.api.auth.identity import Role
from tests.support.repository import ROOT
from tests.support.service import Clock, add_job, client_of, new_service

COMMITTED = ROOT / "docs" / "openapi.json"
RENEW = "PENSTOCK_RENEW"

_folder = tempfile.TemporaryDirectory(prefix="penstock-openapi-")
_service = new_service(Path(_folder.name), clock=Clock())
_bearers = {role: client_of(_service, role).headers["Authorization"] for role in (Role.ADMIN, Role.VIEWER, Role.INGEST)}
add_job(_service, "tiny")
add_job(_service, "tiny", namespace="team")
_app = create_app(_service)

schema = schemathesis.openapi.from_asgi("/v1/openapi.json", _app, headers={"Host": "localhost"})
NOT_OURS = ["positive_data_acceptance"]
"""A job may be well-formed and still have heads that do not divide its width: the schema cannot say all of it."""


@schema.parametrize()
@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("role", [*_bearers, None])
def test_no_request_fails_the_service(case: Any, role: Role | None) -> None:
    headers = {"Host": "localhost", **({"Authorization": _bearers[role]} if role else {})}
    excluded = [CHECKS.get_one(name) for name in NOT_OURS]
    case.call_and_validate(headers=headers, excluded_checks=excluded)


def test_the_committed_document_is_the_service_s() -> None:
    """``PENSTOCK_RENEW=1`` writes it anew."""
    document = json.dumps(_app.openapi(), indent=1, sort_keys=True) + "\n"
    if os.environ.get(RENEW):
        COMMITTED.write_text(document)
    assert COMMITTED.read_text() == document


def test_every_operation_is_named_and_described() -> None:
    operations = [each for path in _app.openapi()["paths"].values() for each in path.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)
    assert all(each.get("description") for each in operations)
    assert all(each.get("tags") for each in operations)
