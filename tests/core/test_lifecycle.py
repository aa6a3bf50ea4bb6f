"""The life cycle: a small executor obeys `decide` over simulated time, through every path the table allows."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import lifecycle as life
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.lifecycle import AttemptState, Observed, Phase, Step, decide
from tests.support.manifests import example


def spec(**changes: Any) -> JobSpec:
    """The example job's spec with changes at dotted paths."""
    return PipelineJob.from_manifest(example(**changes)).spec


@dataclass
class Executor:
    """Observes and applies, as the real executors do; the attempt's behaviour is set by the test."""

    job: JobSpec
    seen: Observed = field(default_factory=lambda: Observed(admitted=True))
    now: float = 0.0
    phases: list[Phase] = field(default_factory=list)
    launches: list[life.Launch] = field(default_factory=list)
    expired: bool = False

    def observe(self, **changes: Any) -> None:
        self.seen = dataclasses.replace(self.seen, **changes)

    def settle(self) -> None:
        """Apply decisions until there is nothing to do now."""
        for _ in range(50):
            decisions = [d for d in decide(self.job, self.seen, self.now) if not isinstance(d, life.Wait)]
            if not decisions or self.expired:
                return
            for decision in decisions:
                self.apply(decision)
        raise AssertionError("never settles")

    def apply(self, decision: life.Decision) -> None:
        match decision:
            case life.SetPhase(phase, reason, _):
                self._enter(phase, reason)
            case life.Launch(attempt, ranks, _):
                self.launches.append(decision)
                self.observe(
                    attempt=attempt,
                    attempt_state=AttemptState.READY,
                    attempt_gone=False,
                    attempt_ranks=ranks,
                    stop_requested=False,
                    plan=Step.MISSING,
                    active_since=self.now if self.seen.active_since is None else self.seen.active_since,
                )
            case life.StartProfile():
                self.observe(profile=Step.DONE)
            case life.StartPlan():
                self.observe(plan=Step.DONE)
            case life.Bind():
                self.observe(attempt_state=AttemptState.RUNNING, last_step_at=self.now)
            case life.Stop():
                self.observe(stop_requested=True)
            case life.Delete():
                self.observe(attempt_gone=True, attempt_state=AttemptState.NONE)
            case life.Expire():
                self.expired = True

    def _enter(self, phase: Phase, reason: str) -> None:
        phase = life.enter(self.seen.phase, phase)
        self.phases.append(phase)
        changes: dict[str, Any] = {"phase": phase}
        if reason in life.LOSSES:
            changes |= {"failed_at": self.now, "failures": self.seen.failures + 1}
        if phase.terminal:
            changes["finished_at"] = self.now
        self.observe(**changes)


def running(**changes: Any) -> Executor:
    """A job that has come to Running."""
    executor = Executor(spec(**changes))
    executor.settle()
    assert executor.seen.phase is Phase.RUNNING
    return executor


def test_the_phases_of_a_job_without_failures() -> None:
    executor = running()
    executor.observe(attempt_state=AttemptState.SUCCEEDED)
    executor.settle()
    assert executor.phases == [
        Phase.QUEUED,
        Phase.PROFILING,
        Phase.PLANNING,
        Phase.BINDING,
        Phase.RUNNING,
        Phase.SUCCEEDED,
    ]
    assert executor.seen.attempt_gone


def test_a_fresh_profile_is_reused() -> None:
    executor = Executor(spec())
    executor.observe(profile=Step.DONE)
    executor.settle()
    assert Phase.PROFILING not in executor.phases


def test_an_attempt_that_measures_and_says_nothing_new_in_time_has_failed() -> None:
    measures = Observed(phase=Phase.PROFILING, attempt=1, attempt_state=AttemptState.READY, profile=Step.WORKING)
    due = dataclasses.replace(measures, news_due_at=9.0, message="pod a is silent")
    assert decide(spec(), measures, 1e9) == []
    assert decide(spec(), due, 8.0) == [life.Wait(9.0)]
    [lost] = decide(spec(), due, 9.0)
    assert isinstance(lost, life.SetPhase)
    assert (lost.phase, lost.reason) == (Phase.RECOVERING, "AttemptFailed")
    assert lost.message == "the measurement reported no progress: pod a is silent"


def test_a_job_waits_for_admission() -> None:
    executor = Executor(spec(), Observed())
    executor.settle()
    assert (executor.seen.phase, executor.launches) == (Phase.QUEUED, [])


