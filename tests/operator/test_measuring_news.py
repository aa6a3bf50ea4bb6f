"""A job that measures says what it waits for, gets its measurement without the service, and never waits forever."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.core.lifecycle import MEASURING_SECONDS, PREPARING_SECONDS, AttemptState, Phase, Step
from penstock.core.model import UnitKind
from penstock.core.pod import AGENT_MEASUREMENT, AGENT_REPORT, AgentReport, CheckpointName
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.names import ATTEMPT_LABEL, BINDING_ANNOTATION, UID_LABEL
from penstock.kube.resources import CONFIG_MAPS, PODS
from penstock.kube.transport import KubeError
from penstock.operator.agents import PAUSE_SECONDS, SELDOM_SECONDS
from penstock.operator.measurements import MOST_KEPT
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import NODES, condition, example
from tests.support.operating import Operating, measured
from tests.support.poison import poison
from tests.support.sample_run import sample_profile

FIRST = "10.0.0.1"
"""The address of the pod on the first host, which has rank 0."""


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


def profiling(operating: Operating, *, service: bool = False, name: str = "") -> str:
    """A job whose pods were asked to measure; its uid."""
    operating.service_is_there = service
    for node in NODES:
        operating.kube.add_node(node)
    manifest = example()
    manifest["metadata"]["name"] = name or manifest["metadata"]["name"]
    uid = operating.kube.submit(manifest)
    operating.turn()
    operating.kube.start_pods(*NODES)
    operating.turn()
    assert operating.phase(uid) is Phase.PROFILING
    return uid


def report(operating: Operating, uid: str, **more: Any) -> AgentReport:
    """What the agent in the first pod says."""
    pod = next(each for each in operating.kube.all(PODS) if each["status"].get("podIP") == FIRST)
    attempt = int(pod["metadata"]["labels"][ATTEMPT_LABEL])
    said: dict[str, Any] = {"state": AttemptState.READY, **more}
    return AgentReport(pod_uid=pod["metadata"]["uid"], job_uid=uid, attempt=attempt, **said)


def later(operating: Operating, seconds: float = SELDOM_SECONDS) -> None:
    """So much later."""
    operating.now += seconds
    operating.turn(8)


class TestWaiting:
    def test_a_job_that_hears_nothing_says_what_it_waits_for(self, operating: Operating) -> None:
        uid = profiling(operating)
        message = operating.status(uid).message
        assert "the agent of pod stdlib-llama-a1-ranks-0-0 cannot be reached" in message
        assert "the service could deliver the measurement, but is not running" in message
        assert condition(operating, uid, ConditionType.PROFILED) == (ConditionStatus.FALSE, "ServiceUnavailable")

    def test_and_is_given_up_and_tried_again(self, operating: Operating) -> None:
        uid = profiling(operating)
        later(operating, MEASURING_SECONDS - 1.0)
        assert operating.phase(uid) is Phase.PROFILING
        later(operating, 1.0)
        status = operating.status(uid)
        assert (status.failures, status.phase, status.reason) == (1, Phase.RECOVERING, "AttemptFailed")
        assert status.message.startswith(
            "the measurement reported no progress: waiting for the measurement: the agent of"
        )
        later(operating, 10.0)
        assert operating.status(uid).attempt == 2

    def test_each_news_gives_it_more_time(self, operating: Operating) -> None:
        uid = profiling(operating)
        for done in range(4):
            operating.answers.serve(FIRST, report(operating, uid, profile=Step.WORKING, done=done, total=4))
            later(operating)
            assert f"has measured {10 * done // 4} tenths of its points" in operating.status(uid).message
            later(operating, MEASURING_SECONDS - 2 * SELDOM_SECONDS)
            assert operating.phase(uid) is Phase.PROFILING
        later(operating, 2 * SELDOM_SECONDS)
        assert operating.status(uid).failures == 1

    def test_data_may_take_hours(self, operating: Operating) -> None:
        uid = profiling(operating)
        operating.answers.serve(FIRST, report(operating, uid, state=AttemptState.STARTING))
        later(operating)
        assert operating.status(uid).message == "pod stdlib-llama-a1-ranks-0-0 is preparing its data"
        later(operating, PREPARING_SECONDS - SELDOM_SECONDS)
        assert operating.phase(uid) is Phase.PROFILING
        later(operating)
        assert operating.status(uid).failures == 1

    def test_an_agent_that_never_answers_may_be_of_an_image_that_has_none(self, operating: Operating) -> None:
        """What it measures comes by the service, as before."""
        uid = profiling(operating, service=True)
        later(operating, MEASURING_SECONDS)
        assert operating.phase(uid) is Phase.PROFILING
        assert "the service may still deliver it" in operating.status(uid).message
        operating.measured(uid, sample_profile())
        operating.turn(12)
        assert operating.phase(uid) is Phase.RUNNING


class TestPulling:
    def test_a_measurement_needs_no_service(self, operating: Operating) -> None:
        uid = profiling(operating)
        operating.answers.serve(FIRST, report(operating, uid), sample_profile())
        later(operating)
        status = operating.status(uid)
        assert (status.phase, status.failures, status.message) == (Phase.RUNNING, 0, "")
        assert status.profile is not None
        assert status.profile.ref == "stdlib-llama-profile-a1"
        metadata = operating.kube.config_map(status.profile.ref)["metadata"]
        assert metadata["labels"][UID_LABEL] == uid
        assert [owner["controller"] for owner in metadata["ownerReferences"]] == [True]
        assert operating.actions.profile("default", status.profile.ref) == sample_profile()

    def test_the_service_and_the_operator_may_both_be_first(self, operating: Operating) -> None:
        uid = profiling(operating, service=True)
        name = "stdlib-llama-profile-a1"
        measured(operating.kube, uid, sample_profile(), name=name)
        operating.kube.report(uid, attempt=1)  # the service was ended before it said more
        metadata = operating.kube.config_map(name)["metadata"]
        metadata |= {"labels": {UID_LABEL: uid}, "ownerReferences": [{"uid": uid}]}
        operating.answers.serve(FIRST, report(operating, uid), sample_profile())
        later(operating)
        assert operating.phase(uid) is Phase.RUNNING

    def test_another_s_config_map_is_not_taken_for_it(self, operating: Operating) -> None:
        uid = profiling(operating)
        operating.kube.add(CONFIG_MAPS, {"metadata": {"name": "stdlib-llama-profile-a1", "namespace": "default"}})
        operating.answers.serve(FIRST, report(operating, uid), sample_profile())
        operating.now += SELDOM_SECONDS
        with pytest.raises(KubeError, match="belongs to something else"):
            operating.turn()
        assert condition(operating, uid, ConditionType.PROFILED) == (ConditionStatus.FALSE, "NameTaken")

    def test_an_operator_that_ends_after_it_laid_it_out_is_followed_by_one_that_finds_it(
        self, operating: Operating
    ) -> None:
        uid = profiling(operating)
        operating.answers.serve(FIRST, report(operating, uid), sample_profile())
        operating.now += SELDOM_SECONDS

        def end(write: str) -> None:
            if write == "create ConfigMap stdlib-llama-profile-a1":
                raise KeyboardInterrupt

        operating.kube.after = end
        with pytest.raises(KeyboardInterrupt):
            operating.turn()
        operating.kube.after = lambda write: None
        operating.restart()
        operating.service_is_there = False
        operating.turn(12)
        assert operating.phase(uid) is Phase.RUNNING

    def test_it_is_asked_at_a_bounded_rate(self, operating: Operating) -> None:
        """And less often when it does not answer."""
        uid = profiling(operating)
        operating.answers.serve(FIRST, report(operating, uid))
        later(operating)
        before = len(operating.answers.asked)
        for _ in range(100):
            later(operating, PAUSE_SECONDS / 10)
        assert len(operating.answers.asked) - before <= 11
        operating.answers.served.clear()
        before = len(operating.answers.asked)
        for _ in range(600):
            operating.now += 1.0
            operating.turn(1)
        assert len(operating.answers.asked) - before <= 15

    def test_checkpoints_are_pulled_while_the_service_is_away(self, operating: Operating) -> None:
        uid = profiling(operating)
        operating.answers.serve(FIRST, report(operating, uid), sample_profile())
        later(operating)
        newest = CheckpointName(attempt=1, step=40)
        operating.answers.serve(FIRST, report(operating, uid, checkpoint=newest), sample_profile())
        before = len(operating.answers.asked)
        later(operating)
        assert operating.status(uid).checkpoint == newest
        assert {name for _, name in operating.answers.asked[before:]} == {AGENT_REPORT}
        operating.service_is_there = True
        operating.turn()
        before = len(operating.answers.asked)
        operating.kube.report(uid, attempt=1, lastCheckpoint=60)
        later(operating, 10 * SELDOM_SECONDS)
        assert operating.answers.asked[before:] == []

    def test_a_checkpoint_that_the_service_tells_costs_no_write(self, operating: Operating) -> None:
        uid = profiling(operating, service=True)
        operating.measured(uid, sample_profile())
        operating.turn(12)
        later(operating)
        operating.kube.report(uid, attempt=1, lastCheckpoint=60)
        writes = len(operating.kube.writes)
        later(operating)
        assert operating.kube.writes[writes:] == []
        operating.kube.remove(operating.kube.all(PODS)[0])
        operating.turn(8)
        assert operating.status(uid).checkpoint == CheckpointName(attempt=1, step=60)


def bad() -> dict[str, bytes]:
    """What may be answered in place of a document, by what is wrong with it."""
    texts = poison(sample_profile().to_manifest())
    long = b'{"podUid": "p", "jobUid": "j", "attempt": 1, "state": "ready", "done": %b}' % (b"9" * 4_000)
    found = {name: base64.b64decode(texts[name]) for name in texts if name not in NOT_BASE64}
    return {**found, "JSON": b"{}", "beyond a maximum": gzip.compress(long)}


NOT_BASE64 = ("not base64", "odd base64", "not ASCII")
BAD = bad()


def another_pod(said: AgentReport) -> AgentReport:
    return replace(said, pod_uid="another")


def another_job(said: AgentReport) -> AgentReport:
    return replace(said, job_uid="another")


def another_attempt(said: AgentReport) -> AgentReport:
    return replace(said, attempt=7)


def another_digest(said: AgentReport) -> AgentReport:
    return replace(said, profile=Step.DONE, measurement="0" * 64)


class TestBadAnswers:
    @pytest.mark.parametrize("change", [another_pod, another_job, another_attempt, another_digest])
    def test_one_that_does_not_belong_to_what_was_asked(
        self, operating: Operating, change: Callable[[AgentReport], AgentReport]
    ) -> None:
        uid = profiling(operating)
        operating.answers.serve(FIRST, report(operating, uid), sample_profile())
        served = dict(operating.answers.served)
        operating.answers.serve(FIRST, change(report(operating, uid, profile=Step.DONE, measurement="1")))
        operating.answers.served[FIRST, AGENT_MEASUREMENT] = served[FIRST, AGENT_MEASUREMENT]
        later(operating)
        assert operating.phase(uid) is Phase.PROFILING
        assert "another" in operating.status(uid).message
        operating.answers.served = served
        later(operating)
        assert operating.phase(uid) is Phase.RUNNING

    @pytest.mark.parametrize("name", BAD)
    def test_a_measurement_that_is_none_is_reported(self, operating: Operating, name: str) -> None:
        uid = profiling(operating)
        operating.answers.serve_measurement(FIRST, report(operating, uid), BAD[name])
        self.is_reported_on_its_job_alone(operating, uid)

    @pytest.mark.parametrize("name", BAD)
    def test_a_report_that_is_none_is_reported(self, operating: Operating, name: str) -> None:
        uid = profiling(operating)
        operating.answers.served[FIRST, AGENT_REPORT] = BAD[name]
        self.is_reported_on_its_job_alone(operating, uid)

    def is_reported_on_its_job_alone(self, operating: Operating, uid: str) -> None:
        other = operating.kube.submit({**example(), "metadata": {"name": "other"}})
        later(operating)
        assert operating.phase(uid) is Phase.PROFILING
        assert "gave an answer that cannot be read" in operating.status(uid).message
        assert operating.phase(other) is Phase.QUEUED


def test_a_pod_of_someone_else_is_never_asked(operating: Operating) -> None:
    """It has the labels and the binding of a rank, and no owner that the job has."""
    uid = profiling(operating)
    rank = operating.kube.all(PODS)[0]
    stray = {
        "metadata": {
            "name": "aaa-stray",
            "namespace": "default",
            "labels": dict(rank["metadata"]["labels"]),
            "annotations": {BINDING_ANNOTATION: rank["metadata"]["annotations"][BINDING_ANNOTATION]},
        },
        "spec": {"nodeName": "east"},
        "status": {**rank["status"], "podIP": "10.6.6.6"},
    }
    operating.kube.add(PODS, stray)
    for _ in range(20):
        later(operating)
    assert {address for address, _ in operating.answers.asked} == {FIRST}
    assert operating.status(uid).phase is Phase.PROFILING


class TestEarlierMeasurements:
    """What a job measured in earlier attempts is found again after a restart of the operator."""

    def measured_on(self, operating: Operating, uid: str, *hosts: str) -> None:
        """Another attempt, on those hosts, which measures them."""
        operating.kube.remove(operating.kube.all(PODS)[0])
        operating.turn(8)
        for host in hosts:
            operating.kube.add_node(host)
        operating.kube.start_pods(*hosts)
        operating.turn(8)
        assert operating.phase(uid) is Phase.PROFILING
        operating.answers.serve(FIRST, report(operating, uid), sample_profile())
        later(operating)
        assert operating.phase(uid) is Phase.RUNNING

    def begun(self, operating: Operating) -> str:
        uid = profiling(operating)
        operating.answers.serve(FIRST, report(operating, uid), sample_profile())
        later(operating)
        return uid

    def test_one_of_hosts_that_it_comes_back_to_is_used(self, operating: Operating) -> None:
        uid = self.begun(operating)
        first = operating.status(uid).profile
        self.measured_on(operating, uid, "east", "north")
        operating.restart()
        operating.kube.remove(operating.kube.all(PODS)[0])
        operating.turn(8)
        operating.kube.start_pods(*NODES)
        operating.turn(12)
        assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.RUNNING, 3)
        assert operating.status(uid).profile == first

    def test_no_more_are_kept_than_may_be(self, operating: Operating) -> None:
        uid = self.begun(operating)
        for number in range(MOST_KEPT + 1):
            self.measured_on(operating, uid, "east", f"north{number}")
        kept = [each.ref for each in operating.status(uid).measurements]
        assert kept == [f"stdlib-llama-profile-a{number}" for number in range(3, MOST_KEPT + 3)]
        there = {each["metadata"]["name"] for each in operating.kube.all(CONFIG_MAPS)}
        assert {name for name in there if "-profile-a" in name} == set(kept)


def _is_of(pod: dict[str, Any], uid: str) -> bool:
    return bool(pod["metadata"]["labels"].get(UID_LABEL) == uid)


class TestMeasurementsOfOthers:
    """A job goes by what another measured on the same hosts only if that has the degrees that it pins."""

    @pytest.mark.parametrize(
        ("pins", "lacks"),
        [
            ({}, ""),
            ({"tp": 1, "headParts": 1}, ""),
            ({"headParts": 2}, "lacks a head in 2 parts at tp 1"),
            ({"tp": 2}, "lacks units at tp 2"),
        ],
    )
    def test_what_it_pins_was_measured_or_is(self, operating: Operating, pins: dict[str, int], lacks: str) -> None:
        first = operating.running(example(), sample_profile(), *NODES)
        manifest = example(parallelism=pins)
        manifest["metadata"]["name"] = "other"
        other = operating.kube.submit(manifest)
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.turn(12)
        status = operating.status(other)
        assert (status.attempt, status.failures) == (1, 0)
        if not lacks:
            assert status.phase is Phase.RUNNING
            assert operating.status(first).profile == status.profile
            return
        assert status.phase is Phase.PROFILING
        profiled = status.condition(ConditionType.PROFILED)
        assert profiled is not None
        assert profiled.message.startswith(f"ConfigMap measured {lacks}: the attempt measures again")
        shards = tuple(replace(each, tp=pins.get("tp", 1)) for each in sample_profile().units)
        parts = tuple(replace(each, head_parts=2) for each in shards if each.unit is UnitKind.HEAD)
        own = replace(sample_profile(), units=(*shards, *parts), only_tp=pins.get("tp"))
        measured(operating.kube, other, own, name="own")
        for attempt in (1, 2):
            operating.turn(12)
            status = operating.status(other)
            assert status.profile is not None
            assert (status.phase, status.attempt, status.profile.ref) == (Phase.RUNNING, attempt, "own")
            operating.kube.remove(next(pod for pod in operating.kube.all(PODS) if _is_of(pod, other)))
            operating.turn(8)
            operating.kube.start_pods(*NODES)
