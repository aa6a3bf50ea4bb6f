"""Plans small enough to run in tests, as a planner would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock.core.layout import Precision, num_remade_units
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import full_remakes
from penstock.core.schedule import CSV, Action, Kind, Part, Schedule, ScheduleSpec
from penstock.planner.compile import schedule_of
from penstock.planner.schedules.registry import find


def small_model(family: Family, *, layers: int = 3) -> ModelSpec:
    """A model whose dimensions all differ, with grouped-query attention where the family has it."""
    return ModelSpec(
        family=family,
        layers=layers,
        hidden=16,
        heads=4,
        kv_heads=2 if family is Family.LLAMA else 0,
        ffn_hidden=24,
        vocab=40,
        positions=64,
    )


def small_plan(
    *,
    family: Family = Family.LLAMA,
    schedule: str | ScheduleSpec = "1f1b",
    pp: int = 2,
    dp: int = 1,
    num_stages: int | None = None,
    slices: tuple[int, ...] = (4, 4, 4),
    num_microbatches: int = 1,
    microbatch: int = 2,
    precision: Precision = Precision.FP64,
    layers: int = 3,
    remainder: int = 0,
    remainder_slices: tuple[int, ...] = (),
    head_parts: int = 1,
    zero: int = 0,
) -> Plan:
    """A plan with stages of nearly equal numbers of units, as many as the schedule has unless told otherwise."""
    model = small_model(family, layers=layers)
    recipe = ScheduleSpec(generator=schedule, version=find(schedule).version) if isinstance(schedule, str) else schedule
    per_rank = find(schedule).stages_per_rank if isinstance(schedule, str) else 1
    plan = Plan(
        model=model,
        precision=precision,
        dp=dp,
        pp=pp,
        microbatch=microbatch,
        num_microbatches=num_microbatches,
        slices=slices,
        stages=even_stages(model.divided(head_parts).num_units, num_stages or pp * per_rank),
        head_parts=head_parts,
        zero=zero,
        schedule=recipe,
        remainder=remainder,
        remainder_slices=remainder_slices,
    )
    return with_stages(plan, plan.stages)


def widened(plan: Plan) -> Plan:
    """The same with a model of some hundred thousand parameters, so that replicas can divide every stage."""
    return replace(plan, model=replace(plan.model, hidden=64, ffn_hidden=112, vocab=160))


def with_stages(plan: Plan, stages: tuple[tuple[int, int], ...]) -> Plan:
    """The plan with these stages; those that have an R in its schedule make everything again."""
    plan = replace(plan, stages=stages, recompute=())
    remade = schedule_of(plan).recomputed_stages if plan.schedule.generator == CSV else frozenset()
    remakes = tuple(full_remakes(plan.model, units) if stage in remade else () for stage, units in enumerate(stages))
    return replace(plan, recompute=remakes) if remade else plan


def plan_of_case(case: Mapping[str, Any], stages_per_rank: Mapping[str, int], **changes: Any) -> Plan:
    """The plan of a case of a covering array, by the names of what it varies; schedules have one stage per rank unless
    told otherwise.
    """
    return small_plan(
        family=case["family"],
        schedule=case["schedule"],
        slices=case["slices"],
        pp=case["pp"],
        dp=case["dp"],
        num_stages=case["pp"] * stages_per_rank.get(case["schedule"], 1),
        num_microbatches=case["num_microbatches"],
        **changes,
    )


def even_stages(num_units: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Ranges [first, stop) whose lengths differ by at most one."""
    bounds = [num_units * stage // num_stages for stage in range(num_stages + 1)]
    return tuple(pairwise(bounds))


def parts_alone(plan: Plan) -> tuple[tuple[int, int], ...]:
    """As many stages of one part each at the end as there are parts, or stages after the first."""
    num_alone = min(plan.head_parts, len(plan.stages) - 1)
    rest = plan.model.num_units - num_alone
    bounds = [*range(rest, plan.model.num_units + 1)]
    return (*even_stages(rest, len(plan.stages) - num_alone), *pairwise(bounds))


def remade_units(num_stages: int, *, layers: int = 3) -> list[int]:
    """Of every stage of `small_plan`, how many units R makes again."""
    model = small_model(Family.LLAMA, layers=layers)
    return [num_remade_units(model, *stage) for stage in even_stages(model.num_units, num_stages)]


def looped_schedule(
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    num_slices: int,
    recompute: bool = False,
    num_units: Sequence[int] = (),
) -> ScheduleSpec:
    """Several stages per rank (stage s on rank s mod num_ranks), all forwards before all backwards, as imported CSV.

    Backward is split on the even stages and full on the odd ones; with ``recompute`` an R precedes every one. With
    ``num_units`` of the stages, those R are in parts of one unit: the first of all slices come before any backward of
    their stage.
    """
    cells = [(microbatch, part) for microbatch in range(num_microbatches) for part in range(num_slices)]
    backward = [(microbatch, part) for microbatch in range(num_microbatches) for part in reversed(range(num_slices))]
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        own = range(rank, num_stages, num_ranks)
        row = [Action(Kind.F, stage, *cell) for stage in own for cell in cells]
        for stage in reversed(own):
            parts = [Part(unit, unit + 1) for unit in range(num_units[stage] if num_units else 0)]
            row.extend(Action(Kind.R, stage, *cell, part=part) for part in parts[:1] for cell in backward)
            for cell in backward:
                row.extend(Action(Kind.R, stage, *cell, part=part) for part in parts[1:])
                row.extend([Action(Kind.R, stage, *cell)] if recompute and not parts else [])
                row.append(Action(Kind.B if stage % 2 else Kind.I, stage, *cell))
        row.extend(Action(Kind.W, stage, *cell) for stage in own if stage % 2 == 0 for cell in cells)
        rows.append(tuple(row))
    schedule = Schedule(
        ranks=tuple(rows), num_stages=num_stages, num_microbatches=num_microbatches, num_slices=num_slices
    )
    return ScheduleSpec(generator=CSV, text=schedule.to_csv())
