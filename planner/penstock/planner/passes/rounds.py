"""Pass 1, order: check that every action occurs once, and that they can run in this order; give every action its round.

The round of an action is one more than the latest round among the previous action of its rank and the actions whose
results it needs: the step at which it runs if every action takes one step and messages take none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product

from penstock.core.errors import UserError
from penstock.core.grid import draw
from penstock.core.roles import Cell
from penstock.core.schedule import Action, Kind, Schedule, flatten, without_overlaps

Work = tuple[Kind, int, int, int]
"""Kind (F, R, I or W), stage, micro-batch, slice; a B is an I and a W."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """The compute actions of every rank, their rounds, and facts that later passes need. Overlaps are replaced by their
    children, except pairs that are one instruction.
    """

    rows: tuple[tuple[Action, ...], ...]
    rounds: tuple[tuple[int, ...], ...]
    stage_ranks: tuple[int, ...]
    recomputed: frozenset[Cell]


def find_rounds(schedule: Schedule, num_units: Sequence[int] = (), *, keep_pairs: bool = False) -> Ordered:
    """Check the schedule and find its rounds; raises `UserError` with the grid if it is incomplete or cannot run.

    ``num_units`` has the number of units of every stage with results that R recomputes; by default as many as the parts
    of its R cover. With ``keep_pairs`` the children of a pair have one round: that of the later one.
    """
    rows = tuple(tuple(flatten(actions)) for actions in schedule.ranks)
    stage_ranks = schedule.stage_ranks
    units = dict(enumerate(num_units)) or schedule.recomputed_units
    _check_parts(rows, units)
    counts = Counter(work for row in rows for action in row for work in work_of(action))
    _check_complete(schedule, rows, counts)
    recomputed = frozenset(work[1:] for work in counts if work[0] is Kind.R)
    if keep_pairs:
        rows = tuple(tuple(without_overlaps(actions, keep_pairs=True)) for actions in schedule.ranks)
    rounds = _Rounds(schedule, rows, recomputed, units).find()
    return Ordered(rows, rounds, stage_ranks, recomputed)


def can_join(schedule: Schedule) -> bool:
    """Whether each pair of ``schedule`` can be one instruction: neither action depends on the other, also not through
    other actions.
    """
    if not any(action.is_pair for actions in schedule.ranks for action in actions):
        return True
    try:
        find_rounds(schedule, keep_pairs=True)
    except UserError:
        return False
    return True


def _check_parts(rows: Sequence[Sequence[Action]], num_units: Mapping[int, int]) -> None:
    """Check that the parts of every recomputation are consecutive and cover all units that keep anything."""
    for rank, row in enumerate(rows):
        reached: dict[Cell, int] = {}
        for action in row:
            if action.part is not None:
                cell = cell_of(action)
                if action.part.first != reached.get(cell, 0):
                    raise UserError(
                        what=f"{action} is out of order: unit {reached.get(cell, 0)} is next",
                        where=f"schedule, rank {rank}",
                        remedy="let the parts of a recomputation follow each other, from [0] on",
                    )
                reached[cell] = action.part.stop
        for cell, stop in reached.items():
            if stop != num_units[cell[0]]:
                raise UserError(
                    what=f"{_name((Kind.R, *cell))} ends at unit {stop} of {num_units[cell[0]]}",
                    where=f"schedule, rank {rank}",
                    remedy="give it parts for all units of its stage but a whole head",
                )


def work_of(action: Action) -> tuple[Work, ...]:
    """The pieces of work of a compute action; of the parts of a recomputation, the first counts for all."""
    if action.resumes:
        return ()
    cell = cell_of(action)
    kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
    return tuple((kind, *cell) for kind in kinds)


def cell_of(action: Action) -> Cell:
    """The cell (stage, micro-batch, slice) of a compute action."""
    assert action.microbatch is not None, f"{action} names no micro-batch"
    assert action.slice is not None, f"{action} names no slice"
    return action.stage, action.microbatch, action.slice


def _check_complete(schedule: Schedule, rows: Sequence[Sequence[Action]], counts: Counter[Work]) -> None:
    empty = [rank for rank, row in enumerate(rows) if not row]
    if empty:
        raise UserError(what="has no actions", where=f"schedule, rank {empty[0]}", remedy="leave the rank out")
    for cell in _cells(schedule):
        for kind in (Kind.F, Kind.R, Kind.I, Kind.W):
            count = counts[kind, *cell]
            if count > 1 or (count == 0 and kind is not Kind.R):
                raise UserError(
                    what=f"{_name((kind, *cell))} is " + (f"there {count} times" if count else "missing"),
                    where=f"schedule, rank {schedule.stage_ranks[cell[0]]}",
                    remedy="give every stage, micro-batch and slice one F and either one B or one I and one W",
                )


def _cells(schedule: Schedule) -> Iterator[Cell]:
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.num_microbatches)):
        for part in range(schedule.num_slices_of(microbatch)):
            yield stage, microbatch, part


def _name(work: Work) -> str:
    kind, stage, microbatch, part = work
    return str(Action(kind, stage, microbatch, part))


class _Rounds:
    """Runs the actions of all ranks as soon as they can run, one per round."""

    def __init__(
        self,
        schedule: Schedule,
        rows: Sequence[Sequence[Action]],
        recomputed: Set[Cell],
        num_units: Mapping[int, int],
    ) -> None:
        self.rows = rows
        self.recomputed = recomputed
        self.num_units = num_units
        self.stage_ranks = schedule.stage_ranks
        self.last_stage = schedule.num_stages - 1
        self.num_slices_of = schedule.num_slices_of
        self.done: dict[Work, int] = {}
        self.rounds: list[list[int]] = [[] for _ in rows]

    def find(self) -> tuple[tuple[int, ...], ...]:
        ranks = range(len(self.rows))
        while sum(self._advance(rank) for rank in ranks):
            pass
        for rank in ranks:
            if self._pending(rank) is not None:
                raise self._deadlock(rank)
        return tuple(map(tuple, self.rounds))

    def _advance(self, rank: int) -> bool:
        """Run the rank as far as possible; return whether it advanced."""
        rounds, row = self.rounds[rank], self.rows[rank]
        start = len(rounds)
        while len(rounds) < len(row) and self._run(row[len(rounds)], rounds):
            pass
        return len(rounds) > start

    def _run(self, action: Action, rounds: list[int]) -> bool:
        ready = rounds[-1] if rounds else 0
        for work in self._needs(action):
            done = self.done.get(work)
            if done is None:
                return False
            ready = max(ready, done)
        rounds.append(ready + 1)
        for work in self._gives(action):
            self.done[work] = ready + 1
        return True

    def _gives(self, action: Action) -> tuple[Work, ...]:
        """The work that is done after the action; of the parts of a recomputation only the last completes any."""
        if action.children:
            return tuple(work for child in action.children for work in self._gives(child))
        if action.part is None:
            return work_of(action)
        return ((Kind.R, *cell_of(action)),) if action.part.stop == self.num_units[action.stage] else ()

    def _needs(self, action: Action) -> Iterator[Work]:
        if action.children:
            for child in action.children:
                yield from self._needs(child)
            return
        kind, (stage, microbatch, part) = action.kind, cell_of(action)
        if kind is Kind.F:
            if part > 0:
                yield Kind.F, stage, microbatch, part - 1
            if stage > 0:
                yield Kind.F, stage - 1, microbatch, part
        elif kind is Kind.R:
            yield Kind.F, stage, microbatch, part
        elif kind is Kind.W:
            yield Kind.I, stage, microbatch, part
        else:
            recomputed = (stage, microbatch, part) in self.recomputed
            yield Kind.R if recomputed else Kind.F, stage, microbatch, part
            if part < self.num_slices_of(microbatch) - 1:
                yield Kind.I, stage, microbatch, part + 1
            if stage < self.last_stage:
                yield Kind.I, stage + 1, microbatch, part

    def _pending(self, rank: int) -> Action | None:
        done = len(self.rounds[rank])
        return self.rows[rank][done] if done < len(self.rows[rank]) else None

    def _missing(self, action: Action) -> Work:
        return next(work for work in self._needs(action) if work not in self.done)

    def _deadlock(self, rank: int) -> UserError:
        chain = [rank]
        while (rank := self._waits_for(chain[-1])) not in chain:
            chain.append(rank)
        chain = chain[chain.index(rank) :]
        blocked = self._pending(chain[0])
        return UserError(
            what="; ".join(self._waiting(rank) for rank in chain) + "\n\n" + self._grid(chain[0]),
            where=f"schedule, rank {chain[0]}: {blocked}",
            remedy="F runs in slice and stage order, I in the reverse of both, R between F and I, W after I",
        )

    def _waits_for(self, rank: int) -> int:
        action = self._pending(rank)
        assert action is not None, "a rank that ended has done all its work, so no rank waits for it"
        return self.stage_ranks[self._missing(action)[1]]

    def _waiting(self, rank: int) -> str:
        action = self._pending(rank)
        assert action is not None, "only ranks that wait are in the chain"
        missing = self._missing(action)
        later = ", which comes later on the same rank" if self.stage_ranks[missing[1]] == rank else ""
        return f"rank {rank} has {action} before {_name(missing)} is done{later}"

    def _grid(self, bad: int) -> str:
        rows = [
            {step: str(action) for step, action in zip(rounds, row, strict=False)}
            for rounds, row in zip(self.rounds, self.rows, strict=True)
        ]
        for rank, row in enumerate(rows):
            pending = self._pending(rank)
            if pending is not None:
                row[self._next_step(rank)] = str(pending)
        return draw(rows, bad, self._next_step(bad))

    def _next_step(self, rank: int) -> int:
        return self.rounds[rank][-1] + 1 if self.rounds[rank] else 1
