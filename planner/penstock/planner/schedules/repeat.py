"""Orders of many micro-batches from orders of few, by repeating a round of P micro-batches in their middle.

**Where.** At some time of a step of few micro-batches, rank r has begun the first a[r] actions of its word. The *round*
from there on consists, for every queue of every rank, of the next P micro-batches, in the order that each rank's word
has. The predecessors of an action of the round were begun before that time, or precede it in the round: the actions
that were begun by some time lack no predecessor, so neither do those plus P micro-batches of each queue, and their
order is a part of one that ran. After the round every queue is P micro-batches further, and the next round finds the
same state as the first. After the last one the word continues as before. So the word with n rounds is a legal order of
n P more micro-batches, and each round ends with as much memory as it began.

**Which time.** If the step repeats itself already, the next actions of each rank are the round. Else some that belong
to the round come later, or others earlier, and have to be moved. Times with the fewest moves are tried first; a round
that exceeds the caps is rejected.

**Which short step.** 1F1B's warm-up and cool-down take K / S micro-batches each, with K ranks and S slices, and orders
with more memory twice as many; `penstock.planner.simulate.periodic.enough_to_repeat` leaves as many between them.
Rounds of P micro-batches only lead to numbers that differ by multiples of P, so each remainder has its own short step.
P = 1 is tried first, then more.

**The gain.** An order of 256 micro-batches of 64 slices over 96 ranks has 4.7 million actions and takes half a minute
to make, its short step a twentieth of that. Since it repeats itself, the simulator also proves its length from a short
one (`penstock.planner.simulate.periodic`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.planner.schedules.pipeline import Ints, Pipeline
from penstock.planner.schedules.refine import Run, Word


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Round:
    """``actions`` [rank, step] of ``num_microbatches`` that may be repeated at ``places`` [rank] of a word."""

    num_microbatches: int
    places: Ints
    actions: Word

    def repeated(self, word: Word, count: int) -> Word:
        """The word with ``count`` more rounds."""
        rows = [
            np.concatenate([row[:place], np.tile(round_actions, count), row[place:]])
            for row, place, round_actions in zip(word, self.places.tolist(), self.actions, strict=True)
        ]
        return np.stack(rows)


def rounds(pipeline: Pipeline, run: Run, num_microbatches: int) -> Iterator[Round]:
    """Rounds of the run's word, those with the fewest moved actions first."""
    word = run[1]
    num_queues = pipeline.first_actions.shape[1]
    units_per_round = num_microbatches * pipeline.num_slices
    length, num_steps = units_per_round * num_queues, word.shape[1]
    if length >= num_steps:
        return
    counts = np.stack([(word == queue).cumsum(axis=1) for queue in range(num_queues)], axis=2)
    counts = np.concatenate([np.zeros((len(word), 1, num_queues), dtype=np.int64), counts], axis=1)
    times = start_times(pipeline, run)
    places = np.stack([np.searchsorted(row, times[0], side="right") for row in times])
    places = places[:, (places <= num_steps - length).all(axis=0)]
    ranks = np.arange(len(word))[:, None]
    num_left = pipeline.num_units - counts[ranks, places]
    places = places[:, (num_left >= units_per_round).all(axis=(0, 2))]
    misplaced = np.abs(counts[ranks, places + length] - counts[ranks, places] - units_per_round).sum(axis=(0, 2))
    for best in np.argsort(misplaced, kind="stable"):
        first = places[:, best]
        yield Round(
            num_microbatches=num_microbatches,
            places=first,
            actions=np.stack(
                [
                    _round_actions(row, place, units_per_round, num_queues)
                    for row, place in zip(word, first, strict=True)
                ]
            ),
        )


def _round_actions(row: Word, place: int, num_units: int, num_queues: int) -> Word:
    """The next ``num_units`` actions of every queue, in their order."""
    rest = row[place:]
    positions = np.sort(np.concatenate([np.flatnonzero(rest == queue)[:num_units] for queue in range(num_queues)]))
    actions: Word = rest[positions]
    return actions


def start_times(pipeline: Pipeline, run: Run) -> Ints:
    """[rank, step]: when each action of the run's word starts."""
    _, word, starts = run
    queues, units = word.astype(np.int64), np.zeros(word.shape, dtype=np.int64)
    for queue in range(pipeline.first_actions.shape[1]):
        is_queue = word == queue
        units[is_queue] = (is_queue.cumsum(axis=1) - 1)[is_queue]
    times: Ints = starts[np.take_along_axis(pipeline.first_actions, queues, axis=1) + units]
    return times
