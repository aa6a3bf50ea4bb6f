"""Generators by name, and recipes: a plan stores a schedule that follows from its shape as a name and a version.

A schedule that was made from costs is recorded as a whole, so it stays readable if its generator changes or disappears.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from penstock.core.errors import UserError
from penstock.core.manifest import nearest
from penstock.core.schedule import CSV, Schedule, ScheduleSpec
from penstock.planner.order import Order, from_schedule, to_schedule
from penstock.planner.schedules.braided import BRAIDED, braided_1f1b
from penstock.planner.schedules.generator import Generator, in_waves, installed_generators, looped
from penstock.planner.schedules.gpipe import gpipe
from penstock.planner.schedules.imported import imported
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.one_f_one_b import eager_1f1b, one_f_one_b, zb_h1
from penstock.planner.schedules.recorded import record, replay

# These load numba, which ranks do not need.


def _zb(inputs: ScheduleInputs) -> Order:
    from penstock.planner.schedules.zero_bubble import zb

    return zb(inputs)


def _zbv(inputs: ScheduleInputs) -> Order:
    from penstock.planner.schedules.v_shape import zbv

    return zbv(inputs)


def _v_half(inputs: ScheduleInputs) -> Order:
    from penstock.planner.schedules.v_shape import v_half

    return v_half(inputs)


def _v_min(inputs: ScheduleInputs) -> Order:
    from penstock.planner.schedules.v_shape import v_min

    return v_min(inputs)


def _interleaved_1f1b(inputs: ScheduleInputs) -> Order:
    from penstock.planner.schedules.grouped import interleaved_1f1b

    return interleaved_1f1b(inputs)


def _interleaved_zb(inputs: ScheduleInputs) -> Order:
    from penstock.planner.schedules.interleaved import interleaved_zb

    return interleaved_zb(inputs)


_FIXED: dict[str, Any] = {"version": 1, "uses_costs": False}
_WAVES: dict[str, Any] = {"uses_costs": True, "splits_backward": True, "place": in_waves, "stages_per_rank": 2}
_LOOPS: dict[str, Any] = {"place": looped, "stages_per_rank": 2}

BUILT_IN = {
    generator.name: generator
    for generator in (
        Generator(name="gpipe", generate=gpipe, is_searched=True, **_FIXED),
        Generator(name="1f1b", generate=one_f_one_b, is_searched=True, repeats=True, is_like_1f1b=True, **_FIXED),
        Generator(name="eager-1f1b", generate=eager_1f1b, **_FIXED),
        Generator(name=BRAIDED, generate=braided_1f1b, repeats=True, **_FIXED),
        Generator(
            name="zb-h1",
            generate=zb_h1,
            is_searched=True,
            splits_backward=True,
            repeats=True,
            is_like_1f1b=True,
            **_FIXED,
        ),
        Generator(
            name="zb",
            version=2,
            generate=_zb,
            uses_costs=True,
            is_searched=True,
            splits_backward=True,
            repeats=True,
            usual="zb-h1",
        ),
        Generator(name="zbv", version=2, generate=_zbv, is_searched=True, is_virtual=True, **_WAVES),
        Generator(name="v-half", version=1, generate=_v_half, **_WAVES),
        Generator(name="v-min", version=1, generate=_v_min, **_WAVES),
        Generator(name="interleaved-1f1b", generate=_interleaved_1f1b, is_virtual=True, **_FIXED, **_LOOPS),
        Generator(
            name="interleaved-zb",
            version=1,
            generate=_interleaved_zb,
            uses_costs=True,
            splits_backward=True,
            is_searched=True,
            is_virtual=True,
            **_LOOPS,
        ),
    )
}
_ROWS = tuple(BUILT_IN.values())

ADAPTIVE = frozenset(row.name for row in _ROWS if row.uses_costs)
"""Built-in schedules that adapt to costs and to the free memory."""

USUAL = {row.name: row.usual for row in _ROWS if row.usual is not None}
"""For adaptive schedules, the one that holds the same bytes if memory suffices. With less memory, the adaptive schedule
still fits without recomputation, but its ranks wait.
"""

SPLITTING = frozenset(row.name for row in _ROWS if row.splits_backward)
REPEATING = frozenset(row.name for row in _ROWS if row.repeats)
LIKE_1F1B = frozenset(row.name for row in _ROWS if row.is_like_1f1b)

SEARCHED = tuple(row.name for row in _ROWS if row.is_searched and row.stages_per_rank == 1)
SEARCHED_VIRTUAL = tuple(row.name for row in _ROWS if row.is_searched and row.stages_per_rank > 1)
"""Schedules that the search tries, with one stage and with several stages per rank."""


def find(name: str, version: int | None = None) -> Generator:
    """The generator ``name``, built in or installed; raises `UserError` for an unknown name or another version."""
    known = BUILT_IN if name in BUILT_IN else installed_generators() | BUILT_IN
    generator = known.get(name)
    if generator is None:
        remedy = nearest(name, tuple(known)) or "known schedules: " + ", ".join(sorted(known))
        raise UserError(what=f"{name!r} is not a schedule", where="schedule", remedy=remedy)
    if version not in (None, generator.version):
        raise UserError(
            what=f"{name} is at version {generator.version} here, the plan was made with version {version}",
            where="schedule",
            remedy="plan again",
        )
    return generator


def stage_ranks(name: str, num_ranks: int, num_stages: int | None = None) -> tuple[int, ...]:
    """The rank of every stage under the schedule ``name``."""
    return find(name).stage_ranks(num_ranks, num_stages)


def to_spec(name: str, inputs: ScheduleInputs) -> ScheduleSpec:
    """The recipe of ``find(name).generate(inputs)``; the counts of ranks, micro-batches and slices are the plan's."""
    return recipe(name, lambda: find(name).generate(inputs))


