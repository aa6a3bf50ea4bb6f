"""Pins to compare with the planner's own choice. They fix every field, so that plans are only simulated.

There are five sources, the first four of which have a fixed number of pins:

- neighbours of the chosen plan (`tests.support.random_plans.neighbours`);
- the chosen plan with any one field changed, to each value that it can have;
- configurations from `benchmarks/data/published`, for as many devices as the job has;
- the same with stages of equally many layers, as papers have them;
- random ones over every mesh that the devices and the batch allow.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.core.cluster import ClusterSpec
from penstock.core.job import JobSpec, ParallelismSpec
from penstock.core.plan import Plan
from penstock.planner.evaluate import VARIED
from penstock.planner.outlines import MOST_ACTIONS_IN_FULL, NUM_SLICES
from penstock.planner.problem import problem_from_cluster
from penstock.planner.schedules.registry import BUILT_IN, REPEATING, find
from penstock.planner.sizes import divisors
from tests.support.random_plans import full_pin, neighbours

PUBLISHED = Path(__file__).parents[1] / "data" / "published"

CONTINUED = REPEATING | frozenset(map(str, VARIED))
"""Schedules for which only a part of a long step is simulated. Other steps are simulated action by action."""

MOST_ACTIONS = 5 * MOST_ACTIONS_IN_FULL
"""Limit for steps that are simulated action by action. They take a few seconds of one core."""

INTERLEAVED = "interleaved-1f1b"

SWEPT = "9"
"""Setting of TeraPipe that was measured with several numbers of equal slices."""


def pins_around(
    chance: random.Random, spec: JobSpec, cluster: ClusterSpec, free: Plan | None, count: int
) -> list[ParallelismSpec]:
    """``count`` different pins, of which at least a third are random."""
    known: Iterable[ParallelismSpec] = published(spec)
    if free is not None:
        known = itertools.chain(neighbours(free), every_field(spec, free), known)
    shapes = set(_shapes(spec, cluster))
    likely = [pin for pin in dict.fromkeys(known) if _is_possible(spec, pin, shapes) and is_short(spec, pin)]
    pins = dict.fromkeys(chance.sample(likely, min(len(likely), 2 * count // 3)))
    for pin in itertools.islice(random_pins(chance, spec, cluster), 20 * count):
        if len(pins) >= count:
            break
        pins[pin] = None
    return list(pins)


def every_field(spec: JobSpec, plan: Plan) -> Iterator[ParallelismSpec]:
    """Pins of the plan with one field changed. Degrees of the mesh change in pairs, since their product is fixed."""
    here = full_pin(plan)
    for count in NUM_SLICES:
        if count <= spec.data.sequence_length:
            yield dataclasses.replace(here, slices=count)
    for schedule in BUILT_IN:
        yield dataclasses.replace(here, schedule=schedule)
    for batch in divisors(spec.training.global_batch // plan.dp):
        yield dataclasses.replace(here, micro_batch=batch)
    for one, other in itertools.permutations(("dp", "tp", "pp"), 2):
        product = getattr(plan, one) * getattr(plan, other)
        for degree in divisors(product):
            yield dataclasses.replace(here, **{one: degree, other: product // degree})
    yield with_even_stages(spec, here)


def published(spec: JobSpec) -> Iterator[ParallelismSpec]:
    """Pins of papers: tensor and pipeline parallelism, micro-batch, slices, schedule, and as many replicas as fit."""
    ranks, batch = spec.resources.ranks, spec.training.global_batch
    for tp, pp, micro_batch, slices, schedule in dict.fromkeys(itertools.chain(_of_a100s(), _of_terapipe())):
        dp = ranks // (tp * pp)
        if dp * tp * pp != ranks or batch % (dp * micro_batch) or not spec.model.can_be_sharded(tp):
            continue
        pin = ParallelismSpec(dp=dp, tp=tp, pp=pp, micro_batch=micro_batch, slices=slices, schedule=schedule)
        yield pin
        yield with_even_stages(spec, pin)


def _of_a100s() -> Iterator[tuple[int, int, int, int, str]]:
    for row in _rows("a100_steps.csv"):
        name = INTERLEAVED if row["schedule"] == "interleaved" else row["schedule"]
        yield int(row["tp"]), int(row["pp"]), int(row["microbatch"]), 1, name


def _of_terapipe() -> Iterator[tuple[int, int, int, int, str]]:
    """Settings of TeraPipe, with the authors' numbers of slices, including those of the sweep."""
    sweep = [int(row["num_slices"]) for row in _rows("terapipe_setting9_uniform.csv")]
    for row in _rows("terapipe_v100.csv"):
        counts = {1, _count(row["slices_with"]) or 1, *(sweep if row["setting"] == SWEPT else ())}
        for count in sorted(counts):
            yield int(row["tp"]), int(row["pp"]), 1, count, "gpipe"


