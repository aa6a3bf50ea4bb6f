"""Program checker: runs a Program on an untimed machine and checks the state that every instruction finds.

Problem. A Program is one list of instructions per rank. It is correct if no rank waits forever, every action reads the
data that the model requires, every message meets the receive that was posted for it, and no two slots in use overlap.
This has to hold at any speeds of devices and links, and there are too many interleavings to try all.

Idea. One run is enough. A rank runs its instructions in order. Three kinds wait for another rank: WAIT_RECV until the
message was sent, WAIT_SEND until the peer posted its receive, WAIT_REDUCE until every rank of its group has started the
reduction. SEND, POST_RECV, START_REDUCE and START_GATHER never wait. Replicas and shards run the same Program, so a
reduction or gather over them (dp, tp) has been started by all once it was started here. A rank makes no choice, and a
condition that it waits for stays true once it is true. So the order of instructions on different ranks changes neither
what an instruction finds nor which instructions run: one run of this machine stands for all (as for Kahn process
networks, 1974). If no rank can advance and one has not ended, the Program deadlocks at any speed.

Example: two stages on two ranks, one micro-batch of one slice, without reductions and frees.

    rank 0   0POST_RECV_B0  0F0            0SEND_F0  0WAIT_RECV_B0  0B0        0WAIT_SEND_F0
    rank 1   1POST_RECV_F0  1WAIT_RECV_F0  1F0       1B0            1SEND_B0   1WAIT_SEND_B0

The first sweep advances rank 0 to 0WAIT_RECV_B0: 0F0 has filled ``y``, as 0SEND_F0 requires. Then rank 1 runs to its
end: its message was sent, and rank 0 posted the receive that 1WAIT_SEND_B0 waits for. The second sweep ends rank 0. If
1SEND_B0 came before 1B0, it would send an empty slot, which is a violation. If 0WAIT_RECV_B0 came before 0F0, no rank
would advance: rank 0 waits for a gradient and rank 1 for the activation that it is made of.

Complexity. Every instruction runs once, in time proportional to the slots that it touches. A rank that waits is tried
again once per sweep over the ranks.

Rejected: a run of the simulator, which shows one interleaving and depends on costs; a search over interleavings, which
finds nothing that this run does not.

The contents of a slot are a count: 0 is nothing; ``kv`` and ``dkv`` of a whole micro-batch hold as many slices as were
added, in their only allowed order; any other slot is full at 1. The owner of the data follows from the slot's name,
which is checked for every instruction. Where every slice has its own ``kv`` and ``dkv``, the actions themselves have to
come in the order of slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from penstock.core.lifetimes import Lifetimes, ViolationError
from penstock.core.program import Channel, Instruction, Program, RankProgram, Slot
from penstock.core.reducing import Buckets, Reducing
from penstock.core.roles import DKV, G_IN, G_OUT, KV, Cell, Place, Roles, SlotName, X, Y
from penstock.core.schedule import BACKWARD_KINDS, COMPUTE_KINDS, Action, Kind, Part

_FORWARD, _RECOMPUTE, _INPUT, _WEIGHT = 1, 2, 4, 8

_DOES = {Kind.F: _FORWARD, Kind.R: _RECOMPUTE, Kind.I: _INPUT, Kind.W: _WEIGHT, Kind.B: _INPUT | _WEIGHT}
"""The parts of its cell's work that an action does, and below, those that have to precede it."""

_NEEDS = {Kind.F: 0, Kind.R: _FORWARD, Kind.I: _FORWARD, Kind.B: _FORWARD, Kind.W: _INPUT}

_MESSAGE_SLOTS = {
    Kind.SEND_F: Y,
    Kind.WAIT_SEND_F: Y,
    Kind.POST_RECV_F: X,
    Kind.WAIT_RECV_F: X,
    Kind.SEND_B: G_OUT,
    Kind.WAIT_SEND_B: G_OUT,
    Kind.POST_RECV_B: G_IN,
    Kind.WAIT_RECV_B: G_IN,
}

