"""Random answers to what a plan's stages run again, and what follows for Plans."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.core.layout import Operation
from penstock.core.model import ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import Remake, Remakes, full_remakes


def random_remakes(spec: ModelSpec, stages: Sequence[tuple[int, int]], seed: int) -> tuple[Remakes, ...]:
    """For every stage several groups of units with operations of their own; some units, and some stages, have none."""
    rng = random.Random(seed)
    return tuple(tuple(_of_stage(rng, full_remakes(spec, stage))) for stage in stages)


def _of_stage(rng: random.Random, full: Remakes) -> Iterator[Remake]:
    for each in rng.sample(full, len(full)):
        left = each.count
        while left and rng.random() < 0.8:
            count = rng.randint(1, left)
            left -= count
            yield replace(each, count=count, operations=_some(rng, each.operations))


def _some(rng: random.Random, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    chosen = rng.sample(operations, rng.randint(1, len(operations)))
    return tuple(operation for operation in operations if operation in chosen)


def randomly_recomputed(plan: Plan, seed: int) -> Plan:
    """The plan with such remakes: inside its backwards, or by an R up to three actions ahead of them."""
    recompute = random_remakes(plan.model, plan.stages, seed)
    return replace(plan, recompute=recompute, recompute_ahead=seed % 4, recompute_inside=seed % 3 == 0)
