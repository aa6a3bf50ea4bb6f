"""Pass 4, slots: the slots that every instruction of a rank reads and writes, numbered in the order of first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from penstock.core.layout import SlotKind
from penstock.core.roles import G_IN, G_OUT, Cell, Place, Roles, SlotName, X, Y
from penstock.core.schedule import Action, Kind, flatten
from penstock.planner.passes.draft import Draft
from penstock.planner.passes.rounds import cell_of

_SENT = {Kind.SEND_F: Y, Kind.SEND_B: G_OUT}
_AWAITED = {Kind.WAIT_SEND_F: Y, Kind.WAIT_SEND_B: G_OUT}
_POSTED = {Kind.POST_RECV_F: X, Kind.POST_RECV_B: G_IN}


def add_slots(drafts: Iterable[Draft], roles_of: Callable[[int], Roles], recomputed: Set[Cell]) -> tuple[SlotName, ...]:
    """Fill in the slots of every draft of one rank, by the roles of its micro-batch; return the slots' names.

    A SEND reads its slot and the WAIT_SEND releases it; a POST_RECV writes its slot, which the consumer then reads.
    """
    slots = _Slots()
    for draft in drafts:
        action = draft.action
        if action.is_compute:
            for child in flatten((action,)):
                stage, microbatch, part = cell = cell_of(child)
                touched = roles_of(microbatch).touched(child.kind, stage, part, cell in recomputed, child.resumes)
                draft.reads += slots.numbers_of(touched.reads, microbatch)
                draft.writes += slots.numbers_of(touched.writes, microbatch)
        elif action.kind in _SENT:
            draft.reads = slots.own(_SENT[action.kind], action)
        elif action.kind in _AWAITED:
            draft.releases = slots.own(_AWAITED[action.kind], action)
        elif action.kind in _POSTED:
            draft.writes = slots.own(_POSTED[action.kind], action)
    return tuple(slots.numbers)


class _Slots:
    def __init__(self) -> None:
        self.numbers: dict[SlotName, int] = {}

    def numbers_of(self, places: Sequence[Place], microbatch: int) -> tuple[int, ...]:
        names = [(kind, stage, microbatch, part) for kind, stage, part in places]
        return tuple([self.numbers.setdefault(name, len(self.numbers)) for name in names])

    def own(self, kind: SlotKind, action: Action) -> tuple[int, ...]:
        """The slot of a message."""
        return (self.numbers.setdefault((kind, *cell_of(action)), len(self.numbers)),)
