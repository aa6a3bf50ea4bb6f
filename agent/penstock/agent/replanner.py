"""Re-planning of a running attempt: watches its steps, has other plans computed next to it, and chooses one.

The rules are those of `penstock.core.replanning`; the search runs in a process of its own. A plan that the running
ranks can change to is written to the run directory, where the first rank finds it. For any other plan the caller ends
the attempt, after a checkpoint, and the next one runs by it.

A plan may fail where the former one ran, for example for lack of memory. The former plan stays in the run directory
until the ranks have made `WARM_UP_STEPS` steps by the new plan. If they fail before that, the next attempt runs by the
former plan, and the run is not planned again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.records import WARM_UP_STEPS, StepMetrics
from penstock.core.replanning import MOST_TIMELINES, NUM_TIMELINES, WINDOW, Replanning, choose, is_drifted
from penstock.core.run.documents import read_timeline
from penstock.core.run.folder import RunDir
from penstock.core.run.former_plan import FormerPlan
from penstock.core.serialization.files import write_json
from penstock.planner.worker.process import Planner
from penstock.planner.worker.protocol import PlanningRequest

KEY = "the plan of a running job"
PATIENCE_SECONDS = 20.0
"""Time for which steps have to drift before a search; doubled after each search."""
MOST_DOUBLINGS = 12
RESTART_STARTS = 2.0
"""Cost of another attempt, in starts like that of the present one: new processes, the model's parameters and a first
step. The end of an attempt with its checkpoint is assumed to take as long as a start.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextPlan:
    """A plan to continue by, the profile that it was made for, and the plan before it."""

    plan: Plan
    profile: Profile
    former: Plan


