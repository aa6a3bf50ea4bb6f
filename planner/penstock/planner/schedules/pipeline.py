"""A pipeline with a split backward as flat tables, and its orders as words, for compiled passes over them.

Every rank has a queue for each kind and stage of its own, and takes the units of a queue in turn: unit u of F is slice
u mod S of micro-batch u div S, unit u of I and W is slice S - 1 - (u mod S). So the order of a rank is a *word*: the
queue of each of its actions. Queue ``kind * stages_per_rank + place`` holds F, I or W (0, 1, 2) of the rank's stage
``owned[rank, place]``. Micro-batches never overtake each other within a queue, nor in any published schedule.

Actions are numbered ``(kind * stages + stage) * units + unit``. An action has at most two successors: the same pass of
the neighbouring stage (after a transfer, if that is on another rank), and the first I of a micro-batch after its last F
on the last stage, or W after I. The same tables with successors and predecessors exchanged describe the step in
reversed time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from penstock.core.errors import UserError
from penstock.planner.order import FORWARD, INPUT_GRADIENT, RECOMPUTE, WEIGHT_GRADIENT, Order, join_ranks
from penstock.planner.schedules.inputs import ScheduleInputs, StageTable

Ints = npt.NDArray[np.int64]

F, I, W, R = range(4)  # noqa: E741  the field's own name for the input-gradient pass

CODES = np.array([FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, RECOMPUTE], dtype=np.int32)
"""Codes of the kinds F, I, W and R in an `Order`. Only some pipelines have R
(`penstock.planner.schedules.recomputed`).
"""

TIMES = {"forward_ns": 1, "input_ns": 1, "weight_ns": 1, "send_forward_ns": 0, "send_backward_ns": 0}
STASHES = {"forward_stash": 1, "input_stash": 0, "weight_stash": -1}
"""Tables of `ScheduleInputs`, with the value of each cell of an empty table."""

MOST_STAGES_PER_RANK = 42
"""Limit of queues, which are numbered in eight bits."""

TO_PASS, TO_OTHER = range(2)
"""Columns of links: the same pass of the neighbouring stage, and another pass of the same stage."""


def cost_table(inputs: ScheduleInputs, name: str) -> Ints:
    """[stage, slice] of the table called ``name``; filled with its default if empty."""
    table: StageTable = getattr(inputs, name)
    shape = (inputs.num_stages, inputs.num_slices)
    return np.array(table, dtype=np.int64) if table else np.full(shape, (TIMES | STASHES)[name], dtype=np.int64)


MOST_KEPT_ACTIONS, KEPT_SHAPES = 20_000, 64
"""The tables that do not depend on costs are kept for `KEPT_SHAPES` recent pipelines of at most `MOST_KEPT_ACTIONS`
actions, since a search makes orders of few shapes: 30 MB.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline without its costs: the stages ``owned`` by each rank, ascending, micro-batches and slices."""

    owned: tuple[tuple[int, ...], ...]
    num_microbatches: int
    num_slices: int

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return len(self.owned) * len(self.owned[0])

    @property
    def num_units(self) -> int:
        """Number of (micro-batch, slice) units: the length of every queue."""
        return self.num_microbatches * self.num_slices

    @property
    def num_actions(self) -> int:
        """F, I and W of all units on all stages."""
        return 3 * self.num_stages * self.num_units

    @property
    def owners(self) -> Ints:
        """[stages]: the rank of every stage."""
        owners = np.empty(self.num_stages, dtype=np.int64)
        owners[np.array(self.owned)] = np.arange(len(self.owned))[:, None]
        return owners


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """For each action its successors (-1: none), the nanoseconds of the transfers to them, and its number of
    predecessors.
    """

    successors: npt.NDArray[np.int32]
    delays: Ints
    num_awaited: npt.NDArray[np.int8]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """The tables of one pipeline, as in the module's description.

    ``durations``, ``stash`` (the change in its rank's stash) and ``ranks`` are per action; ``first_actions`` [rank,
    queue] is unit 0 of each queue. ``links`` are those of the step, and those of the step in reversed time. ``mean_ns``
    [5, stage] holds the mean over slices of F, I, W and of both transfers. At most ``most_sent`` messages of a channel
    are under way: ``receive_ahead`` wait for their SEND to end, and as many are received ahead unless receives are
    late.
    """

    shape: Shape
    owned: Ints
    durations: Ints
    stash: Ints
    ranks: npt.NDArray[np.int32]
    first_actions: Ints
    links: tuple[Links, Links]
    mean_ns: Ints
    most_sent: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step."""
        return self.shape.num_microbatches

    @property
    def num_slices(self) -> int:
        """Slices of each micro-batch."""
        return self.shape.num_slices

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.owned)

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank."""
        return int(self.owned.shape[1])

    @property
    def num_units(self) -> int:
        """Number of (micro-batch, slice) units: the length of every queue."""
        return self.shape.num_units

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.shape.num_stages

    @property
    def num_passes(self) -> int:
        """Number of actions of one kind."""
        return self.num_stages * self.num_units

    @property
    def owners(self) -> Ints:
        """[stages]: the rank of every stage."""
        return self.shape.owners

    @property
    def work_ns(self) -> Ints:
        """[ranks]: nanoseconds of all actions of a rank."""
        return np.bincount(self.ranks, weights=self.durations, minlength=self.num_ranks).astype(np.int64)

    def peaks(self, word: npt.NDArray[np.int8]) -> Ints:
        """[ranks]: the most stash held at once."""
        peaks = np.zeros(self.num_ranks, dtype=np.int64)
        _walk(word, self.first_actions, self.stash, peaks)
        return peaks

    def order(self, word: npt.NDArray[np.int8]) -> Order:
        """The word as an order; its number of micro-batches may differ from the pipeline's."""
        units = np.zeros(word.shape, dtype=np.int32)
        _number(word, units)
        kinds, places = np.divmod(word.astype(np.int64), self.stages_per_rank)
        stages = np.take_along_axis(self.owned, places, axis=1)
        microbatches, parts = np.divmod(units, self.num_slices)
        parts = np.where(kinds == F, parts, self.num_slices - 1 - parts)
        rows = np.stack([CODES[kinds], stages, microbatches, parts], axis=2).astype(np.int32)
        return join_ranks(
            list(rows),
            num_stages=self.num_stages,
            num_microbatches=word.shape[1] // (self.first_actions.shape[1] * self.num_slices),
            num_slices=self.num_slices,
        )

    def word(self, order: Order) -> npt.NDArray[np.int8]:
        """The order as a word; the units of each queue have to be in their order. A B counts as I with W directly after
        it.
        """
        places = np.zeros(self.num_stages, dtype=np.int64)
        places[self.owned] = np.arange(self.stages_per_rank)
        word = np.zeros((self.num_ranks, 3 * self.stages_per_rank * self.num_units), dtype=np.int8)
        kinds_of = {FORWARD: (F,), INPUT_GRADIENT: (I,), WEIGHT_GRADIENT: (W,)}
        for rank in range(self.num_ranks):
            steps = range(order.offsets[rank], order.offsets[rank + 1])
            word[rank] = [
                kind * self.stages_per_rank + places[order.stages[step]]
                for step in steps
                for kind in kinds_of.get(int(order.kinds[step]), (I, W))
            ]
        return word