_SENDER_KINDS = {"F": (Kind.SEND_F, Kind.WAIT_SEND_F), "B": (Kind.SEND_B, Kind.WAIT_SEND_B)}
_RECEIVER_KINDS = {"F": (Kind.POST_RECV_F, Kind.WAIT_RECV_F), "B": (Kind.POST_RECV_B, Kind.WAIT_RECV_B)}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Facts about a pipeline from a Program's compute actions, and the required bytes of its slots.

    ``num_units`` has, by stage, the number of units that the parts of a recomputation have to cover, ``num_trained``
    the number that the parts of a backward have to. ``buckets`` are those of the reductions. A smaller last micro-batch
    has ``num_remainder_slices`` and the slots of ``remainder_table``.
    """

    stage_ranks: tuple[int, ...]
    recomputed: frozenset[Cell]
    num_units: Mapping[int, int]
    num_microbatches: int
    num_slices: int
    table: Mapping[Place, int]
    num_remainder_slices: int = 0
    remainder_table: Mapping[Place, int] = field(default_factory=dict)
    num_trained: Mapping[int, int] = field(default_factory=dict)
    buckets: Buckets = field(default_factory=dict)

    @property
    def num_cells(self) -> int:
        """Number of (micro-batch, slice) cells."""
        missing = self.num_slices - self.num_remainder_slices if self.num_remainder_slices else 0
        return self.num_microbatches * self.num_slices - missing

    def is_remainder(self, microbatch: int | None) -> bool:
        """Whether the micro-batch is the smaller last one."""
        return self.num_remainder_slices > 0 and microbatch == self.num_microbatches - 1

    def num_slices_of(self, microbatch: int | None) -> int:
        """Number of slices of a micro-batch."""
        return self.num_remainder_slices if self.is_remainder(microbatch) else self.num_slices

    def bytes_of(self, slot: Slot) -> int:
        """The required bytes of a slot with that name; 0 if there is none."""
        table = self.remainder_table if self.is_remainder(slot.microbatch) else self.table
        return table.get((slot.kind, slot.stage, slot.slice), 0)


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a rank waits: ``rank`` has to do ``what`` first."""

    rank: int
    what: str


class _End(NamedTuple):
    """One end of a transfer: its slot, and the step of the grid at which it was sent or posted."""

    slot_index: int
    name: SlotName
    num_bytes: int
    step: int


@dataclass(slots=True)
class _Line:
    """The messages of one channel so far, first-in first-out."""

    channel: Channel
    sent: list[_End] = field(default_factory=list)
    posted: list[_End] = field(default_factory=list)


class RankState:
    """One rank of the machine. ``cells`` are its compute actions so far with their steps in the grid. ``unfinished`` is
    the action that has run in part, if its parts share memory that is no slot: that of buffers that a forward gives up,
    or that a backward recomputes inside it.
    """

    def __init__(self, program: RankProgram, bytes_of: Callable[[Slot], int], reducing: Reducing) -> None:
        self.rank = program.rank
        self.program = program
        self.lifetimes = Lifetimes(program, bytes_of)
        self.names: list[SlotName] = [(s.kind, s.stage, s.microbatch, s.slice) for s in program.slots]
        self.contents = [0] * len(program.slots)
        self.position = 0
        self.step = 0
        self.cells: list[tuple[int, Action]] = []
        self.unfinished: tuple[Kind, Cell] | None = None
        self.reducing = reducing

    @property
    def pending(self) -> Instruction | None:
        """The next instruction; None at the end."""
        instructions = self.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None