def recipe(name: str, make: Callable[[], Order]) -> ScheduleSpec:
    """The recipe of the order from ``make`` by the generator ``name``."""
    generator = find(name)
    text = record(make()) if generator.uses_costs else ""
    return ScheduleSpec(generator=name, version=generator.version, text=text)


def order_from_spec(
    spec: ScheduleSpec,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_slices: int,
    num_stages: int | None = None,
    num_remainder_slices: int = 0,
    recomputed: Set[int] = frozenset(),
    recompute_ahead: int = 0,
    recompute_inside: bool = False,
    keep_pairs: bool = True,
) -> Order:
    """The schedule of a recipe, as arrays; ``num_stages`` are the plan's, by default the schedule's usual number.

    A recipe is for equal micro-batches; the last one keeps ``num_remainder_slices`` unless that is 0. Unless it
    includes R itself, its stages keep everything, and the stages ``recomputed`` get an R ``recompute_ahead`` actions
    before every backward, or none if they ``recompute_inside`` (`Order.with_recomputation`). Unless
    ``keep_pairs``, an R may come between the two actions of a pair, which then run one after the other.
    """
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_slices": num_slices}
    if spec.generator == CSV:
        order = from_schedule(imported(spec, **shape), keep_pairs=True)
    elif spec.text:
        order = replay(spec.text, **shape)
    else:
        order = find(spec.generator, spec.version).of_shape(**shape, num_stages=num_stages)
    order = order if keep_pairs or not recomputed else order.unpaired()
    return order.with_remainder(num_remainder_slices).with_recomputation(
        recomputed, recompute_ahead, inside=recompute_inside
    )


def from_spec(
    spec: ScheduleSpec,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_slices: int,
    num_stages: int | None = None,
    num_remainder_slices: int = 0,
    recomputed: Set[int] = frozenset(),
    recompute_ahead: int = 0,
    recompute_inside: bool = False,
    keep_pairs: bool = True,
) -> Schedule:
    """The schedule of a recipe, as objects; the same on every rank."""
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_slices": num_slices}
    if spec.generator == CSV and not recomputed:
        return imported(spec, **shape).with_remainder(num_remainder_slices)
    order = order_from_spec(
        spec,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        num_stages=num_stages,
        num_remainder_slices=num_remainder_slices,
        recomputed=recomputed,
        recompute_ahead=recompute_ahead,
        recompute_inside=recompute_inside,
        keep_pairs=keep_pairs,
    )
    return to_schedule(order)