class Replanner:
    """Watches the attempts of one run. ``note`` receives every decision as a sentence with its figures.
    ``num_searches`` is the number of searches, or of attempts, before. Without a ``planner``, or if the job does not
    allow it, nothing is planned again.

    `begin` starts with a plan that runs now, `stepped` takes every step, `poll` does the work that is due, and `end`
    writes the plan of the next attempt. No error of that work ends the run: it becomes a note, and the ranks keep their
    plan. ``better`` is a plan for which the attempt has to end, once there is one.
    """

    def __init__(
        self,
        spec: JobSpec,
        run: RunDir,
        planner: Planner | None,
        clock: Callable[[], float],
        note: Callable[[str], None],
        num_searches: int = 0,
    ) -> None:
        self._spec, self._run, self._clock, self._note = spec, run, clock, note
        self._planner = planner if spec.run_policy.replan_on_drift else None
        self._num_searches = num_searches
        self._plan: Plan | None = None
        self._written: NextPlan | None = None
        self.better: NextPlan | None = None
        self._has_returned = self._is_unproven = False
        self._searched_drift: float | None = None
        self._begun_at = 0.0
        self._start_seconds: float | None = None
        self._earlier_timelines: dict[Path, int] = {}
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._num_steps = 0
        self._step = 0
        self._drifted_at: float | None = None
        self._drifted_step = 0

    def begin(self, plan: Plan) -> None:
        """Watch ranks that start now, with this plan. Timelines that exist already belong to earlier attempts."""
        if self._planner is None:
            return
        self._forget_search(self._planner)
        self._forget_steps()
        self._written = self.better = None
        self._plan, self._begun_at, self._start_seconds = plan, self._clock(), None
        self._earlier_timelines = {path: path.stat().st_mtime_ns for path in self._run.timelines.glob("step-*.json")}
        self._has_returned = self._is_unproven = False
        try:
            former = self._run.read_former_plan() if self._run.former_plan.exists() else None
        except UserError as error:
            self._note(f"cannot read the former plan, so a failure of the present one will not be undone: {error}")
            return
        if former is not None:
            self._has_returned = former.has_returned and former.plan.digest == plan.digest
            self._is_unproven = former.successor_digest == plan.digest

    def end(self, *, has_failed: bool, has_succeeded: bool) -> Plan | None:
        """Forget ranks that have ended, and return the plan of the next attempt if it is not the one of `begin`.

        It is in the run directory: the former plan if the present one failed in its first steps, else the better one
        unless the run has succeeded, else the one that the ranks changed to.
        """
        if self._planner is None:
            return None
        self._forget_search(self._planner)
        changed, better = self._changed(), self.better
        self._plan = self._written = self.better = None
        self._forget_steps()
        if has_failed and (former := self._former()):
            return former
        return better.plan if better and not has_succeeded and self._take(better) else changed

    @property
    def is_watching(self) -> bool:
        """Whether the ranks may be planned again; if not, their steps need not be followed."""
        return self._plan is not None

    def close(self) -> None:
        """Cancel a search, and keep all plans as they are."""
        if self._planner is not None:
            self._forget_search(self._planner)

    def _forget_search(self, planner: Planner) -> None:
        """Cancel the search, and withdraw a plan that the ranks have not taken."""
        if planner.busy(KEY):
            planner.cancel(KEY)
        self._run.next_plan.unlink(missing_ok=True)

    def stepped(self, metrics: StepMetrics) -> None:
        """Take the metrics of a step. The first ones after a start are slower and do not count."""
        if self._start_seconds is None:
            self._start_seconds = self._clock() - self._begun_at
        self._num_steps, self._step = self._num_steps + 1, metrics.step
        if self._num_steps >= WARM_UP_STEPS and self._is_unproven:
            self._is_unproven = False
            with contextlib.suppress(OSError):  # the next change replaces it
                self._run.former_plan.unlink(missing_ok=True)
        prediction = self._plan.prediction if self._plan else None
        if self._num_steps <= WARM_UP_STEPS or prediction is None:
            return
        self._recent.append(metrics.step_seconds)
        was_drifted = self._drifted_at is not None
        if not is_drifted(list(self._recent), prediction.step_seconds, was_drifted=was_drifted):
            self._drifted_at = None
        elif self._drifted_at is None:
            self._drifted_at, self._drifted_step = self._clock(), metrics.step

    def poll(self) -> Plan | None:
        """Start a search that is due, or read the answer of the running one. Return the plan that the ranks have
        changed to, once.
        """
        changed = self._changed()
        is_decided = self._has_returned or self._written is not None or self.better is not None
        if self._planner is None or self._plan is None or is_decided:
            return changed
        try:
            if self._planner.busy(KEY):
                self._read_answer(self._planner)
            elif self._is_due():
                self._search(self._planner, self._plan)
        except (UserError, OSError) as error:
            self._note(f"the run keeps its plan, since planning again failed: {error}")
        return changed

    def _changed(self) -> Plan | None:
        """The plan that the ranks have changed to, returned once. It is the run's from now on, with its profile."""
        written = self._written
        if written is None or self._run.next_plan.exists():
            return None
        self._written = None
        self._forget_steps()
        try:
            is_taken = self._run.read_plan().digest == written.plan.digest
        except UserError as error:
            self._note(f"cannot tell whether the ranks changed their plan: {error}")
            return None
        if not is_taken:
            self._note("the run keeps its plan: its ranks refused the other one, and their log has the reason")
            return None
        self._plan, self._is_unproven = written.plan, True
        self._take(written)
        return written.plan

    def _take(self, following: NextPlan) -> bool:
        """Make it the plan of the run directory, with its profile; return whether that was possible."""
        self._keep_former(following)
        try:
            write_json(self._run.profile, following.profile.to_manifest())
            write_json(self._run.plan, following.plan.to_manifest())
        except OSError as error:
            self._note(f"cannot write the other plan and its profile to the run directory: {error}")
            return False
        return True

    def _keep_former(self, following: NextPlan) -> None:
        digest = following.plan.digest
        try:
            former = FormerPlan(plan=following.former, profile=self._run.read_profile(), successor_digest=digest)
            write_json(self._run.former_plan, former.to_manifest())
        except (UserError, OSError) as error:
            self._note(f"cannot keep the present plan, so a failure of the other one will not be undone: {error}")

    def _former(self) -> Plan | None:
        """Write the former plan back after a failure of the ranks, and return it.

        None if the ranks of this attempt did not start by a new plan, or have made `WARM_UP_STEPS` steps by it.
        """
        if not self._is_unproven:
            return None
        self._is_unproven = False
        try:
            former = replace(self._run.read_former_plan(), has_returned=True)
            write_json(self._run.profile, former.profile.to_manifest())
            write_json(self._run.plan, former.plan.to_manifest())
            write_json(self._run.former_plan, former.to_manifest())
        except (UserError, OSError) as error:
            self._note(f"the run cannot return to its former plan: {error}")
            return None
        self._note("the run returns to its former plan, since the other one failed, and is not planned again")
        return former.plan

    def _is_due(self) -> bool:
        patience = PATIENCE_SECONDS * 2 ** min(self._num_searches, MOST_DOUBLINGS)
        return self._drifted_at is not None and self._clock() >= self._drifted_at + patience

    def _search(self, planner: Planner, plan: Plan) -> None:
        if not self._run.profile.exists():
            return  # the run was given a plan, and nothing was measured
        paths = self._drifted_timelines()
        if len(paths) < NUM_TIMELINES:
            return
        self._num_searches += 1  # first, so that after an error the next search also waits for longer
        self._searched_drift = self._drifted_at
        timelines = tuple(read_timeline(path) for path in paths)
        request = PlanningRequest(spec=self._spec, profile=self._run.read_profile(), plan=plan, timelines=timelines)
        planner.start(KEY, request)
        self._note("steps have drifted from the prediction: searching for another plan next to the run")

    def _drifted_timelines(self) -> list[Path]:
        """The newest `MOST_TIMELINES` timelines of drifted steps, or all if there are fewer."""
        paths = {path: path.stem.removeprefix("step-") for path in self._run.timelines.glob("step-*.json")}
        steps = sorted((int(step), path) for path, step in paths.items() if step.isdecimal())
        drifted = [path for step, path in steps if self._drifted_step <= step <= self._step]
        own = [path for path in drifted if path.stat().st_mtime_ns != self._earlier_timelines.get(path)]
        return own[-MOST_TIMELINES:]

    def _read_answer(self, planner: Planner) -> None:
        answer = planner.poll(KEY)
        if answer is None:
            return
        if self._drifted_at is None or self._drifted_at != self._searched_drift:
            self._note("the run keeps its plan: the drift ended during the search")
        elif answer.replanning is None:
            self._note(f"the run keeps its plan: the search found no other one: {answer.error}")
        else:
            self._choose(answer.replanning)

    def _choose(self, replanning: Replanning) -> None:
        restart_seconds = RESTART_STARTS * (self._start_seconds or 0.0)
        choice = choose(replanning, self._spec.training.steps - 1 - self._step, restart_seconds)
        if choice.option is None:
            self._note(f"the run keeps its plan: {choice.reason}")
            return
        assert self._plan is not None, "only a plan that runs is compared"
        self._note(f"the run continues with another plan: {choice.reason}")
        following = NextPlan(plan=choice.option.plan, profile=replanning.profile, former=self._plan)
        if choice.option.restart_reasons:
            self.better = following
        else:
            self._written = following  # set before the write, so that `_changed` resets it if the write fails
            write_json(self._run.next_plan, following.plan.to_manifest())
