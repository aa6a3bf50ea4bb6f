"""Pass 5, frees: a slot is acquired where it is first touched, and a FREE stands directly after its last use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.core.program import Instruction
from penstock.core.schedule import Action, Kind, flatten
from penstock.planner.passes.draft import Draft

Life = tuple[int, int]
"""The positions of a slot's acquiring instruction and of its FREE."""


def add_frees(
    drafts: Sequence[Draft],
    num_slots: int,
    transients: Mapping[tuple[Kind, int, int], int],
    column_of: Callable[[Action], int],
) -> tuple[tuple[Instruction, ...], list[Life]]:
    """The rank's instructions, with acquisitions and FREEs, and the lives of its slots.

    ``transients`` are by kind, stage and the action's column.
    """
    last_use = _last_use(drafts, num_slots)
    instructions: list[Instruction] = []
    starts: list[int] = []
    stops = [0] * num_slots
    for at, draft in enumerate(drafts):
        touched = dict.fromkeys(draft.reads + draft.writes + draft.releases)
        born = tuple([index for index in touched if index >= len(starts)])
        starts += [len(instructions)] * len(born)
        instructions.append(_instruction(draft, born, _transient_bytes(draft.action, transients, column_of)))
        ended = tuple([index for index in touched if last_use[index] == at])
        if ended:
            for index in ended:
                stops[index] = len(instructions)
            instructions.append(Instruction(_free_after(draft.action), frees=ended))
    return tuple(instructions), list(zip(starts, stops, strict=True))


def _last_use(drafts: Sequence[Draft], num_slots: int) -> list[int]:
    last_use = [0] * num_slots
    for at, draft in enumerate(drafts):
        for index in draft.reads + draft.writes + draft.releases:
            last_use[index] = at
    return last_use


def _transient_bytes(
    action: Action, transients: Mapping[tuple[Kind, int, int], int], column_of: Callable[[Action], int]
) -> int:
    """Those of a pair's children are there together."""
    return sum(transients.get((each.kind, each.stage, column_of(each)), 0) for each in flatten((action,)))


def _instruction(draft: Draft, born: tuple[int, ...], transient_bytes: int) -> Instruction:
    return Instruction(
        draft.action,
        acquires=born,
        reads=draft.reads,
        writes=draft.writes,
        channel=draft.channel,
        sequence=draft.sequence,
        transient_bytes=transient_bytes,
    )


def _free_after(action: Action) -> Action:
    """The FREE of an action's slots; of a pair, by the name of its first child."""
    action = next(flatten((action,)))
    return Action(Kind.FREE, action.stage, action.microbatch, action.slice)
