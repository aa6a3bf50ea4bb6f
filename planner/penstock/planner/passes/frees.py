"""Pass 5, frees: a slot is acquired where it is first touched, and a FREE stands directly after its last use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.program import Instruction
from penstock.core.roles import SlotName
from penstock.core.schedule import Action, Kind
from penstock.planner.passes.draft import Draft

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lived:
    """One rank's instructions, and its slots in the order of acquisition: names and lives.

    A life (start, stop) goes from the acquiring instruction to the FREE, by position in ``instructions``.
    """

    instructions: tuple[Instruction, ...]
    names: tuple[SlotName, ...]
    lives: tuple[tuple[int, int], ...]


def add_frees(drafts: Sequence[Draft], transients: Mapping[tuple[Kind, int, int], int]) -> Lived:
    """The rank's instructions with numbered slots, acquisitions and FREEs."""
    numbers: dict[SlotName, int] = {}
    touched = [_number(draft, numbers) for draft in drafts]
    last_use = {index: at for at, (_, _, indices) in enumerate(touched) for index in indices}
    instructions: list[Instruction] = []
    starts: list[int] = []
    stops = [0] * len(numbers)
    for at, (draft, (reads, writes, indices)) in enumerate(zip(drafts, touched, strict=True)):
        action = draft.action
        born = tuple(range(len(starts), max(indices, default=-1) + 1))
        starts += [len(instructions)] * len(born)
        transient_bytes = transients.get((action.kind, action.stage, action.slice or 0), 0)
        instructions.append(
            Instruction(action, born, reads, writes, (), draft.channel, draft.sequence, transient_bytes)
        )
        ended = tuple([index for index in indices if last_use[index] == at])
        if ended:
            for index in ended:
                stops[index] = len(instructions)
            instructions.append(Instruction(_free_after(action), frees=ended))
    return Lived(tuple(instructions), tuple(numbers), tuple(zip(starts, stops, strict=True)))


def _number(draft: Draft, numbers: dict[SlotName, int]) -> tuple[Indices, Indices, Indices]:
    """The draft's slots by number, new ones numbered in the order of appearance: reads, writes, and all it touches."""
    reads = tuple([numbers.setdefault(name, len(numbers)) for name in draft.reads])
    writes = tuple([numbers.setdefault(name, len(numbers)) for name in draft.writes])
    releases = tuple([numbers.setdefault(name, len(numbers)) for name in draft.releases])
    return reads, writes, tuple(dict.fromkeys(reads + writes + releases))


def _free_after(action: Action) -> Action:
    return Action(Kind.FREE, action.stage, action.microbatch, action.slice)
