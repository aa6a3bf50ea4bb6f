"""What the operator does when people ask for something: suspend, resize, delete, storage."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.names import REMINDER_ANNOTATION, STOP_ANNOTATION
from penstock.kube.resources import JOBS, JOBSETS, PODS
from penstock.kube.transport import KubeError
from penstock.operator.reconcile import REMIND_SECONDS
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import condition, end_all, example, running
from tests.support.operating import Operating


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


def reminders(operating: Operating) -> list[str]:
    """What each pod was reminded of last."""
    return [pod["metadata"]["annotations"].get(REMINDER_ANNOTATION, "") for pod in operating.kube.all(PODS)]


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
        operating.turn()
        operating.now += REMIND_SECONDS
        wait = operating.turn()
        assert wait == pytest.approx(60.0 - REMIND_SECONDS)
        operating.now += 60.0
        operating.turn(8)
        assert (operating.phase(uid), operating.kube.all(PODS)) == (Phase.SUSPENDED, [])

    def test_pods_are_reminded_once_of_each_thing_that_they_were_told(self, operating: Operating) -> None:
        uid = running(operating)
        assert reminders(operating) == [""] * 2
        assert operating.turn() == pytest.approx(REMIND_SECONDS)
        operating.restart()
        operating.turn()
        operating.now += REMIND_SECONDS
        operating.turn()
        assert reminders(operating) == ["epoch-1"] * 2
        operating.kube.change_spec(uid, runPolicy={"suspend": True})
        operating.turn()
        operating.now += REMIND_SECONDS
        operating.turn()
        assert reminders(operating) == ["epoch-1-stop"] * 2
        before = len(operating.kube.writes)
        operating.now += REMIND_SECONDS
        operating.turn()
        assert operating.kube.writes[before:] == []

    def test_a_pod_that_went_is_not_reminded(self, operating: Operating) -> None:
        uid = running(operating)
        gone = sorted(operating.cache.pods(uid), key=lambda pod: pod.name)
        operating.kube.remove(operating.kube.objects[PODS.plural, gone[0].namespace, gone[0].name])
        operating.actions.remind(gone)
        assert reminders(operating) == ["epoch-1"]

    def test_a_spec_that_the_cluster_let_pass_is_refused_with_its_place(self, operating: Operating) -> None:
        uid = operating.kube.submit(example(model__heads=7))
        operating.turn()
        status = operating.status(uid)
        assert (status.phase, status.reason) == (Phase.FAILED, "InvalidSpec")
        assert "heads" in status.message

    def test_all_mistakes_of_a_spec_are_in_its_message(self, operating: Operating) -> None:
        uid = operating.kube.submit(example(model__heads=7, model__kvHeads=5, kubernetes__queueName="no name"))
        operating.turn()
        message = operating.status(uid).message
        for place in ("spec.model.heads", "spec.model.kvHeads", "spec.kubernetes.queueName"):
            assert place in message

    @pytest.mark.parametrize(
        "beyond",
        [
            {"model__layers": 5 * 10**6},
            {"model__hidden": 2**30},
            {"resources": {"ranks": 10**18}},
            {"resources": {"memoryPerRank": "9" * 5_000}},
            {"parallelism": {"slices": [1] * 100_000}},
        ],
        ids=lambda beyond: next(iter(beyond)),
    )
    @pytest.mark.parametrize("ended", [False, True])
    def test_one_that_is_stored_beyond_a_maximum_says_why_and_can_be_deleted(
        self, operating: Operating, beyond: dict[str, Any], ended: bool
    ) -> None:
        """Five million layers made the operator build ten million units at each start, until it was out of memory."""
        uid = operating.kube.submit(example(**beyond))
        found = operating.kube.all(JOBS)[0]
        if ended:
            found["status"] = {"phase": "Succeeded", "reason": "Done", "message": "", "attempt": 1}
        other = operating.kube.submit({**example(), "metadata": {"name": "other"}})
        operating.turn()
        status = operating.status(uid)
        if ended:
            assert (status.phase, status.reason) == (Phase.SUCCEEDED, "Done")
        else:
            assert (status.phase, status.reason) == (Phase.FAILED, "InvalidSpec")
            assert next(iter(beyond)).split("__")[-1] in status.message or "spec.resources" in status.message
        assert operating.phase(other) is Phase.QUEUED
        operating.kube.remove(found)
        operating.turn()
        assert [each.name for each in operating.cache.jobs()] == ["other"]

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
            "0 of 2 pods were made; kubectl describe job stdlib-llama-a1-ranks-0 shows the reason"
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