class ProgramChecker:
    """Runs a Program; `advance` moves one rank and raises `ViolationError` at the first violation."""

    def __init__(self, program: Program, pipeline: Pipeline) -> None:
        owners, num_cells = pipeline.stage_ranks, pipeline.num_cells
        gathers = program.zero > 0
        self.ranks = [
            RankState(
                rank,
                pipeline.bytes_of,
                Reducing(rank.rank, program.reductions, owners, num_cells, gathers=gathers, buckets=pipeline.buckets),
            )
            for rank in program.ranks
        ]
        self.pipeline = pipeline
        self._roles = Roles(owners, pipeline.num_slices, pipeline.table)
        self._remainder_roles = Roles(owners, pipeline.num_remainder_slices, pipeline.remainder_table)
        self._members = {reduction.group: reduction.ranks for reduction in program.reductions}
        self._lines = _lines(pipeline.stage_ranks)
        self._done: dict[Cell, int] = {}
        self._remade: dict[Cell, int] = {}
        self._forwarded: dict[Cell, int] = {}
        self._trained: dict[Cell, tuple[Kind, int]] = {}
        self.num_transfers = 0
        self._waits: dict[Kind, Callable[[RankState, Instruction], Wait | None]] = {
            Kind.WAIT_RECV_F: self._await_send,
            Kind.WAIT_RECV_B: self._await_send,
            Kind.WAIT_SEND_F: self._await_post,
            Kind.WAIT_SEND_B: self._await_post,
            Kind.WAIT_REDUCE: self._await_group,
        }
        self._effects: dict[Kind, Callable[[RankState, Instruction], None]] = {
            **dict.fromkeys((*COMPUTE_KINDS, Kind.OVERLAP), self._compute),
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.POST_RECV_F: self._post,
            Kind.POST_RECV_B: self._post,
            Kind.WAIT_RECV_F: self._receive,
            Kind.WAIT_RECV_B: self._receive,
            Kind.WAIT_SEND_F: self._sent,
            Kind.WAIT_SEND_B: self._sent,
            Kind.FREE: _nothing,
            Kind.START_REDUCE: self._start_reduction,
            Kind.WAIT_REDUCE: self._reduced,
            Kind.STEP: self._optimize,
            Kind.START_GATHER: self._start_gather,
            Kind.WAIT_GATHER: self._gathered,
        }

    def advance(self, rank: RankState) -> Wait | None:
        """Run ``rank`` until it ends (None) or has to wait."""
        while (instruction := rank.pending) is not None:
            kind = instruction.action.kind
            if kind not in self._effects:
                raise ViolationError("is not an instruction")
            wait = self._waits[kind](rank, instruction) if kind in self._waits else None
            if wait is not None:
                return wait
            rank.lifetimes.run(instruction)
            self._effects[kind](rank, instruction)
            rank.position += 1
        return None

    def finish(self, rank: RankState) -> None:
        """Require that a rank at its end has done all its work and left nothing."""
        rank.lifetimes.finish()
        if not rank.reducing.is_stepped:
            raise ViolationError("ends without STEP")

    # Compute: each action once, in order, on the right slots, which hold what it needs. The children of a pair run in
    # turns, a part of one and a part of the other: each finds the contents from before both began.

    def _compute(self, rank: RankState, instruction: Instruction) -> None:
        action = instruction.action
        if (action.kind is Kind.OVERLAP or action.children) and not action.is_pair:  # other kinds have no children
            raise ViolationError("is no forward and backward of different micro-batches")
        children = {child.microbatch: (child, self._cell(rank, child)) for child in action.children or (action,)}
        for child, cell in children.values():
            if child.kind is Kind.F:
                rank.reducing.require_gathered(child)
            self._require_turn(child, cell)
            self._require_memory(rank, action, child, cell)
        for child, cell in children.values():
            self._take_turn(rank, child, cell)
        under_way = {child.microbatch for child, cell in children.values() if self._goes_on(child)}
        touched = [self._touched(child, cell) for child, cell in children.values()]
        _check_names(rank, "read", instruction.reads, [name for reads, _ in touched for name in reads])
        _check_names(rank, "write", instruction.writes, [name for _, writes in touched for name in writes])
        for index in instruction.reads:
            child, cell = children[rank.names[index][2]]
            self._check_content(rank, index, child.kind, cell)
        for index in instruction.writes:
            child, cell = children[rank.names[index][2]]
            self._fill(rank, index, cell, resumes=child.resumes, under_way=child.microbatch in under_way)
        rank.step += 1
        rank.cells.append((rank.step, action))

    def _cell(self, rank: RankState, action: Action) -> Cell:
        pipeline, cell = self.pipeline, (action.stage, action.microbatch, action.slice)
        num_slices = pipeline.num_slices_of(action.microbatch)
        limits = (len(pipeline.stage_ranks), pipeline.num_microbatches, num_slices)
        if any(value is None or not 0 <= value < limit for value, limit in zip(cell, limits, strict=True)):
            raise ViolationError(
                "is not work of a pipeline of {} stages, {} micro-batches and {} slices".format(*limits)
            )
        if pipeline.stage_ranks[action.stage] != rank.rank:
            raise ViolationError(f"belongs to a stage of rank {pipeline.stage_ranks[action.stage]}")
        return cast(Cell, cell)

    def _touched(self, action: Action, cell: Cell) -> tuple[list[SlotName], list[SlotName]]:
        """The slots that the action reads and writes."""
        stage, microbatch, part = cell
        touched = self._roles_of(microbatch).touched(
            action.kind, stage, part, cell in self.pipeline.recomputed, action.resumes
        )
        reads, writes = (
            [(kind, stage_of_slot, microbatch, slice_) for kind, stage_of_slot, slice_ in places]
            for places in (touched.reads, touched.writes)
        )
        return reads, writes

    def _roles_of(self, microbatch: int) -> Roles:
        return self._remainder_roles if self.pipeline.is_remainder(microbatch) else self._roles

    def _require_turn(self, action: Action, cell: Cell) -> None:
        done, does, needs = self._done.get(cell, 0), _DOES[action.kind], _NEEDS[action.kind]
        if cell in self.pipeline.recomputed and does & _INPUT:
            needs |= _RECOMPUTE
        if done & does or self._was_begun(action, cell):
            raise ViolationError("does work that was done before")
        if done & needs != needs:
            raise ViolationError(f"runs before the {_names_of(needs & ~done)} of its slice")
        self._require_order(cell, does)

    def _require_order(self, cell: Cell, does: int) -> None:
        """Forwards in the order of slices, backwards in the reverse order, where each slice has its own keys."""
        stage, microbatch, part = cell
        roles = self._roles_of(microbatch)
        if not roles.needs_order(stage):
            return
        if does & _FORWARD and part and not self._done.get((stage, microbatch, part - 1), 0) & _FORWARD:
            raise ViolationError("runs before the F of the slice before it")
        if does & _INPUT and not roles.is_last(part) and not self._done.get((stage, microbatch, part + 1), 0) & _INPUT:
            raise ViolationError("runs before the I of the slice after it")

    def _require_memory(self, rank: RankState, action: Action, child: Action, cell: Cell) -> None:
        """Forwards that give up buffers, and recomputations inside backwards, use the same memory: nothing else runs
        until one has ended.
        """
        if rank.unfinished not in (None, (child.kind, cell)):
            kind, of = rank.unfinished
            raise ViolationError(f"runs between parts of {Action(kind, *of)}, which share memory that is no slot")
        if not self._gives_up_buffers(child.kind, cell):
            return
        if action.children and child.kind is not Kind.F:
            raise ViolationError(f"has the memory of its forward, which {child} needs for its recomputation")
        rank.unfinished = (child.kind, cell) if self._goes_on(child) else None

    def _gives_up_buffers(self, kind: Kind, cell: Cell) -> bool:
        """Whether the action needs memory that is no slot: a forward of a slice that is recomputed, or a backward that
        recomputes it inside.
        """
        stage, microbatch, part = cell
        is_inside = kind in BACKWARD_KINDS and cell not in self.pipeline.recomputed
        return (kind is Kind.F or is_inside) and self._roles_of(microbatch).remakes(stage, part)

    def _was_begun(self, action: Action, cell: Cell) -> bool:
        """Whether parts of another action have done some of its work."""
        if not _DOES[action.kind] & (_INPUT | _WEIGHT):
            return action.part is None and cell in (self._remade if action.kind is Kind.R else self._forwarded)
        kind, _ = self._trained.get(cell, (action.kind, 0))
        return kind is not action.kind or (action.part is None and cell in self._trained)

    def _take_turn(self, rank: RankState, action: Action, cell: Cell) -> None:
        does, part = _DOES[action.kind], action.part
        if part is None or self._take_part(part, cell, action.kind):
            self._done[cell] = self._done.get(cell, 0) | does
        if does & _WEIGHT:
            rank.reducing.add(cell[0], cell[1:], 0 if part is None else part.first)

    def _take_part(self, part: Part, cell: Cell, kind: Kind) -> bool:
        """Run a part of the cell's work; return whether it was the last."""
        if kind is Kind.R:
            return self._remake(part, cell)
        if kind is Kind.F:
            return self._run_forward(part, cell)
        if kind is Kind.I:
            raise ViolationError("is for a part of its stage, which only F, R, B and W may be")
        return self._train(part, cell, kind)

    def _goes_on(self, action: Action) -> bool:
        """Whether the action is a part of a forward or backward and not the last one, after which what it writes is
        complete.
        """
        if action.part is None or action.kind is Kind.R:
            return False
        if action.kind is Kind.F:
            return action.part.stop < self.pipeline.num_trained[action.stage]
        return action.part.first > 0

    def _run_forward(self, part: Part, cell: Cell) -> bool:
        """Run a part of the cell's forward, from the first unit to the last; return whether it was the last."""
        reached, num_units = self._forwarded.get(cell, 0), self.pipeline.num_trained[cell[0]]
        if part.first != reached or part.stop > num_units:
            raise ViolationError(f"begins at unit {part.first} of {num_units} where unit {reached} is next")
        self._forwarded[cell] = part.stop
        return part.stop == num_units

    def _train(self, part: Part, cell: Cell, kind: Kind) -> bool:
        """Run a part of the cell's backward, from the last unit to the first; return whether it was the last."""
        _, reached = self._trained.get(cell, (kind, self.pipeline.num_trained[cell[0]]))
        if part.stop != reached:
            raise ViolationError(f"ends at unit {part.stop} where the units before {reached} are next")
        self._trained[cell] = (kind, part.first)
        return part.first == 0

    def _remake(self, part: Part, cell: Cell) -> bool:
        """Recompute a part of the cell's units; return whether it was the last."""
        remade, num_units = self._remade.get(cell, 0), self.pipeline.num_units[cell[0]]
        if part.first != remade:
            raise ViolationError(f"makes unit {part.first} again where unit {remade} is next")
        if part.stop > num_units:
            raise ViolationError(f"makes units up to {part.stop} again of a stage that keeps {num_units}")
        self._remade[cell] = part.stop
        return part.stop == num_units

    def _check_content(self, rank: RankState, index: int, kind: Kind, cell: Cell) -> None:
        (slot, *_, of_slice), held = rank.names[index], rank.contents[index]
        _, microbatch, part = cell
        if of_slice is not None:
            has_content = held == 1
        elif slot is KV:
            has_content = held == part if kind is Kind.F else held > part
        elif slot is DKV:
            has_content = held == self.pipeline.num_slices_of(microbatch) - 1 - part
        else:
            has_content = held == 1
        if not has_content:
            raise ViolationError(f"reads {rank.program.slots[index]}, which {_holds(rank.names[index], held)}")

    def _fill(self, rank: RankState, index: int, cell: Cell, *, resumes: bool, under_way: bool) -> None:
        """Fill a slot; a recomputation that ``resumes`` continues in the slots that the first part filled. The last
        part of a forward or backward fills its slots; its other parts are ``under_way``.
        """
        (slot, *_, of_slice), held = rank.names[index], rank.contents[index]
        _, microbatch, part = cell
        num_added = self.pipeline.num_slices_of(microbatch) - 1 - part
        turn = int(resumes)
        if of_slice is None:
            turn = {KV: part, DKV: num_added}.get(slot, turn)
        elif slot is DKV:
            turn = min(num_added, 1)
        if held != turn:
            raise ViolationError(f"writes {rank.program.slots[index]}, which {_holds(rank.names[index], held)}")
        if not under_way:
            rank.contents[index] = held + 1 if of_slice is None and slot in (KV, DKV) else 1

    # Transfers: numbered per channel on both sides, equal slots and bytes, each awaited once.

    def _send(self, rank: RankState, instruction: Instruction) -> None:
        line = self._line(rank, instruction)
        end = self._end(rank, instruction, instruction.reads, len(line.sent))
        if rank.contents[end.slot_index] != 1:
            raise ViolationError(f"sends {_text(end.name)}, which holds nothing")
        line.sent.append(end)

    def _post(self, rank: RankState, instruction: Instruction) -> None:
        line = self._line(rank, instruction)
        end = self._end(rank, instruction, instruction.writes, len(line.posted))
        if rank.contents[end.slot_index]:
            raise ViolationError(f"receives into {_text(end.name)}, which is full")
        line.posted.append(end)

    def _await_send(self, rank: RankState, instruction: Instruction) -> Wait | None:
        line = self._line(rank, instruction)
        if instruction.sequence >= len(line.sent):
            return Wait(line.channel.source, f"to send message {instruction.sequence} of {line.channel}")
        return None

    def _await_post(self, rank: RankState, instruction: Instruction) -> Wait | None:
        line = self._line(rank, instruction)
        if instruction.sequence >= len(line.posted):
            return Wait(line.channel.target, f"to post the receive of message {instruction.sequence} of {line.channel}")
        return None

    def _receive(self, rank: RankState, instruction: Instruction) -> None:
        line = self._line(rank, instruction)
        sent, posted = line.sent[instruction.sequence], line.posted[instruction.sequence]
        _check_same_work(instruction, posted.name)
        kind, stage, microbatch, part = posted.name
        expected = (Y, stage - 1, microbatch, part) if kind is X else (G_OUT, stage + 1, microbatch, part)
        if sent.name != expected:
            raise ViolationError(f"receives {_text(sent.name)} where {_text(expected)} is expected")
        if sent.num_bytes != posted.num_bytes:
            raise ViolationError(
                f"receives {sent.num_bytes} bytes into {posted.num_bytes} bytes of {_text(posted.name)}"
            )
        rank.contents[posted.slot_index] = 1
        self.num_transfers += 1
        rank.step = max(rank.step, sent.step)

    def _sent(self, rank: RankState, instruction: Instruction) -> None:
        line = self._line(rank, instruction)
        _check_same_work(instruction, line.sent[instruction.sequence].name)
        rank.step = max(rank.step, line.posted[instruction.sequence].step)

    def _line(self, rank: RankState, instruction: Instruction) -> _Line:
        """The line on which ``rank`` exchanges this message."""
        action = instruction.action
        line = self._lines.get((action.kind, action.stage, rank.rank))
        if line is None:
            raise ViolationError("has no rank to exchange this message with")
        if instruction.channel != line.channel:
            raise ViolationError(f"uses channel {instruction.channel} instead of {line.channel}")
        return line

    def _end(self, rank: RankState, instruction: Instruction, indices: tuple[int, ...], number: int) -> _End:
        if instruction.sequence != number:
            raise ViolationError(f"is number {instruction.sequence} of {instruction.channel}, where {number} is next")
        if len(indices) != 1 or len(instruction.reads) + len(instruction.writes) != 1:
            raise ViolationError("does not transfer exactly one slot")
        index = indices[0]
        _check_same_work(instruction, rank.names[index])
        return _End(index, rank.names[index], rank.program.slots[index].num_bytes, rank.step)

    # Reductions and the end of the step.

    def _start_reduction(self, rank: RankState, instruction: Instruction) -> None:
        rank.reducing.start(instruction.action)

    def _await_group(self, rank: RankState, instruction: Instruction) -> Wait | None:
        """The first rank of the group that has not started the reduction; None for a group of peers."""
        group = rank.reducing.require_started(instruction.action)
        for member in () if group.is_of_peers else self._members[group]:
            if not self.ranks[member].reducing.has_started(group):
                return Wait(member, f"to reach START_REDUCE({group})")
        return None

    def _reduced(self, rank: RankState, instruction: Instruction) -> None:
        rank.reducing.finish(instruction.action)

    def _optimize(self, rank: RankState, instruction: Instruction) -> None:
        rank.reducing.step()

    def _start_gather(self, rank: RankState, instruction: Instruction) -> None:
        rank.reducing.start_gather(instruction.action)

    def _gathered(self, rank: RankState, instruction: Instruction) -> None:
        rank.reducing.finish_gather(instruction.action)


