"""Builds the stages of one rank from a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch

from penstock.core.layout import prefix_bytes
from penstock.core.model import UnitKind
from penstock.core.plan import Plan
from penstock.core.program import RankProgram
from penstock.core.schedule import Action, Group, Kind, Part, flatten
from penstock.trainer.parameters import StageParameters
from penstock.trainer.stage import Stage
from penstock.trainer.units.workspace import Workspace, workspace_bytes


def _prefix_bytes(plan: Plan, stages: Iterable[tuple[int, int]]) -> int:
    """Bytes for the prefix of one unit's attention, where the plan's slices have their own keys and values."""
    units = (plan.model.units[first:stop] for first, stop in stages)
    has_attention = any(unit.kind is UnitKind.ATTENTION for unit in chain.from_iterable(units))
    if not (plan.prefix_by_slice and has_attention):
        return 0
    return max(
        prefix_bytes(plan.model, plan.precision, plan.size_of(number), plan.slices_of(number), plan.sharding)
        for number in (0, plan.num_microbatches - 1)
    )


def stage_numbers(program: RankProgram) -> tuple[int, ...]:
    """The stages that ``program`` computes, in ascending order."""
    return tuple(sorted({action.stage for action in _computed(program)}))


def _computed(program: RankProgram) -> Iterator[Action]:
    return flatten(instruction.action for instruction in program.instructions if instruction.action.is_compute)


def _buckets(program: RankProgram, stage: int) -> list[Part]:
    """The buckets in which replicas sum the gradients of a stage; empty if they sum them as one."""
    starts = (instruction.action for instruction in program.instructions)
    starts = (action for action in starts if action.kind is Kind.START_REDUCE and action.group is Group.DP)
    return [action.part for action in starts if action.stage == stage and action.part is not None]


def build_stages(
    plan: Plan, program: RankProgram, *, shard: int = 0, replica: int = 0, device: torch.device, seed: int
) -> dict[int, Stage]:
    """One shard of the rank's stages, by number, with initial weights.

    ``replica`` is used only where replicas divide the optimizer's state.
    """
    parameters = {
        number: StageParameters(
            plan.model,
            *plan.stages[number],
            sharding=plan.sharding,
            shard=shard,
            dp=plan.optimizer_shards,
            replica=replica if plan.zero else 0,
            buckets=_buckets(program, number) if plan.zero else (),
            precision=plan.precision,
            device=device,
            seed=seed,
        )
        for number in stage_numbers(program)
    }
    return stages_with(parameters, plan, program, device=device)


def stages_with(
    parameters: Mapping[int, StageParameters], plan: Plan, program: RankProgram, *, device: torch.device
) -> dict[int, Stage]:
    """The rank's stages with these parameters, by number, and with memory for the temporaries of the plan's slices.

    They share one workspace, with a second region for the second action of a pair: no other two actions run at the same
    time.
    """
    ranges = {number: plan.stages[number] for number in stage_numbers(program)}
    longest = max(
        plan.size_of(microbatch) * max(plan.slices_of(microbatch)) for microbatch in (0, plan.num_microbatches - 1)
    )
    needed = {
        number: workspace_bytes(plan.model, plan.precision, *units, longest, plan.sharding)
        for number, units in ranges.items()
    }
    seconds = {
        instruction.action.children[1].stage for instruction in program.instructions if instruction.action.children
    }
    workspace = Workspace(max(needed.values()), device, max([needed[number] for number in seconds], default=0))
    prefix = Workspace(_prefix_bytes(plan, ranges.values()), device)
    return {
        number: Stage(
            plan.model,
            *units,
            parameters=parameters[number],
            workspace=workspace,
            prefix=prefix,
            sequence_length=plan.sequence_length,
        )
        for number, units in ranges.items()
    }
