"""Checks of the pins against the job, before the search: each conflict is one `UserError`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from penstock.core.errors import UserError
from penstock.core.job import ParallelismSpec
from penstock.core.layout import num_remade_units
from penstock.core.model import ModelSpec
from penstock.core.remaking import check_remakes
from penstock.core.schedule import Schedule
from penstock.planner.compile import require_places
from penstock.planner.passes.rounds import find_rounds
from penstock.planner.problem import (
    Problem,
    imported_schedule,
    most_units,
    runs_on_shards,
    stage_counts,
)
from penstock.planner.schedules.registry import find
from penstock.planner.sizes import divisors
from penstock.planner.stagecost import Stages

PINNED = "spec.parallelism"


def pinned_stages(blocks: Sequence[float], num_units: int, head_parts: int = 1) -> Stages:
    """Unit ranges from blocks per stage, halves allowed. The embedding joins the first stage and the head the last; a
    divided head joins the last stages, one part each.
    """
    first_head_stage = len(blocks) - head_parts
    ends = [1 + round(2 * b) + max(stage - first_head_stage + 1, 0) for stage, b in enumerate(np.cumsum(blocks)[:-1])]
    return tuple(itertools.pairwise([0, *ends, num_units]))


def parts_of_pinned_stages(blocks: Sequence[float], layers: int) -> tuple[int, ...]:
    """The numbers of parts of the head, ascending, for which every stage with these numbers of blocks has a unit."""
    most = len(blocks) if sum(blocks) == layers else 1
    return tuple(parts for parts in range(1, most + 1) if first_mistake(blocks, layers, parts) is None)


def first_mistake(blocks: Sequence[float], layers: int, head_parts: int) -> tuple[int, str] | None:
    """The first impossible stage, and why: a stage must have a unit, and no blocks may follow a part of the head."""
    whole = len(blocks) - head_parts
    for stage in range(max(whole + 1, 0), len(blocks)):
        if blocks[stage]:
            return stage, f"holds blocks after part {stage - whole} of {head_parts} of the head"
    for stage, (first, stop) in enumerate(pinned_stages(blocks, 2 * layers + 1 + head_parts, head_parts)):
        if first >= stop:
            return stage, "holds no unit"
    return None


def check_pins(problem: Problem, receive_ahead: int) -> None:
    """Raise `UserError` if no plan can meet the pins.

    Plans post up to ``receive_ahead`` receives of a channel in advance.
    """
    _check_schedule(problem, receive_ahead)
    _check_degrees(problem)
    _check_stages(problem)
    _check_parts(problem)
    _check_recompute(problem)


def _check_degrees(problem: Problem) -> None:
    pinned = problem.pinned
    if pinned.tp is not None and pinned.tp not in problem.tp_degrees:
        raise _indivisible(problem, pinned.tp)
    _check_head_parts(problem)
    fewest, most = min(stage_counts(pinned, pinned.pp or 1)), most_units(problem, pinned.tp or 1)
    if fewest > most:
        raise UserError(
            what=f"{fewest} stages cannot share the model's {most} units",
            where=f"{PINNED}.pp",
            remedy=f"pin at most {most}: embedding, head, and an attention and an MLP per layer",
        )


def _check_head_parts(problem: Problem) -> None:
    parts, where, tp = problem.pinned.head_parts, f"{PINNED}.headParts", problem.pinned.tp or 1
    if parts is None:
        return
    degrees = problem.head_degrees(tp)
    if parts in degrees:
        return
    if problem.profile_digest:
        raise UserError(
            what=f"a head in {parts} parts was not measured",
            where=where,
            remedy=f"pin one of: {', '.join(map(str, degrees))}; a measurement for this job, with headParts pinned, "
            "measures it",
        )
    raise UserError(
        what="the described costs are those of a whole head: they are a table, or their software runs the head's "
        "backward as passes of its own",
        where=where,
        remedy="pin 1 or leave it out",
    )


def _indivisible(problem: Problem, tp: int) -> UserError:
    """The error for a degree of tensor parallelism that does not divide the model or the hardware."""
    model, possible = problem.model, ", ".join(map(str, problem.tp_degrees))
    if model.can_be_sharded(tp) and problem.profile_digest:
        what = f"tp {tp} was not measured; a measurement for this job, with tp pinned, measures it"
    elif model.can_be_sharded(tp):
        what = f"tp {tp} neither divides a node's devices nor is a multiple of them"
    else:
        what = (
            f"tp {tp} does not divide {model.heads} heads and a feed-forward width of {model.ffn_hidden}, or neither "
            f"divides {model.kv_heads} key/value heads nor is a multiple of them"
        )
    return UserError(what=what, where=f"{PINNED}.tp", remedy=f"pin one of: {possible or 1}")


def _check_schedule(problem: Problem, receive_ahead: int) -> None:
    pinned, imported = problem.pinned, imported_schedule(problem.pinned)
    if isinstance(pinned.schedule, str):
        find(pinned.schedule)
    if imported is None:
        return
    count = pinned.slices if isinstance(pinned.slices, int) or pinned.slices is None else len(pinned.slices)
    shares = _shares(problem, imported.num_microbatches)
    for name, expected, actual in (
        ("ranks", pinned.pp, len(imported.ranks)),
        ("slices", count, imported.num_slices),
        ("micro-batches", shares if imported.num_microbatches not in shares else None, imported.num_microbatches),
    ):
        if expected is not None and expected != actual:
            shown = " or ".join(map(str, sorted(expected))) if isinstance(expected, set) else expected
            raise UserError(
                what=f"the schedule is for {actual} {name}, the job has {shown}",
                where=f"{PINNED}.schedule",
                remedy=f"write the schedule for {shown} {name}, or pin others",
            )
    if (pinned.tp or 1) > 1 and not runs_on_shards(pinned):
        raise _pairs_cannot_join(imported, pinned.tp)
    if problem.num_places is not None:
        require_places(imported, receive_ahead, problem.num_places, f"{PINNED}.schedule")


def _pairs_cannot_join(schedule: Schedule, tp: int | None) -> UserError:
    """The error for a schedule that can run, but not with both actions of its pairs starting together."""
    find_rounds(schedule)
    try:
        find_rounds(schedule, keep_pairs=True)
    except UserError as error:
        what = f"with tp {tp} both actions of an overlap begin together, and {error.what}"
        remedy = "pin tp 1, or write the two actions one after the other"
        return UserError(what=what, where=f"{PINNED}.schedule", remedy=remedy)
    raise AssertionError("only a schedule whose pairs cannot be joined is refused")


def _shares(problem: Problem, num_microbatches: int) -> set[int]:
    """Possible numbers of micro-batches of a replica: ``num_microbatches`` if it is possible, and those without a
    smaller last one.
    """
    pinned, batch = problem.pinned, problem.global_batch
    counts = set()
    for share in [batch // dp for dp in divisors(batch) if dp == (pinned.dp or dp)]:
        if pinned.micro_batch is not None:
            counts |= {-(-share // pinned.micro_batch)} if pinned.micro_batch <= share else set()
            continue
        counts |= {share // size for size in divisors(share)}
        counts |= {num_microbatches} if -(-share // -(-share // num_microbatches)) == num_microbatches else set()
    return counts


def _stage_counts(pinned: ParallelismSpec, imported: Schedule | None) -> tuple[int, ...]:
    """Numbers of stages that the pins allow; empty if any."""
    if imported is not None:
        return (imported.num_stages,)
    return () if pinned.pp is None else stage_counts(pinned, pinned.pp)


def _check_stages(problem: Problem) -> None:
    pinned, imported = problem.pinned, imported_schedule(problem.pinned)
    if pinned.stages is not None:
        allowed = _stage_counts(pinned, imported)
        if allowed and len(pinned.stages) not in allowed:
            has = f"{'the schedule' if imported else 'pp'} has {' or '.join(map(str, allowed))}"
            raise UserError(
                what=f"{len(pinned.stages)} stages are pinned, but {has}",
                where=f"{PINNED}.stages",
                remedy="give one number of blocks per stage",
            )
        _check_blocks(problem, pinned.stages)
    most = most_units(problem, pinned.tp or 1)
    if imported and imported.num_stages > most:
        raise UserError(
            what=f"the schedule's {imported.num_stages} stages cannot share the model's {most} units",
            where=f"{PINNED}.schedule",
            remedy="write it for fewer stages",
        )


def _check_blocks(problem: Problem, blocks: Sequence[float]) -> None:
    """Check that each stage has a unit, and that the last stages have the head's parts, one each."""
    layers, pinned = problem.model.layers, problem.pinned
    parts = pinned.head_parts
    if parts is not None and parts > max(len(blocks), 1):
        raise UserError(
            what=f"{parts} parts of the head need a stage each, but only {len(blocks)} stages are pinned",
            where=f"{PINNED}.headParts",
            remedy=f"pin at most {len(blocks)}, or leave stages out",
        )
    if parts is None and set(parts_of_pinned_stages(blocks, layers)) & set(problem.head_degrees(pinned.tp or 1)):
        return
    mistake = first_mistake(blocks, layers, parts or 1)
    if mistake is None:
        return
    stage, what = mistake
    is_whole = parts in (None, 1)
    allowed = "only the first and the last may have 0" if is_whole else f"of the last {parts} stages all but one have 0"
    raise UserError(what=what, where=f"{PINNED}.stages[{stage}]", remedy=f"give it at least half a block; {allowed}")


