"""Plans for supervisors and the local executor: matching a plan to a job, and making a new one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from penstock.agent.probe import Identity
from penstock.agent.profiles import Profiles
from penstock.agent.progress_files import newest_checkpoint_step
from penstock.core.job import Device, JobSpec, PipelineJob
from penstock.core.plan import Plan
from penstock.core.run.folder import RunDir
from penstock.core.schedule import ScheduleSpec
from penstock.core.serialization.files import write_json
from penstock.planner.worker.process import Planner
from penstock.planner.worker.searching import Report, plan_for


def serves(plan: Plan, spec: JobSpec) -> bool:
    """Whether ``plan`` is of the job's model and data, within its resources, and obeys what it pins."""
    resources, pinned = spec.resources, spec.parallelism
    peak = max(plan.prediction.peak_bytes, default=0) if plan.prediction else 0
    types = (plan.precision, plan.moment_type, plan.gradient_reduction_type)
    of_the_job = (plan.model.whole, *types, plan.sequence_length, plan.global_batch) == (
        spec.model,
        spec.training.precision,
        spec.training.optimizer.moment_type,
        spec.training.gradient_reduction_type,
        spec.data.sequence_length,
        spec.training.global_batch,
    )
    degrees = (
        (pinned.dp, plan.dp),
        (pinned.tp, plan.tp),
        (pinned.pp, plan.pp),
        (pinned.head_parts, plan.head_parts),
        (pinned.micro_batch, plan.microbatch),
    )
    is_divided_alike = plan.tp == 1 or plan.sequence_parallel == pinned.is_sequence_parallel
    return (
        of_the_job
        and plan.num_ranks <= resources.ranks
        and peak <= resources.memory_per_rank
        and all(pinned_degree in (None, degree) for pinned_degree, degree in degrees)
        and is_divided_alike
        and plan.obeys_zero(pinned.zero)
        and _obeys_slices(plan, pinned.slices)
        and _obeys_schedule(plan, pinned.schedule)
        and pinned.stages in (None, plan.blocks)
        and (pinned.recompute is None or plan.recomputes(pinned.recompute))
        and not plan.lacks_recompute
    )


def _obeys_slices(plan: Plan, pinned: int | tuple[int, ...] | None) -> bool:
    return pinned in (None, plan.slices, len(plan.slices))


def _obeys_schedule(plan: Plan, pinned: str | ScheduleSpec | None) -> bool:
    return pinned in (None, plan.schedule, plan.schedule.generator)


class LocalDecider:
    """Finds or makes the profile and the plan of one run on this machine."""

    def __init__(
        self,
        job: PipelineJob,
        run: RunDir,
        profiles: Profiles,
        *,
        identify: Callable[[JobSpec], Identity],
        clock: Callable[[], float],
        planner: Planner | None = None,
    ) -> None:
        self._job, self._run, self._profiles = job, run, profiles
        self._identify, self._clock, self._planner = identify, clock, planner

    @cached_property
    def identity(self) -> Identity:
        """Return the identity that a profile must have; raises `UserError` if this machine lacks the job's device."""
        return self._identify(self._job.spec)

    def find_profile(self) -> bool:
        """Whether there is a fresh profile, or a plan, which needs no profile. Raises `UserError` if this machine lacks
        the CUDA devices of the job.
        """
        planned = self.find_plan() is not None
        if planned and self._job.spec.resources.device is Device.CPU:
            return True  # PyTorch need not be loaded, which takes seconds
        identity = self.identity
        if planned:
            return True
        profile = self._profiles.find(self._job.spec, identity, [self._run.profile], self._clock())
        if profile is not None:
            write_json(self._run.profile, profile.to_manifest())
        return profile is not None

    def keep_profile(self) -> None:
        """Store the profile for other runs on this machine too."""
        self._profiles.keep(self._run.read_profile(), self.identity)

    def find_plan(self) -> Plan | None:
        """Return the plan in the run directory; none if it does not match the job."""
        if not self._run.plan.exists():
            return None
        plan = self._run.read_plan()
        return plan if serves(plan, self._job.spec) else None

    def plan(self, report: Report) -> Plan:
        """Search for a plan in a separate process."""
        spec = self._job.spec.to_plan(has_checkpoint=newest_checkpoint_step(self._run) is not None)
        plan = plan_for(spec, self._run.read_profile(), report, self._planner)
        write_json(self._run.plan, plan.to_manifest())
        return plan