class Cluster(Executor):
    """An executor whose attempts wait for their place themselves."""

    def apply(self, decision: life.Decision) -> None:
        super().apply(decision)
        if isinstance(decision, life.Launch):
            self.observe(attempt_state=AttemptState.STARTING)


def queued(**changes: Any) -> Cluster:
    """A job on a cluster whose first attempt waits for its place."""
    cluster = Cluster(spec(**changes), Observed(attempts_queue=True))
    cluster.settle()
    assert (cluster.seen.phase, len(cluster.launches)) == (Phase.QUEUED, 1)
    return cluster


class TestAttemptsThatWaitForTheirPlace:
    def test_the_phases_of_a_job_without_failures(self) -> None:
        cluster = queued()
        cluster.observe(attempt_state=AttemptState.READY)
        cluster.settle()
        assert cluster.phases == [Phase.QUEUED, Phase.PROFILING, Phase.PLANNING, Phase.BINDING, Phase.RUNNING]

    def test_a_fresh_profile_is_reused(self) -> None:
        cluster = queued()
        cluster.observe(attempt_state=AttemptState.READY, profile=Step.DONE)
        cluster.settle()
        assert cluster.phases == [Phase.QUEUED, Phase.PLANNING, Phase.BINDING, Phase.RUNNING]

    def test_a_failure_before_placement_counts_as_a_failure(self) -> None:
        cluster = queued()
        cluster.observe(attempt_state=AttemptState.FAILED)
        cluster.settle()
        assert (cluster.seen.phase, cluster.seen.failures) == (Phase.RECOVERING, 1)

    @pytest.mark.parametrize("state", [AttemptState.STARTING, AttemptState.READY, AttemptState.RUNNING])
    def test_a_disruption_does_not_count_as_a_failure(self, state: AttemptState) -> None:
        cluster = queued()
        cluster.observe(attempt_state=state)
        cluster.settle()
        cluster.observe(attempt_state=AttemptState.DISRUPTED, message="pod a was deleted")
        cluster.settle()
        assert (cluster.seen.phase, cluster.seen.failures, len(cluster.launches)) == (Phase.QUEUED, 0, 2)

    def test_suspension_deletes_a_waiting_attempt(self) -> None:
        cluster = queued()
        cluster.job = spec(runPolicy__suspend=True)
        cluster.settle()
        assert (cluster.seen.phase, cluster.seen.attempt_gone) == (Phase.SUSPENDED, True)

    def test_an_attempt_that_does_not_stop_in_time_is_ended(self) -> None:
        cluster = queued()
        cluster.observe(attempt_state=AttemptState.READY)
        cluster.settle()
        cluster.job = spec(runPolicy__suspend=True)
        cluster.settle()
        assert cluster.seen.stop_requested
        cluster.observe(stop_due_at=60.0)
        assert decide(cluster.job, cluster.seen, 59.0) == [life.Wait(60.0)]
        cluster.now = 60.0
        cluster.settle()
        assert (cluster.seen.phase, cluster.seen.attempt_gone) == (Phase.SUSPENDED, True)

    @pytest.mark.parametrize(
        ("short_since", "node_lost_since", "shrinks_at"), [(10.0, None, 130.0), (10.0, 5.0, 65.0), (90.0, 5.0, 90.0)]
    )
    def test_an_elastic_job_shrinks_to_its_placed_ranks(
        self, short_since: float, node_lost_since: float | None, shrinks_at: float
    ) -> None:
        cluster = queued(resources__ranks=4, resources__minRanks=2)
        cluster.observe(short_since=short_since, node_lost_since=node_lost_since, feasible_ranks=3)
        assert decide(cluster.job, cluster.seen, shrinks_at - 1) == [life.Wait(shrinks_at)]
        cluster.now = shrinks_at
        cluster.settle()
        assert [launch.ranks for launch in cluster.launches] == [4, 3]
        assert cluster.seen.failures == 0

    def test_places_that_jobs_ahead_need_are_given_back_soon(self) -> None:
        cluster = queued(resources__ranks=4)
        cluster.observe(placement_since=10.0, placed_ranks=2, gives_way_to="job b")
        due = 10.0 + life.GIVE_WAY_SECONDS
        assert decide(cluster.job, cluster.seen, due - 1) == [life.Wait(due)]
        (decision,) = decide(cluster.job, cluster.seen, due)
        message = "2 of 4 ranks have a place; job b wants the same and is ahead"
        assert decision == life.SetPhase(Phase.RECOVERING, "GaveWay", message)

    @pytest.mark.parametrize(("placed", "followed"), [(1, False), (0, True), (3, True)])
    def test_an_attempt_placed_in_part_for_too_long_gives_up_its_places(self, placed: int, followed: bool) -> None:
        cluster = queued(resources__ranks=4)
        cluster.observe(placement_since=10.0, placed_ranks=placed, followed=followed, holders="held by job b")
        due = 10.0 + life.PLACED_IN_PART_SECONDS
        assert decide(cluster.job, cluster.seen, due - 1) == [life.Wait(due)]
        (decision,) = decide(cluster.job, cluster.seen, due)
        message = f"{placed} of 4 ranks have a place after 120 s; held by job b"
        assert decision == life.SetPhase(Phase.RECOVERING, "PlacedInPart", message)

    def test_an_attempt_without_places_waits_while_no_other_job_needs_them(self) -> None:
        cluster = queued(resources__ranks=4)
        cluster.observe(placement_since=10.0)
        assert decide(cluster.job, cluster.seen, 1e6) == []

    def test_a_job_that_gave_up_its_places_retries_after_a_pause_and_in_its_turn(self) -> None:
        cluster = queued(resources__ranks=4)
        cluster.observe(phase=Phase.RECOVERING, places_released_at=200.0, places_waited_seconds=200.0, jitter=0.0)
        cluster.observe(attempt_gone=True, attempt_state=AttemptState.NONE)
        assert decide(cluster.job, cluster.seen, 249.0) == [life.Wait(250.0)]
        cluster.now = 250.0
        cluster.observe(held="job b")
        launches = len(cluster.launches)
        cluster.settle()
        assert (cluster.seen.phase, len(cluster.launches)) == (Phase.QUEUED, launches)
        cluster.observe(held="")
        cluster.settle()
        assert len(cluster.launches) == launches + 1

    @pytest.mark.parametrize(("least", "feasible"), [(None, 3), (3, 2), (2, 4)])
    def test_a_job_that_cannot_shrink_waits(self, least: int | None, feasible: int) -> None:
        elastic = {} if least is None else {"resources__minRanks": least}
        cluster = queued(resources__ranks=4, **elastic)
        cluster.observe(short_since=0.0, feasible_ranks=feasible)
        cluster.now = 10_000.0
        cluster.settle()
        assert (cluster.seen.phase, len(cluster.launches)) == (Phase.QUEUED, 1)