def _count(lengths: str) -> int:
    """Number of slices in a string like "4x120+64"; 0 if it is empty."""
    return sum(int(part.partition("x")[0]) if "x" in part else 1 for part in lengths.split("+") if part)


def _rows(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open(newline="") as file:
        return list(csv.DictReader(file))


def with_even_stages(spec: JobSpec, pin: ParallelismSpec) -> ParallelismSpec:
    """The pin with about equally many layers on every stage, or half layers if there are more stages than layers."""
    num_stages = _num_stages(pin)
    halves, rest = divmod(2 * spec.model.layers, num_stages)
    if halves >= 2:
        layers, rest = divmod(spec.model.layers, num_stages)
        return dataclasses.replace(pin, stages=tuple(float(layers + (i < rest)) for i in range(num_stages)))
    return dataclasses.replace(pin, stages=tuple((halves + (i < rest)) / 2 for i in range(num_stages)))


def random_pins(chance: random.Random, spec: JobSpec, cluster: ClusterSpec) -> Iterator[ParallelismSpec]:
    """Endless random pins, if there is any mesh. All meshes are equally likely, and steps simulate in seconds."""
    shapes = list(_shapes(spec, cluster))
    while shapes:
        dp, tp, pp = chance.choice(shapes)
        pin = ParallelismSpec(
            dp=dp,
            tp=tp,
            pp=pp,
            micro_batch=chance.choice(divisors(spec.training.global_batch // dp)),
            slices=chance.choice([count for count in NUM_SLICES if count <= spec.data.sequence_length]),
            schedule=chance.choice(list(BUILT_IN)),
        )
        if _num_stages(pin) <= spec.model.num_units and is_short(spec, pin):
            yield pin


def _shapes(spec: JobSpec, cluster: ClusterSpec) -> Iterator[tuple[int, int, int]]:
    ranks, batch = spec.resources.ranks, spec.training.global_batch
    for tp in problem_from_cluster(spec, cluster).tp_degrees:
        for pp in divisors(ranks // tp) if ranks % tp == 0 else ():
            dp = ranks // (tp * pp)
            if pp <= spec.model.num_units and batch % dp == 0:
                yield dp, tp, pp


def _is_possible(spec: JobSpec, pin: ParallelismSpec, shapes: set[tuple[int, int, int]]) -> bool:
    dp, tp, pp, micro_batch, _, _ = _values(pin)
    has_shape = (dp, tp, pp) in shapes and _num_stages(pin) <= spec.model.num_units
    return has_shape and spec.training.global_batch // dp % micro_batch == 0


def is_short(spec: JobSpec, pin: ParallelismSpec) -> bool:
    """Whether the pinned step is periodic, or has few enough actions to be simulated in full."""
    dp, _, _, micro_batch, slices, schedule = _values(pin)
    num_actions = 3 * _num_stages(pin) * (spec.training.global_batch // (dp * micro_batch)) * slices
    return schedule in CONTINUED or num_actions <= MOST_ACTIONS


def _num_stages(pin: ParallelismSpec) -> int:
    _, _, pp, _, _, schedule = _values(pin)
    return pp * find(schedule).per_rank(pp, None)


def _values(pin: ParallelismSpec) -> tuple[int, int, int, int, int, str]:
    match pin:
        case ParallelismSpec(
            dp=int(dp), tp=int(tp), pp=int(pp), micro_batch=int(micro_batch), slices=int(slices), schedule=str(schedule)
        ):
            return dp, tp, pp, micro_batch, slices, schedule
    raise AssertionError(f"not everything is pinned: {pin}")
