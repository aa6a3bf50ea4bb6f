"""Candidate: all choices of a plan that a simulation needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.core.remaking import Remakes
from penstock.core.schedule import ScheduleSpec
from penstock.core.speed import Speed, speed_of
from penstock.core.units import format_count
from penstock.planner.device_order import peak_in_order
from penstock.planner.problem import Mesh, Problem
from penstock.planner.stagecost import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """All choices that the planner varies."""

    mesh: Mesh
    stages: Stages
    slices: tuple[int, ...]
    schedule: str | ScheduleSpec
    variant: int | None = None
    """The index of one of its generator's orders; None for the best of them."""
    remainder_slices: tuple[int, ...] = ()
    """Slices of the mesh's smaller last micro-batch, if it has one."""
    head_parts: int = 1
    """Number of parts of the head; ``stages`` are ranges of the units of the model divided so."""
    recompute: tuple[Remakes, ...] = ()
    """Recomputation of each stage, before or inside its backwards; empty if all keep everything."""
    recompute_ahead: int = 0
    """Distance in actions of its rank from an R to its backward."""
    recompute_inside: bool = False
    """Whether stages without an R in the schedule recompute inside their backwards instead of getting one."""
    zero: int = 0
    """1 if replicas divide the optimizer state (ZeRO-1), 0 if each has all of it."""

    @property
    def optimizer_shards(self) -> int:
        """Number of shards of the optimizer state."""
        return optimizer_shards(self.mesh, self.zero)

    @property
    def label(self) -> str:
        """Text for explanations."""
        parts, recomputes = self.head_parts, any(self.recompute)
        return label_of(self.mesh, len(self.slices), self.schedule, parts, recomputes=recomputes, zero=self.zero)

    @property
    def num_actions(self) -> int:
        """F, I and W of every slice on every stage."""
        return 3 * len(self.stages) * (self.mesh.num_alike * len(self.slices) + len(self.remainder_slices))

    def speed(self, problem: Problem, step_seconds: float) -> Speed | None:
        """The speed at ``step_seconds`` per step; None for a step without duration."""
        return speed_of(
            problem.model,
            num_sequences=self.mesh.num_sequences,
            sequence_length=sum(self.slices),
            num_devices=self.mesh.num_devices,
            step_seconds=step_seconds,
            peak_flops=peak_in_order(problem, self.mesh),
        )


def at_other_zero(candidate: Candidate) -> Candidate:
    """The candidate at the other degree of ZeRO."""
    return replace(candidate, zero=1 - candidate.zero)


def optimizer_shards(mesh: Mesh, zero: int) -> int:
    """Number of shards of the optimizer state at this degree of ZeRO."""
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
    """Text of a mesh with a number of slices and a schedule, and where they differ from the default the parts of the
    head, recomputation, and a sharded optimizer state.
    """
    name = schedule if isinstance(schedule, str) else schedule.generator
    divided = f", head in {head_parts} parts" if head_parts > 1 else ""
    recomputed = ", recomputes" if recomputes else ""
    sharded = f", ZeRO-{zero}" if zero else ""
    return f"{mesh.label}, {format_count(num_slices, 'slice')}, {name}{divided}{recomputed}{sharded}"
