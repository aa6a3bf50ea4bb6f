"""What the operator does about a job that has to wait, and what it says of it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import UserError
from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.names import QUEUE_LABEL, STOP_ANNOTATION
from penstock.kube.resources import JOBSETS, PODS
from penstock.kube.transport import KubeError
from penstock.operator import reconcile
from penstock.planner.budget import Budget
from penstock.planner.decide import decide
from penstock.planner.worker.protocol import Answer
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import NODES, bindings, condition, end_all, example, running
from tests.support.operating import Operating
from tests.support.planning import problem
from tests.support.sample_run import sample_profile

LATE = Answer(what="planning took over 600 s", remedy="pin dp", is_transient=True)


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


class TestWaiting:
    def test_what_keeps_a_pod_from_starting_is_told(self, operating: Operating) -> None:
        for node in NODES:
            operating.kube.add_node(node)
        uid = operating.kube.submit(example())
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.kube.hinder_pod(1, "Unschedulable", "0/2 nodes are available", at=operating.now)
        operating.turn()
        status = operating.status(uid)
        said = "pod stdlib-llama-a1-ranks-0-1: Unschedulable: 0/2 nodes are available; add nodes or free some"
        assert (status.phase, status.message.partition(",")[0]) == (Phase.QUEUED, said)
        assert condition(operating, uid, ConditionType.ADMITTED) == (ConditionStatus.FALSE, "PlacedInPart")

    def test_a_queue_admits(self, operating: Operating) -> None:
        uid = operating.kube.submit(example(kubernetes={"queueName": "team"}))
        operating.turn()
        (jobset,) = operating.kube.all(JOBSETS)
        assert jobset["spec"]["suspend"]
        assert jobset["metadata"]["labels"][QUEUE_LABEL] == "team"
        assert (
            operating.status(uid).message
            == "queue team has not admitted the job yet; check that Kueue runs, and the queue with "
            "kubectl get localqueue team -n default"
        )

    def test_waiting_for_a_queue_takes_nothing_of_the_time_that_a_job_has(self, operating: Operating) -> None:
        uid = operating.kube.submit(example(kubernetes={"queueName": "team"}, runPolicy={"activeDeadlineSeconds": 60}))
        operating.turn()
        operating.now += 600.0
        operating.turn()
        assert operating.status(uid).started_at is None
        operating.kube.all(JOBSETS)[0]["spec"]["suspend"] = False
        for node in NODES:
            operating.kube.add_node(node)
        operating.kube.start_pods(*NODES)
        operating.turn()
        assert (operating.phase(uid), operating.status(uid).started_at) == (Phase.PROFILING, operating.now)
        operating.now += 60.0
        operating.turn()
        assert operating.status(uid).reason == "DeadlineExceeded"

    def test_a_preempted_attempt_is_followed_by_one_that_queues(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.all(JOBSETS)[0]["spec"]["suspend"] = True
        operating.turn(8)
        assert (operating.status(uid).attempt, operating.status(uid).failures) == (2, 0)

    def test_the_service_away_is_told_while_measuring(self, operating: Operating) -> None:
        operating.service_is_there = False
        for node in NODES:
            operating.kube.add_node(node)
        uid = operating.kube.submit(example())
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.turn()
        assert condition(operating, uid, ConditionType.PROFILED) == (ConditionStatus.FALSE, "ServiceUnavailable")

    def test_an_elastic_job_makes_do_with_the_room_there_is(self, operating: Operating) -> None:
        for node in NODES:
            operating.kube.add_node(node)
        uid = operating.kube.submit(example(resources={"ranks": 2, "minRanks": 1}))
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.kube.hinder_pod(1, "Unschedulable", "0/2 nodes are available", at=operating.now)
        assert operating.turn() == pytest.approx(120.0)
        operating.now += 120.0
        operating.turn(8)
        status = operating.status(uid)
        assert (status.attempt, status.ranks, status.failures) == (2, 1, 0)

    def test_what_the_cluster_denies_is_told(self, operating: Operating) -> None:
        for node in NODES:
            operating.kube.add_node(node)
        uid = operating.kube.submit(example())
        operating.turn()
        operating.kube.start_pods(*NODES)

        def deny(write: str) -> None:
            if write.startswith("annotate"):
                raise KubeError(403, "Forbidden", "a policy says no")

        operating.kube.hook = deny
        with pytest.raises(KubeError, match="a policy says no"):
            operating.turn()
        assert (operating.phase(uid), operating.status(uid).message) == (Phase.PROFILING, "a policy says no")
        assert condition(operating, uid, ConditionType.PROFILED) == (ConditionStatus.FALSE, "Forbidden")
        operating.kube.hook = lambda write: None
        operating.turn()
        assert condition(operating, uid, ConditionType.PROFILED) == (ConditionStatus.FALSE, "Measuring")

    def test_an_attempt_whose_plan_leaves_ranks_unused_keeps_its_pods_and_is_planned_once(self) -> None:
        plan = decide(problem(ranks=2, min_ranks=1, dp=1, tp=1, pp=1), Budget(candidates=1)).plan
        assert plan.num_ranks == 1
        planner = FakePlanner(answer=Answer(plan=plan))
        operating = Operating(planner)
        uid = running(operating, resources={"ranks": 2, "minRanks": 1}, training__steps=1_000_000)
        assert planner.requests[0].spec.resources.min_ranks == 1
        assert [each.ranks_per_pod * each.num_nodes for each in bindings(operating)] == [2, 2]
        operating.cache.set_capacities({uid: 4}, operating.now)
        operating.now += 299.0
        operating.kube.report(uid, attempt=1, epoch=1, step=9)
        operating.now += 1.0
        operating.turn(8)
        status = operating.status(uid)
        assert (status.phase, status.attempt, status.ranks) == (Phase.RUNNING, 1, 2)
        assert len(operating.kube.all(PODS)) == 2
        assert STOP_ANNOTATION not in operating.kube.all(PODS)[0]["metadata"]["annotations"]
        assert len(planner.asked) == 1

    def shrunken(self, operating: Operating, steps: int) -> str:
        """An elastic job that runs on one rank of two."""
        for node in NODES:
            operating.kube.add_node(node)
        manifest = example(resources={"ranks": 2, "minRanks": 1})
        manifest["spec"]["training"]["steps"] = steps
        uid = operating.kube.submit(manifest)
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.kube.hinder_pod(1, "Unschedulable", "0/2 nodes are available", at=operating.now)
        operating.turn()
        operating.now += 120.0
        operating.turn(8)
        operating.kube.start_pods(NODES[0])
        operating.turn()
        operating.measured(uid, sample_profile(), attempt=2)
        operating.turn(12)
        assert (operating.phase(uid), operating.status(uid).ranks) == (Phase.RUNNING, 1)
        return uid

    def test_it_grows_once_there_was_room_for_long(self, operating: Operating) -> None:
        uid = self.shrunken(operating, steps=1_000_000)
        operating.cache.set_capacities({uid: 1}, operating.now)
        operating.now += 299.0
        operating.kube.report(uid, attempt=2, epoch=1, step=9)
        operating.turn()
        assert operating.status(uid).feasible_ranks == 1
        operating.cache.set_capacities({uid: 1}, operating.now)
        operating.now += 1.0
        operating.turn()
        end_all(operating, AttemptState.STOPPED)
        operating.turn(8)
        status = operating.status(uid)
        assert (status.attempt, status.ranks, status.failures) == (3, 2, 0)

    @pytest.mark.parametrize(
        ("steps", "pods", "changes"), [(20, 1, False), (1_000_000, 0, False), (1_000_000, 1, True)]
    )
    def test_it_stays_where_growing_does_not_pay(
        self, operating: Operating, steps: int, pods: int, changes: bool
    ) -> None:
        uid = self.shrunken(operating, steps)
        operating.cache.set_capacities({uid: pods + changes}, operating.now)
        operating.now += 299.0
        operating.cache.set_capacities({uid: pods}, operating.now)
        operating.kube.report(uid, attempt=2, epoch=1, step=9)
        operating.now += 1.0
        operating.turn()
        assert not any(STOP_ANNOTATION in pod["metadata"]["annotations"] for pod in operating.kube.all(PODS))

    def planned(self, operating: Operating, name: str = "stdlib-llama") -> str:
        """A job for which a plan was requested and answered; its uid."""
        for node in NODES:
            operating.kube.add_node(node)
        manifest = example()
        manifest["metadata"]["name"] = name
        uid = operating.kube.submit(manifest)
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.turn()
        operating.measured(uid, sample_profile())
        operating.turn(12)
        return uid

    def test_nothing_fits(self) -> None:
        planner = FakePlanner(Answer(what="no plan fits", remedy="raise memoryPerRank"))
        operating = Operating(planner)
        for name in ("one", "equal"):
            uid = self.planned(operating, name)
            status = operating.status(uid)
            assert (status.phase, status.reason) == (Phase.FAILED, "NoPlan")
            assert condition(operating, uid, ConditionType.PLANNED) == (ConditionStatus.FALSE, "NoPlan")
        assert len(planner.asked) == 1

    def test_a_request_that_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(**parts: Any) -> None:
            raise UserError(what="is of another model", where="profile", remedy="measure again")

        monkeypatch.setattr(reconcile, "PlanningRequest", refuse)
        operating = Operating(FakePlanner())
        status = operating.status(self.planned(operating, "one"))
        assert (status.phase, status.reason) == (Phase.FAILED, "NoPlan")
        assert status.message.startswith("profile: is of another model")

    def test_a_failure_of_the_planning_process_does_not_fail_later_jobs(self) -> None:
        planner = FakePlanner(LATE)
        operating = Operating(planner)
        uid = self.planned(operating, "one")
        assert (operating.phase(uid), operating.status(uid).message) == (Phase.FAILED, LATE.error)
        planner.answer = FakePlanner().answer
        assert operating.phase(self.planned(operating, "equal")) is Phase.RUNNING
        assert operating.phase(uid) is Phase.FAILED

    def test_a_failure_that_could_not_be_written_is_not_planned_again(self) -> None:
        planner = FakePlanner(LATE)
        operating = Operating(planner)
        conflicts = [KubeError(409, "Conflict", "the job has changed")] * 2

        def refuse(write: str) -> None:
            if planner.asked and not planner.polls and conflicts:
                raise conflicts.pop()

        operating.kube.hook = refuse
        uid = self.planned(operating)
        assert (operating.phase(uid), operating.status(uid).message) == (Phase.FAILED, LATE.error)
        assert (len(planner.asked), conflicts) == (1, [])
