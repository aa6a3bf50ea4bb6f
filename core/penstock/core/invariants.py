"""The proof that a Program can run: it ends, every action finds its data, and memory suffices.

There is no choice at run time, so the proof is exact: the Program is run once on the untimed machine, which checks
every instruction (`penstock.core.program_checker`) and every slot's live range and offset (`penstock.core.lifetimes`).

One run also stands for all shards of the ranks (`penstock.core.sharding`). They run the same Program: shard i exchanges
messages with shards i of other ranks, and the shards of a rank meet in an action's collectives and in reductions over
tp. Let the machine's run be the instructions e1, e2, ... If all shards have run e1 to ek, each of them can run e(k+1):
the instructions of other ranks that it waits for are among e1 to ek on the same shard, and the other shards of its rank
have come as far, so they can enter the same collectives. So there is an order in which all shards end. An instruction
that can run stays able to until it does, and no shard has a choice, so they end in every order. Within an overlapped
pair the shards of a rank start the collectives of both children in one order, which follows from the Program alone: the
pair is one action with the collectives of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.core.errors import MemoryLimitError, ProgramError, TooManyKernelsError
from penstock.core.grid import draw
from penstock.core.lifetimes import ViolationError
from penstock.core.program import Program, SlotSizes
from penstock.core.program_checker import Pipeline, ProgramChecker, RankState, Wait
from penstock.core.residency import resident_kernels
from penstock.core.roles import Cell, Place, slot_table
from penstock.core.schedule import Action, Group, Kind, Part, flatten


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Results of the proof. Bytes are per rank.

    ``live_bytes`` is the most that live slots and the transients of one action take together, ``arena_bytes`` the size
    of the arena that holds the slots, ``transient_bytes`` the largest transient of one action.
    """

    num_instructions: int
    num_transfers: int
    num_steps: int
    live_bytes: tuple[int, ...]
    arena_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank needs for slots and transients."""
        return tuple(arena + extra for arena, extra in zip(self.arena_bytes, self.transient_bytes, strict=True))


def prove(
    program: Program,
    *,
    sizes: SlotSizes | None = None,
    remainder_sizes: SlotSizes | None = None,
    num_units: Sequence[int] | None = None,
    num_trained: Sequence[int] | None = None,
    memory_limit_bytes: Sequence[int] | None = None,
    num_places: int | None = None,
) -> Proof:
    """Prove that ``program`` ends, is correct, and fits; raises `ProgramError` with the grid around the first bad cell.

    With ``sizes`` every slot must have exactly those bytes, those of a smaller last micro-batch ``remainder_sizes``;
    without, the slots' own sizes count, and slots that differ only in their micro-batch must be equally large. With
    ``num_units`` the parts of a recomputation have to cover that many units of their stage; without, as many as some
    recomputation of the stage does. With ``num_trained`` the parts of a backward, and the buckets of its gradients,
    have to cover all units of their stage, and so do the parts of a forward.

    ``memory_limit_bytes`` is what each rank has for its arena and transients; `MemoryLimitError` means that only that
    is insufficient. ``num_places`` is the number of communication kernels that a CUDA device runs at once: with it, no
    kernel that can start ever waits for a place (`penstock.core.residency`); `TooManyKernelsError` means that only
    their number is too large.
    """
    pipeline = _survey(program, (sizes, remainder_sizes), num_units, num_trained)
    _check_reductions(program, pipeline.stage_ranks)
    _check_buckets(pipeline)
    checker = ProgramChecker(program, pipeline)
    _run(checker)
    if memory_limit_bytes is not None:
        _check_limits(checker, memory_limit_bytes)
    if num_places is not None:
        _check_places(checker, program, num_places)
    lifetimes = [rank.lifetimes for rank in checker.ranks]
    return Proof(
        num_instructions=sum(len(rank.instructions) for rank in program.ranks),
        num_transfers=checker.num_transfers,
        num_steps=max(rank.step for rank in checker.ranks),
        live_bytes=tuple(slots.high_water_bytes for slots in lifetimes),
        arena_bytes=tuple(rank.arena_bytes for rank in program.ranks),
        transient_bytes=tuple(slots.transient_bytes for slots in lifetimes),
    )


_Table = dict[Place, int]


def _survey(
    program: Program,
    sizes: tuple[SlotSizes | None, SlotSizes | None],
    num_units: Sequence[int] | None,
    num_trained: Sequence[int] | None,
) -> Pipeline:
    owners: dict[int, int] = {}
    recomputed: set[Cell] = set()
    units: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for rank, action in _compute_actions(program):
        owners.setdefault(action.stage, rank)
        if action.kind is Kind.R and action.microbatch is not None and action.slice is not None:
            recomputed.add((action.stage, action.microbatch, action.slice))
        if action.part is not None:
            of_kind = units[action.kind is not Kind.R]
            of_kind[action.stage] = max(of_kind.get(action.stage, 0), action.part.stop)
    if len(owners) != program.num_stages or sorted(owners) != list(range(len(owners))) or not owners:
        raise ProgramError(
            reason=f"the Program has work for stages {sorted(owners)}, not for all of {program.num_stages}"
        )
    if [rank.rank for rank in program.ranks] != list(range(len(program.ranks))):
        raise ProgramError(reason="the ranks are not numbered from 0")
    table, remainder_table = _tables(program, *sizes)
    return Pipeline(
        stage_ranks=tuple(owners[stage] for stage in range(program.num_stages)),
        recomputed=frozenset(recomputed),
        num_units=units[0] if num_units is None else dict(enumerate(num_units)),
        num_microbatches=program.num_microbatches,
        num_slices=len(program.slice_capacities),
        table=table,
        num_remainder_slices=len(program.remainder_capacities),
        remainder_table=remainder_table,
        num_trained=units[1] if num_trained is None else dict(enumerate(num_trained)),
        buckets=_buckets(program),
    )


def _buckets(program: Program) -> dict[int, tuple[Part, ...]]:
    """The parts of the reductions of every stage that has any, from the last units to the first."""
    parts: dict[int, set[Part]] = {}
    for rank in program.ranks:
        for instruction in rank.instructions:
            action = instruction.action
            if action.kind is Kind.START_REDUCE and action.part is not None:
                parts.setdefault(action.stage, set()).add(action.part)
    return {stage: tuple(sorted(own, key=lambda part: -part.stop)) for stage, own in parts.items()}


def _check_buckets(pipeline: Pipeline) -> None:
    """Check that the buckets of every stage are all of its units, once."""
    for stage, buckets in pipeline.buckets.items():
        bounds = [pipeline.num_trained.get(stage, buckets[0].stop), *(part.first for part in buckets)]
        if bounds[-1] or [part.stop for part in buckets] != bounds[:-1]:
            names = ", ".join(map(str, buckets))
            raise ProgramError(reason=f"the reductions of {names} are not all of stage {stage}, once")


def _compute_actions(program: Program) -> Iterator[tuple[int, Action]]:
    for rank in program.ranks:
        for instruction in rank.instructions:
            if instruction.action.is_compute:
                for action in flatten((instruction.action,)):
                    yield rank.rank, action


def _tables(program: Program, sizes: SlotSizes | None, remainder_sizes: SlotSizes | None) -> tuple[_Table, _Table]:
    """Bytes of the slots of a micro-batch, and of a smaller last one."""
    if sizes is not None:
        both = ((sizes, program.slice_capacities), (remainder_sizes or sizes, program.remainder_capacities))
        usual, last = (
            slot_table(of_kind, program.num_stages, slices, prefix_by_slice=program.prefix_by_slice)
            for of_kind, slices in both
        )
        return usual, last
    tables: tuple[_Table, _Table] = ({}, {})
    for rank in program.ranks:
        for slot in rank.slots:
            table = tables[program.is_remainder(slot.microbatch)]
            table.setdefault((slot.kind, slot.stage, slot.slice), slot.num_bytes)
    return tables


def _check_reductions(program: Program, stage_ranks: Sequence[int]) -> None:
    everyone = tuple(range(len(program.ranks)))
    members = {
        Group.TIE: _tied_ranks(program, stage_ranks),
        Group.TP: everyone,
        Group.DP: everyone,
        Group.NORM: everyone,
    }
    groups = [reduction.group for reduction in program.reductions]
    if groups != [group for group in members if group in {*groups, Group.NORM}]:
        names = ", ".join(members)
        raise ProgramError(reason=f"the reductions are {', '.join(groups) or 'none'}; they have to be {names}")
    for reduction in program.reductions:
        if reduction.ranks != members[reduction.group]:
            raise ProgramError(reason=f"the reduction over {reduction.group} must not join the ranks {reduction.ranks}")
    if program.zero and Group.DP not in groups:
        raise ProgramError(
            reason=f"zero {program.zero} divides the optimizer's state between replicas, of which it has one"
        )


def _tied_ranks(program: Program, stage_ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The ranks of the stages with a tied matrix, the first and some last ones; None if the stages are not these. There
    are several ranks, except with replicas: copies on one rank are summed before their sums over replicas.
    """
    last = program.num_stages - 1
    tied = next((reduction.stages for reduction in program.reductions if reduction.group is Group.TIE), ()) or (0, last)
    is_right = len(tied) > 1 and tied[0] == 0 < tied[1] and list(tied[1:]) == list(range(tied[1], last + 1))
    ranks = tuple(sorted({stage_ranks[stage] for stage in tied})) if is_right else ()
    has_replicas = any(reduction.group is Group.DP for reduction in program.reductions)
    return ranks if len(ranks) > 1 or (ranks and has_replicas) else None


