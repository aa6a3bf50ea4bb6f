"""The stages that one rank holds, made from a plan."""

from __future__ import annotations

import torch

from penstock.core.plan import Plan
from penstock.core.program import RankProgram
from penstock.trainer.parameters import StageParameters
from penstock.trainer.stage import Stage
from penstock.trainer.units.workspace import Workspace, workspace_bytes


def stage_numbers(program: RankProgram) -> tuple[int, ...]:
    """The stages that ``program`` computes, in order."""
    return tuple(sorted({i.action.stage for i in program.instructions if i.action.is_compute}))


def build_stages(
    plan: Plan, program: RankProgram, *, shard: int = 0, device: torch.device, seed: int
) -> dict[int, Stage]:
    """One shard of the rank's stages by number, freshly initialised, sharing one workspace: their actions run one at a
    time.
    """
    ranges = {number: plan.stages[number] for number in stage_numbers(program)}
    longest = max(plan.size_of(each) * max(plan.slices_of(each)) for each in (0, plan.num_microbatches - 1))
    needed = [workspace_bytes(plan.model, plan.precision, *units, longest, plan.sharding) for units in ranges.values()]
    workspace = Workspace(max(needed), device)
    return {
        number: Stage(
            plan.model,
            *units,
            parameters=StageParameters(
                plan.model,
                *units,
                sharding=plan.sharding,
                shard=shard,
                precision=plan.precision,
                device=device,
                seed=seed,
            ),
            workspace=workspace,
            sequence_length=plan.sequence_length,
        )
        for number, units in ranges.items()
    }