def _check_parts(problem: Problem) -> None:
    """Check that a schedule that recomputes parts of stages matches the pinned stages."""
    imported, parts = imported_schedule(problem.pinned), problem.pinned.head_parts or 1
    model = problem.model.divided(parts)
    recomputed_units = {} if imported is None else imported.recomputed_units
    if recomputed_units and problem.pinned.stages is None:
        raise UserError(
            what="the schedule recomputes parts of stages, whose units the planner would choose",
            where=f"{PINNED}.schedule",
            remedy="pin stages as well, or write R without parts",
        )
    stages = pinned_stages(problem.pinned.stages or (), model.num_units, parts)
    for stage, num_units in sorted(recomputed_units.items()):
        num_kept = num_remade_units(model, *stages[stage])
        if num_units != num_kept:
            raise UserError(
                what=f"the schedule recomputes {num_units} units of stage {stage}, of which {num_kept} keep anything",
                where=f"{PINNED}.schedule",
                remedy=f"let the parts of its R end at unit {num_kept}: {_units_of(model, stages[stage])}",
            )


def _check_recompute(problem: Problem) -> None:
    """Check that pinned stages have the units that pinned recomputation names."""
    pinned = problem.pinned
    if not isinstance(pinned.recompute, tuple) or pinned.stages is None:
        return
    parts = pinned.head_parts or 1
    model = problem.model.divided(parts)
    stages = pinned_stages(pinned.stages, model.num_units, parts)
    for number, (stage, remakes) in enumerate(zip(stages, pinned.recompute, strict=True)):
        check_remakes(model, stage, remakes, f"{PINNED}.recompute[{number}]")


def _units_of(model: ModelSpec, stage: tuple[int, int]) -> str:
    return ", ".join(f"{i} {unit.kind.value}" for i, unit in enumerate(model.units[slice(*stage)]))