def stages_by_rank(owners: Sequence[int], num_ranks: int) -> Ints:
    """[ranks, stages per rank]: the stages of each rank, ascending; ``owners`` is the rank of every stage."""
    stages: Ints = np.argsort(owners, kind="stable").reshape(num_ranks, -1)
    return stages


def pipeline_of(inputs: ScheduleInputs, owned: Ints) -> Pipeline:
    """The tables of ``inputs`` if rank r has the stages ``owned[r]``, ascending."""
    check_balance(inputs)
    if inputs.stages_per_rank > MOST_STAGES_PER_RANK:
        raise UserError(
            what=f"{inputs.stages_per_rank} stages per rank are more than {MOST_STAGES_PER_RANK}",
            where="schedule",
            remedy="pin fewer stages",
        )
    times = [cost_table(inputs, name) for name in TIMES]
    stashes = [cost_table(inputs, name) for name in STASHES]
    rows = tuple(map(tuple, owned.tolist()))
    shape = Shape(owned=rows, num_microbatches=inputs.num_microbatches, num_slices=inputs.num_slices)
    structure = (_structure if shape.num_actions <= MOST_KEPT_ACTIONS else _structure.__wrapped__)(shape)
    forward = np.arange(inputs.num_units) % inputs.num_slices
    backward = inputs.num_slices - 1 - forward
    parts = (forward, backward, backward)
    delays = _delays(shape, times[3][:, forward], times[4][:, backward])
    return Pipeline(
        shape=shape,
        owned=owned,
        durations=np.concatenate([times[kind][:, parts[kind]].ravel() for kind in (F, I, W)]),
        stash=np.concatenate([stashes[kind][:, parts[kind]].ravel() for kind in (F, I, W)]),
        ranks=structure.ranks,
        first_actions=structure.first_actions,
        links=(
            Links(structure.links[0], delays[0], structure.num_awaited[0]),
            Links(structure.links[1], delays[1], structure.num_awaited[1]),
        ),
        most_sent=inputs.receive_ahead * (1 if inputs.late_receives else 2),
        mean_ns=np.stack([-(-table.sum(axis=1) // inputs.num_slices) for table in times]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Structure:
    """The tables of a `Pipeline` that follow from its shape. ``links`` [direction, action, column] are successors in
    the step and in reversed time, ``num_awaited`` [direction, action] the numbers of predecessors.
    """

    ranks: npt.NDArray[np.int32]
    first_actions: Ints
    links: npt.NDArray[np.int32]
    num_awaited: npt.NDArray[np.int8]


@functools.lru_cache(maxsize=KEPT_SHAPES)
def _structure(shape: Shape) -> _Structure:
    num_stages, num_units, num_slices = shape.num_stages, shape.num_units, shape.num_slices
    actions = np.arange(shape.num_actions).reshape(3, num_stages, num_units)
    links = np.full((2, *actions.shape, 2), -1, dtype=np.int32)
    last, every = num_slices - 1, slice(None, None, num_slices)
    pairs = (
        ((F, slice(0, -1)), (F, slice(1, None)), TO_PASS),
        ((I, slice(1, None)), (I, slice(0, -1)), TO_PASS),
        ((I,), (W,), TO_OTHER),
        ((F, -1, slice(last, None, num_slices)), (I, -1, every), TO_OTHER),
    )
    for before, after, column in pairs:
        for side, (origin, target) in enumerate(((before, after), (after, before))):
            links[side][(*origin, ..., column)] = actions[target]
    flat = links.reshape(2, -1, 2)
    counts = (flat >= 0).sum(axis=2, dtype=np.int8)
    stages = np.array(shape.owned)[:, None, :] + num_stages * np.arange(3)[:, None]
    return _Structure(
        ranks=np.tile(np.repeat(shape.owners.astype(np.int32), num_units), 3),
        first_actions=stages.reshape(len(shape.owned), -1) * num_units,
        links=flat,
        num_awaited=counts[::-1].copy(),
    )


def _delays(shape: Shape, down: Ints, up: Ints) -> Ints:
    """[direction, action, column]: nanoseconds of transfers to successors, in the step and in reversed time; ``down``
    and ``up`` [stage, unit] are those to the next and to the previous stage.
    """
    crosses = (np.diff(shape.owners) != 0)[:, None]
    delays = np.zeros((2, 3, *down.shape, 2), dtype=np.int64)
    delays[0, F, :-1, :, TO_PASS] = delays[1, F, 1:, :, TO_PASS] = down[:-1] * crosses
    delays[0, I, 1:, :, TO_PASS] = delays[1, I, :-1, :, TO_PASS] = up[1:] * crosses
    return delays.reshape(2, -1, 2)


def check_balance(inputs: ScheduleInputs) -> None:
    """Raise `UserError` unless the stash changes of every slice sum to 0."""
    forward, gradient, weight = (cost_table(inputs, name) for name in STASHES)
    if (forward < 0).any() or (forward + gradient < 0).any() or (forward + gradient + weight != 0).any():
        raise UserError(
            what="gives back more or less than was taken",
            where="stash tables",
            remedy="F, I and W of a slice must sum to 0, and F alone, and F with I, be 0 or more",
        )


@numba.njit(cache=True, nogil=True)
def _walk(word: npt.NDArray[np.int8], first_actions: Ints, stash: Ints, peaks: Ints) -> None:
    units = np.zeros(first_actions.shape[1], dtype=np.int64)
    for rank in range(len(word)):
        units[:] = 0
        held = 0
        for queue in word[rank]:
            held += stash[first_actions[rank, queue] + units[queue]]
            units[queue] += 1
            peaks[rank] = max(peaks[rank], held)


@numba.njit(cache=True, nogil=True)
def _number(word: npt.NDArray[np.int8], units: npt.NDArray[np.int32]) -> None:
    """Fill ``units`` with the unit of every action of ``word``."""
    counts = np.zeros(128, dtype=np.int32)
    for rank in range(len(word)):
        counts[:] = 0
        for step in range(word.shape[1]):
            units[rank, step] = counts[word[rank, step]]
            counts[word[rank, step]] += 1
