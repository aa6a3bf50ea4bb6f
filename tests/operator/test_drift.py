"""A job whose steps take another time than was predicted, and that may be planned again for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.core.lifecycle import REPLAN_AFTER_DRIFT_SECONDS, AttemptState, Phase
from penstock.core.speed import Speed, step_text
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.names import STOP_ANNOTATION
from penstock.kube.resources import JOBS, PODS
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import NODES, condition, end_all, example, measured_again, running, word
from tests.support.operating import Operating, measured
from tests.support.sample_run import sample_profile

SLOWER = 2.0
REPORT_SECONDS = 50.0


@pytest.fixture
def operating() -> Operating:
    found = Operating(FakePlanner())
    found.now = sample_profile().measured_at
    return found


def report_ratio(operating: Operating, uid: str, ratio: float, attempt: int = 1, *, ref: str = "") -> None:
    """The service tells of one more step, which took so many times what was predicted."""
    status = operating.status(uid)
    assert status.plan is not None
    assert status.plan.step_seconds is not None
    step = status.progress.step + 1 if status.progress and status.progress.step else 9
    seconds = ratio * status.plan.step_seconds
    operating.kube.report(uid, attempt=attempt, epoch=1, step=step, stepSeconds=seconds, profileRef=ref)
    operating.turn()


def trained(operating: Operating, uid: str, seconds: float, ratio: float, *, attempt: int = 1, ref: str = "") -> None:
    """For so long, at that pace, of which is reported meanwhile."""
    end = operating.now + seconds
    while operating.now < end:
        operating.now += REPORT_SECONDS
        report_ratio(operating, uid, ratio, attempt, ref=ref)


def is_asked_to_stop(operating: Operating) -> bool:
    return all(STOP_ANNOTATION in pod["metadata"]["annotations"] for pod in operating.kube.all(PODS))


ALLOWED = {"runPolicy": {"replanOnDrift": True}, "training": {"globalBatch": 64, "steps": 100_000}}


def drifted(operating: Operating) -> str:
    """A job that has trained for long as predicted, and is slower since."""
    uid = running(operating, **ALLOWED)
    trained(operating, uid, REPLAN_AFTER_DRIFT_SECONDS, 1.0)
    trained(operating, uid, REPLAN_AFTER_DRIFT_SECONDS, SLOWER)
    assert not is_asked_to_stop(operating)
    return uid


def test_what_drifts_for_long_is_measured_and_planned_anew(operating: Operating) -> None:
    uid = drifted(operating)
    trained(operating, uid, REPORT_SECONDS, SLOWER)
    assert is_asked_to_stop(operating)
    end_all(operating, AttemptState.STOPPED)
    operating.turn(12)
    message = measured_again(operating, uid)
    assert message.startswith("ConfigMap measured is older than the drift: the attempt measures again; waiting for")
    operating.measured(uid, replace(sample_profile(), measured_at=operating.now), attempt=2)
    operating.turn(12)
    assert operating.phase(uid) is Phase.RUNNING
    assert condition(operating, uid, ConditionType.DRIFTED) == (ConditionStatus.FALSE, "Beginning")


def test_the_status_shows_the_speed_of_every_step_time(operating: Operating) -> None:
    """The plan says how many tokens and FLOPs a step is; the service tells the speed of the measured step."""
    uid = running(operating, **ALLOWED)
    plan = operating.status(uid).plan
    assert plan is not None
    assert plan.step_seconds is not None
    assert plan.speed is not None
    assert plan.speed.tokens_per_second_per_device > 0
    measured = Speed(tokens_per_second_per_device=4096.0, model_flops_utilization=0.25)
    progress = {"stepSeconds": SLOWER * plan.step_seconds, "speed": measured.to_manifest()}
    operating.kube.report(uid, attempt=1, epoch=1, step=9, **progress)
    operating.turn()
    drifted = operating.status(uid).condition(ConditionType.DRIFTED)
    assert drifted is not None
    now, then = step_text(SLOWER * plan.step_seconds, measured), step_text(plan.step_seconds, plan.speed)
    assert drifted.message == f"a step takes {now}, and {then} were predicted"
    assert "(4,096 tokens/s per device, MFU 25.0 %)" in now


def test_where_the_new_prediction_is_wrong_too_it_stays(operating: Operating) -> None:
    """What was just measured is not measured again because steps, from the first, take another time."""
    uid = running(operating, **ALLOWED)
    trained(operating, uid, 3 * REPLAN_AFTER_DRIFT_SECONDS, SLOWER, ref="measured")
    assert condition(operating, uid, ConditionType.DRIFTED) == (ConditionStatus.TRUE, "Slower")
    assert not is_asked_to_stop(operating)


def written_by_0_1_0(operating: Operating, uid: str) -> None:
    """The status is as 0.1.0 wrote it, which kept no time of the first comparison, and another operator begins."""
    job = next(each for each in operating.kube.all(JOBS) if each["metadata"]["uid"] == uid)
    del job["status"]["plan"]["comparedSince"]
    operating.kube.touch(job)
    operating.restart()


@pytest.mark.parametrize("drifts_before", [True, False])
def test_what_0_1_0_compared_for_long_is_no_wrong_prediction_after_the_upgrade(
    operating: Operating, drifts_before: bool
) -> None:
    """Steps came as predicted for long; they are slower since shortly before the upgrade, or since it."""
    uid = running(operating, **ALLOWED)
    trained(operating, uid, 2 * REPLAN_AFTER_DRIFT_SECONDS, 1.0, ref="measured")
    if drifts_before:
        trained(operating, uid, REPORT_SECONDS, SLOWER, ref="measured")
    written_by_0_1_0(operating, uid)
    trained(operating, uid, REPLAN_AFTER_DRIFT_SECONDS, SLOWER, ref="measured")
    plan = operating.status(uid).plan
    assert plan is not None
    assert not plan.mispredicted
    trained(operating, uid, 2 * REPORT_SECONDS, SLOWER, ref="measured")
    assert is_asked_to_stop(operating)


def test_what_0_1_0_found_off_from_the_first_step_stays_a_wrong_prediction(operating: Operating) -> None:
    uid = running(operating, **ALLOWED)
    trained(operating, uid, REPLAN_AFTER_DRIFT_SECONDS / 2, SLOWER, ref="measured")
    written_by_0_1_0(operating, uid)
    trained(operating, uid, 2 * REPLAN_AFTER_DRIFT_SECONDS, SLOWER, ref="measured")
    plan = operating.status(uid).plan
    assert plan is not None
    assert plan.mispredicted
    assert not is_asked_to_stop(operating)


def test_what_0_1_0_compared_nothing_of_is_compared_from_its_first_step_on(operating: Operating) -> None:
    uid = running(operating, **ALLOWED)
    operating.now += 2 * REPLAN_AFTER_DRIFT_SECONDS
    operating.kube.report(uid, attempt=1, epoch=1, step=1)
    operating.turn()
    operating.restart()
    trained(operating, uid, 3 * REPLAN_AFTER_DRIFT_SECONDS, SLOWER, ref="measured")
    plan = operating.status(uid).plan
    assert plan is not None
    assert plan.mispredicted


def test_where_its_first_steps_come_late_the_new_prediction_is_wrong_too(operating: Operating) -> None:
    """On a slow machine, or with long steps, the first step is reported long after the attempt was bound."""
    uid = running(operating, **ALLOWED)
    operating.now += 2 * REPLAN_AFTER_DRIFT_SECONDS
    trained(operating, uid, 3 * REPLAN_AFTER_DRIFT_SECONDS, SLOWER, ref="measured")
    plan = operating.status(uid).plan
    assert plan is not None
    assert plan.mispredicted
    assert not is_asked_to_stop(operating)


def test_each_new_plan_makes_the_next_drift_wait_twice_as_long(operating: Operating) -> None:
    """A machine whose speed comes and goes costs a job few restarts."""
    uid = drifted(operating)
    trained(operating, uid, REPORT_SECONDS, SLOWER)
    assert is_asked_to_stop(operating)
    end_all(operating, AttemptState.STOPPED)
    operating.turn(12)
    operating.kube.start_pods(*NODES)
    operating.turn(12)
    newer = replace(sample_profile(), measured_at=operating.now)
    measured(operating.kube, uid, newer, attempt=2, name="newer")
    operating.turn(12)
    assert (operating.phase(uid), operating.status(uid).replans) == (Phase.RUNNING, 1)
    trained(operating, uid, 2 * REPLAN_AFTER_DRIFT_SECONDS, 1.0, attempt=2, ref="newer")
    trained(operating, uid, 2 * REPLAN_AFTER_DRIFT_SECONDS, SLOWER, attempt=2, ref="newer")
    assert not is_asked_to_stop(operating)
    trained(operating, uid, 2 * REPORT_SECONDS, SLOWER, attempt=2, ref="newer")
    assert is_asked_to_stop(operating)


def test_a_step_that_is_as_predicted_by_chance_makes_no_wrong_prediction_right(operating: Operating) -> None:
    uid = running(operating, **ALLOWED)
    trained(operating, uid, 1.5 * REPLAN_AFTER_DRIFT_SECONDS, SLOWER, ref="measured")
    report_ratio(operating, uid, 1.0, ref="measured")
    assert condition(operating, uid, ConditionType.DRIFTED) == (ConditionStatus.FALSE, "AsPredicted")
    trained(operating, uid, 3 * REPLAN_AFTER_DRIFT_SECONDS, SLOWER, ref="measured")
    plan = operating.status(uid).plan
    assert plan is not None
    assert plan.mispredicted
    assert not is_asked_to_stop(operating)


def test_what_came_back_while_nobody_looked_stays(operating: Operating) -> None:
    uid = drifted(operating)
    operating.now += REPORT_SECONDS
    report_ratio(operating, uid, 1.1)
    assert condition(operating, uid, ConditionType.DRIFTED) == (ConditionStatus.FALSE, "AsPredicted")
    assert not is_asked_to_stop(operating)


def test_it_goes_by_its_newer_measurement_and_not_by_another_job_s(operating: Operating) -> None:
    other = running(operating, **ALLOWED)
    end_all(operating, AttemptState.SUCCEEDED)
    operating.turn(8)
    assert operating.phase(other) is Phase.SUCCEEDED
    uid = operating.kube.submit({**example(**ALLOWED), "metadata": {"name": "another"}})
    operating.turn(8)
    operating.kube.start_pods(*NODES)
    operating.turn(12)
    trained(operating, uid, REPLAN_AFTER_DRIFT_SECONDS + REPORT_SECONDS, SLOWER)
    end_pods_of(operating, "another-a1", AttemptState.STOPPED)
    operating.turn(12)
    operating.kube.start_pods(*NODES)
    operating.turn(12)
    newer = replace(sample_profile(), measured_at=operating.now)
    measured(operating.kube, uid, newer, attempt=2, name="newer")
    operating.turn(12)
    report_ratio(operating, uid, 1.0, attempt=2)
    report_ratio(operating, uid, 1.0, attempt=2)
    operating.kube.remove(next(pod for pod in operating.kube.all(PODS) if "another-a2" in pod["metadata"]["name"]))
    operating.turn(12)
    operating.kube.start_pods(*NODES)
    operating.turn(12)
    profile = operating.status(uid).profile
    assert profile is not None
    assert (operating.status(uid).attempt, operating.phase(uid), profile.ref) == (3, Phase.RUNNING, "newer")


def end_pods_of(operating: Operating, jobset: str, state: AttemptState) -> None:
    """All pods of an attempt end so."""
    for index, pod in enumerate(operating.kube.all(PODS)):
        if pod["metadata"]["name"].startswith(jobset):
            operating.kube.end_pod(index, code=0, word=word(state))


def test_what_measured_itself_may_drift_later(operating: Operating) -> None:
    uid = running(operating, **ALLOWED)
    trained(operating, uid, 2 * REPLAN_AFTER_DRIFT_SECONDS, 1.0, ref="measured")
    trained(operating, uid, REPLAN_AFTER_DRIFT_SECONDS + REPORT_SECONDS, SLOWER, ref="measured")
    assert is_asked_to_stop(operating)


def test_what_comes_back_in_time_stays(operating: Operating) -> None:
    uid = drifted(operating)
    report_ratio(operating, uid, 1.0)
    trained(operating, uid, REPLAN_AFTER_DRIFT_SECONDS, SLOWER)
    assert not is_asked_to_stop(operating)


def test_nothing_is_planned_anew_unasked_or_for_a_few_steps(operating: Operating) -> None:
    """Steps that are nearly done gain less than another attempt costs."""
    unasked, short = {**ALLOWED, "runPolicy": {}}, {**ALLOWED, "training": {"globalBatch": 64, "steps": 200}}
    for changes in (unasked, short):
        there = Operating(FakePlanner())
        there.now = sample_profile().measured_at
        uid = running(there, **changes)
        trained(there, uid, REPLAN_AFTER_DRIFT_SECONDS + REPORT_SECONDS, SLOWER)
        assert condition(there, uid, ConditionType.DRIFTED)[0] is ConditionStatus.TRUE
        assert not is_asked_to_stop(there)


def test_the_attempt_after_another_loss_measures_too(operating: Operating) -> None:
    uid = drifted(operating)
    operating.kube.remove(operating.kube.all(PODS)[0])
    operating.turn(12)
    operating.kube.start_pods(*NODES)
    operating.turn(12)
    assert (operating.status(uid).attempt, operating.phase(uid)) == (2, Phase.PROFILING)