def _run(checker: ProgramChecker) -> None:
    """Advance every rank as far as possible until none advances: then all have ended, or it is a deadlock."""
    moved = True
    while moved:
        positions_before = [rank.position for rank in checker.ranks]
        waits = [_guard(checker, rank, checker.advance) for rank in checker.ranks]
        moved = positions_before != [rank.position for rank in checker.ranks]
    if any(waits):
        raise _deadlock(checker, waits)
    for rank in checker.ranks:
        _guard(checker, rank, checker.finish)


_T = TypeVar("_T")


def _guard(checker: ProgramChecker, rank: RankState, act: Callable[[RankState], _T]) -> _T:
    try:
        return act(rank)
    except ViolationError as violation:
        raise _refusal(checker, rank, str(violation)) from None


def _check_limits(checker: ProgramChecker, limits: Sequence[int]) -> None:
    for rank, limit in zip(checker.ranks, limits, strict=True):
        arena, transient = rank.program.arena_bytes, rank.lifetimes.transient_bytes
        if arena + transient > limit:
            reason = f"the arena's {arena} and at most {transient} transient bytes exceed the limit of {limit}"
            raise _refusal(checker, rank, reason, MemoryLimitError)


def _check_places(checker: ProgramChecker, program: Program, num_places: int) -> None:
    for rank, most in zip(checker.ranks, resident_kernels(program), strict=True):
        if most.num_kernels > num_places:
            instructions_before = rank.program.instructions[: most.position]
            num_computed = sum(instruction.action.is_compute for instruction in instructions_before)
            rank.position = most.position
            rank.step = rank.cells[num_computed - 1][0] if num_computed else 0
            reason = (
                f"may be kernel {most.num_kernels} that waits for its peer on a device with places for {num_places}"
            )
            raise _refusal(checker, rank, reason, TooManyKernelsError)


