"""A Program: the schedule lowered to the instructions of every rank, in order, with every transfer and every live
range.

Slots of one (stage, micro-batch, slice), and their live ranges:

    x      stage input                      POST_RECV (or the previous stage's F on the same rank) to I
    a      activations only I needs         F to I
    l      inputs of the Linears            F to W
    ra     those of a that R recomputes     R to I
    rl     those of l that R recomputes     R to W, without an R I to W
    w      gradients of their outputs       I to W
    y      stage output                     F to WAIT_SEND
    g_out  gradient of the stage's input    I to WAIT_SEND
    g_in   gradient received                POST_RECV (or the next stage's I on the same rank) to I
    h      gradient at the head's input     F to I, last stage only

and of one (stage, micro-batch): ``kv`` from the first F to I of slice 0, ``dkv`` from the first I to I of slice 0.
Where every slice has its own (``Program.prefix_by_slice``), ``kv`` lives from its F to its I, and ``dkv`` from the
micro-batch's first I to its own. A full backward B is I and W in one action. Only FREE ends live ranges.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.core.layout import SlotKind
from penstock.core.manifest import Manifest
from penstock.core.schedule import Action, Group, read_action

SlotSizes = Callable[[SlotKind, int, int], int]
"""Bytes of a slot by kind, stage and tokens: of the slice, or of the sequence for ``kv`` and ``dkv`` of a whole
micro-batch. 0: no such slot.
"""


@dataclass(frozen=True, slots=True)
class Channel(Manifest):
    """A directed edge of one kind of message: activations (F) or gradients (B), from one rank to another."""

    source: int
    target: int
    direction: str

    def __str__(self) -> str:
        return f"{self.source}->{self.target}{self.direction}"


@dataclass(frozen=True, slots=True)
class Extent(Manifest):
    """A contiguous range of a rank's arena."""

    offset: int
    num_bytes: int

    @property
    def stop(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class Slot(Manifest):
    """Memory with a lifetime, at a fixed place in its rank's arena: one extent, or several (`penstock.core.extents`).
    ``slice`` is none for ``kv`` and ``dkv`` of a whole micro-batch.
    """

    kind: SlotKind
    stage: int
    microbatch: int
    slice: int | None
    extents: tuple[Extent, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its extents."""
        return sum(extent.num_bytes for extent in self.extents)

    def __str__(self) -> str:
        part = "" if self.slice is None else f".{self.slice}"
        return f"{self.kind.value}@{self.stage}:{self.microbatch}{part}"


@dataclass(frozen=True, slots=True)
class Instruction(Manifest):
    """One action as its rank runs it.

    ``acquires``, ``reads``, ``writes`` and ``frees`` are indices into the rank's slots: the live ranges of acquired
    slots start here (contents undefined), those of freed ones end (only FREE frees). A transfer names its channel and
    its number on that channel, first-in first-out. ``transient_bytes`` are only held during the action. In a manifest
    the action is its text.

    A pair of actions (`Action.is_pair`) is one instruction: it reads and writes the slots of its children, the first
    child's first, and ``transient_bytes`` are those of both.
    """

    action: Action = field(metadata={"read": read_action, "write": str})
    acquires: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    channel: Channel | None = None
    sequence: int = 0
    transient_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgram(Manifest):
    """The program of one rank: instructions in order, its slots, and the arena that holds them.

    The proof checks whether it can run, and whether instructions name existing slots.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    arena_bytes: int

    def apart(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The children of a pair as separate instructions, with the slots of their micro-batches; any other instruction
        unchanged.
        """
        if not instruction.action.children:
            return (instruction,)
        return tuple(self._child(instruction, child) for child in instruction.action.children)

    def _child(self, pair: Instruction, child: Action) -> Instruction:
        acquires, reads, writes = (
            tuple(index for index in indices if self.slots[index].microbatch == child.microbatch)
            for indices in (pair.acquires, pair.reads, pair.writes)
        )
        return Instruction(child, acquires=acquires, reads=reads, writes=writes)

    def lines(self) -> Iterator[str]:
        """One readable line per instruction."""
        names = [str(slot) for slot in self.slots]
        for instruction in self.instructions:
            yield self._line(instruction, names)

    @staticmethod
    def _line(instruction: Instruction, names: list[str]) -> str:
        parts = [f"{instruction.action!s:<20}"]
        for sign, indices in (
            ("+", instruction.acquires),
            ("<", instruction.reads),
            (">", instruction.writes),
            ("-", instruction.frees),
        ):
            parts.extend([f"{sign}{names[index]}" for index in indices])
        if instruction.channel:
            parts.append(f"[{instruction.channel} #{instruction.sequence}]")
        return " ".join(parts).rstrip()


@dataclass(frozen=True, slots=True)
class Reduction(Manifest):
    """A group that sums over ranks, and the ranks of the pipeline that belong to it (dp, tp: each joins its peers).

    A reduction over tie joins the ``stages`` that hold rows of the tied matrix, by default the first and the last: the
    first one with each of the others. Those on its own rank are summed there, without a message.
    """

    group: Group
    ranks: tuple[int, ...]
    stages: tuple[int, ...] = ()

    def tied_of(self, stage_ranks: Sequence[int], rank: int) -> list[int]:
        """The stages of a rank whose gradients its one reduction over tie sums."""
        stages = self.stages or (0, len(stage_ranks) - 1)
        return [stage for stage in dict.fromkeys(stages) if stage_ranks[stage] == rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program(Manifest):
    """The programs of all ranks of one pipeline replica, for slices of given capacities (tokens).

    A smaller last micro-batch has slices of ``remainder_capacities``; if empty, it is like the others. ``reductions``
    are in the order in which they reduce a gradient. Those over peers may be for buckets of a stage, and then its last
    backward is in parts (`penstock.core.buckets`). With ``zero`` 1 the one over dp leaves each replica the sums of its
    shard (`penstock.core.replicas`). Then STEP leaves parameters in shards, and the next step begins with gathers over
    dp, of the same buckets: the first forward of a stage is in parts, too. With ``prefix_by_slice`` every slice has its
    own slots for keys, values and their gradients.
    """

    ranks: tuple[RankProgram, ...]
    num_stages: int
    num_microbatches: int
    slice_capacities: tuple[int, ...]
    receive_ahead: int
    late_receives: bool = False
    reductions: tuple[Reduction, ...] = ()
    remainder_capacities: tuple[int, ...] = ()
    zero: int = 0
    prefix_by_slice: bool = False

    def is_remainder(self, microbatch: int | None) -> bool:
        """Whether the micro-batch is the smaller last one."""
        return bool(self.remainder_capacities) and microbatch == self.num_microbatches - 1

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of every stage."""
        owners = {i.action.stage: rank.rank for rank in self.ranks for i in rank.instructions if i.action.is_compute}
        return tuple(owners[stage] for stage in range(self.num_stages))

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Every channel, in an order that is the same on all ranks."""
        used = {i.channel for rank in self.ranks for i in rank.instructions if i.channel}
        return tuple(sorted(used, key=lambda c: (c.source, c.target, c.direction)))

    @property
    def digest(self) -> str:
        """SHA-256 over every instruction's action, slots, channel and number on it, and every slot's place.

        A START_REDUCE directly followed by its WAIT_REDUCE counts as one REDUCE, as it was up to 0.1.0. Fields that
        follow from the plan with this digest are left out: ``receive_ahead``, ``late_receives``, ``reductions``,
        ``zero``, ``prefix_by_slice``, the capacities and ``transient_bytes``. Stored plans hold digests, so another
        choice would reject them all.
        """
        text = hashlib.sha256()
        for rank in self.ranks:
            text.update(f"rank {rank.rank} {rank.arena_bytes}\n".encode())
            for slot in rank.slots:
                places = " ".join(f"{extent.num_bytes} {extent.offset}" for extent in slot.extents)
                text.update(f"{slot} {places}\n".encode())
            lines = "".join(f"{line}\n" for line in rank.lines())
            text.update(_AT_ONCE.sub(r"\1REDUCE\2", lines).encode())
        return text.hexdigest()


_AT_ONCE = re.compile(r"^(\d+)START_REDUCE(\(\w+\))\n\1WAIT_REDUCE\2$", re.MULTILINE)
