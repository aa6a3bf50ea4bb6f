"""/metrics: jobs as the database has them at the scrape, and what the service counted of itself."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Connection, delete, event
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.live.listeners import Filter, ListListener
from penstock.api.metrics.jobs import DAY_SECONDS, GAUGES, JobsCollector
from penstock.api.service import Service
from penstock.api.store import jobs, step_predictions
from penstock.api.store import schema as tables
from penstock.api.store.job_summaries import JobSummary
from penstock.api.store.step_predictions import StepPrediction
from penstock.core.lifecycle import Phase
from tests.support.filled_job import enter, running_job
from tests.support.listening import ear
from tests.support.sample_run import explained_plan, sample_metrics, sample_plan
from tests.support.service import Clock, add_job, client_of, new_service, step_records

Labels = frozenset[tuple[str, str]]
TINY = {"namespace": "default", "job_name": "tiny"}


def scraped(service: Service) -> Mapping[str, Mapping[Labels, float]]:
    """The value of every sample by its name and labels."""
    answer = client_of(service, Role.VIEWER).get("/metrics")
    assert answer.status_code == 200
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def value(service: Service, name: str, **labels: str) -> float | None:
    return scraped(service).get(name, {}).get(frozenset(labels.items()))


def of_job(service: Service) -> dict[str, float]:
    """What is told of the job ``tiny``, without the prefix."""
    mine = frozenset(TINY.items())
    found = scraped(service).items()
    return {name.removeprefix("penstock_job_"): values[mine] for name, values in found if mine in values}


class TestJobs:
    def test_a_running_one_shows_what_it_promised_and_what_it_does(self, service: Service) -> None:
        running_job(service, steps=8)
        found = of_job(service)
        assert found.keys() == {*GAUGES, "failures_total"} - {"model_flops_utilization"}, "no peak is known"
        assert (found["step"], found["num_steps"], found["failures_total"]) == (9, 10, 0)
        assert found["predicted_step_seconds"] == 0.2306
        assert found["predicted_peak_bytes"] == 485 * 2**20
        assert found["peak_bytes"] == 618 * 2**20
        steps = sample_metrics()[:8]
        assert found["step_seconds"] == pytest.approx(statistics.median(each.step_seconds for each in steps))
        assert found["tokens_per_second"] == pytest.approx(steps[-1].tokens_per_second)
        plan = sample_plan()
        tokens = plan.global_batch * plan.sequence_length / plan.num_ranks
        assert found["tokens_per_second_per_device"] == pytest.approx(tokens / found["step_seconds"])
        assert found["memory_limit_bytes"] == 4 * 2**30
        assert found["last_report_timestamp_seconds"] == service.clock()

    def test_the_share_of_a_known_peak_is_that_of_the_measured_step(self) -> None:
        plan = explained_plan()
        standing = JobSummary(
            namespace="default",
            name="tiny",
            phase=Phase.RUNNING,
            phase_entered_at=0.0,
            attempt=1,
            failures=0,
            num_steps=10,
            memory_limit_bytes=1,
            plan_digest=plan.digest,
            step=3,
            loss=None,
            step_seconds=0.25,
            reported_at=0.0,
            tokens_per_second=None,
            peak_bytes=None,
        )
        prediction = StepPrediction(step_seconds=1.0, peak_bytes=1, of_a_second=plan.speed(1.0))
        speed = plan.speed(0.25)
        assert speed is not None
        _, utilization = GAUGES["model_flops_utilization"]
        assert utilization(standing, prediction) == pytest.approx(speed.model_flops_utilization)
        assert utilization(dataclasses.replace(standing, phase=Phase.RECOVERING), prediction) is None
        assert utilization(standing, None) is None

    def test_one_that_does_not_run_has_no_speed(self, service: Service) -> None:
        uid = running_job(service).uid
        enter(service, uid, Phase.RECOVERING)
        found = of_job(service)
        assert {"step", "loss", "failures_total", "predicted_step_seconds"} <= found.keys()
        assert not {"step_seconds", "tokens_per_second", "peak_bytes", "last_report_timestamp_seconds"} & found.keys()

    def test_one_that_told_nothing_yet_has_been_silent_since_it_runs(self, service: Service, clock: Clock) -> None:
        uid = add_job(service).uid
        assert of_job(service).keys() == {"num_steps", "attempt", "memory_limit_bytes", "failures_total"}
        for phase in (Phase.QUEUED, Phase.PROFILING, Phase.PLANNING, Phase.BINDING):
            enter(service, uid, phase)
        clock.now += 60
        enter(service, uid, Phase.RUNNING)
        assert of_job(service)["last_report_timestamp_seconds"] == clock.now

    def test_nothing_stays_of_an_older_attempt(self, service: Service) -> None:
        stored = running_job(service)
        change = {"attempt": stored.attempt + 1}
        service.write(stored.uid, lambda c: jobs.add_event(c, stored.uid, "launched", {}, service.clock(), **change))
        found = of_job(service)
        assert found["attempt"] == 1
        assert not {"step", "loss", "tokens_per_second", "peak_bytes"} & found.keys()

    @pytest.mark.parametrize("end", [Phase.SUCCEEDED, Phase.FAILED])
    def test_what_has_ended_vanishes(self, service: Service, end: Phase) -> None:
        uid = running_job(service).uid
        enter(service, uid, end)
        failed = {"failed_timestamp_seconds": service.clock()} if end is Phase.FAILED else {}
        assert of_job(service) == failed

    def test_what_was_deleted_vanishes(self, service: Service) -> None:
        uid = running_job(service).uid
        service.write(uid, lambda connection: jobs.mark_deleted(connection, uid, service.clock()))
        assert of_job(service) == {}
        assert value(service, "penstock_jobs", phase="Running") == 0

    def test_they_are_counted_by_phase_and_by_their_end(self, service: Service, clock: Clock) -> None:
        add_job(service, "waits")
        enter(service, running_job(service, "broke").uid, Phase.FAILED)
        counted = scraped(service)["penstock_jobs"]
        assert {dict(labels)["phase"] for labels in counted} == {phase.value for phase in Phase}
        assert sum(counted.values()) == 2
        assert value(service, "penstock_jobs", phase="Failed") == 1

    def test_those_that_ended_are_a_counter_which_never_goes_back(self, service: Service, clock: Clock) -> None:
        """Whatever becomes of them: a scrape that comes late misses none, and a forgotten one stays counted."""
        ended = partial(value, service, "penstock_jobs_ended_total", phase="Failed")
        assert (ended(), value(service, "penstock_jobs_ended_total", phase="Succeeded")) == (0, 0)
        uid = running_job(service, "broke").uid
        enter(service, uid, Phase.FAILED)
        clock.now += 3 * DAY_SECONDS
        assert ended() == 1
        enter(service, running_job(service, "again").uid, Phase.FAILED)
        assert (ended(), ended()) == (2, 2)
        clock.now += 3 * DAY_SECONDS
        assert ended() == 2
        service.write(uid, lambda connection: jobs.mark_deleted(connection, uid, clock.now))
        service.write(uid, lambda connection: connection.execute(delete(tables.jobs).where(tables.jobs.c.uid == uid)))
        assert ended() == 2
        enter(service, running_job(service, "third").uid, Phase.FAILED)
        assert ended() == 3

    def test_a_job_that_failed_is_named_until_it_is_deleted(self, service: Service, clock: Clock) -> None:
        uid = running_job(service).uid
        enter(service, uid, Phase.FAILED)
        at = clock.now
        clock.now += 10_000
        assert value(service, "penstock_job_failed_timestamp_seconds", **TINY) == at
        service.write(uid, lambda connection: jobs.mark_deleted(connection, uid, clock.now))
        assert value(service, "penstock_job_failed_timestamp_seconds", **TINY) is None

    def test_only_so_many_have_metrics_those_that_reported_last_among_them(self, service: Service) -> None:
        running_job(service, "reports")
        for _ in range(3):
            add_job(service, "waits-")
        families = {each.name: each for each in JobsCollector(service.engine, service.clock, most=2).collect()}
        shown = [sample.labels["job_name"] for sample in families["penstock_job_attempt"].samples]
        assert shown[0] == "reports"
        assert len(shown) == 2
        assert families["penstock_jobs_left_out"].samples[0].value == 2

    def test_a_plan_is_read_once_for_all_scrapes(self, service: Service) -> None:
        digest = running_job(service).plan_digest
        assert digest is not None
        step_predictions._remembered.pop(digest, None)
        read: list[str] = []

        @event.listens_for(service.engine, "before_cursor_execute")
        def hear(connection: Connection, cursor: Any, statement: str, *rest: Any) -> None:
            read.append(statement)

        for _ in range(2):
            assert of_job(service)["predicted_step_seconds"] > 0
        assert sum("FROM plans" in statement for statement in read) == 1


class TestRequests:
    """On SQLite: what is counted here is no business of the database."""

    @pytest.fixture
    def service(self, tmp_path: Path) -> Service:
        return new_service(tmp_path)

    @pytest.mark.parametrize(
        ("method", "path", "operation", "status"),
        [
            ("GET", "/v1/jobs", "listJobs", "2xx"),
            ("GET", "/v1/jobs/default/gone", "getJob", "4xx"),
            ("GET", "/", "show_jobs", "2xx"),
            ("GET", "/nowhere/at/all", "none", "4xx"),
            ("GET", "/nowhere/else", "none", "4xx"),
            ("BREW", "/coffee", "none", "4xx"),
        ],
    )
    def test_they_are_observed_by_operation(
        self, service: Service, method: str, path: str, operation: str, status: str
    ) -> None:
        client_of(service).request(method, path)
        name = "penstock_http_request_seconds_count"
        assert value(service, name, operation=operation, status=status) == 1
        service.close()

    def test_labels_stay_few(self, service: Service) -> None:
        client = client_of(service)
        for i in range(50):
            client.get(f"/v1/jobs/default/job-{i}")
            client.get(f"/{i}")
            client.request("GET", "/v1/jobs", headers={"Host": f"evil-{i}.example"})
        pairs = scraped(service)["penstock_http_request_seconds_count"]
        assert {dict(labels)["operation"] for labels in pairs} <= {"getJob", "none", "listJobs"}
        service.close()

    def test_what_fails_is_observed_too(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("bad luck")

        client = client_of(service)
        with monkeypatch.context() as patch:
            patch.setattr(jobs, "page", fail)
            assert client.get("/v1/jobs").status_code == 500
        assert value(service, "penstock_http_request_seconds_count", operation="listJobs", status="5xx") == 1
        service.close()

    def test_two_services_count_for_themselves(self, service: Service, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = new_service(tmp_path / "other")
        client_of(service).get("/v1/jobs")
        name = "penstock_http_request_seconds_count"
        assert value(other, name, operation="listJobs", status="2xx") is None
        assert not [each for each in REGISTRY.collect() if each.name.startswith("penstock")]
        service.close()
        other.close()


def test_records_and_commits_are_counted(service: Service) -> None:
    uid = running_job(service).uid
    before = value(service, "penstock_commit_changes_sum")
    records = step_records(uid, range(20, 23), attempt=0, source="rank-1")
    body = {"records": [record.to_manifest() for record in records]}
    assert client_of(service, Role.INGEST).post("/v1/ingest", json=body).status_code == 200
    found = scraped(service)
    assert found["penstock_ingested_records_total"][frozenset()] == len(records)
    assert before is not None
    assert found["penstock_commit_changes_sum"][frozenset()] > before
    assert found["penstock_commit_changes_count"][frozenset()] <= found["penstock_commit_changes_sum"][frozenset()]


async def listen_and_fall_behind(service: Service) -> tuple[float | None, float | None]:
    """Streams that were open, and that were dropped, with one reader who takes nothing."""
    listener = ListListener(filter=Filter())
    async with ear(service.feed, listener, deaf=True):
        while service.feed.num_listeners == 0:
            await asyncio.sleep(0.01)
        opened = await asyncio.to_thread(value, service, "penstock_streams")
        while not listener.outgoing.dropped.is_set():
            listener.outgoing.put(b"x")
    return opened, await asyncio.to_thread(value, service, "penstock_streams_dropped_total")


def test_streams_are_counted(service: Service) -> None:
    assert asyncio.run(listen_and_fall_behind(service)) == (1, 1)
    assert value(service, "penstock_streams") == 0


def test_a_token_of_one_namespace_does_not_see_all(service: Service) -> None:
    assert client_of(service, Role.VIEWER, "default").get("/metrics").status_code == 403
    assert client_of(service, Role.INGEST).get("/metrics").status_code == 403


def test_the_program_is_named(service: Service) -> None:
    assert list(scraped(service)["penstock_build_info"].values()) == [1]
    assert "process_resident_memory_bytes" in scraped(service)


def test_the_answer_is_prometheus_text(service: Service) -> None:
    client: TestClient = client_of(service)
    assert client.get("/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
