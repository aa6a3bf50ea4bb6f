"""What the operator does about a job where the cluster itself knows better than what watches told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core.lifecycle import Phase
from penstock.core.profile_matching import OLDEST_SECONDS
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.resources import JOBS, JOBSETS, PODS
from penstock.kube.transport import KubeError
from tests.support import manifests
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import NODES, condition, example, measured_again, running
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


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
        """Nothing is looked up before it: the write of its number is refused, and decided is again."""
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
        assert condition(operating, uid, ConditionType.PROFILED) == (ConditionStatus.FALSE, "Waiting")
        message = measured_again(operating, uid)
        assert message.startswith("ConfigMap measured: was deleted, and with it the measurement")
        operating.measured(uid, sample_profile(), attempt=2)
        operating.turn(12)
        status = operating.status(uid)
        assert (status.attempt, status.failures, status.phase) == (2, 0, Phase.RUNNING)

    def test_a_measurement_that_is_old_is_made_again(self, operating: Operating) -> None:
        uid = running(operating)
        operating.now = sample_profile().measured_at + OLDEST_SECONDS + 86_400.0
        operating.kube.remove(operating.kube.all(PODS)[0])
        operating.turn(8)
        message = measured_again(operating, uid)
        assert message.startswith("ConfigMap measured is 8 days old: the attempt measures again; waiting for")

    def test_a_measurement_that_went_as_it_was_chosen_costs_an_attempt_and_no_more(self, operating: Operating) -> None:
        uid = running(operating)
        (job,) = operating.kube.all(JOBS)
        job["status"]["phase"] = "Planning"
        del job["status"]["profile"]
        operating.kube.touch(job)
        operating.restart()
        operating.turn()
        assert operating.status(uid).failures == 1
        operating.now += 60.0
        operating.turn(12)
        operating.kube.start_pods(*NODES)
        operating.turn(12)
        assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.PROFILING, 2)

    def test_why_a_job_failed_is_not_lost_to_what_the_cluster_refuses_then(self, operating: Operating) -> None:
        uid = running(operating, runPolicy={"backoffLimit": 0})

        def deny(write: str) -> None:
            if write.startswith("delete"):
                raise KubeError(403, "Forbidden", "a policy says no")

        operating.kube.hook = deny
        operating.kube.report(uid, attempt=1, epoch=1, step=9)
        operating.turn()
        operating.now += 3600.0
        with pytest.raises(KubeError, match="a policy says no"):
            operating.turn()
        assert "no step within" in operating.status(uid).message

    def test_a_job_that_was_done_is_done_where_its_pods_are_gone(self, operating: Operating) -> None:
        uid = running(operating)
        operating.kube.report(uid, attempt=1, epoch=1, step=example()["spec"]["training"]["steps"])
        for pod in operating.kube.all(PODS):
            operating.kube.remove(pod)
        done = {"type": "Completed", "status": "True", "reason": "AllJobsCompleted"}
        operating.kube.all(JOBSETS)[0]["status"] = {"conditions": [done]}
        operating.turn(8)
        assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.SUCCEEDED, 1)
