"""Pass 5, frees: a slot is acquired where it is first touched, and a FREE stands directly after its last use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.program import Instruction
from penstock.core.roles import SlotName
from penstock.core.schedule import Action, Kind
from penstock.planner.passes.draft import Draft


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
    writer = _Writer(drafts, transients)
    for position, draft in enumerate(drafts):
        writer.write(position, draft)
    stops = [writer.stops[index] for index in range(len(writer.numbers))]
    return Lived(tuple(writer.instructions), tuple(writer.numbers), tuple(zip(writer.starts, stops, strict=True)))


class _Writer:
    def __init__(self, drafts: Sequence[Draft], transients: Mapping[tuple[Kind, int, int], int]) -> None:
        self.transients = transients
        self.last_use = {name: at for at, draft in enumerate(drafts) for name in _touched(draft)}
        self.instructions: list[Instruction] = []
        self.numbers: dict[SlotName, int] = {}
        self.starts: list[int] = []
        self.stops: dict[int, int] = {}

    def write(self, position: int, draft: Draft) -> None:
        num_before = len(self.numbers)
        names = _touched(draft)
        for name in names:
            if self.numbers.setdefault(name, len(self.numbers)) == len(self.starts):
                self.starts.append(len(self.instructions))
        self.instructions.append(
            Instruction(
                draft.action,
                acquires=tuple(range(num_before, len(self.numbers))),
                reads=tuple([self.numbers[name] for name in draft.reads]),
                writes=tuple([self.numbers[name] for name in draft.writes]),
                channel=draft.channel,
                sequence=draft.sequence,
                transient_bytes=self._transient_bytes(draft.action),
            )
        )
        ended = sorted({self.numbers[name] for name in names if self.last_use[name] == position})
        if ended:
            self._free(draft.action, tuple(ended))

    def _transient_bytes(self, action: Action) -> int:
        return self.transients.get((action.kind, action.stage, action.slice or 0), 0)

    def _free(self, after: Action, indices: tuple[int, ...]) -> None:
        self.stops.update(dict.fromkeys(indices, len(self.instructions)))
        action = Action(Kind.FREE, after.stage, after.microbatch, after.slice)
        self.instructions.append(Instruction(action, frees=indices))


def _touched(draft: Draft) -> tuple[SlotName, ...]:
    return draft.reads + draft.writes + draft.releases
