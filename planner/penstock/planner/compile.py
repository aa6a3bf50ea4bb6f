"""From a Plan to its Program. Every rank repeats this before the first step, and ranks compare the digests."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

from penstock.core.buckets import stage_buckets
from penstock.core.errors import MemoryLimitError, TooManyKernelsError, UserError
from penstock.core.extents import extent_bytes
from penstock.core.invariants import prove
from penstock.core.layout import ALIGNMENT_BYTES, SlotKind, num_remade_units, tied_stages
from penstock.core.model import ModelSpec
from penstock.core.plan import Plan
from penstock.core.program import Program, SlotSizes
from penstock.core.remaking import Remakes
from penstock.core.schedule import Schedule
from penstock.core.sharding import Sharding
from penstock.core.units import MEBIBYTE, format_bytes
from penstock.planner.lowering import NO_TRANSIENTS, Remainder, SlotExtents, Transients, lower, slot_sizes
from penstock.planner.passes.reductions import Buckets
from penstock.planner.schedules.registry import from_spec


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule, generated from its recipe."""
    return from_spec(
        plan.schedule,
        num_ranks=plan.pp,
        num_microbatches=plan.num_microbatches,
        num_slices=len(plan.slices),
        num_stages=len(plan.stages),
        num_remainder_slices=len(plan.remainder_slices),
        recomputed=recomputed_stages(plan.recompute),
        recompute_ahead=plan.recompute_ahead,
        recompute_inside=plan.recompute_inside,
        keep_pairs=plan.tp > 1,
    )


def recomputed_stages(recompute: Sequence[Remakes]) -> frozenset[int]:
    """The stages that recompute anything."""
    return frozenset(stage for stage, remakes in enumerate(recompute) if remakes)


def program_of(plan: Plan) -> Program:
    """The plan's Program, proved to run; raises `UserError` if its digest differs from the plan's."""
    program = lowered(plan)
    prove_plan(plan, program)
    return program


def fitting_program_of(plan: Plan, memory_per_rank: int, *, num_places: int | None = None) -> Program:
    """The plan's Program, also proved to fit in ``memory_per_rank`` bytes; raises `UserError` if a rank needs more.

    ``num_places`` is as for `penstock.core.invariants.prove`, for a plan that runs on CUDA.

    The bytes of a rank outside of its arena (process, parameters and their state, transients) are those of the
    prediction, which was made where costs were known. For a plan without a prediction they are not compared.
    """
    program, bytes_outside = lowered(plan), bytes_outside_arena(plan)
    try:
        prove_plan(
            plan, program, [memory_per_rank - num_bytes for num_bytes in bytes_outside] or None, num_places=num_places
        )
    except MemoryLimitError:
        raise _too_large(program, bytes_outside, memory_per_rank) from None
    except TooManyKernelsError as error:
        raise too_many_kernels(error, "plan") from None
    return program


def lowered(plan: Plan, transients: Transients = NO_TRANSIENTS) -> Program:
    """The plan's Program, without a proof; raises `UserError` like `program_of`."""
    schedule = schedule_of(plan)
    if schedule.num_stages != len(plan.stages):
        raise UserError(
            what=f"the schedule has {schedule.num_stages} stages, the plan {len(plan.stages)}",
            where="plan.stages",
            remedy="give one range of units per stage of the schedule",
        )
    program = lower(
        schedule,
        _sizes(plan, plan.microbatch),
        slices=plan.slices,
        extents=_extents(plan, plan.microbatch),
        remainder=_remainder(plan),
        receive_ahead=plan.receive_ahead,
        late_receives=plan.late_receives,
        prefix_by_slice=plan.prefix_by_slice,
        dp=plan.dp > 1,
        tp=has_shared_gradients(plan.model, plan.sharding),
        tie=tied_stages(plan.model, plan.stages),
        zero=plan.zero,
        buckets=_buckets(plan),
        num_units=_num_units(plan),
        transients=transients,
        keep_pairs=plan.tp > 1,
    )
    if plan.program_digest and program.digest != plan.program_digest:
        raise UserError(
            what="describes another Program than this version of penstock makes from it",
            where="plan",
            remedy="plan again with the version that runs it",
        )
    return program


