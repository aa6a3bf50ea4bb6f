"""Pass 5, frees: a slot is acquired at its first use, and a FREE directly follows its last use."""

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
    """The rank's instructions, with acquisitions and FREEs, and the live ranges of its slots.

    ``transients`` are by kind, stage and the action's column.
    """
    last_use = _last_use(drafts, num_slots)
    instructions: list[Instruction] = []
    starts: list[int] = []
    stops = [0] * num_slots
    for position, draft in enumerate(drafts):
        touched = dict.fromkeys(draft.reads + draft.writes + draft.releases)
        acquired = tuple([index for index in touched if index >= len(starts)])
        starts += [len(instructions)] * len(acquired)
        instructions.append(_instruction(draft, acquired, _transient_bytes(draft.action, transients, column_of)))
        ended = tuple([index for index in touched if last_use[index] == position])
        if ended:
            for index in ended:
                stops[index] = len(instructions)
            instructions.append(Instruction(_free_after(draft.action), frees=ended))
    return tuple(instructions), list(zip(starts, stops, strict=True))


def _last_use(drafts: Sequence[Draft], num_slots: int) -> list[int]:
    last_use = [0] * num_slots
    for position, draft in enumerate(drafts):
        for index in draft.reads + draft.writes + draft.releases:
            last_use[index] = position
    return last_use


def _transient_bytes(
    action: Action, transients: Mapping[tuple[Kind, int, int], int], column_of: Callable[[Action], int]
) -> int:
    """The action's transient bytes; those of a pair's children are needed at the same time."""
    return sum(transients.get((child.kind, child.stage, column_of(child)), 0) for child in flatten((action,)))


def _instruction(draft: Draft, acquired: tuple[int, ...], transient_bytes: int) -> Instruction:
    return Instruction(
        draft.action,
        acquires=acquired,
        reads=draft.reads,
        writes=draft.writes,
        channel=draft.channel,
        sequence=draft.sequence,
        transient_bytes=transient_bytes,
    )


def _free_after(action: Action) -> Action:
    """The FREE of an action's slots; a pair's has the name of its first child."""
    action = next(flatten((action,)))
    return Action(Kind.FREE, action.stage, action.microbatch, action.slice)
