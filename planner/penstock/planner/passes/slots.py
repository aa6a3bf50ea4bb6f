"""Pass 4, slots: what every instruction reads and writes, by name."""

from __future__ import annotations

from collections.abc import Iterable, Set

from penstock.core.layout import SlotKind
from penstock.core.roles import G_IN, G_OUT, Cell, Place, Roles, SlotName, X, Y
from penstock.core.schedule import COMPUTE_KINDS, Action, Kind
from penstock.planner.passes.draft import Draft
from penstock.planner.passes.rounds import cell_of

_SENT = {Kind.SEND_F: Y, Kind.SEND_B: G_OUT}
_AWAITED = {Kind.WAIT_SEND_F: Y, Kind.WAIT_SEND_B: G_OUT}
_POSTED = {Kind.POST_RECV_F: X, Kind.POST_RECV_B: G_IN}


def add_slots(drafts: Iterable[Draft], roles: Roles, recomputed: Set[Cell]) -> None:
    """Fill in the slots that every draft of one rank touches.

    A SEND reads its slot and the WAIT_SEND releases it; a POST_RECV writes its slot, which the consumer then reads.
    """
    for draft in drafts:
        action = draft.action
        if action.kind in COMPUTE_KINDS:
            _touch(draft, roles, recomputed)
        elif action.kind in _SENT:
            draft.reads = (_own(_SENT[action.kind], action),)
        elif action.kind in _AWAITED:
            draft.releases = (_own(_AWAITED[action.kind], action),)
        elif action.kind in _POSTED:
            draft.writes = (_own(_POSTED[action.kind], action),)


def _touch(draft: Draft, roles: Roles, recomputed: Set[Cell]) -> None:
    action = draft.action
    stage, microbatch, part = cell = cell_of(action)
    touched = roles.touched(action.kind, stage, part, cell in recomputed)
    draft.reads = _named(touched.reads, microbatch)
    draft.writes = _named(touched.writes, microbatch)


def _named(places: tuple[Place, ...], microbatch: int) -> tuple[SlotName, ...]:
    return tuple([(kind, stage, microbatch, part) for kind, stage, part in places])


def _own(kind: SlotKind, action: Action) -> SlotName:
    return kind, *cell_of(action)
