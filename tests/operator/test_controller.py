"""The operator as a whole, on a cluster in memory: what watches tell becomes calls, and what is counted and probed."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.errors import PenstockError
from penstock.core.host.ports import free_port
from penstock.core.lifecycle import Phase
from penstock.kube.names import SERVICE_LEASE
from penstock.kube.resources import CLUSTER_PROFILES, EVENTS, JOBS, JOBSETS, LEASES, PODS, Resource
from penstock.kube.transport import KubeError
from penstock.operator import controller, health
from penstock.operator.controller import Controller, NotStartedError, StuckError
from penstock.operator.metrics import serve
from penstock.operator.settings import Settings
from tests.support.fake_kube import FakeKube
from tests.support.fake_planner import FakePlanner
from tests.support.manifests import example
from tests.support.operating import Operating, measured
from tests.support.sample_run import sample_profile
from tests.support.watchable import Watchable

SECONDS = 10.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kube.watching.FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr("penstock.kube.watching.LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr("penstock.operator.job_feed.FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr("penstock.operator.job_feed.LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr("penstock.operator.job_feed.LIST_SECONDS", 0.05)
    monkeypatch.setattr(controller, "SYNC_SECONDS", 0.2)
    monkeypatch.setattr(controller, "UNSYNCED_SECONDS", 0.05)
    monkeypatch.setattr(controller, "SERVICE_POLL_SECONDS", 0.05)


@asynccontextmanager
async def operating(
    kube: Watchable, *, namespace: str = "", service: str = "", resync_seconds: float = 0.05
) -> AsyncIterator[Controller]:
    """An operator that runs."""
    settings = Settings(image="trainer:1", namespace=namespace, service=service, resync_seconds=resync_seconds)
    found = Controller(kube, FakePlanner(), settings, time.time)
    await found.start(asyncio.get_running_loop())
    try:
        yield found
    finally:
        await found.close()


async def until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not so():
        assert time.monotonic() < end, "it does not come to be"
        await asyncio.sleep(0.01)


def phase(kube: FakeKube, uid: str) -> str:
    job = next(each for each in kube.all(JOBS) if each["metadata"]["uid"] == uid)
    return str((job.get("status") or {}).get("phase"))


def figures(found: Controller) -> dict[str, float]:
    """What Prometheus reads, by name and labels."""
    text = generate_latest(found.registry).decode()
    return {
        ",".join([sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_a_job_s_whole_life() -> None:
    async def test() -> None:
        kube = Watchable()
        for node in ("east", "west"):
            kube.add_node(node)
        uid = kube.submit(example(kubernetes={"volumes": {"out": {"claim": "shared"}}}))
        async with operating(kube) as found:
            await until(lambda: bool(kube.all(JOBSETS)))
            kube.start_pods("east", "west")
            await until(lambda: phase(kube, uid) == Phase.PROFILING)
            measured(kube, uid, sample_profile())
            await until(lambda: phase(kube, uid) == Phase.RUNNING)
            for index in (0, 1):
                kube.end_pod(index, code=0)
            ended = "penstock_operator_attempts_ended_total,phase=Succeeded,reason=Completed"
            await until(lambda: figures(found).get(ended) == 1)
            told = figures(found)
            assert phase(kube, uid) == Phase.SUCCEEDED
            assert told["penstock_operator_jobs,phase=Succeeded"] == 1
            assert told["penstock_operator_planning_seconds_count"] == 1
            assert told["penstock_operator_reconcile_seconds_count,result=done"] >= 6
            assert told["penstock_operator_api_seconds_count,code=200,resource=jobsets,verb=create"] == 1

    run(test)


def test_a_cluster_profile_has_its_job_where_the_operator_lives() -> None:
    async def test() -> None:
        kube = Watchable()
        model = {"family": "llama", "layers": 2, "hidden": 64, "heads": 2, "kvHeads": 1, "vocab": 257}
        kube.add(CLUSTER_PROFILES, {"metadata": {"name": "pool"}, "spec": {"model": model, "sequenceLength": 128}})
        async with operating(kube):
            await until(lambda: bool(kube.all(JOBSETS)))
            (jobset,) = kube.all(JOBSETS)
            assert (jobset["metadata"]["namespace"], jobset["metadata"]["name"]) == (
                "penstock-system",
                "pool-profile-a1",
            )

    run(test)


def test_nothing_follows_from_the_half_of_the_truth() -> None:
    """Pods cannot be listed when the operator starts: a job that runs is not taken for one that lost its pods."""

    async def test() -> None:
        kube, before = Watchable(), Operating(FakePlanner())
        before.kube = kube
        before.restart()
        shared = {"volumes": {"out": {"claim": "shared"}}}
        uid = before.running(example(kubernetes=shared), sample_profile(), "east", "west")
        kube.unlistable = {PODS.plural}
        writes = len(kube.writes)
        async with operating(kube):
            await asyncio.sleep(0.5)
            assert len(kube.writes) == writes
            kube.unlistable.clear()
            await asyncio.sleep(0.5)
            assert phase(kube, uid) == Phase.RUNNING
            assert [each["metadata"]["name"] for each in kube.all(JOBSETS)] == ["stdlib-llama-a1"]

    run(test)


def test_jobs_are_heard_of_at_once_however_long_the_cluster_was_away() -> None:
    """The look at every job that comes now and then has no part in it."""

    async def test() -> None:
        kube = Watchable()
        kube.unlistable = {JOBS.plural}
        first = kube.submit(named("first"))
        async with operating(kube, resync_seconds=3600.0) as found:
            await asyncio.sleep(0.3)
            assert found.cache.jobs() == []
            kube.unlistable.clear()
            await until(lambda: bool(kube.all(JOBSETS)))
            kube.unlistable = {JOBS.plural}
            await asyncio.sleep(0.3)
            kube.submit(named("second"))
            kube.remove(next(each for each in kube.all(JOBS) if each["metadata"]["uid"] == first))
            kube.unlistable.clear()
            await until(lambda: "second-a1" in [each["metadata"]["name"] for each in kube.all(JOBSETS)])
            await until(lambda: found.cache.job(first) is None)

    run(test)


def test_who_may_not_see_other_namespaces_knows_of_no_room_and_sees_to_its_own() -> None:
    async def test() -> None:
        kube, before = Watchable(), Operating(FakePlanner())
        before.kube = kube
        before.restart()
        uid = before.running(shared_output(), sample_profile(), "east", "west")
        kube.change_spec(uid, resources={"ranks": 4, "minRanks": 2})
        kube.closed = {PODS.plural}
        async with operating(kube, namespace="default") as found:
            await until(lambda: found.cache.capacity(uid) is not None)
            room = found.cache.capacity(uid)
            assert room is not None
            assert room.num_pods == 0
            other = kube.submit(named("other"))
            await until(lambda: phase(kube, other) == Phase.QUEUED)
            assert phase(kube, uid) == Phase.RUNNING

    run(test)


def test_a_cluster_that_fails_now_and_then_costs_retries_and_is_counted() -> None:
    async def test() -> None:
        kube = Watchable()
        failures = iter([True, False] * 3)

        def hook(write: str) -> None:
            if next(failures, False):
                raise KubeError(500, "Internal", "etcd")

        kube.hook = hook
        uid = kube.submit(example(kubernetes={"volumes": {"out": {"claim": "shared"}}}))
        async with operating(kube) as found:
            await until(lambda: bool(kube.all(JOBSETS)))
            told = figures(found)
        assert phase(kube, uid) == Phase.QUEUED
        assert told["penstock_operator_retries_total"] >= 1
        assert told["penstock_operator_api_seconds_count,code=500,resource=pipelinejobs/status,verb=apply"] >= 1

    run(test)


def shared_output() -> dict[str, Any]:
    return example(kubernetes={"volumes": {"out": {"claim": "shared"}}})


def named(name: str) -> dict[str, Any]:
    """A job of that name."""
    return {**shared_output(), "metadata": {"name": name}}


def test_nobody_waits_for_events_and_the_last_are_written_before_the_end() -> None:
    async def test() -> None:
        kube, let = Watchable(), threading.Event()

        def hook(write: str) -> None:
            assert not write.startswith("create Event") or let.wait(SECONDS)

        kube.hook = hook
        kube.submit(shared_output())
        async with operating(kube):
            await until(lambda: bool(kube.all(JOBSETS)))
            assert kube.all(EVENTS) == []
            let.set()
        assert [each["reason"] for each in kube.all(EVENTS)] == ["Accepted"]

    run(test)


def test_events_of_a_cluster_that_does_not_take_them_hold_the_end_up_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "FLUSH_SECONDS", 0.1)

    async def test() -> None:
        kube, let = Watchable(), threading.Event()

        def hook(write: str) -> None:
            assert not write.startswith("create Event") or let.wait(SECONDS)

        kube.hook = hook
        for number in range(5):
            kube.submit(named(f"job-{number}"))
        async with operating(kube):
            await until(lambda: len(kube.all(JOBSETS)) == 5)
            began = time.monotonic()
        assert time.monotonic() - began < SECONDS / 2
        let.set()
        await until(lambda: len(kube.all(EVENTS)) == 1)
        await asyncio.sleep(0.1)
        assert len(kube.all(EVENTS)) == 1  # the one that was on its way

    run(test)


def test_a_first_attempt_does_not_wait_for_jobs_that_are_followed() -> None:
    async def test() -> None:
        kube, let = Watchable(), threading.Event()
        for node in ("east", "west"):
            kube.add_node(node)
        followed = [kube.submit(named(f"old-{number}")) for number in range(2 * controller.NUM_THREADS)]
        async with operating(kube):
            await until(lambda: len(kube.all(JOBSETS)) == len(followed))

            def hook(write: str) -> None:
                assert "old-" not in write or let.wait(SECONDS)

            kube.hook = hook
            for uid in followed:
                kube.change_spec(uid, runPolicy={"suspend": True})
            await asyncio.sleep(0.3)
            kube.submit(named("new"))
            await until(lambda: "new-a1" in [each["metadata"]["name"] for each in kube.all(JOBSETS)])
            assert not let.is_set()
            let.set()

    run(test)


def test_labels_take_few_values_whatever_jobs_there_are() -> None:
    async def test() -> None:
        kube = Watchable()
        for number in range(30):
            manifest = example()
            manifest["metadata"] = {"name": f"job-{number}"}
            kube.submit(manifest)
        async with operating(kube) as found:
            failed = "penstock_operator_attempts_ended_total,phase=Failed,reason=UserError"
            await until(lambda: figures(found).get(failed) == 30)
            told = figures(found)
        assert not [name for name in told if "job-" in name]

    run(test)


class TestProbe:
    def probed(self, probe: Callable[[], dict[str, float]], path: str = "/healthz") -> tuple[int, bytes]:
        port = free_port()
        close = health.serve(probe, port)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
                return int(response.status), response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        finally:
            close()

    def test_all_watches_are_heard_of(self) -> None:
        status, body = self.probed(lambda: {"pods": 1.0})
        assert (status, json.loads(body)) == (200, {"watches": {"pods": 1.0}})

    @pytest.mark.parametrize("error", [StuckError("the watch of pods did nothing"), NotStartedError("no list yet")])
    def test_a_watch_that_does_nothing_fails_it_at_once(self, error: PenstockError) -> None:
        def fail() -> dict[str, float]:
            raise error

        status, body = self.probed(fail)
        assert (status, json.loads(body)) == (503, {"message": str(error)})

    def test_other_paths_are_not_served(self) -> None:
        assert self.probed(dict, "/metrics")[0] == 404

    def test_a_client_that_says_nothing_delays_no_other(self) -> None:
        port = free_port()
        close = health.serve(dict, port)
        try:
            with (
                socket.create_connection(("127.0.0.1", port)),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as response,
            ):
                assert response.status == 200
        finally:
            close()

    def test_it_fails_before_the_start_and_after_the_end(self) -> None:
        async def test() -> None:
            kube = Watchable()
            unstarted = Controller(kube, FakePlanner(), Settings(), time.time)
            with pytest.raises(NotStartedError):
                unstarted.probe()
            async with operating(kube) as found:
                assert found.probe().keys() == found.watch_ages().keys()
            with pytest.raises(NotStartedError):
                found.probe()

        run(test)

    def test_when_a_watch_counts_as_stuck(self) -> None:
        now = [0.0]
        found = Controller(Watchable(), FakePlanner(), Settings(), lambda: now[0])
        now[0] = controller.MOST_STUCK_SECONDS
        assert set(found.watch_ages()) == {"pipelinejobs", "jobsets", "jobs", "pods", "nodes"}
        now[0] += 1
        with pytest.raises(StuckError, match="jobsets, jobs, pods, nodes"):
            found.watch_ages()


@pytest.mark.parametrize("service", ["", "https://service:8470"])
def test_a_lease_that_nobody_renews_is_counted(service: str) -> None:
    """Where there is no service, there is no Lease to miss."""
    held = "penstock_operator_service_lease_held"
    expected = [0.0, 1.0] if service else [None, None]

    async def test() -> None:
        kube = Watchable()
        metadata = {"name": SERVICE_LEASE, "namespace": Settings().own_namespace}
        async with operating(kube, service=service) as found:
            await until(lambda: found._is_lease_held is False)
            assert figures(found).get(held) == expected[0]
            kube.add(LEASES, {"metadata": metadata, "spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}})
            await until(lambda: found._is_lease_held is True)
            assert figures(found).get(held) == expected[1]

    run(test)


def test_prometheus_is_answered() -> None:
    found = Controller(Watchable(), FakePlanner(), Settings(), time.time)
    port = free_port()
    close = serve(found.registry, port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            assert b'penstock_operator_jobs{phase="Running"} 0.0' in response.read()
    finally:
        close()


def test_a_start_that_is_cancelled_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watches go on meanwhile, so the second start only waits for them."""
    monkeypatch.setattr(controller, "SYNC_SECONDS", SECONDS)

    async def test() -> None:
        kube, may_list = Watchable(), threading.Event()
        list_objects = kube.list

        def wait_and_list(*arguments: Any) -> Any:
            may_list.wait(SECONDS)
            return list_objects(*arguments)

        monkeypatch.setattr(kube, "list", wait_and_list)
        kube.submit(named("early"))
        found = Controller(kube, FakePlanner(), Settings(image="trainer:1", resync_seconds=0.05), time.time)
        first = asyncio.create_task(found.start(asyncio.get_running_loop()))
        await asyncio.sleep(0.1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(found.start(asyncio.get_running_loop()))
        await asyncio.sleep(0.1)
        assert not second.done()
        may_list.set()
        await second
        await until(lambda: bool(kube.all(JOBSETS)))
        await found.close()

    run(test)


def test_no_watch_is_expected_before_the_end_of_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the start has ended, kopf does not watch, so neither silence nor a new definition restarts kopf."""
    monkeypatch.setattr("penstock.operator.job_feed.REPORT_SECONDS", 0.0)

    async def test() -> None:
        kube, restarts = Watchable(), list[bool]()
        kube.submit(named("early"))
        list_objects, num_lists = kube.list, [0]

        def count_and_list(resource: Resource, *arguments: Any) -> Any:
            num_lists[0] += resource == JOBS
            if resource == JOBS and num_lists[0] == 1:
                raise KubeError(404, "NotFound", "no such kind")
            return list_objects(resource, *arguments)

        monkeypatch.setattr(kube, "list", count_and_list)
        kube.unlistable = {"pods"}
        found = Controller(kube, FakePlanner(), Settings(image="trainer:1"), time.time)
        found.jobs.on_unwatched = lambda: restarts.append(True)
        await found.start(asyncio.get_running_loop())
        assert num_lists[0] >= 3
        assert not restarts
        await until(lambda: bool(restarts))  # no watch reports the job
        await found.close()

    run(test)
