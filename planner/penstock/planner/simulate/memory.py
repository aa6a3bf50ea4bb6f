"""The bytes of an order: the peak of its Program's slots and transients, without making the Program.

A rank's instructions run one by one, so its bytes follow from their order alone. The live ranges of slots are those of
`core.program`: acquired at the first use, freed directly after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numba
import numpy as np
import numpy.typing as npt

from penstock.core.layout import SlotKind
from penstock.core.roles import PREFIX_KINDS
from penstock.core.schedule import Kind
from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, RECOMPUTE, WEIGHT_GRADIENT, Order
from penstock.planner.simulate.arrays import Linked, link_order
from penstock.planner.simulate.channels import DIRECTIONS
from penstock.planner.simulate.costs import TO_NEXT, TO_PREVIOUS
from penstock.planner.simulate.link import AWAITED, POSTED, SENDER, STOP_POST, STOP_WAIT

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

SlotBytes = Callable[[SlotKind, Sequence[int]], Ints]
"""[stages, lengths]: the bytes of one kind of slot on every stage, for slices of these lengths in tokens, or for
sequences if ``kv`` and ``dkv`` are of a whole micro-batch.
"""

Shape = tuple[SlotBytes, Sequence[int]]
"""A smaller last micro-batch: the bytes of its slots, and the lengths of its slices in tokens."""

Transients = Mapping[tuple[Kind, int, int], int]
"""Bytes that an action needs only while it runs, by kind, stage and column; 0 if missing."""

# The kernel's `changes`: bytes acquired by an action, its transient bytes, bytes freed after it; and the bytes that an
# action marked in `is_special` acquires and frees.
ACQUIRED, TRANSIENT, FREED, ACQUIRED_SPECIAL, FREED_SPECIAL = range(5)

# Columns of its `codes`, `stops` and `messages`; the slice is the column of tables (`penstock.planner.order.Order`),
# and the last is 1 for the first action of a pair.
KIND, STAGE, SLICE, JOINED = range(4)
POSTS, WAITS = range(2)
SENT_BY, POSTED_ON, AWAITED_ON = range(3)

# Columns of its `message_bytes`: of the sender's slot and of the receiver's.
AT_SENDER, AT_RECEIVER = range(2)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Walk:
    """An order whose messages are numbered once, for repeated counts of its bytes.

    ``codes`` [actions] are kind, stage, slice and whether a pair begins. ``stops`` [actions] are the numbers of
    POST_RECVs and WAIT_SENDs that all ranks have done by then, in the two lists that ``messages`` holds next to the
    action that sends each message.
    """

    order: Order
    codes: Codes
    stops: Codes
    messages: Codes
    first_messages: Ints
    first_waits: Ints
    is_special: Flags

    @classmethod
    def of(cls, order: Order, receive_ahead: int, *, late_receives: bool = False) -> Walk:
        """The walk with this number of receives posted ahead."""
        return cls.of_linked(order, link_order(order, receive_ahead, late_receives))

    @classmethod
    def of_linked(cls, order: Order, linked: Linked) -> Walk:
        """The walk of an order whose messages are already numbered."""
        return cls(
            order=order,
            codes=np.stack([order.kinds, order.stages, order.columns, _joined(order)], axis=1).astype(np.int32),
            stops=linked.actions[:, [STOP_POST, STOP_WAIT]].astype(np.int32),
            messages=linked.messages[:, [SENDER, POSTED, AWAITED]].astype(np.int32),
            first_messages=linked.first_messages,
            first_waits=linked.first_waits,
            is_special=_is_special(order),
        )

    def high_water_bytes(
        self,
        sizes: SlotBytes,
        slices: Sequence[int],
        transients: Transients = MappingProxyType({}),
        *,
        remainder: Shape | None = None,
        prefix_by_slice: bool = False,
    ) -> Ints:
        """Per rank, the most bytes of live slots and transients at one instruction; ``slices`` are in tokens. With
        ``prefix_by_slice`` every slice has its own ``kv`` and ``dkv``.
        """
        shapes = [(sizes, slices), *([] if remainder is None else [remainder])]
        return self._walked(shapes, transients, prefix_by_slice)[0]

    def levels_bytes(
        self,
        sizes: SlotBytes,
        slices: Sequence[int],
        *,
        remainder: Shape | None = None,
        prefix_by_slice: bool = False,
    ) -> Ints:
        """Per action, the bytes of live slots while it runs; for the first of a pair, without those of the second."""
        shapes = [(sizes, slices), *([] if remainder is None else [remainder])]
        return self._walked(shapes, {}, prefix_by_slice)[1]

    def _walked(self, shapes: Sequence[Shape], transients: Transients, prefix_by_slice: bool) -> tuple[Ints, Ints]:
        """Per rank the most bytes, and per action its bytes."""
        slots = _slot_table(self.order, shapes, prefix_by_slice)
        peaks = np.zeros(self.order.num_ranks, dtype=np.int64)
        levels = np.zeros(self.order.num_actions, dtype=np.int64)
        _walk(
            self.order.offsets,
            self.codes,
            self.is_special,
            _changes(self.order, slots, transients, prefix_by_slice),
            np.stack(_message_tables(slots)),
            DIRECTIONS,
            self.stops,
            self.messages,
            self.first_messages,
            self.first_waits,
            peaks,
            levels,
        )
        return peaks, levels


def high_water_bytes(
    order: Order,
    sizes: SlotBytes,
    slices: Sequence[int],
    receive_ahead: int,
    transients: Transients = MappingProxyType({}),
    *,
    late_receives: bool = False,
    remainder: Shape | None = None,
    prefix_by_slice: bool = False,
) -> Ints:
    """Per rank, the most bytes of live slots and transients at one instruction; ``slices`` are lengths in tokens."""
    walk = Walk.of(order, receive_ahead, late_receives=late_receives)
    return walk.high_water_bytes(sizes, slices, transients, remainder=remainder, prefix_by_slice=prefix_by_slice)


def _slot_table(order: Order, shapes: Sequence[Shape], prefix_by_slice: bool) -> dict[SlotKind, Ints]:
    """Bytes [stage, slice] of every kind of slot, ``kv`` and ``dkv`` of a whole micro-batch equal for every slice; 0 if
    there is none.
    """
    last = order.num_stages - 1
    stages_without = {
        SlotKind.INPUT: [0],
        SlotKind.SENT_GRADIENT: [0],
        SlotKind.OUTPUT: [last],
        SlotKind.RECEIVED_GRADIENT: [last],
        SlotKind.HEAD_GRADIENT: list(range(last)),
    }
    table = {}
    for slot in SlotKind:
        if slot in PREFIX_KINDS and not prefix_by_slice:
            tables = [np.repeat(sizes(slot, [sum(slices)]), len(slices), axis=1) for sizes, slices in shapes]
        else:
            tables = [sizes(slot, slices) for sizes, slices in shapes]
        num_bytes = np.concatenate(tables, axis=1)
        num_bytes[stages_without.get(slot, [])] = 0
        table[slot] = num_bytes
    return table


def _message_tables(slots: Mapping[SlotKind, Ints]) -> tuple[Ints, Ints]:
    """[direction, sending stage, slice]: bytes of a message's slot at its sender and at its receiver."""
    sent = np.stack([slots[SlotKind.OUTPUT], slots[SlotKind.SENT_GRADIENT]])
    received = np.zeros_like(sent)
    received[TO_NEXT, :-1] = slots[SlotKind.INPUT][1:]
    received[TO_PREVIOUS, 1:] = slots[SlotKind.RECEIVED_GRADIENT][:-1]
    return sent, received


