"""Orders of a split backward with R as an action of its own, which runs where its rank would otherwise wait.

Elsewhere R belongs to its I: it stands directly before it, and orders that are made from costs count its time as a part
of that of I. Here R has a queue of its own. It runs after F of its slice and before I, and occupies the stash that I
frees. `refine` then treats it like any action: a ready R moves before an action that waits, provided that the rank's
stash stays within its cap until the place where R stood. The backward pass moves R behind urgent actions.

Stages that keep everything get an R that takes nothing, so that all ranks have equally many actions; it is left out of
the order.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.planner.order import RECOMPUTE, Order
from penstock.planner.schedules.pipeline import TO_OTHER, F, I, Ints, Links, Pipeline, R
from penstock.planner.schedules.refine import Word, refine

PATIENCES = (0, 50, 100)

MOST_STAGES_PER_RANK = 31
"""Limit of queues of four kinds, which are numbered in eight bits."""


def recomputing(pipeline: Pipeline, recomputed: Set[int], recompute_ns: Ints, remade: Ints) -> Pipeline:
    """The pipeline with R of the stages ``recomputed``, which takes ``recompute_ns`` [stages, slices] and ``remade``
    stash, all of which I gives back.
    """
    num_stages, num_units = pipeline.num_stages, pipeline.num_units
    backward = pipeline.num_slices - 1 - np.arange(num_units) % pipeline.num_slices
    is_recomputed = np.isin(np.arange(num_stages), list(recomputed))[:, None]
    added_ns = np.where(is_recomputed, recompute_ns, 0)[:, backward].ravel()
    taken = np.where(is_recomputed, remade, 0)[:, backward].ravel()
    stash = pipeline.stash.copy()
    stash.reshape(3, -1)[I] -= taken
    return replace(
        pipeline,
        durations=np.concatenate([pipeline.durations, added_ns]),
        stash=np.concatenate([stash, taken]),
        ranks=np.concatenate([pipeline.ranks, pipeline.ranks[: num_stages * num_units]]),
        first_actions=np.concatenate([pipeline.first_actions, (R * num_stages + pipeline.owned) * num_units], axis=1),
        links=_links(pipeline, is_recomputed.ravel(), backward),
    )


def _links(pipeline: Pipeline, is_recomputed: npt.NDArray[np.bool_], backward: Ints) -> tuple[Links, Links]:
    """Both directions of links: R follows F of its slice, and I follows R instead of F. The first I of a micro-batch on
    the last stage belongs to the last slice, so after R it follows the last F as before.
    """
    num_stages, num_units = pipeline.num_stages, pipeline.num_units
    units = np.arange(num_units)
    own_forward = units - units % pipeline.num_slices + backward
    shape, stages = (4, num_stages, num_units, 2), np.flatnonzero(is_recomputed)[:, None]
    actions = np.arange(4 * num_stages * num_units).reshape(shape[:3])
    successors, delays = [], []
    for side, links in enumerate(pipeline.links):
        targets = np.full(shape, -1, dtype=np.int32)
        targets[:R] = links.successors.reshape(R, *shape[1:])
        if side == 0:
            targets[F, stages, own_forward, TO_OTHER] = actions[R, stages, units]
            targets[R, stages, units, TO_OTHER] = actions[I, stages, units]
        else:
            targets[I, stages, units, TO_OTHER] = actions[R, stages, units]
            targets[R, stages, units, TO_OTHER] = actions[F, stages, own_forward]
        successors.append(targets.reshape(-1, 2))
        delays.append(np.concatenate([links.delays, np.zeros((num_stages * num_units, 2), dtype=np.int64)]))
    counts = [(targets >= 0).sum(axis=1, dtype=np.int8) for targets in successors]
    return Links(successors[0], delays[0], counts[1]), Links(successors[1], delays[1], counts[0])


def with_refined_recomputation(
    pipeline: Pipeline, order: Order, recomputed: Set[int], recompute_ns: Ints, remade: Ints, caps: Ints
) -> Order:
    """The order with an R of the stages ``recomputed``, refined within the larger of ``caps`` and the peaks with R
    directly before I. ``pipeline`` and ``order`` contain no R.
    """
    extended = recomputing(pipeline, recomputed, recompute_ns, remade)
    word = _with_recomputations(pipeline.word(order), pipeline.stages_per_rank)
    limits = np.maximum(caps, extended.peaks(word))
    refined = min((refine(extended, word, limits, patience) for patience in PATIENCES), key=lambda run: run[0])[1]
    with_empty = extended.order(refined)
    return with_empty.only((with_empty.kinds != RECOMPUTE) | np.isin(with_empty.stages, list(recomputed)))


def _with_recomputations(word: Word, stages_per_rank: int) -> Word:
    """The word with R directly before every I."""
    rows = []
    for row in word:
        gradients = np.flatnonzero(row // stages_per_rank == I)
        places = row[gradients] % stages_per_rank
        rows.append(np.insert(row, gradients, R * stages_per_rank + places))
    return np.stack(rows)
