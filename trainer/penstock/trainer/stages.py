"""Builds the stages of one rank from a plan."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock.core.plan import Plan
from penstock.core.program import RankProgram
from penstock.core.schedule import Action, flatten
from penstock.trainer.parameters import StageParameters
from penstock.trainer.stage import Stage
from penstock.trainer.units.workspace import Workspace, workspace_bytes


def stage_numbers(program: RankProgram) -> tuple[int, ...]:
    """The stages that ``program`` computes, in ascending order."""
    return tuple(sorted({action.stage for action in _computed(program)}))


def _computed(program: RankProgram) -> Iterator[Action]:
    return flatten(instruction.action for instruction in program.instructions if instruction.action.is_compute)


def build_stages(
    plan: Plan, program: RankProgram, *, shard: int = 0, replica: int = 0, device: torch.device, seed: int
) -> dict[int, Stage]:
    """One shard of the rank's stages, by number, with initial weights.

    They share one workspace, since only the two actions of a pair run at the same time. ``replica`` is used only where
    replicas divide the optimizer's state.
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
    return {
        number: Stage(
            plan.model,
            *units,
            parameters=StageParameters(
                plan.model,
                *units,
                sharding=plan.sharding,
                shard=shard,
                dp=plan.optimizer_shards,
                replica=replica if plan.zero else 0,
                precision=plan.precision,
                device=device,
                seed=seed,
            ),
            workspace=workspace,
            sequence_length=plan.sequence_length,
        )
        for number, units in ranges.items()
    }