def _deadlock(checker: ProgramChecker, waits: Sequence[Wait | None]) -> ProgramError:
    chain = [next(rank for rank, wait in enumerate(waits) if wait)]
    while (wait := waits[chain[-1]]) and wait.rank not in chain:
        chain.append(wait.rank)
    if wait:
        chain = chain[chain.index(wait.rank) :]
    reasons = [_waiting(checker, rank, waits[rank]) for rank in chain]
    return _refusal(checker, checker.ranks[chain[0]], "deadlock: " + "; ".join(reasons))


def _waiting(checker: ProgramChecker, rank: int, wait: Wait | None) -> str:
    if wait is None:
        return f"rank {rank} has ended"
    pending = checker.ranks[rank].pending
    return f"rank {rank} waits in {pending.action if pending else 'its end'} for rank {wait.rank} {wait.what}"


def _refusal(
    checker: ProgramChecker, bad: RankState, reason: str, kind: type[ProgramError] = ProgramError
) -> ProgramError:
    rows = [{step: str(action) for step, action in rank.cells} for rank in checker.ranks]
    for rank, row in zip(checker.ranks, rows, strict=True):
        if rank.pending is not None:
            row[rank.step + 1] = str(rank.pending.action)
    return kind(
        rank=bad.rank,
        action=str(bad.pending.action) if bad.pending else "end of the Program",
        reason=reason,
        grid=draw(rows, bad.rank, bad.step + 1),
    )
