"""What was measured, over REST, on both databases."""

from __future__ import annotations

import dataclasses

import pytest
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.core.model import UnitKind
from penstock.core.profile import LinkRecord, MemoryRecord, Profile, TransientRecord
from penstock.core.profile_matching import OLDEST_SECONDS
from penstock.core.schedule import Kind
from tests.support.planning import profile_for
from tests.support.sample_run import sample_profile
from tests.support.service import NOW, Clock, client_of
from tests.support.whatif import keep_profile, tiny_job

SPEC = tiny_job().spec
LINK = LinkRecord(source=2, target=0, latency_seconds=1e-5, bytes_per_second=2e9, error=0.25)


@pytest.fixture
def client(service: Service) -> TestClient:
    return client_of(service, Role.VIEWER, "some-namespace")


def test_there_are_none_at_first(client: TestClient) -> None:
    assert client.get("/v1/profiles").json() == {"items": []}
    missing = client.get("/v1/profiles/none")
    assert (missing.status_code, missing.json()["remedy"]) == (404, "list the profiles with GET /v1/profiles")


def test_a_profile_in_a_line(service: Service, client: TestClient, clock: Clock) -> None:
    measured = profile_for(SPEC, method="medians")
    keep_profile(service, measured)
    clock.now += 60
    (found,) = client.get("/v1/profiles").json()["items"]
    assert found["digest"] == measured.digest
    assert (found["host"], found["device"], found["method"], found["numRanks"]) == ("desk", "abacus", "medians", 2)
    assert (found["ageSeconds"], found["fresh"], found["precision"]) == (60, True, "fp32")
    assert found["modelDigest"] == measured.model_digest


@pytest.mark.parametrize(("age", "fresh"), [(OLDEST_SECONDS, True), (OLDEST_SECONDS + 1, False)])
def test_an_old_one_is_not_fresh(service: Service, client: TestClient, age: float, fresh: bool) -> None:
    keep_profile(service, profile_for(SPEC, measured_at=NOW - age))
    assert client.get("/v1/profiles").json()["items"][0]["fresh"] is fresh


def test_one_that_was_measured_anew_is_not_fresh(service: Service, client: TestClient) -> None:
    for at in (NOW - 2, NOW - 1):
        keep_profile(service, profile_for(SPEC, measured_at=at))
    assert [each["fresh"] for each in client.get("/v1/profiles").json()["items"]] == [True, False]


def test_a_whole_profile(service: Service, client: TestClient) -> None:
    measured = sample_profile()
    keep_profile(service, measured)
    found = client.get(f"/v1/profiles/{measured.digest}").json()
    assert Profile.from_manifest(found["profile"]) == measured
    assert len(found["layers"]) == len(measured.units)
    first, layer = measured.units[0], found["layers"][0]
    assert (layer["unit"], layer["kind"], layer["batch"]) == (first.unit.value, first.kind.value, first.batch)
    assert (layer["togetherSeconds"], layer["spread"]) == (first.together_seconds, first.spread)
    assert found["memory"]["constantBytes"] == measured.memory.constant_bytes
    listed = {name: found[name] for name in client.get("/v1/profiles").json()["items"][0]}
    assert listed == client.get("/v1/profiles").json()["items"][0]


def test_links_are_matrices_by_sender_and_receiver(service: Service, client: TestClient) -> None:
    measured = dataclasses.replace(profile_for(SPEC, num_ranks=3), links=(LINK,))
    keep_profile(service, measured)
    links = client.get(f"/v1/profiles/{measured.digest}").json()["links"]
    empty = [None, None, None]
    assert links["latencySeconds"] == [empty, empty, [1e-5, None, None]]
    assert links["bytesPerSecond"] == [empty, empty, [2e9, None, None]]
    assert links["error"][2][0] == 0.25


def test_memory_of_passes_is_told(service: Service, client: TestClient) -> None:
    unit = profile_for(SPEC).units[0].unit
    taken = TransientRecord(unit=unit, kind=Kind.F, batch=1, length=16, prefix=0, num_bytes=77, tp=2, head_parts=3)
    measured = profile_for(SPEC, memory=MemoryRecord(constant_bytes=5, transients=(taken,)))
    keep_profile(service, measured)
    found = client.get(f"/v1/profiles/{measured.digest}").json()["memory"]
    assert found["constantBytes"] == 5
    assert found["transients"] == [
        {
            "unit": unit.value,
            "kind": "F",
            "batch": 1,
            "length": 16,
            "prefix": 0,
            "numBytes": 77,
            "tp": 2,
            "headParts": 3,
        }
    ]


def test_layers_say_of_which_division_they_are(service: Service, client: TestClient) -> None:
    plain = profile_for(SPEC)
    divided = [
        dataclasses.replace(record, tp=2, head_parts=3 if record.unit is UnitKind.HEAD else 1) for record in plain.units
    ]
    measured = dataclasses.replace(plain, units=(*plain.units, *divided))
    keep_profile(service, measured)
    layers = client.get(f"/v1/profiles/{measured.digest}").json()["layers"]
    assert [(layer["unit"], layer["tp"], layer["headParts"]) for layer in layers] == [
        (record.unit.value, record.tp, record.head_parts) for record in measured.units
    ]
