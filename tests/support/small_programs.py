"""Programs from a line or two of text, and small edits of them, for tests that say exactly what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.core.layout import REMADE_SLOTS, SlotKind
from penstock.core.program import Instruction, Program, RankProgram, SlotSizes
from penstock.core.schedule import Kind, Part, Schedule, parse_schedule
from penstock.planner.lowering import NO_TRANSIENTS, Transients, lower

SPLIT_BACKWARD = """\
0F0.0,0F0.1,0I0.1,0I0.0,0W0.1,0W0.0
1F0.0,1F0.1,1I0.1,1I0.0,1W0.1,1W0.0
"""
"""Two ranks, one micro-batch, two slices."""

TWO_MICROBATCHES = """\
0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1
"""


def one_line_each(kind: SlotKind, stage: int, tokens: int) -> int:
    """64 bytes per token for every slot, where all is kept."""
    return 0 if kind in REMADE_SLOTS.values() else 64 * tokens


def one_line_remade(kind: SlotKind, stage: int, tokens: int) -> int:
    """64 bytes per token for every slot, where all that can be is made again."""
    return 0 if kind in REMADE_SLOTS else 64 * tokens


def one_line_of_both(kind: SlotKind, stage: int, tokens: int) -> int:
    """64 bytes per token for every slot, where some is made again."""
    return 64 * tokens


def schedule_of(text: str) -> Schedule:
    """The schedule written as CSV."""
    schedule, _ = parse_schedule(text)
    return schedule


def lowered(
    text: str,
    *,
    sizes: SlotSizes | None = None,
    slices: tuple[int, ...] = (),
    receive_ahead: int = 2,
    late_receives: bool = False,
    dp: bool = False,
    tp: bool = False,
    tie: tuple[int, ...] = (),
    zero: int = 0,
    buckets: Sequence[tuple[Part, ...]] = (),
    num_units: Sequence[int] = (),
    transients: Transients = NO_TRANSIENTS,
    keep_pairs: bool = False,
    prefix_by_slice: bool = False,
) -> Program:
    """The Program of a schedule written as CSV; slices of one token unless given, and without ``sizes`` all is made
    again if anything is.
    """
    schedule = schedule_of(text)
    usual = one_line_remade if schedule.recomputed_stages else one_line_each
    return lower(
        schedule,
        sizes or usual,
        slices=slices or (1,) * schedule.num_slices,
        receive_ahead=receive_ahead,
        late_receives=late_receives,
        dp=dp,
        tp=tp,
        tie=tie,
        zero=zero,
        buckets=buckets,
        num_units=num_units,
        transients=transients,
        keep_pairs=keep_pairs,
        prefix_by_slice=prefix_by_slice,
    )


def slot_lives(program: Program, rank: int) -> dict[str, tuple[str, str]]:
    """Every slot's first and last instruction, by name."""
    found = {}
    instructions = program.ranks[rank].instructions
    for index, slot in enumerate(program.ranks[rank].slots):
        touching = [i for i in instructions if index in i.acquires + i.reads + i.writes]
        ended = next(at for at, i in enumerate(instructions) if index in i.frees)
        before = [i for i in instructions[:ended] if i.action.kind is not Kind.FREE]
        found[str(slot)] = (str(touching[0].action), str(before[-1].action))
    return found


def actions(program: Program, rank: int) -> list[str]:
    """The text of a rank's actions, without FREE."""
    texts = [str(instruction.action) for instruction in program.ranks[rank].instructions]
    return [text for text in texts if "FREE" not in text]


def position(rank: RankProgram, text: str) -> int:
    """Where the instruction with this action stands."""
    return [str(instruction.action) for instruction in rank.instructions].index(text)


def without(program: Program, rank: int, text: str) -> Program:
    """The Program with one instruction left out."""
    at = position(program.ranks[rank], text)
    return _edited(program, rank, lambda instructions: instructions[:at] + instructions[at + 1 :])


def moved(program: Program, rank: int, text: str, before: str) -> Program:
    """The Program with one instruction taken to just before another one of its rank."""
    at = position(program.ranks[rank], text)

    def change(instructions: list[Instruction]) -> list[Instruction]:
        instruction = instructions.pop(at)
        to = [str(other.action) for other in instructions].index(before)
        return [*instructions[:to], instruction, *instructions[to:]]

    return _edited(program, rank, change)


def replaced(program: Program, rank: int, text: str, instruction: Callable[[Instruction], Instruction]) -> Program:
    """The Program with one instruction changed."""
    at = position(program.ranks[rank], text)
    return _edited(program, rank, lambda found: [*found[:at], instruction(found[at]), *found[at + 1 :]])


def _edited(program: Program, rank: int, change: Callable[[list[Instruction]], list[Instruction]]) -> Program:
    changed = replace(program.ranks[rank], instructions=tuple(change(list(program.ranks[rank].instructions))))
    return replace(program, ranks=(*program.ranks[:rank], changed, *program.ranks[rank + 1 :]))
