"""What a request costs before it is refused or taken grows with its size, not with the numbers in it or their squares.

Calls are counted, and bytes: times would say more of the machine.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.api.auth.identity import Role
from penstock.api.http import dependencies
from penstock.api.http.routes import ingest
from penstock.api.schemas.examples import EXAMPLE_RECORD
from penstock.api.store.plan_requests import PlanInput
from penstock.api.store.sanitize import require_storable
from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from tests.support.manifests import CLUSTER, example, loaded
from tests.support.service import Clock, client_of, job_manifest, new_service

SLACK = 1.2


def calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and C, ``work`` calls; it may end with a `UserError`."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    except UserError:
        pass
    finally:
        sys.setprofile(None)
    return count


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
    except UserError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def with_links(count: int) -> dict[str, Any]:
    cluster = loaded(CLUSTER)
    return {**cluster, "links": cluster["links"] * count}


def with_labels(count: int) -> dict[str, Any]:
    job = example()
    job["metadata"]["labels"] = {f"key-{number}": "value" for number in range(count)}
    return job


def with_env(count: int) -> dict[str, Any]:
    return example(kubernetes={"env": [{"name": f"NAME_{number}", "value": "x"} for number in range(count)]})


def nested(depth: int, width: int) -> Any:
    document: Any = [0] * width
    for _ in range(depth):
        document = [document]
    return document


GROWING: dict[str, tuple[int, Callable[[int], Callable[[], object]]]] = {
    "links": (1_000, lambda size: lambda: ClusterSpec.from_manifest(with_links(size))),
    "labels": (200, lambda size: lambda: PipelineJob.from_manifest(with_labels(size))),
    "env": (16, lambda size: lambda: PipelineJob.from_manifest(with_env(size))),
    "values": (1_000, lambda size: lambda: require_storable(nested(900, size))),
    "slices": (1_000, lambda size: lambda: PipelineJob.from_manifest(example(parallelism={"slices": [1] * size}))),
}


@pytest.mark.parametrize("name", GROWING)
def test_work_is_linear_in_the_input(name: str) -> None:
    size, make = GROWING[name]
    works = [make(size * factor) for factor in (1, 2, 4)]
    for measure in (calls, peak_bytes):
        for work in works:  # what is cached at first use is not counted
            measure(work)
        once, twice, fourfold = (measure(work) for work in works)
        assert twice <= 2 * SLACK * once
        assert fourfold <= 2 * SLACK * twice


@pytest.mark.parametrize("num_nodes", [65_536, 10**9, 10**18])
def test_a_number_of_nodes_costs_nothing(num_nodes: int) -> None:
    """It was written out for each link: 20 million nodes and three links took 1.3 GB and 14 s."""
    text = json.dumps({**with_links(100), "numNodes": num_nodes, "devicesPerNode": 1})
    assert peak_bytes(lambda: ClusterSpec.from_manifest(json.loads(text))) < 2**20


def noting_threads(work: Callable[..., Any], on_the_loop: list[bool]) -> Callable[..., Any]:
    """``work``, which also notes whether the event loop's thread runs it."""

    def call(*arguments: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_the_loop.append(False)
        else:
            on_the_loop.append(True)
        return work(*arguments)

    return call


@pytest.mark.parametrize("media", ["application/json", "application/yaml"])
def test_no_body_is_validated_on_the_event_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, media: str) -> None:
    on_the_loop: list[bool] = []
    monkeypatch.setattr(dependencies, "require_storable", noting_threads(require_storable, on_the_loop))
    monkeypatch.setattr(dependencies, "load_json", noting_threads(dependencies.load_json, on_the_loop))
    monkeypatch.setattr(PlanInput, "from_manifest", noting_threads(PlanInput.from_manifest, on_the_loop))
    service = new_service(tmp_path, "", Clock())
    try:
        client = client_of(service, Role.EDITOR)
        body = json.dumps({"job": job_manifest(), "cluster": loaded(CLUSTER)})
        answer = client.post("/v1/plans", content=body, headers={"Content-Type": media})
        assert answer.status_code == 202, answer.text
    finally:
        service.close()
    assert len(on_the_loop) >= 2
    assert not any(on_the_loop)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_no_large_batch_is_read_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: bool
) -> None:
    on_the_loop: list[bool] = []
    monkeypatch.setattr(ingest, "read_records", noting_threads(ingest.read_records, on_the_loop))
    service = new_service(tmp_path, "", Clock())
    try:
        client = client_of(service, Role.INGEST)
        record = {**EXAMPLE_RECORD, "data": {"text": random.Random(1).randbytes(ingest.SMALL_BYTES).hex()}}
        body = json.dumps({"records": [record]}).encode()
        headers = {"Content-Encoding": "gzip"} if packed else {}
        client.post("/v1/ingest", content=gzip.compress(body) if packed else body, headers=headers)
    finally:
        service.close()
    assert on_the_loop == [False]