def _joined(order: Order) -> Flags:
    return np.zeros(order.num_actions, dtype=bool) if order.joined is None else order.joined


def _is_special(order: Order) -> Flags:
    """[actions]: whether it is a B or I of a slice without an R, which recomputes inside if its stage recomputes
    anything, or an R that continues another.
    """
    inside = order.recomputes_inside()
    return inside if order.parts is None else inside | ((order.kinds == RECOMPUTE) & (order.parts[:, 0] > 0))


def _changes(order: Order, slots: Mapping[SlotKind, Ints], transients: Transients, prefix_by_slice: bool) -> Ints:
    """[ACQUIRED ... FREED_SPECIAL, kind, stage, slice] of a compute action. An I that recomputes inside acquires
    ``rl``, which its W frees, and no ``ra``; a B neither; an R that continues another acquires nothing.
    """
    acquired, freed = _compute_tables(order, slots, prefix_by_slice)
    remade, linear = slots[SlotKind.REMADE_ACTIVATIONS], slots[SlotKind.REMADE_LINEAR_INPUTS]
    acquired_special, freed_special = acquired.copy(), freed.copy()
    acquired_special[RECOMPUTE] = 0
    acquired_special[INPUT_GRADIENT] += linear
    freed_special[INPUT_GRADIENT] -= remade
    freed_special[BACKWARD] -= remade + linear
    return np.stack([acquired, _transient_table(order, transients), freed, acquired_special, freed_special])


