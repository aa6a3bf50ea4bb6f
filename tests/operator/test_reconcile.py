"""What the operator does about one job, through its whole life, whatever happens to it, the cluster or the operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.pod import JOB_FILE, PLAN_FILE, PodBinding
from penstock.core.status import ConditionStatus, ConditionType
from penstock.core.supervision import AttemptReport
from penstock.kube.names import BINDING_ANNOTATION, QUEUE_LABEL, STOP_ANNOTATION
from penstock.kube.packing import unpacked
from penstock.kube.resources import CONFIG_MAPS, JOBS, JOBSETS, PODS
from penstock.kube.transport import KubeError
from penstock.planning.questions import Answer
from tests.support import manifests
from tests.support.fake_supervisors import CrashError, FakePlanner
from tests.support.operating import Operating
from tests.support.sample_run import sample_plan, sample_profile

NODES = ("east", "west")


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


def example(**changes: Any) -> dict[str, Any]:
    """The design's example with an output that its two pods can share."""
    kubernetes = {"volumes": {"out": {"claim": "shared"}}, **changes.pop("kubernetes", {})}
    return manifests.example(kubernetes=kubernetes, **changes)


def running(operating: Operating, **changes: Any) -> str:
    return operating.running(example(**changes), sample_profile(), *NODES)


def bindings(operating: Operating) -> list[PodBinding]:
    texts = [pod["metadata"]["annotations"][BINDING_ANNOTATION] for pod in operating.kube.all(PODS)]
    return [PodBinding.from_manifest(json.loads(text)) for text in texts]


def word(state: AttemptState, **more: Any) -> str:
    return json.dumps(AttemptReport(state=state, **more).to_manifest())


def end_all(operating: Operating, state: AttemptState) -> None:
    for index in range(len(operating.kube.all(PODS))):
        operating.kube.end_pod(index, code=0, word=word(state))


def condition(operating: Operating, uid: str, kind: ConditionType) -> tuple[ConditionStatus, str]:
    found = operating.status(uid).condition(kind)
    assert found is not None
    return found.status, found.reason


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
            operating.kube.report(uid, attempt=1, step=step, reportedAt="2001-01-01T00:00:00Z")
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


def removed(operating: Operating, uid: str) -> None:
    """Nobody submits it again."""
    operating.kube.remove(next(each for each in operating.kube.all(JOBS) if each["metadata"]["uid"] == uid))


def replaced(operating: Operating, uid: str) -> None:
    """Somebody submits another of that name, which is suspended."""
    removed(operating, uid)
    suspended(operating, operating.kube.submit(example()))


def suspended(operating: Operating, uid: str) -> None:
    """It is not to begin."""
    operating.kube.change_spec(uid, runPolicy={"suspend": True})


def begun_by_another(operating: Operating, uid: str) -> None:
    """A second operator, which nobody meant to start, makes the attempt."""
    other = Operating(FakePlanner())
    other.kube = operating.kube
    other.restart()
    other.turn()
    assert other.names() == ["stdlib-llama-a1"]


