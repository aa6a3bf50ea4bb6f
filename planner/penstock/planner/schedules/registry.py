"""Generators by name, and recipes: a plan stores a schedule as name, version and integers, not as its actions."""

from __future__ import annotations

from itertools import chain, repeat

from penstock.core.errors import UserError
from penstock.core.manifest import nearest
from penstock.core.schedule import Schedule, ScheduleSpec
from penstock.planner.order import Order, from_schedule, to_schedule
from penstock.planner.schedules.generator import Generator, installed_generators
from penstock.planner.schedules.gpipe import gpipe
from penstock.planner.schedules.imported import CSV, imported
from penstock.planner.schedules.inputs import TABLES, ScheduleInputs, StageTable
from penstock.planner.schedules.one_f_one_b import one_f_one_b, zb_h1
from penstock.planner.schedules.zero_bubble import with_best_variant, zb

BUILT_IN = {
    generator.name: generator
    for generator in (
        Generator(name="gpipe", version=1, generate=gpipe, uses_costs=False),
        Generator(name="1f1b", version=1, generate=one_f_one_b, uses_costs=False),
        Generator(name="zb-h1", version=1, generate=zb_h1, uses_costs=False),
        Generator(name="zb", version=1, generate=zb, uses_costs=True, resolve=with_best_variant),
    )
}


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


def to_spec(name: str, inputs: ScheduleInputs) -> ScheduleSpec:
    """The recipe of ``find(name).generate(inputs)``; the counts of ranks, micro-batches and slices are the plan's."""
    generator = find(name)
    return ScheduleSpec(
        generator=name,
        version=generator.version,
        inputs=_recorded(generator.resolve(inputs)) if generator.uses_costs else None,
    )


def _recorded(inputs: ScheduleInputs) -> dict[str, tuple[int, ...]]:
    tables = {name: tuple(chain.from_iterable(getattr(inputs, name))) for name in TABLES}
    kept = {name: values for name, values in tables.items() if values}
    if inputs.caps:
        kept["caps"] = inputs.caps
    if inputs.variant is not None:
        kept["variant"] = (inputs.variant,)
    return kept | {"receive_ahead": (inputs.receive_ahead,)}


def inputs_from_spec(spec: ScheduleSpec, *, num_ranks: int, num_microbatches: int, num_slices: int) -> ScheduleInputs:
    """The inputs recorded by `to_spec`; raises `UserError` for a name or a length that does not belong there."""
    recorded = dict(spec.inputs or {})
    unknown = sorted(set(recorded) - {*TABLES, "caps", "receive_ahead", "variant"})
    if unknown:
        raise UserError(what="unknown input", where=f"schedule.inputs.{unknown[0]}", remedy="plan again")
    caps = recorded.pop("caps", ())
    (receive_ahead,) = recorded.pop("receive_ahead", (2,))
    (variant,) = recorded.pop("variant", (None,))
    tables = {name: _table(name, values, num_slices) for name, values in recorded.items()}
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        caps=caps,
        receive_ahead=receive_ahead,
        variant=variant,
        **tables,
    )


def _table(name: str, values: tuple[int, ...], num_slices: int) -> StageTable:
    if len(values) % num_slices:
        where = f"schedule.inputs.{name}"
        raise UserError(what=f"{len(values)} values do not fill rows of {num_slices} slices", where=where)
    return tuple(zip(*repeat(iter(values), num_slices), strict=True))


def order_from_spec(spec: ScheduleSpec, *, num_ranks: int, num_microbatches: int, num_slices: int) -> Order:
    """The schedule of a recipe, as arrays."""
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_slices": num_slices}
    if spec.generator == CSV:
        return from_schedule(imported(spec, **shape))
    return find(spec.generator, spec.version).generate(inputs_from_spec(spec, **shape))


def from_spec(spec: ScheduleSpec, *, num_ranks: int, num_microbatches: int, num_slices: int) -> Schedule:
    """The schedule of a recipe, as objects: equal on every rank that asks."""
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_slices": num_slices}
    if spec.generator == CSV:
        return imported(spec, **shape)
    return to_schedule(order_from_spec(spec, **shape))