def _compute_tables(order: Order, slots: Mapping[SlotKind, Ints], prefix_by_slice: bool) -> tuple[Ints, Ints]:
    """[kind, stage, slice]: bytes that a compute action acquires and frees, with an R before each backward."""
    sent, received = _message_tables(slots)
    owners = order.stage_ranks
    crosses = np.zeros((2, order.num_stages, 1), dtype=bool)
    crosses[TO_NEXT, :-1, 0] = crosses[TO_PREVIOUS, 1:, 0] = owners[1:] != owners[:-1]
    output, gradient = np.where(crosses, sent, received)
    kept = slots[SlotKind.ACTIVATIONS] + slots[SlotKind.LINEAR_INPUTS]
    remade = slots[SlotKind.REMADE_ACTIVATIONS] + slots[SlotKind.REMADE_LINEAR_INPUTS]
    prefix, started, ended = _prefix_tables(order, slots, prefix_by_slice)
    acquired = np.zeros((len(KINDS), *kept.shape), dtype=np.int64)
    freed = np.zeros_like(acquired)
    acquired[RECOMPUTE] = remade
    acquired[FORWARD] = kept + prefix + output + slots[SlotKind.HEAD_GRADIENT]
    acquired[INPUT_GRADIENT] = slots[SlotKind.OUTPUT_GRADIENTS] + gradient + started
    consumed = (
        SlotKind.INPUT,
        SlotKind.ACTIVATIONS,
        SlotKind.REMADE_ACTIVATIONS,
        SlotKind.RECEIVED_GRADIENT,
        SlotKind.HEAD_GRADIENT,
    )
    freed[INPUT_GRADIENT] = prefix + ended + sum(slots[slot] for slot in consumed)
    until_weight = (SlotKind.LINEAR_INPUTS, SlotKind.REMADE_LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS)
    freed[WEIGHT_GRADIENT] = sum(slots[slot] for slot in until_weight)
    acquired[BACKWARD] = acquired[INPUT_GRADIENT]
    freed[BACKWARD] = freed[INPUT_GRADIENT] + freed[WEIGHT_GRADIENT]
    return acquired, freed


def _prefix_tables(order: Order, slots: Mapping[SlotKind, Ints], prefix_by_slice: bool) -> tuple[Ints, Ints, Ints]:
    """[stage, slice]: bytes of keys and values, which F acquires and I frees; bytes of their gradients that I acquires,
    all of a micro-batch with its last slice; and those that I frees.
    """
    prefix, gradients = slots[SlotKind.KEYS_VALUES].copy(), slots[SlotKind.KEYS_VALUES_GRADIENTS]
    firsts, lasts = _ends(order)
    started = np.zeros_like(gradients)
    if prefix_by_slice:
        for first, last in zip(firsts, lasts, strict=True):
            started[:, last] = gradients[:, first : last + 1].sum(axis=1)
        return prefix, started, gradients
    prefix[:, np.setdiff1d(np.arange(order.num_columns), firsts)] = 0
    ended = np.zeros_like(gradients)
    started[:, lasts], ended[:, firsts] = gradients[:, lasts], gradients[:, firsts]
    return prefix, started, ended


def _ends(order: Order) -> tuple[list[int], list[int]]:
    """The columns of first and of last slices."""
    stops = [order.num_slices, *([order.num_columns] if order.num_remainder_slices else [])]
    return [0, *stops[:-1]], [stop - 1 for stop in stops]


def _transient_table(order: Order, transients: Transients) -> Ints:
    table = np.zeros((len(KINDS), order.num_stages, order.num_columns), dtype=np.int64)
    for (kind, stage, part), num_bytes in transients.items():
        table[KINDS.index(kind), stage, part] = num_bytes
    return table


@numba.njit(cache=True, nogil=True)
def _walk(
    offsets: Ints,
    codes: Codes,
    is_special: Flags,
    changes: Ints,
    message_bytes: Ints,
    directions: Ints,
    stops: Codes,
    messages: Codes,
    first_messages: Ints,
    first_waits: Ints,
    peaks: Ints,
    levels: Ints,
) -> None:
    """Fill ``peaks`` [ranks] and ``levels`` [actions]; ``message_bytes`` are [AT_SENDER AT_RECEIVER, direction, sending
    stage, slice].

    The slots and transients of a pair's actions exist at the same time; slots that its first action frees or sends are
    freed after both.
    """
    num_posted = np.zeros(len(first_messages), dtype=np.int64)
    num_released = np.zeros(len(first_messages), dtype=np.int64)
    post = 0
    for rank in range(len(peaks)):
        live = 0
        transient, freed = 0, 0
        wait = first_waits[rank]
        for index in range(offsets[rank], offsets[rank + 1]):
            while post < stops[index, POSTS]:
                channel = messages[post, POSTED_ON]
                sender = messages[first_messages[channel] + num_posted[channel], SENT_BY]
                live += message_bytes[
                    AT_RECEIVER, directions[codes[sender, KIND]], codes[sender, STAGE], codes[sender, SLICE]
                ]
                num_posted[channel] += 1
                post += 1
            kind, stage, part = codes[index, KIND], codes[index, STAGE], codes[index, SLICE]
            if is_special[index]:
                live += changes[ACQUIRED_SPECIAL, kind, stage, part]
                freed += changes[FREED_SPECIAL, kind, stage, part]
            else:
                live += changes[ACQUIRED, kind, stage, part]
                freed += changes[FREED, kind, stage, part]
            transient += changes[TRANSIENT, kind, stage, part]
            levels[index] = live + transient
            if codes[index, JOINED]:
                continue
            peaks[rank] = max(peaks[rank], levels[index])
            live -= freed
            transient, freed = 0, 0
            while wait < stops[index, WAITS]:
                channel = messages[wait, AWAITED_ON]
                sender = messages[first_messages[channel] + num_released[channel], SENT_BY]
                live -= message_bytes[
                    AT_SENDER, directions[codes[sender, KIND]], codes[sender, STAGE], codes[sender, SLICE]
                ]
                num_released[channel] += 1
                wait += 1