def test_failures_back_off_and_then_end_the_job() -> None:
    executor = running(runPolicy__backoffLimit=2)
    waited = []
    for _ in range(2):
        executor.observe(attempt_state=AttemptState.FAILED, last_checkpoint=7)
        executor.settle()
        assert executor.phases[-1:] == [Phase.RECOVERING]
        (wait,) = decide(executor.job, executor.seen, executor.now)
        assert isinstance(wait, life.Wait)
        waited.append(wait.until - executor.now)
        executor.now = wait.until
        executor.settle()
        assert executor.phases[-1:] == [Phase.RUNNING]
        assert executor.launches[-1].resume_from == 7
    assert waited == [1.0, 2.0]
    executor.observe(attempt_state=AttemptState.FAILED)
    executor.settle()
    assert executor.seen.phase is Phase.FAILED
    assert [launch.attempt for launch in executor.launches] == [1, 2, 3]


def test_no_backoff_limit_means_one_try() -> None:
    executor = running(runPolicy__backoffLimit=0)
    executor.observe(attempt_state=AttemptState.FAILED)
    executor.settle()
    assert executor.phases[-1:] == [Phase.FAILED]


def test_the_next_attempt_waits_until_the_old_one_is_gone() -> None:
    executor = running()
    executor.observe(attempt_state=AttemptState.FAILED)
    assert decide(executor.job, executor.seen, 0.0)[0] == life.SetPhase(
        Phase.RECOVERING, "AttemptFailed", "the attempt ended"
    )
    executor.observe(phase=Phase.RECOVERING, failed_at=0.0)
    assert decide(executor.job, executor.seen, 1e9) == [life.Delete(1)]


