"""A candidate: everything that a simulation needs to know of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.core.remaking import Remakes
from penstock.core.schedule import ScheduleSpec
from penstock.core.speed import Speed, speed_of
from penstock.core.units import format_count
from penstock.planner.problem import Mesh, Problem
from penstock.planner.stagecost import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The planner varies nothing else."""

    mesh: Mesh
    stages: Stages
    slices: tuple[int, ...]
    schedule: str | ScheduleSpec
    variant: int | None = None
    """Which of its orders a generator of several makes; the best of them if none is named."""
    remainder_slices: tuple[int, ...] = ()
    """Those of the mesh's smaller last micro-batch, if it has one."""
    head_parts: int = 1
    """Into how many parts the head is divided; ``stages`` are ranges of that model's units."""
    recompute: tuple[Remakes, ...] = ()
    """What each stage makes again before its backwards; none where all keep everything."""
    recompute_ahead: int = 0
    """How many actions of its rank an R comes before its backward."""
    zero: int = 0
    """1 where replicas divide the state of the optimizer (ZeRO-1), 0 where each has all of it."""

    @property
    def optimizer_shards(self) -> int:
        """Into how many shards the state of the optimizer is cut."""
        return optimizer_shards(self.mesh, self.zero)

    @property
    def label(self) -> str:
        """For explanations."""
        parts, recomputes = self.head_parts, any(self.recompute)
        return label_of(self.mesh, len(self.slices), self.schedule, parts, recomputes=recomputes, zero=self.zero)

    @property
    def num_actions(self) -> int:
        """F, I and W of every slice on every stage."""
        return 3 * len(self.stages) * (self.mesh.num_alike * len(self.slices) + len(self.remainder_slices))

    def speed(self, problem: Problem, step_seconds: float) -> Speed | None:
        """How fast a step of ``step_seconds`` is; none without a time."""
        return speed_of(
            problem.model,
            num_sequences=self.mesh.num_sequences,
            sequence_length=sum(self.slices),
            num_devices=self.mesh.num_devices,
            step_seconds=step_seconds,
            peak_flops=problem.peak_flops,
        )


def at_other_zero(candidate: Candidate) -> Candidate:
    """The candidate at the other degree of ZeRO."""
    return replace(candidate, zero=1 - candidate.zero)


def optimizer_shards(mesh: Mesh, zero: int) -> int:
    """Into how many shards the state of the optimizer is cut at this degree of ZeRO."""
    return mesh.dp if zero else 1


def label_of(
    mesh: Mesh,
    num_slices: int,
    schedule: str | ScheduleSpec,
    head_parts: int = 1,
    *,
    recomputes: bool = False,
    zero: int = 0,
) -> str:
    """What people are told of a mesh with so many slices under a schedule, of a head in several parts, of stages that
    make again what they do not keep, and of an optimizer whose state is sharded.
    """
    name = schedule if isinstance(schedule, str) else schedule.generator
    divided = f", head in {head_parts} parts" if head_parts > 1 else ""
    recomputed = ", recomputes" if recomputes else ""
    sharded = f", ZeRO-{zero}" if zero else ""
    return f"{mesh.label}, {format_count(num_slices, 'slice')}, {name}{divided}{recomputed}{sharded}"
