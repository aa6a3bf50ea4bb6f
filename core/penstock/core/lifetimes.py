"""The part of the proof about one rank's memory: every slot's live range in program order and arena offset."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from penstock.core.layout import ALIGNMENT_BYTES
from penstock.core.program import Extent, Instruction, RankProgram, Slot
from penstock.core.schedule import Kind


class ViolationError(Exception):
    """A violation by the current instruction; the message is a sentence without its subject, the instruction."""


_STARTS = {Kind.SEND_F: "sent", Kind.SEND_B: "sent", Kind.POST_RECV_F: "received", Kind.POST_RECV_B: "received"}
_WAITS = {
    Kind.WAIT_SEND_F: "sent",
    Kind.WAIT_SEND_B: "sent",
    Kind.WAIT_RECV_F: "received",
    Kind.WAIT_RECV_B: "received",
}

_UNBORN, _LIVE, _IN_FLIGHT, _FREED = range(4)
_STATE_WORDS = ("was never acquired", "is live", "is under transfer", "was freed before")


class Lifetimes:
    """Tracks the slots of one rank, instruction by instruction.

    A slot is acquired once, touched only while live and not under transfer (from SEND or POST_RECV to its WAIT), freed
    once, and overlaps no other live slot. Program order is exact for this: a rank runs its instructions one by one.
    ``bytes_of`` gives the required size of a slot. ``high_water_bytes`` is the largest number of bytes of live slots
    and transients at one instruction.
    """

    def __init__(self, program: RankProgram, bytes_of: Callable[[Slot], int]) -> None:
        self.high_water_bytes = 0
        self.transient_bytes = 0
        self._bytes_of = bytes_of
        self._live_bytes = 0
        self._slots = program.slots
        self._states = bytearray(len(program.slots))
        self._arena = _Arena(program.arena_bytes)
        self._flights: dict[tuple[object, int, str], tuple[int, ...]] = {}

    def run(self, instruction: Instruction) -> None:
        """Apply an instruction's acquisitions, accesses and frees; raises `ViolationError`."""
        kind = instruction.action.kind
        for index in instruction.acquires:
            self._begin(index)
        self._require_live(instruction.reads, "reads")
        self._require_live(instruction.writes, "writes")
        if kind in _STARTS:
            self._take_off(instruction, _STARTS[kind])
        elif kind in _WAITS:
            self._land(instruction, _WAITS[kind])
        for index in instruction.acquires:
            for extent in self._slots[index].extents:
                self._arena.insert(self._slots[index], extent)
        self._count(instruction.transient_bytes)
        if instruction.frees:
            self._free(instruction.frees, kind)

    def _begin(self, index: int) -> None:
        slot = self._slot(index)
        needed = self._bytes_of(slot)
        if slot.num_bytes != needed:
            raise ViolationError(f"acquires {slot} of {slot.num_bytes} bytes, where {needed} are needed")
        if self._states[index] != _UNBORN:
            raise ViolationError(f"acquires {slot}, which was acquired before")
        self._states[index] = _LIVE
        self._live_bytes += slot.num_bytes

    def _require_live(self, indices: tuple[int, ...], verb: str) -> None:
        for index in indices:
            slot = self._slot(index)
            if self._states[index] != _LIVE:
                raise ViolationError(f"{verb} {slot}, which {_STATE_WORDS[self._states[index]]}")

    def _slot(self, index: int) -> Slot:
        if not 0 <= index < len(self._slots):
            raise ViolationError(f"names slot number {index}, but its rank has {len(self._slots)}")
        return self._slots[index]

    def _take_off(self, instruction: Instruction, direction: str) -> None:
        indices = instruction.reads + instruction.writes
        self._flights[instruction.channel, instruction.sequence, direction] = indices
        for index in indices:
            if len(self._slots[index].extents) > 1:
                raise ViolationError(f"transfers {self._slots[index]}, which is not one range of memory")
            self._states[index] = _IN_FLIGHT

    def _land(self, instruction: Instruction, direction: str) -> None:
        key = (instruction.channel, instruction.sequence, direction)
        if key not in self._flights:
            raise ViolationError(
                f"waits for message {instruction.sequence} of {instruction.channel}, which is not being {direction}"
            )
        for index in self._flights.pop(key):
            self._states[index] = _LIVE

    def _count(self, transient_bytes: int) -> None:
        if transient_bytes < 0:
            raise ViolationError(f"has {transient_bytes} transient bytes")
        self.transient_bytes = max(self.transient_bytes, transient_bytes)
        self.high_water_bytes = max(self.high_water_bytes, self._live_bytes + transient_bytes)

    def _free(self, indices: tuple[int, ...], kind: Kind) -> None:
        if kind is not Kind.FREE:
            raise ViolationError("frees slots, which only FREE may")
        for index in indices:
            self._require_live((index,), "frees")
            self._states[index] = _FREED
            for extent in self._slots[index].extents:
                self._arena.remove(extent)
            self._live_bytes -= self._slots[index].num_bytes

    def finish(self) -> None:
        """Require that no slot or message is left; raises `ViolationError`."""
        for slot, state in zip(self._slots, self._states, strict=True):
            if state != _FREED:
                raise ViolationError(f"leaves {slot}, which {_STATE_WORDS[state]}")
        for channel, sequence, direction in self._flights:
            raise ViolationError(f"leaves message {sequence} of {channel} being {direction}")


class _Arena:
    """The extents of live slots by offset. Since no two overlap, a new one can only overlap its two neighbours."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._offsets: list[int] = []
        self._live: list[tuple[Extent, Slot]] = []

    def insert(self, slot: Slot, extent: Extent) -> None:
        if extent.num_bytes <= 0 or extent.offset < 0 or extent.offset % ALIGNMENT_BYTES:
            raise ViolationError(
                f"acquires {slot}, whose {extent.num_bytes} bytes at offset {extent.offset} are no aligned place"
            )
        if extent.stop > self._num_bytes:
            raise ViolationError(f"acquires {slot}, which ends past the arena's {self._num_bytes} bytes")
        index = bisect_left(self._offsets, extent.offset)
        for other, owner in self._live[max(0, index - 1) : index + 1]:
            if other.offset < extent.stop and extent.offset < other.stop:
                raise ViolationError(f"acquires {slot}, which overlaps {owner} in the arena")
        self._offsets.insert(index, extent.offset)
        self._live.insert(index, (extent, slot))

    def remove(self, extent: Extent) -> None:
        index = bisect_left(self._offsets, extent.offset)
        del self._offsets[index], self._live[index]