def test_a_stalled_attempt_counts_as_lost() -> None:
    executor = running()
    executor.observe(predicted_step_seconds=10.0, last_step_at=5.0)
    assert decide(executor.job, executor.seen, 104.0) == [life.Wait(105.0)]
    (lost,) = decide(executor.job, executor.seen, 105.0)
    assert isinstance(lost, life.SetPhase)
    assert lost.phase is Phase.RECOVERING


def test_an_attempt_that_never_takes_a_step_is_given_time_to_begin() -> None:
    executor = running()
    executor.observe(predicted_step_seconds=1.0, last_step_at=None, training_since=5.0)
    assert decide(executor.job, executor.seen, 664.0) == [life.Wait(665.0)]
    (lost,) = decide(executor.job, executor.seen, 665.0)
    assert lost == life.SetPhase(Phase.RECOVERING, "AttemptFailed", "no step within 660 s of its start")
    executor.observe(predicted_step_seconds=700.0)
    assert decide(executor.job, executor.seen, 665.0) == [life.Wait(7605.0)]
    executor.observe(predicted_step_seconds=1.0, last_step_at=70.0)
    assert decide(executor.job, executor.seen, 129.0) == [life.Wait(130.0)]


def test_an_attempt_without_progress_reports_does_not_count_as_stalled() -> None:
    executor = running()
    executor.observe(last_step_at=None, training_since=None)
    assert decide(executor.job, executor.seen, 1e9) == []


def test_suspend_stops_after_a_checkpoint_and_resume_goes_on_from_it() -> None:
    executor = running()
    executor.job = spec(runPolicy__suspend=True)
    executor.settle()
    assert executor.seen.stop_requested
    assert executor.phases[-1:] == [Phase.RUNNING]
    executor.observe(attempt_state=AttemptState.STOPPED, last_checkpoint=12)
    executor.settle()
    assert executor.phases[-1:] == [Phase.SUSPENDED]
    executor.job = spec()
    executor.settle()
    assert executor.launches[-1] == life.Launch(2, 2, 12)


@pytest.mark.parametrize("phase", [phase for phase in Phase if not phase.terminal])
def test_suspend_holds_in_every_phase(phase: Phase) -> None:
    executor = Executor(spec(runPolicy__suspend=True), Observed(phase=phase, admitted=True))
    executor.settle()
    expected = Phase.SUSPENDED if Phase.SUSPENDED in life.TRANSITIONS[phase] or phase is Phase.SUSPENDED else phase
    assert executor.seen.phase is expected


def test_the_deadline_ends_a_running_attempt() -> None:
    executor = running(runPolicy__activeDeadlineSeconds=60)
    executor.now = 61.0
    executor.settle()
    assert executor.phases[-1:] == [Phase.FAILED]
    assert executor.seen.attempt_gone


def test_a_suspended_job_outlives_its_deadline() -> None:
    suspended = Observed(phase=Phase.SUSPENDED, active_since=0.0)
    job = spec(runPolicy__activeDeadlineSeconds=60, runPolicy__suspend=True)
    assert decide(job, suspended, 61.0) == []


def test_a_plan_that_fits_nowhere_fails_at_once() -> None:
    executor = Executor(spec(), Observed(phase=Phase.PLANNING, plan=Step.FAILED, attempt=1, admitted=True))
    executor.observe(attempt_state=AttemptState.READY, attempt_gone=False)
    executor.settle()
    assert executor.phases == [Phase.FAILED]


def test_a_job_grows_back_only_at_a_checkpoint_and_if_it_pays() -> None:
    executor = running(resources={"ranks": 4, "minRanks": 2})
    executor.observe(attempt_ranks=3, feasible_ranks=4, capacity_stable_since=0.0, last_step_at=300.0)
    assert not _stops(executor, 300.0)
    executor.observe(checkpoint_is_current=True)
    assert not _stops(executor, 300.0)
    executor.observe(growth_pays=True)
    assert not _stops(executor, 299.0)
    assert _stops(executor, 300.0)
    executor.observe(stop_requested=True, attempt_state=AttemptState.STOPPED)
    (next_one,) = decide(executor.job, executor.seen, 301.0)
    assert next_one == life.SetPhase(Phase.RECOVERING, "Grow", "stopped after a checkpoint")


