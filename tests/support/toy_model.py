"""A model small enough to be exact: every tensor of a slice is a number modulo a prime, and every weight is one number.

    x_0 = e token                               the first stage's input
    k_i = u x_i                                 its key, where the stage has attention
    y_i = v x_i^2 + b x_i + k_i P_i             the stage's output, P_i = sum over j <= i of (j + 2) k_j
    loss = sum of target head y_i^2             on the last stage

A slice depends on all earlier ones in an order that matters, and every saved number takes part in some gradient, so a
wrong order, a stale number or a missing term changes the result. Stages without Linears train neither v nor u.
The expected gradients come from dual numbers, which know nothing of backward passes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.strategies import Case

PRIME = 2**61 - 1


@dataclass(frozen=True, slots=True)
class Dual:
    """A number and its derivative by one weight, modulo the prime."""

    value: int
    slope: int = 0

    def __add__(self, other: Dual) -> Dual:
        return Dual((self.value + other.value) % PRIME, (self.slope + other.slope) % PRIME)

    def __mul__(self, other: Dual) -> Dual:
        slope = self.value * other.slope + self.slope * other.value
        return Dual(self.value * other.value % PRIME, slope % PRIME)


@dataclass(frozen=True, slots=True)
class ToyModel:
    """Weights by name (``v0``, ``u0``, ``b0``, ... by stage, ``e``, ``head``) and one batch of tokens and targets."""

    weights: dict[str, int]
    tokens: dict[tuple[int, int], int]
    targets: dict[tuple[int, int], int]

    def trained(self, case: Case) -> list[str]:
        """The weights that have gradients."""
        stages = [stage for stage, widths in enumerate(case.stages) if widths.has_linears]
        return ["e", "head", *(f"{name}{stage}" for stage in stages for name in "vu")]

    def gradients(self, case: Case) -> dict[str, int]:
        """The exact gradient of every trained weight."""
        return {name: self._loss(case, name).slope for name in self.trained(case)}

    def _loss(self, case: Case, by: str) -> Dual:
        weights = {name: Dual(value, int(name == by)) for name, value in self.weights.items()}
        total = Dual(0)
        for microbatch in range(case.schedule.num_microbatches):
            parts = range(case.schedule.num_slices_of(microbatch))
            values = [weights["e"] * Dual(self.tokens[microbatch, part]) for part in parts]
            for stage, widths in enumerate(case.stages):
                v, u, b = (weights[f"{name}{stage}"] for name in "vub")
                values = _stage(values, v, u, b, attention=bool(widths.attention))
            for part, value in zip(parts, values, strict=True):
                total += Dual(self.targets[microbatch, part]) * weights["head"] * value * value
        return total


def toy_model(case: Case, seed: int) -> ToyModel:
    """Random weights and batch; a tied head is the embedding's copy."""
    rng = random.Random(seed)
    names = ["e", "head", *(f"{name}{stage}" for stage in range(len(case.stages)) for name in "vub")]
    weights = {name: rng.randrange(1, PRIME) for name in names}
    if case.tie:
        weights["head"] = weights["e"]
    counts = map(case.schedule.num_slices_of, range(case.schedule.num_microbatches))
    cells = [(microbatch, part) for microbatch, count in enumerate(counts) for part in range(count)]
    tokens, targets = ({cell: rng.randrange(1, PRIME) for cell in cells} for _ in range(2))
    return ToyModel(weights, tokens, targets)


def position_weight(part: int) -> int:
    """How much slice ``part`` counts in the prefix of later ones."""
    return part + 2


def _stage(inputs: Sequence[Dual], v: Dual, u: Dual, b: Dual, *, attention: bool) -> list[Dual]:
    outputs = []
    prefix = Dual(0)
    for part, x in enumerate(inputs):
        output = v * x * x + b * x
        if attention:
            key = u * x
            prefix += Dual(position_weight(part)) * key
            output += key * prefix
        outputs.append(output)
    return outputs
