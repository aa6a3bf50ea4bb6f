"""What the operator does about one job, through its whole life, whatever happens to it, the cluster or the operator."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.plan import Plan
from penstock.core.pod import JOB_FILE, PLAN_FILE
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.packing import unpacked
from penstock.kube.resources import CONFIG_MAPS, JOBS, JOBSETS, PODS
from penstock.kube.transport import KubeError
from penstock.planner.worker.protocol import Answer
from tests.support.crashing import CrashError
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import NODES, bindings, condition, end_all, example, running, word
from tests.support.operating import Operating, measured
from tests.support.sample_run import confident_plan, sample_plan, sample_profile


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


class TestAnUndisturbedLife:
    def test_phases_and_what_people_are_told(self, operating: Operating) -> None:
        uid = running(operating)
        end_all(operating, AttemptState.SUCCEEDED)
        operating.turn()
        assert operating.phase(uid) is Phase.SUCCEEDED
        reasons = [reason for reason, _ in operating.events()]
        assert reasons == ["Accepted", "Admitted", "Profiled", "Planned", "Bound", "Completed"]

    def test_every_condition_holds_in_the_end(self, operating: Operating) -> None:
        uid = running(operating)
        end_all(operating, AttemptState.SUCCEEDED)
        operating.turn()
        found = {each.type.value: each.status.value for each in operating.status(uid).conditions}
        true = {"Admitted", "Profiled", "Planned", "Bound", "Complete"}
        assert found == dict.fromkeys(true, "True") | {"Failed": "False"}
        assert operating.status(uid).observed_generation == 1

    def test_the_attempt_has_one_jobset_and_finds_its_job(self, operating: Operating) -> None:
        uid = running(operating)
        assert operating.names() == ["stdlib-llama-a1"]
        config = operating.kube.config_map("stdlib-llama-a1")
        assert json.loads(config["data"][JOB_FILE])["metadata"]["uid"] == uid

    def test_ranks_are_told_their_places_and_the_plan(self, operating: Operating) -> None:
        running(operating)
        found = bindings(operating)
        assert [(each.node_rank, each.num_nodes, each.epoch) for each in found] == [(0, 2, 1), (1, 2, 1)]
        assert {each.master for each in found} == {"10.0.0.1"}
        assert {each.plan_digest for each in found} == {sample_plan().digest}
        plan = unpacked(operating.kube.config_map("stdlib-llama-a1")["binaryData"][PLAN_FILE])
        assert plan == sample_plan().to_manifest()

    def test_ranks_are_bound_to_the_plan_as_ranks_are_given_it(self) -> None:
        """Those of 0.1.0 refused a prediction with an interval; a job that was planned after an upgrade failed."""
        operating = Operating(FakePlanner(answer=Answer(plan=confident_plan())))
        operating.now = sample_profile().measured_at
        uid = running(operating)
        given = unpacked(operating.kube.config_map("stdlib-llama-a1")["binaryData"][PLAN_FILE])
        assert {each.plan_digest for each in bindings(operating)} == {Plan.from_manifest(given).digest}
        plan = operating.status(uid).plan
        assert plan is not None
        assert plan.digest == confident_plan().digest

    def test_a_status_that_would_say_the_same_is_not_written(self, operating: Operating) -> None:
        running(operating)
        writes = len(operating.kube.writes)
        operating.turn()
        assert operating.kube.writes[writes:] == []

    def test_a_plan_that_is_there_already_is_not_waited_for(self, operating: Operating) -> None:
        """Equal questions have one answer, which nobody tells of a second time."""
        running(operating)
        manifest = example()
        manifest["metadata"]["name"] = "other"
        uid = operating.kube.submit(manifest)
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.look()
        operating.reconciler.reconcile(uid)
        assert operating.phase(uid) is Phase.RUNNING

    def test_it_expires_after_its_ttl(self, operating: Operating) -> None:
        running(operating)
        end_all(operating, AttemptState.SUCCEEDED)
        assert operating.turn() == pytest.approx(86_400)
        operating.now += 86_400
        operating.turn()
        assert operating.kube.all(JOBS) == operating.kube.all(JOBSETS) == operating.kube.all(PODS) == []


class TestLoss:
    def test_a_deleted_pod_costs_an_attempt_but_is_no_failure(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.all(PODS)[0]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        operating.turn(8)
        status = operating.status(uid)
        assert (status.attempt, status.failures, status.phase) == (2, 0, Phase.QUEUED)
        assert operating.names() == ["stdlib-llama-a2"]
        assert ("Disrupted", "Recovering: pod stdlib-llama-a1-ranks-0-0 was deleted") in operating.events()

    def test_on_the_same_hosts_nothing_is_measured_again(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.remove(operating.kube.all(PODS)[0])
        operating.turn(8)
        operating.kube.start_pods(*reversed(NODES))
        operating.turn(12)
        assert operating.phase(uid) is Phase.RUNNING
        assert [reason for reason, _ in operating.events()].count("Profiled") == 1
        hosts = [pod["spec"]["nodeName"] for pod in operating.kube.all(PODS)]
        order = {host: each.node_rank for host, each in zip(hosts, bindings(operating), strict=True)}
        assert order == {"east": 0, "west": 1}

    def test_hosts_that_an_earlier_attempt_measured_are_not_measured_again(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.add_node("north")
        for attempt, hosts in ((2, ("east", "north")), (3, NODES)):
            operating.kube.remove(operating.kube.all(PODS)[0])
            operating.turn(8)
            operating.kube.start_pods(*hosts)
            operating.turn(8)
            if attempt == 2:
                measured(operating.kube, uid, sample_profile(), attempt, "measured-elsewhere")
                operating.turn(12)
            status = operating.status(uid)
            assert (status.phase, status.attempt) == (Phase.RUNNING, attempt)
        assert status.profile is not None
        assert status.profile.ref == "measured"
        assert [reason for reason, _ in operating.events()].count("Profiled") == 2

    def test_other_hosts_are_measured(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.add_node("north")
        operating.kube.remove(operating.kube.all(PODS)[0])
        operating.turn(8)
        operating.kube.start_pods("east", "north")
        operating.turn(8)
        assert operating.phase(uid) is Phase.PROFILING
        assert {each.epoch for each in bindings(operating)} == {0}

    def test_a_failed_pod_counts_and_waits_a_moment(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.end_pod(1, code=1, word=word(AttemptState.FAILED, message="rank 1 was killed"))
        operating.kube.remove(operating.kube.all(PODS)[0])
        wait = operating.turn()
        assert (operating.phase(uid), operating.status(uid).failures) == (Phase.RECOVERING, 1)
        assert wait == pytest.approx(1.0)
        operating.now += 1.0
        operating.turn()
        assert operating.status(uid).attempt == 2

    def test_a_mistake_of_the_user_s_ends_the_job(self, operating: Operating) -> None:
        uid = running(operating)
        report = word(AttemptState.FAILED, message="data: empty\n  remedy: add text", refused=True)
        operating.kube.end_pod(0, code=2, word=report)
        operating.turn()
        status = operating.status(uid)
        assert (status.phase, status.reason) == (Phase.FAILED, "UserError")
        assert "remedy: add text" in status.message

    def test_a_lost_node_s_pod_holds_nothing_up(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.add_node("west", ready=False, at=operating.now)
        left = next(pod for pod in operating.kube.all(PODS) if pod["spec"]["nodeName"] == "west")
        operating.turn(8)
        operating.kube.add(PODS, left)
        operating.turn(8)
        assert operating.status(uid).attempt == 2

    def test_a_silent_run_has_stalled(self, operating: Operating) -> None:
        uid = running(operating)
        operating.now += 3600
        operating.turn()
        assert condition(operating, uid, ConditionType.STALLED) == (ConditionStatus.TRUE, "NoStep")

    def test_steps_count_by_the_operator_s_own_clock(self, operating: Operating) -> None:
        uid = running(operating)
        for step in range(1, 30):
            operating.now += 50
            operating.kube.report(uid, attempt=1, epoch=1, step=step, reportedAt="2001-01-01T00:00:00Z")
            operating.turn()
        assert operating.phase(uid) is Phase.RUNNING
        operating.now += 61
        operating.turn()
        assert condition(operating, uid, ConditionType.STALLED) == (ConditionStatus.TRUE, "NoStep")

    def test_the_first_step_may_take_longer_than_the_others(self, operating: Operating) -> None:
        uid = running(operating)
        operating.now += 590
        operating.turn()
        assert operating.phase(uid) is Phase.RUNNING

    def test_nobody_stalls_while_the_service_is_away(self, operating: Operating) -> None:
        uid = running(operating)
        operating.service_is_there = False
        operating.now += 3600
        operating.turn()
        assert operating.phase(uid) is Phase.RUNNING

    @pytest.mark.parametrize(
        ("measured", "told"),
        [
            ([1.0], ["False"]),
            ([1.5], ["True"]),
            ([0.6], ["True"]),
            ([1.25], ["False"]),
            ([1.5, 1.25, 1.1], ["True", "True", "False"]),
        ],
    )
    def test_steps_that_take_another_time_than_predicted(
        self, operating: Operating, measured: list[float], told: list[str]
    ) -> None:
        uid = running(operating)
        plan = operating.status(uid).plan
        assert plan is not None
        assert plan.step_seconds is not None
        found = []
        for ratio in measured:
            operating.kube.report(uid, attempt=1, epoch=1, step=9, stepSeconds=ratio * plan.step_seconds)
            operating.turn()
            found.append(condition(operating, uid, ConditionType.DRIFTED)[0].value)
        assert found == told

    def test_what_has_ended_stays_ended(self, operating: Operating) -> None:
        uid = running(operating)
        end_all(operating, AttemptState.SUCCEEDED)
        operating.turn()
        operating.kube.remove(operating.kube.all(JOBSETS)[0])
        operating.turn()
        assert (operating.phase(uid), operating.names()) == (Phase.SUCCEEDED, [])


class TestWhateverHappensToTheOperator:
    def life(self, operating: Operating) -> str:
        """A job that loses an attempt."""
        for node in NODES:
            operating.kube.add_node(node)
        uid = operating.kube.submit(example())
        settle(operating)
        operating.kube.start_pods(*NODES)
        settle(operating)
        operating.measured(uid, sample_profile())
        settle(operating)
        for index in (0, 1):
            operating.kube.end_pod(index, code=1, word=word(AttemptState.FAILED, message="a rank was killed"))
        settle(operating)
        operating.now += 2.0
        settle(operating)
        operating.kube.start_pods(*NODES)
        settle(operating)
        end_all(operating, AttemptState.SUCCEEDED)
        settle(operating)
        return uid

    def count_writes(self) -> int:
        operating = Operating(FakePlanner())
        self.life(operating)
        return len(operating.kube.writes)

    @pytest.mark.parametrize("heard", [False, True])
    @pytest.mark.parametrize("failure", [CrashError(), KubeError(409, "Conflict", ""), KubeError(500, "Internal", "")])
    def test_any_write_may_be_its_last(self, failure: BaseException, heard: bool) -> None:
        """Whether it was not made, or made and not heard of."""
        total = self.count_writes()
        assert total > 20
        for fatal in range(total):
            operating = Operating(FakePlanner())
            hook = once(fatal, failure)
            operating.kube.hook, operating.kube.after = (ignore, hook) if heard else (hook, ignore)
            uid = self.life(operating)
            status = operating.status(uid)
            assert (status.phase, status.attempt, status.failures) == (Phase.SUCCEEDED, 2, 1), (fatal, status)
            assert operating.names() == ["stdlib-llama-a2"], fatal
            configs = [each["metadata"]["name"] for each in operating.kube.all(CONFIG_MAPS)]
            assert sorted(configs) == ["measured", "stdlib-llama-a2"], fatal


def ignore(write: str) -> None:
    """A hook that does nothing."""


def once(fatal: int, failure: BaseException) -> Callable[[str], None]:
    """A hook that fails at one write."""
    count = -1

    def hook(write: str) -> None:
        nonlocal count
        count += 1
        if count == fatal:
            raise failure

    return hook


def settle(operating: Operating) -> None:
    """Turns as a queue makes them; an operator that ends is followed by another."""
    for _ in range(6):
        try:
            operating.turn(3)
        except KubeError:
            continue
        except CrashError:
            operating.restart()
