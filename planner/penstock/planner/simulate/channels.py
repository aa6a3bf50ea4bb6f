"""Channels of a pipeline, which follow from the stages' ranks alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS
from penstock.planner.simulate.costs import TO_NEXT, TO_PREVIOUS

Numbers = npt.NDArray[np.int64]

DIRECTIONS = np.full(len(KINDS), -1, dtype=np.int64)
"""The direction of the message that an action of each kind sends, and of the one that it needs; -1 for none."""
DIRECTIONS[FORWARD] = TO_NEXT
DIRECTIONS[[BACKWARD, INPUT_GRADIENT]] = TO_PREVIOUS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Channels:
    """Channels in the order of `core.program.Program.channels`, by number.

    ``sends`` and ``receives`` [direction, stage] are the channels on which a stage's messages leave and arrive, -1 for
    none: neighbouring stages on one rank need no message.
    """

    sources: Numbers
    targets: Numbers
    sends: Numbers
    receives: Numbers


def channels_of(stage_ranks: Sequence[int]) -> Channels:
    """The channels between stages on these ranks."""
    pairs = list(enumerate(itertools.pairwise(stage_ranks)))
    hops = [(source, target, "F", TO_NEXT, stage, stage + 1) for stage, (source, target) in pairs if source != target]
    hops += [
        (target, source, "B", TO_PREVIOUS, stage + 1, stage) for stage, (source, target) in pairs if source != target
    ]
    names = sorted({hop[:3] for hop in hops})
    sends = np.full((2, len(stage_ranks)), -1, dtype=np.int64)
    receives = sends.copy()
    for source, target, letter, direction, sender, receiver in hops:
        sends[direction, sender] = receives[direction, receiver] = names.index((source, target, letter))
    return Channels(
        sources=np.array([name[0] for name in names], dtype=np.int64),
        targets=np.array([name[1] for name in names], dtype=np.int64),
        sends=sends,
        receives=receives,
    )