def prove_plan(
    plan: Plan,
    program: Program,
    memory_limit_bytes: Sequence[int] | None = None,
    *,
    num_places: int | None = None,
) -> None:
    """Prove that the plan's Program runs, with the slots that its model needs, within the limits of its ranks."""
    prove(
        program,
        sizes=_sizes(plan, plan.microbatch),
        remainder_sizes=_sizes(plan, plan.remainder),
        num_units=_num_units(plan),
        num_trained=[stop - first for first, stop in plan.stages],
        memory_limit_bytes=memory_limit_bytes,
        num_places=num_places,
    )


def _buckets(plan: Plan) -> Buckets:
    """Buckets of gradients, if replicas reduce them next to compute."""
    if plan.dp == 1 or plan.late_receives:
        return ()
    return stage_buckets(plan.model, plan.stages, plan.precision, plan.tp)


def bytes_outside_arena(plan: Plan) -> list[int]:
    """Predicted bytes of each pipeline rank outside of its arena; empty for a plan without a prediction."""
    prediction = plan.prediction
    return (
        [] if prediction is None else [a - b for a, b in zip(prediction.peak_bytes, prediction.slot_bytes, strict=True)]
    )


def _sizes(plan: Plan, microbatch: int) -> SlotSizes:
    return slot_sizes(plan.model, plan.precision, plan.stages, microbatch, plan.sharding, plan.remade)


def _remainder(plan: Plan) -> Remainder | None:
    if not plan.remainder:
        return None
    return Remainder(_sizes(plan, plan.remainder), plan.remainder_slices, _extents(plan, plan.remainder))


def _extents(plan: Plan, microbatch: int) -> SlotExtents | None:
    """The extents of slots, if the plan divides them."""
    if not plan.split_slots:
        return None
    remade = plan.remade

    @functools.cache
    def num_bytes(kind: SlotKind, stage: int, tokens: int) -> tuple[int, ...]:
        shape = (*plan.stages[stage], kind, microbatch, tokens, plan.sharding, remade[stage])
        return extent_bytes(plan.model, plan.precision, *shape)

    return num_bytes


def _num_units(plan: Plan) -> list[int]:
    return [num_remade_units(plan.model, *stage) for stage in plan.stages]


def _too_large(program: Program, bytes_outside: Sequence[int], memory_per_rank: int) -> UserError:
    needed, rank = max(
        (bytes_outside[program_of_rank.rank] + program_of_rank.arena_bytes, program_of_rank.rank)
        for program_of_rank in program.ranks
    )
    return UserError(
        what=f"the plan needs {format_bytes(needed)} on rank {rank}, {format_bytes(memory_per_rank)} are allowed",
        where="spec.resources.memoryPerRank",
        remedy=f"allow {-(-needed // MEBIBYTE)}Mi, or pin a smaller microBatch or more slices",
    )


def require_places(schedule: Schedule, receive_ahead: int, num_places: int, where: str) -> None:
    """Raise `UserError` if a rank of ``schedule`` may need more than ``num_places`` communication kernels at once.

    Its receives are posted late, as in any plan for such devices. The number depends on the order of actions and not on
    sizes. A rank needs at most one per channel. Neighbouring stages on different ranks have two channels, one for
    activations and one for gradients. So most schedules have too few channels to need a proof.
    """
    borders = {(a, b) for a, b in pairwise(schedule.stage_ranks) if a != b}
    if 2 * max(Counter(chain.from_iterable(borders)).values(), default=0) <= num_places:
        return
    slices, last = ((1,) * count for count in (schedule.num_slices, schedule.num_remainder_slices))
    program = lower(
        schedule,
        _equal_bytes,
        slices=slices,
        remainder=Remainder(_equal_bytes, last) if last else None,
        receive_ahead=receive_ahead,
        late_receives=True,
        dp=False,
    )
    try:
        prove(program, num_places=num_places)
    except TooManyKernelsError as error:
        raise too_many_kernels(error, where) from None


def _equal_bytes(kind: SlotKind, stage: int, tokens: int) -> int:
    return ALIGNMENT_BYTES


def too_many_kernels(error: TooManyKernelsError, where: str) -> UserError:
    """The error for a Program that may hang CUDA devices."""
    return UserError(
        what=f"cannot run on CUDA, where devices would wait for each other forever: {error}",
        where=where,
        remedy="let each rank exchange messages with fewer others, or run it on device: cpu",
    )


def has_shared_gradients(model: ModelSpec, sharding: Sharding) -> bool:
    """Whether a shard has only an addend of some gradients (`penstock.core.layout.shared_parameters`)."""
    return sharding.by_tokens or model.kv_copies(sharding.tp) > 1
