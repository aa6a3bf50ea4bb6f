"""The numbers of a long run, as people read them on its page: exact, and with every spike."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.service import Service
from penstock.api.store.ingest import Batch, take
from penstock.core.lifecycle import Phase
from penstock.core.records import Record, RecordKind, StepMetrics
from penstock.core.timeline import Source
from tests.support.filled_job import enter, running_job
from tests.support.sample_report import sample_report
from tests.support.sample_run import sample_metrics
from tests.support.service import NOW, client_of, new_service

HTML = {"Accept": "text/html"}
STEPS, SPIKE = 2_000, 517


def long_run() -> list[StepMetrics]:
    """Loss falls from 6.264 to 1.715, but for one step; every tenth step takes five times as long."""
    like = sample_metrics(1)[0]
    return [
        dataclasses.replace(
            like,
            step=step,
            loss=8.17 if step == SPIKE else 6.264 + (1.715 - 6.264) * step / (STEPS - 1),
            gradient_norm=52.8 if step == SPIKE else 1.0,
            step_seconds=0.2 if step % 10 == 0 else 0.04,
            tokens_per_second=1_000.0 if step % 10 == 0 else 5_000.0,
        )
        for step in range(STEPS)
    ]


def send(service: Service, uid: str, contents: Sequence[dict[str, Any]], first: int = 1_000) -> None:
    records = [
        Record(uid=uid, attempt=0, source="rank-0", sequence=number, recorded_at=NOW, **content)
        for number, content in enumerate(contents, first)
    ]
    for start in range(0, len(records), 500):
        batch = Batch.of(records[start : start + 500], NOW)
        service.write(uid, partial(take, batches=[batch]))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = new_service(tmp_path)
    yield made
    made.close()


@pytest.fixture
def uid(service: Service) -> str:
    """A job that reported the long run, and as sampled steps a typical one between two slow ones."""
    made = running_job(service, steps=0)
    send(service, made.uid, [{"kind": RecordKind.METRICS, "metrics": each} for each in long_run()])
    measured = sample_report().measured
    assert measured is not None
    slow = [dataclasses.replace(measured, step=step, source=Source.MEASURED) for step in (500, 777, 1990)]
    send(service, made.uid, [{"kind": RecordKind.TIMELINE, "timeline": each} for each in slow], first=9_000)
    return made.uid


def page(client: TestClient, path: str) -> tuple[str, dict[str, Any]]:
    """Words and figures."""
    answer = client.get(path, headers=HTML)
    assert answer.status_code == 200, answer.text
    found = re.findall(r'id="figures">(.*?)</script>', answer.text, re.DOTALL)
    text = re.sub(r"<style>.*?</style>|<script.*?</script>|<[^>]+>", " ", answer.text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text), json.loads(found[0])["figures"]


def highest(figure: dict[str, Any]) -> float:
    return max(float(value) for trace in figure["data"] for value in trace["y"] if value is not None)


def test_a_long_job_s_page_shows_exact_numbers_and_its_spike(service: Service, uid: str) -> None:
    words, figures = page(client_of(service), "/jobs/default/tiny")
    assert "Training loss went from 6.264 at step 0 to 1.715 at step 1,999" in words
    assert "median of 1,995 steps" in words
    assert "5,000 tokens/s" in words
    assert "Step time 40.0 ms" in words
    assert highest(figures["loss"]) == 8.17
    assert highest(figures["gradient-norm"]) == 52.8
    assert "Final loss" not in words, "it runs"
    enter(service, uid, Phase.SUCCEEDED)
    assert "Final loss 1.715" in page(client_of(service), "/jobs/default/tiny")[0]


def test_jobs_are_compared_by_exact_numbers(service: Service, uid: str) -> None:
    assert uid
    words, figures = page(client_of(service), "/compare?job=default/tiny&job=default/tiny")
    assert "loss 1.715 1.715" in words
    assert "5,000 tokens/s" in words
    assert re.search(r"step, measured 40(\.0)? ?ms", words), words
    assert highest(figures["loss"]) == 8.17


def test_the_api_says_first_last_least_and_greatest(service: Service, uid: str) -> None:
    assert uid
    for most in (1, 7, 500):
        found = client_of(service).get("/v1/jobs/default/tiny/metrics", params={"points": most}).json()["series"]
        (loss,) = [each for each in found if each["name"] == "loss"]
        assert loss["count"] == STEPS
        assert loss["first"] == {"step": 0, "value": 6.264}
        assert loss["last"]["step"] == 1999
        assert loss["last"]["value"] == pytest.approx(1.715)
        assert (loss["min"], loss["max"]) == (pytest.approx(1.715), 8.17)
        assert sum(point["count"] for point in loss["points"]) == STEPS
        assert max(point["max"] for point in loss["points"]) == 8.17


def test_a_typical_step_is_drawn_and_any_sampled_one_can_be(service: Service, uid: str) -> None:
    assert uid
    client = client_of(service)
    words, _ = page(client, "/jobs/default/tiny")
    assert "Measured, step 777" in words
    for step in (500, 777, 1990):
        words, _ = page(client, f"/jobs/default/tiny?step={step}")
        assert f"Measured, step {step}" in words
    answer = client.get("/jobs/default/tiny", headers=HTML).text
    assert re.findall(r'href="\?step=(\d+)#step"', answer) == ["120", "500", "777", "1990"]
    assert client.get("/jobs/default/tiny?step=501", headers=HTML).status_code == 404
    told = client.get("/v1/jobs/default/tiny/timeline").json()
    assert (told["typicalStep"], told["sampledSteps"]) == (777, [120, 500, 777, 1990])