def test_a_job_with_lasting_drift_stops_for_a_new_profile_if_allowed_and_worthwhile() -> None:
    executor = running(runPolicy__replanOnDrift=True)
    executor.observe(drifted_since=100.0, last_step_at=5000.0)
    due = 100.0 + life.REPLAN_AFTER_DRIFT_SECONDS
    assert not _stops(executor, due)
    executor.observe(replan_pays=True)
    assert decide(executor.job, executor.seen, due - 1.0) == [life.Wait(due)]
    assert decide(executor.job, executor.seen, due) == [life.Stop(1, "Drift")]
    executor.observe(stop_requested=True, attempt_state=AttemptState.STOPPED)
    (next_one,) = decide(executor.job, executor.seen, due + 60.0)
    assert next_one == life.SetPhase(Phase.RECOVERING, "Drift", "stopped after a checkpoint")
    executor.observe(stop_requested=False, attempt_state=AttemptState.RUNNING)
    executor.job = spec()
    assert not _stops(executor, due)


def test_a_better_plan_ends_the_attempt_for_the_next_one() -> None:
    executor = running()
    executor.observe(last_step_at=100.0)
    assert not _stops(executor, 100.0)
    executor.observe(better_plan=True)
    assert decide(executor.job, executor.seen, 100.0) == [life.Stop(1, "Drift")]
    executor.observe(stop_requested=True, attempt_state=AttemptState.STOPPED)
    (next_one,) = decide(executor.job, executor.seen, 101.0)
    assert next_one == life.SetPhase(Phase.RECOVERING, "Drift", "stopped after a checkpoint")


def _stops(executor: Executor, now: float) -> bool:
    return any(isinstance(decision, life.Stop) for decision in decide(executor.job, executor.seen, now))


def test_a_finished_job_expires_after_its_ttl() -> None:
    executor = Executor(spec(), Observed(phase=Phase.SUCCEEDED, finished_at=100.0))
    assert decide(executor.job, executor.seen, 100.0) == [life.Wait(86_500.0)]
    assert decide(executor.job, executor.seen, 86_500.0) == [life.Expire()]


@pytest.mark.parametrize(("current", "following"), list(itertools.product(Phase, Phase)))
def test_only_the_table_allows_a_change(current: Phase, following: Phase) -> None:
    if following in life.TRANSITIONS[current]:
        assert life.enter(current, following) is following
    else:
        with pytest.raises(life.IllegalTransitionError):
            life.enter(current, following)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1))
def test_pauses_for_places_grow_within_bounds(one: float, other: float, jitter: float) -> None:
    shorter, longer = (life.place_pause_seconds(waited, jitter) for waited in sorted((one, other)))
    assert 2.5 <= shorter <= longer <= 450.0
    assert life.place_pause_seconds(one, 0.0) <= life.place_pause_seconds(one, jitter)


TIMES = st.none() | st.floats(0, 1000)


@given(
    st.builds(
        Observed,
        phase=st.sampled_from(Phase),
        attempt=st.integers(0, 3),
        attempt_state=st.sampled_from(AttemptState),
        attempt_gone=st.booleans(),
        stop_requested=st.booleans(),
        stop_due_at=TIMES,
        admitted=st.booleans(),
        attempts_queue=st.booleans(),
        short_since=TIMES,
        node_lost_since=TIMES,
        news_due_at=TIMES,
        held=st.sampled_from(("", "job b")),
        placement_since=TIMES,
        placed_ranks=st.integers(0, 4),
        gives_way_to=st.sampled_from(("", "job b")),
        followed=st.booleans(),
        places_released_at=TIMES,
        attempt_ranks=st.integers(0, 4),
        profile=st.sampled_from(Step),
        plan=st.sampled_from(Step),
        failures=st.integers(0, 5),
        active_since=TIMES,
        failed_at=TIMES,
        finished_at=TIMES,
        training_since=TIMES,
        last_step_at=TIMES,
        feasible_ranks=st.none() | st.integers(0, 4),
        drifted_since=TIMES,
        replan_pays=st.booleans(),
    ),
    st.booleans(),
    st.floats(0, 2000),
)
def test_decisions_are_legal_for_every_observation(seen: Observed, suspend: bool, now: float) -> None:
    policy = {"suspend": suspend, "activeDeadlineSeconds": 500, "replanOnDrift": True}
    job = spec(runPolicy=policy, resources={"ranks": 4, "minRanks": 2})
    for decision in decide(job, seen, now):
        if isinstance(decision, life.SetPhase):
            life.enter(seen.phase, decision.phase)
        if isinstance(decision, life.Launch):
            assert decision.attempt == seen.attempt + 1
        if seen.phase.terminal:
            assert isinstance(decision, life.Delete | life.Expire | life.Wait)
