"""Breaks a Program in random places, as a bug in lowering, a bad file or a wrong edit could."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from penstock.core.program import Channel, Extent, Instruction, Program, RankProgram, Slot
from penstock.core.schedule import Kind, Part

Corruption = Callable[[random.Random, Program], Program]


def corrupt(rng: random.Random, program: Program) -> Program:
    """The Program with one or two random changes; it differs from the one given."""
    while True:
        broken = program
        for _ in range(rng.choice([1, 1, 1, 2])):
            broken = rng.choice(CORRUPTIONS)(rng, broken)
        if broken != program:
            return broken


def drop(rng: random.Random, program: Program) -> Program:
    """Leave out an instruction."""

    def change(instructions: list[Instruction]) -> None:
        del instructions[rng.randrange(len(instructions))]

    return _reordered(rng, program, change)


def duplicate(rng: random.Random, program: Program) -> Program:
    """Repeat an instruction, at once or elsewhere."""

    def change(instructions: list[Instruction]) -> None:
        at = rng.randrange(len(instructions))
        instructions.insert(rng.choice([at, rng.randrange(len(instructions) + 1)]), instructions[at])

    return _reordered(rng, program, change)


def swap(rng: random.Random, program: Program) -> Program:
    """Exchange two instructions, neighbours or any."""

    def change(instructions: list[Instruction]) -> None:
        first = rng.randrange(len(instructions))
        second = rng.choice([(first + 1) % len(instructions), rng.randrange(len(instructions))])
        instructions[first], instructions[second] = instructions[second], instructions[first]

    return _reordered(rng, program, change)


def swap_work(rng: random.Random, program: Program) -> Program:
    """Exchange two compute instructions, or only the slots that two of a kind touch."""

    def change(instructions: list[Instruction]) -> None:
        places = [at for at, instruction in enumerate(instructions) if instruction.action.is_compute]
        first, second = rng.choice(places), rng.choice(places)
        one, other = instructions[first], instructions[second]
        if one.action.kind is other.action.kind and rng.random() < 0.5:
            one, other = replace(one, action=other.action), replace(other, action=one.action)
        instructions[first], instructions[second] = other, one

    return _reordered(rng, program, change)


def move(rng: random.Random, program: Program) -> Program:
    """Take an instruction elsewhere."""

    def change(instructions: list[Instruction]) -> None:
        instruction = instructions.pop(rng.randrange(len(instructions)))
        instructions.insert(rng.randrange(len(instructions) + 1), instruction)

    return _reordered(rng, program, change)


def carry_over(rng: random.Random, program: Program) -> Program:
    """Take an instruction to another rank."""
    source, target = rng.choice(program.ranks), rng.choice(program.ranks)
    instruction = rng.choice(source.instructions)
    at = rng.randrange(len(target.instructions) + 1)
    longer = (*target.instructions[:at], instruction, *target.instructions[at:])
    return _with_rank(program, replace(target, instructions=longer))


def retarget(rng: random.Random, program: Program) -> Program:
    """Replace, drop or add one slot index of an instruction."""

    def change(instruction: Instruction, rank: RankProgram) -> Instruction:
        name = rng.choice(["acquires", "reads", "writes", "frees"])
        indices = list(getattr(instruction, name))
        any_index = rng.randrange(-1, len(rank.slots) + 1)
        if indices and rng.random() < 0.7:
            at = rng.randrange(len(indices))
            indices[at : at + 1] = rng.choice([[], [any_index]])
        else:
            indices.insert(rng.randrange(len(indices) + 1), any_index)
        return _with(instruction, name, tuple(indices))

    return _edited(rng, program, change)


def rename(rng: random.Random, program: Program) -> Program:
    """Change what an instruction says it does, or for which stage, micro-batch or slice."""

    def change(instruction: Instruction, _: RankProgram) -> Instruction:
        action = instruction.action
        number = rng.randrange(-1, 4)
        return replace(
            instruction,
            action=rng.choice(
                [
                    replace(action, kind=rng.choice(list(Kind))),
                    replace(action, stage=number),
                    replace(action, microbatch=rng.choice([None, number])),
                    replace(action, slice=rng.choice([None, number])),
                    replace(action, part=rng.choice([None, Part(rng.randrange(3), 3)])),
                ]
            ),
        )

    return _edited(rng, program, change)


def reroute(rng: random.Random, program: Program) -> Program:
    """Change the channel of a transfer or its number there."""

    def change(instruction: Instruction, _: RankProgram) -> Instruction:
        ranks = len(program.ranks)
        other = Channel(rng.randrange(ranks), rng.randrange(ranks), rng.choice("FB"))
        if rng.random() < 0.5:
            return replace(instruction, channel=rng.choice([None, other]))
        return replace(instruction, sequence=rng.randrange(-1, 6))

    return _edited(rng, program, change, only=lambda instruction: instruction.channel is not None)


def resize(rng: random.Random, program: Program) -> Program:
    """Change a slot's bytes or the arena's."""
    rank = rng.choice(program.ranks)
    change = rng.choice([-64, -8, 8, 64, 256])
    if not rank.slots or rng.random() < 0.2:
        return _with_rank(program, replace(rank, arena_bytes=max(0, rank.arena_bytes + change)))
    at = rng.randrange(len(rank.slots))
    slot = rank.slots[at]
    at_extent = rng.randrange(len(slot.extents))
    extent = slot.extents[at_extent]
    return _with_slot(
        program, rank, at, _with_extent(slot, at_extent, replace(extent, num_bytes=max(0, extent.num_bytes + change)))
    )


def misplace(rng: random.Random, program: Program) -> Program:
    """Change a slot's offset, or exchange two slots' places."""
    rank = rng.choice(program.ranks)
    if not rank.slots:
        return program
    at, other = rng.randrange(len(rank.slots)), rng.randrange(len(rank.slots))
    slot = rank.slots[at]
    at_extent = rng.randrange(len(slot.extents))
    extent = slot.extents[at_extent]
    elsewhere = rng.choice(rank.slots[other].extents)
    offset = rng.choice([elsewhere.offset, extent.offset + rng.choice([-64, -8, 8, 64, 192])])
    return _with_slot(program, rank, at, _with_extent(slot, at_extent, replace(extent, offset=offset)))


def relabel(rng: random.Random, program: Program) -> Program:
    """Change whose slot it is."""
    rank = rng.choice(program.ranks)
    if not rank.slots:
        return program
    at = rng.randrange(len(rank.slots))
    other = rng.choice(rank.slots)
    slot = rank.slots[at]
    changed = rng.choice(
        [replace(slot, kind=other.kind), replace(slot, stage=other.stage), replace(slot, microbatch=other.microbatch)]
    )
    return _with_slot(program, rank, at, changed)


def redeclare(rng: random.Random, program: Program) -> Program:
    """Change what the Program says about itself."""
    return rng.choice(
        [
            replace(program, reductions=program.reductions[1:]),
            replace(program, reductions=program.reductions[::-1]),
            replace(program, num_stages=program.num_stages + rng.choice([-1, 1])),
            replace(program, num_microbatches=program.num_microbatches + rng.choice([-1, 1])),
            replace(program, slice_capacities=program.slice_capacities[1:]),
            replace(program, remainder_capacities=program.remainder_capacities[1:]),
            replace(program, remainder_capacities=()),
            replace(program, ranks=program.ranks[::-1]),
        ]
    )


CORRUPTIONS: list[Corruption] = [
    drop,
    duplicate,
    swap,
    swap_work,
    move,
    carry_over,
    retarget,
    rename,
    reroute,
    resize,
    misplace,
    relabel,
    redeclare,
]


def _reordered(rng: random.Random, program: Program, change: Callable[[list[Instruction]], None]) -> Program:
    rank = rng.choice(program.ranks)
    instructions = list(rank.instructions)
    change(instructions)
    return _with_rank(program, replace(rank, instructions=tuple(instructions)))


def _edited(
    rng: random.Random,
    program: Program,
    change: Callable[[Instruction, RankProgram], Instruction],
    only: Callable[[Instruction], bool] = lambda _: True,
) -> Program:
    rank = rng.choice(program.ranks)
    places = [at for at, instruction in enumerate(rank.instructions) if only(instruction)]
    if not places:
        return program
    instructions = list(rank.instructions)
    at = rng.choice(places)
    instructions[at] = change(instructions[at], rank)
    return _with_rank(program, replace(rank, instructions=tuple(instructions)))


def _with(instruction: Instruction, name: str, indices: tuple[int, ...]) -> Instruction:
    changes: dict[str, tuple[int, ...]] = {name: indices}
    return replace(instruction, **changes)  # type: ignore[arg-type]  # all four are tuples of indices


def _with_rank(program: Program, rank: RankProgram) -> Program:
    return replace(program, ranks=tuple(rank if other.rank == rank.rank else other for other in program.ranks))


def _with_slot(program: Program, rank: RankProgram, at: int, slot: Slot) -> Program:
    slots = list(rank.slots)
    slots[at] = slot
    return _with_rank(program, replace(rank, slots=tuple(slots)))


def _with_extent(slot: Slot, at: int, extent: Extent) -> Slot:
    return replace(slot, extents=(*slot.extents[:at], extent, *slot.extents[at + 1 :]))