def _lines(stage_ranks: Sequence[int]) -> dict[tuple[Kind, int, int], _Line]:
    """The line of every kind of transfer, stage, and rank of that stage."""
    lines: dict[Channel, _Line] = {}
    by_transfer: dict[tuple[Kind, int, int], _Line] = {}
    for direction, step in (("F", 1), ("B", -1)):
        for sender, source in enumerate(stage_ranks):
            receiver = sender + step
            if 0 <= receiver < len(stage_ranks) and stage_ranks[receiver] != source:
                channel = Channel(source, stage_ranks[receiver], direction)
                line = lines.setdefault(channel, _Line(channel))
                by_transfer.update({(kind, sender, source): line for kind in _SENDER_KINDS[direction]})
                by_transfer.update({(kind, receiver, channel.target): line for kind in _RECEIVER_KINDS[direction]})
    return by_transfer


def _nothing(rank: RankState, instruction: Instruction) -> None:
    """FREE has no effect beyond ending live ranges."""


def _names_of(bits: int) -> str:
    return " and ".join(kind.value for kind in (Kind.F, Kind.R, Kind.I, Kind.W) if _DOES[kind] & bits)


def _text(name: SlotName) -> str:
    kind, stage, microbatch, part = name
    return f"{kind.value}@{stage}:{microbatch}" + ("" if part is None else f".{part}")


def _holds(name: SlotName, held: int) -> str:
    if not held:
        return "holds nothing"
    return f"holds {held} slices" if name[0] in (KV, DKV) and name[3] is None else "is full"


def _check_names(rank: RankState, verb: str, indices: tuple[int, ...], expected: list[SlotName]) -> None:
    actual = [rank.names[index] for index in indices]
    if actual != expected:
        texts = [", ".join(map(_text, names)) or "nothing" for names in (expected, actual)]
        raise ViolationError(f"has to {verb} {texts[0]}, not {texts[1]}")


def _check_same_work(instruction: Instruction, name: SlotName) -> None:
    action = instruction.action
    if name != (_MESSAGE_SLOTS[action.kind], action.stage, action.microbatch, action.slice):
        raise ViolationError(f"names other work than {_text(name)}, which it transfers")