class TestWhatTheClusterKnowsBetter:
    def test_a_namesake_is_not_told_what_its_predecessor_did(self, operating: Operating) -> None:
        uid = running(operating)
        (old,) = operating.kube.all(JOBS)
        operating.kube.remove(old)
        new = operating.kube.submit(example())
        end = operating.cache.job(uid)
        assert end is not None
        with pytest.raises(KubeError, match="Conflict"):
            operating.actions.write_status(end, end.status)
        assert operating.status(new).phase is Phase.PENDING

    @pytest.mark.parametrize("change", [removed, replaced, suspended, begun_by_another])
    def test_a_first_attempt_is_not_made_of_what_is_no_longer_so(
        self, operating: Operating, change: Callable[[Operating, str], None]
    ) -> None:
        """Nothing is looked up before it: the write of its number is refused, and decided is anew."""
        uid = operating.kube.submit(example())
        operating.look()
        change(operating, uid)
        before = operating.names()
        operating.reconciler.reconcile(uid)
        assert operating.names() == before

    def test_a_first_attempt_is_made_without_a_look(self, operating: Operating) -> None:
        """A thousand jobs at once are made to wait by everything that is asked before."""
        uid = operating.kube.submit(manifests.example(resources={"ranks": 1}))
        operating.look()
        operating.kube.reads.clear()
        operating.reconciler.reconcile(uid)
        assert operating.kube.reads == []
        assert [write for write in operating.kube.writes if "Event" not in write] == [
            "apply PipelineJob stdlib-llama status",
            "create ConfigMap stdlib-llama-a1",
            "create JobSet stdlib-llama-a1",
        ]
        assert condition(operating, uid, ConditionType.ADMITTED) == (ConditionStatus.FALSE, "Waiting")

    def test_an_operator_that_begins_anew_knows_what_was_launched(self, operating: Operating) -> None:
        """From the JobSet, which says so sooner than the status."""
        for node in NODES:
            operating.kube.add_node(node)
        uid = operating.kube.submit(example())
        operating.turn()
        assert operating.status(uid).launched == 0
        writes = len(operating.kube.writes)
        operating.restart()
        operating.turn()
        assert operating.kube.writes[writes:] == []
        operating.kube.start_pods(*NODES)
        operating.turn()
        assert (operating.phase(uid), operating.status(uid).launched) == (Phase.PROFILING, 1)

    def test_a_queued_attempt_that_somebody_deletes_is_made_again(self, operating: Operating) -> None:
        uid = operating.kube.submit(example())
        operating.turn()
        operating.kube.remove(operating.kube.all(JOBSETS)[0])
        operating.turn()
        assert (operating.phase(uid), operating.names()) == (Phase.QUEUED, ["stdlib-llama-a1"])

    def test_progress_meanwhile_costs_a_second_look_and_no_more(self, operating: Operating) -> None:
        uid = operating.kube.submit(example())
        operating.look()
        operating.kube.report(uid, attempt=0, step=1)
        operating.reconciler.reconcile(uid)
        assert operating.phase(uid) is Phase.QUEUED

    def test_an_attempt_is_not_given_up_for_what_a_watch_missed(self, operating: Operating) -> None:
        uid = running(operating)
        pods = operating.kube.all(PODS)
        operating.kube.hide(PODS)
        operating.restart()
        operating.look()
        operating.kube.hidden.clear()
        operating.reconciler.reconcile(uid)
        assert operating.phase(uid) is Phase.RUNNING
        assert len(operating.cache.pods(uid)) == len(pods) == 2

    def test_a_job_set_that_failed_for_a_pod_that_was_taken_is_no_failure(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.remove(operating.kube.all(PODS)[0])
        failed = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "a job failed"}
        operating.kube.all(JOBSETS)[0]["status"] = {"conditions": [failed]}
        operating.turn(8)
        assert (operating.status(uid).attempt, operating.status(uid).failures) == (2, 0)

    def test_a_measurement_that_is_gone_is_made_again(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.remove(operating.kube.config_map("measured"))
        operating.kube.remove(operating.kube.all(PODS)[0])
        operating.turn(8)
        operating.kube.start_pods(*NODES)
        operating.turn(12)
        operating.now += 300
        operating.turn(12)
        operating.kube.start_pods(*NODES)
        operating.turn(12)
        status = operating.status(uid)
        assert (status.attempt, status.failures, status.phase) == (3, 1, Phase.PROFILING)
        told = [message for reason, message in operating.events() if reason == "AttemptFailed"]
        assert told == [
            "Recovering: ConfigMap measured: with what was measured is gone\n  remedy: nothing: it is measured again"
        ]


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
        assert condition(operating, uid, ConditionType.ADMITTED) == (ConditionStatus.FALSE, "Waiting")

    def test_a_queue_admits(self, operating: Operating) -> None:
        uid = operating.kube.submit(example(kubernetes={"queueName": "team"}))
        operating.turn()
        (jobset,) = operating.kube.all(JOBSETS)
        assert jobset["spec"]["suspend"]
        assert jobset["metadata"]["labels"][QUEUE_LABEL] == "team"
        assert (
            operating.status(uid).message
            == "queue team has not admitted it yet; it has to be in this namespace, and Kueue in the cluster"
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
        operating.cache.see_rooms({uid: 1}, operating.now)
        operating.now += 299.0
        operating.kube.report(uid, attempt=2, epoch=1, step=9)
        operating.turn()
        assert operating.status(uid).feasible_ranks == 1
        operating.cache.see_rooms({uid: 1}, operating.now)
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
        operating.cache.see_rooms({uid: pods + changes}, operating.now)
        operating.now += 299.0
        operating.cache.see_rooms({uid: pods}, operating.now)
        operating.kube.report(uid, attempt=2, epoch=1, step=9)
        operating.now += 1.0
        operating.turn()
        assert not any(STOP_ANNOTATION in pod["metadata"]["annotations"] for pod in operating.kube.all(PODS))

    def test_nothing_fits(self, operating: Operating) -> None:
        operating = Operating(FakePlanner(Answer(what="no plan fits", remedy="raise memoryPerRank")))
        for node in NODES:
            operating.kube.add_node(node)
        uid = operating.kube.submit(example())
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.turn()
        operating.measured(uid, sample_profile())
        operating.turn(12)
        status = operating.status(uid)
        assert (status.phase, status.reason) == (Phase.FAILED, "NoPlan")
        assert condition(operating, uid, ConditionType.PLANNED) == (ConditionStatus.FALSE, "NoPlan")


class TestRequests:
    def test_suspended_with_a_checkpoint_and_resumed(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.change_spec(uid, runPolicy={"suspend": True})
        operating.turn()
        assert all(STOP_ANNOTATION in pod["metadata"]["annotations"] for pod in operating.kube.all(PODS))
        assert operating.phase(uid) is Phase.RUNNING
        end_all(operating, AttemptState.STOPPED)
        operating.turn()
        assert operating.phase(uid) is Phase.SUSPENDED
        operating.kube.change_spec(uid, runPolicy={"suspend": False})
        operating.turn()
        assert (operating.status(uid).attempt, operating.names()) == (2, ["stdlib-llama-a2"])

    def test_one_that_does_not_stop_in_time_is_ended(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.change_spec(uid, runPolicy={"suspend": True})
        wait = operating.turn()
        assert wait == pytest.approx(60.0)
        operating.now += 60.0
        operating.turn(8)
        assert (operating.phase(uid), operating.kube.all(PODS)) == (Phase.SUSPENDED, [])

    def test_a_spec_that_the_cluster_let_pass_is_refused_with_its_place(self, operating: Operating) -> None:
        uid = operating.kube.submit(example(model__heads=7))
        operating.turn()
        status = operating.status(uid)
        assert (status.phase, status.reason) == (Phase.FAILED, "InvalidSpec")
        assert "heads" in status.message

    def test_output_that_pods_cannot_share_is_refused(self, operating: Operating) -> None:
        uid = operating.kube.submit(example(kubernetes={"volumes": {}}))
        operating.turn()
        status = operating.status(uid)
        assert (status.phase, status.reason, operating.names()) == (Phase.FAILED, "UserError", [])
        assert status.message.startswith("spec.kubernetes.volumes.out: is missing")

    def test_a_name_that_is_taken_is_told(self, operating: Operating) -> None:
        other = {"metadata": {"name": "stdlib-llama-a1", "namespace": "default", "labels": {}}, "spec": {}}
        operating.kube.add(JOBSETS, other)
        uid = operating.kube.submit(example())
        with pytest.raises(KubeError, match="belongs to something else"):
            operating.turn()
        assert "rename the job" in operating.status(uid).message
        assert condition(operating, uid, ConditionType.ADMITTED) == (ConditionStatus.FALSE, "NameTaken")

    def test_a_cluster_without_job_sets_is_told_and_the_job_goes_on_once_there_are(self, operating: Operating) -> None:
        uid = operating.kube.submit(example())
        operating.kube.refusals["jobsets"] = KubeError(404, "Not Found", "404 page not found")
        with pytest.raises(KubeError):
            operating.turn()
        assert condition(operating, uid, ConditionType.ADMITTED) == (ConditionStatus.FALSE, "JobSetMissing")
        assert "install JobSet" in operating.status(uid).message
        operating.kube.refusals.clear()
        operating.turn()
        assert (operating.names(), operating.status(uid).message) == (["stdlib-llama-a1"], "")

    def test_what_it_already_told_it_does_not_write_again(self, operating: Operating) -> None:
        operating.kube.submit(example())
        operating.kube.refusals["jobsets"] = KubeError(403, "Forbidden", "exceeded quota")
        counts = []
        for _ in range(3):
            with pytest.raises(KubeError):
                operating.turn(1)
            counts.append(len(operating.kube.writes))
        status_writes = [write for write in operating.kube.writes if write.endswith("status")]
        assert len(status_writes) <= 4
        assert counts[2] - counts[1] == 2  # the two things that it tries to make

    def test_pods_that_the_cluster_does_not_make(self, operating: Operating) -> None:
        uid = operating.kube.submit(example())
        operating.turn()
        assert operating.status(uid).message == ""
        operating.now += 60
        operating.turn()
        assert operating.status(uid).message == (
            "0 of 2 pods were made; kubectl describe job stdlib-llama-a1-ranks-0 says why"
        )

    def test_a_spec_that_turns_wrong_ends_what_runs(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.change_spec(uid, model={"heads": 7})
        operating.turn()
        assert (operating.phase(uid), operating.names()) == (Phase.FAILED, [])
        assert condition(operating, uid, ConditionType.FAILED) == (ConditionStatus.TRUE, "InvalidSpec")

    def test_templates_become_claims_that_outlive_the_job(self, operating: Operating) -> None:
        volumes = {"out": {"template": {"size": "1Gi"}}, "data/own": {"template": {"size": "1Gi"}, "reclaim": "Delete"}}
        uid = operating.kube.submit(example(kubernetes={"volumes": volumes}))
        operating.turn()
        owned = {each["metadata"]["name"]: bool(each["metadata"].get("ownerReferences")) for each in claims(operating)}
        assert owned == {"stdlib-llama-out": False, "stdlib-llama-data-own": True}
        operating.kube.remove(next(each for each in operating.kube.all(JOBS) if each["metadata"]["uid"] == uid))
        assert [each["metadata"]["name"] for each in claims(operating)] == ["stdlib-llama-out"]


def claims(operating: Operating) -> list[dict[str, Any]]:
    return [each for (plural, _, _), each in operating.kube.objects.items() if plural == "persistentvolumeclaims"]


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
