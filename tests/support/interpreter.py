"""Runs a Program in one process, on numbers that live in real bytes at the slots' offsets.

It does what a runtime does and checks nothing else: ranks go through their instructions in any interleaving, a message
is copied piece by piece at any time after both ends were posted, the n-th send of a channel meets its n-th receive, and
the contents of a slot are undefined once it is acquired. A wrong Program crashes, hangs or gives a wrong answer.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from penstock.core.layout import SlotKind
from penstock.core.program import Channel, Instruction, Program, RankProgram, Slot
from penstock.core.roles import DKV, G_IN, G_OUT, KV, RA, RL, A, H, L, W, X, Y
from penstock.core.schedule import Action, Group, Kind, Part
from tests.support.strategies import Case
from tests.support.toy_model import PRIME, ToyModel, position_weight

NUM_REPLICAS = 2
"""Replicas of a case with dp; all of them see the same batch."""

NUM_SHARDS = 3
"""Shards of a case with tp; each has the same addend of every ``u``, and all of everything else."""

WORD = 8

_REST = {A: RA, L: RL}
"""Where the rest is of what these slots hold."""


class Crash(Exception):  # noqa: N818  it is what a process does
    """The Program did what no runtime survives."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step gives: gradients after all reductions, and the weights after STEP."""

    gradients: dict[str, int]
    weights: dict[str, int]


def expected_answer(case: Case, model: ToyModel) -> Answer:
    """The answer from the model's exact gradients."""
    replicas = NUM_REPLICAS if case.dp else 1
    shards = NUM_SHARDS if case.tp else 1
    addends = {name: shards if name.startswith("u") else 1 for name in model.weights}
    gradients = {name: addends[name] * replicas * slope % PRIME for name, slope in model.gradients(case).items()}
    if case.tie:
        gradients["e"] = gradients["head"] = (gradients["e"] + gradients["head"]) % PRIME
    norm = sum(gradients.values()) % PRIME
    weights = {name: (model.weights[name] - norm * slope) % PRIME for name, slope in gradients.items()}
    return Answer(gradients, weights)


def interpret(program: Program, case: Case, model: ToyModel, seed: int) -> Answer:
    """Run one step of every rank; raises `Crash` when a rank does, or when none can go on."""
    return _Interpreter(program, case, model, random.Random(seed)).run()


@dataclass(slots=True)
class _Flight:
    """One message: where it comes from and goes to, and how many of its bytes have been copied."""

    source: memoryview | None = None
    target: memoryview | None = None
    num_copied: int = 0

    @property
    def arrived(self) -> bool:
        return self.target is not None and self.num_copied == len(self.target)

    @property
    def can_move(self) -> bool:
        return self.source is not None and self.target is not None and not self.arrived

    def move(self, num_bytes: int) -> None:
        if self.source is None or self.target is None or len(self.source) != len(self.target):
            raise Crash("a message and its receive differ in size")
        stop = min(len(self.target), self.num_copied + num_bytes)
        self.target[self.num_copied : stop] = self.source[self.num_copied : stop]
        self.num_copied = stop


class _Rank:
    """One process: its arena, its position, its gradients and weights."""

    def __init__(self, program: RankProgram, rng: random.Random) -> None:
        self.program = program
        self.memory = memoryview(bytearray(rng.randbytes(program.arena_bytes)))
        self.position = 0
        self.flights: dict[tuple[Channel | None, int, bool], _Flight] = {}
        self.gradients: defaultdict[str, int] = defaultdict(int)
        self.weights: dict[str, int] = {}
        self.norm: int | None = None
        self.remade: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.started: dict[tuple[Group | None, int, Part | None], dict[str, int]] = {}
        self.stepped: dict[str, int] = {}
        self.gathering: dict[tuple[int, Part | None], dict[str, int]] = {}
        self.forwarded: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self.shared: dict[SlotKind, list[int]] = {}

    @property
    def next(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None

    def view(self, slot: Slot, num_bytes: int) -> memoryview:
        """The slot's bytes, as many as the model needs there."""
        (extent,) = slot.extents
        found = self.memory[extent.offset : extent.offset + num_bytes]
        if extent.offset < 0 or len(found) < num_bytes:
            raise Crash("a slot lies outside the arena")
        return found

    def slots(self, indices: Sequence[int]) -> dict[SlotKind, Slot]:
        try:
            return {slot.kind: slot for slot in (self.program.slots[index] for index in indices)}
        except IndexError:
            raise Crash("no such slot") from None


class _Interpreter:
    def __init__(self, program: Program, case: Case, model: ToyModel, rng: random.Random) -> None:
        self.case = case
        self.model = model
        self.rng = rng
        self.ranks = [_Rank(rank, rng) for rank in program.ranks]
        self.channels: defaultdict[tuple[Channel | None, bool], list[_Flight]] = defaultdict(list)
        self.hurry = rng.choice([0.05, 0.5, 0.95])
        for stage, rank in enumerate(case.schedule.stage_ranks):
            names = [f"{name}{stage}" for name in "vu"] if case.stages[stage].has_linears else []
            names += ["e"] if stage == 0 else []
            names += ["head"] if stage == len(case.stages) - 1 else []
            self.ranks[rank].stepped.update({name: model.weights[name] for name in names})
            stale = {name: rng.randrange(PRIME) for name in names}
            self.ranks[rank].weights.update(stale if case.zero else self.ranks[rank].stepped)

    def run(self) -> Answer:
        while any(rank.next for rank in self.ranks):
            ready = [rank for rank in self.ranks if rank.next and not self._blocked(rank, rank.next)]
            moving = [flight for flights in self.channels.values() for flight in flights if flight.can_move]
            if moving and (not ready or self.rng.random() < self.hurry):
                self.rng.choice(moving).move(self.rng.choice([WORD, 64, 1 << 20]))
            elif ready:
                self._advance(self.rng.choice(ready))
            else:
                raise Crash("no rank can go on")
        gradients: dict[str, int] = {}
        weights: dict[str, int] = {}
        for rank in self.ranks:
            gradients.update({name: rank.gradients[name] for name in rank.weights})
            weights.update(rank.stepped)
        return Answer(gradients, weights)

    def _blocked(self, rank: _Rank, instruction: Instruction) -> bool:
        kind = instruction.action.kind
        if kind in _WAITS:
            flight = rank.flights.get((instruction.channel, instruction.sequence, kind in _SEND_WAITS))
            if flight is None:
                raise Crash("waits for a message that it did not start")
            return not flight.arrived
        return kind is Kind.WAIT_REDUCE and not all(
            self._has_started(m, instruction) for m in self._members(instruction)
        )

    def _advance(self, rank: _Rank) -> None:
        instruction = rank.next
        assert instruction is not None, "only ranks with work are ready"
        for index in instruction.acquires:
            (slot,) = rank.slots([index]).values()
            rank.view(slot, slot.num_bytes)[:] = self.rng.randbytes(slot.num_bytes)
        action = instruction.action
        run = _TABLE.get(action.kind)
        if run is None:
            raise Crash("no such instruction")
        run(self, rank, instruction)
        rank.position += 1

    # Transfers.

    def start(self, rank: _Rank, instruction: Instruction) -> None:
        sending = instruction.action.kind in (Kind.SEND_F, Kind.SEND_B)
        indices = instruction.reads if sending else instruction.writes
        slots = [rank.program.slots[index] for index in indices if 0 <= index < len(rank.program.slots)]
        if len(slots) != 1:
            raise Crash("a message needs one slot")
        view = rank.view(slots[0], slots[0].num_bytes)
        flights, others = self.channels[instruction.channel, sending], self.channels[instruction.channel, not sending]
        flight = others[len(flights)] if len(flights) < len(others) else _Flight()
        flights.append(flight)
        if sending:
            flight.source = view
        else:
            flight.target = view
        rank.flights[instruction.channel, instruction.sequence, sending] = flight

    def nothing(self, rank: _Rank, instruction: Instruction) -> None:
        pass

    # Compute.

    def pair(self, rank: _Rank, instruction: Instruction) -> None:
        """Both children, in any order, each on the slots of its micro-batch."""
        children = list(instruction.action.children)
        self.rng.shuffle(children)
        for child in children:
            reads, writes = (
                tuple(index for index in indices if rank.program.slots[index].microbatch == child.microbatch)
                for indices in (instruction.reads, instruction.writes)
            )
            _TABLE[child.kind](self, rank, replace(instruction, action=child, reads=reads, writes=writes))

    def forward(self, rank: _Rank, instruction: Instruction) -> None:
        """In parts the first reads the input, and only the last leaves all that backward needs."""
        part, cell = instruction.action.part, _cell(instruction.action)
        reached, x, attended = rank.forwarded.get(cell, (0, 0, 0))
        if part is not None and part.first != reached:
            raise Crash("goes on with what was not begun")
        if any(self._has(rest, cell[0]) for rest in _REST.values()):
            rank.shared, rank.forwarded = {}, {}
        if part is None or part.first == 0:
            x, attended = self._attended(rank, instruction)
        if part is not None:
            rank.forwarded[cell] = (part.stop, x, attended)
        if self._is_of_last_unit(instruction.action):
            self._end_forward(rank, instruction, x, attended)

    def _attended(self, rank: _Rank, instruction: Instruction) -> tuple[int, int]:
        """The input, and what the first unit makes of it."""
        stage, _, part = _cell(instruction.action)
        x, u = self._input(rank, instruction), self._weight(rank, f"u{stage}")
        if not self.case.stages[stage].attention:
            return x, 0
        keys = self._regions(rank, rank.slots(instruction.writes), KV, stage)
        _store(keys[part], [u * x % PRIME])
        return x, u * x * self._prefix(keys, part) % PRIME

    def _weight(self, rank: _Rank, name: str) -> int:
        """What this replica has; a weight that no step changes is the model's."""
        return rank.weights.get(name, self.model.weights[name])

    def _end_forward(self, rank: _Rank, instruction: Instruction, x: int, attended: int) -> None:
        stage, microbatch, part = _cell(instruction.action)
        written = rank.slots(instruction.writes)
        v, b = self._weight(rank, f"v{stage}"), self.model.weights[f"b{stage}"]
        y = (v * x * x + b * x + attended) % PRIME
        self._save(rank, instruction, x)
        if stage < len(self.case.stages) - 1:
            self._write(rank, written, Y if Y in written else X, stage, part, [y])
        else:
            target = self.model.targets[microbatch, part]
            rank.gradients["head"] = (rank.gradients["head"] + target * y * y) % PRIME
            self._write(rank, written, H, stage, part, [2 * target * self._weight(rank, "head") * y % PRIME])

    def recompute(self, rank: _Rank, instruction: Instruction) -> None:
        """In parts the first reads the input, and only the last leaves all that backward needs. Reads what was kept."""
        part, cell = instruction.action.part, _cell(instruction.action)
        remade, x = rank.remade.get(cell, (0, 0))
        if part is not None and part.first != remade:
            raise Crash("goes on with what was not begun")
        if part is None or part.first == 0:
            x = self._input(rank, instruction)
        if part is None or part.stop == self.case.num_units[cell[0]]:
            self._save_rest(rank, instruction, x)
        if part is not None:
            rank.remade[cell] = (part.stop, x)

    def input_gradient(self, rank: _Rank, instruction: Instruction) -> None:
        stage, microbatch, part = _cell(instruction.action)
        read, written = rank.slots(instruction.reads), rank.slots(instruction.writes)
        widths, last_stage = self.case.stages[stage], len(self.case.stages) - 1
        (dy,) = self._read(rank, read, H if stage == last_stage else G_IN, stage, part, 1)
        self._remake_inside(rank, instruction)
        if widths.activations or widths.remade_activations:
            (factor,) = self._saved(rank, read, A, stage, part, 1)
        else:
            factor = self._factor(stage, self._input(rank, instruction))
        dk = self._key_gradient(rank, read, written, stage, part, dy) if widths.attention else 0
        dx = (factor * dy + self.model.weights[f"u{stage}"] * dk) % PRIME
        if widths.has_linears:
            self._write(rank, written, W, stage, part, [dy, dk, dx])
        elif stage == 0:
            self._embedding_gradient(rank, microbatch, part, dx)
        if stage > 0:
            self._write(rank, written, G_OUT if G_OUT in written else G_IN, stage, part, [dx])

    def weight_gradient(self, rank: _Rank, instruction: Instruction) -> None:
        self._weight_gradient(rank, instruction, rank.slots(instruction.reads))

    def backward(self, rank: _Rank, instruction: Instruction) -> None:
        """In parts, the first writes the gradients of all outputs, and all parts read them."""
        if self._is_of_last_unit(instruction.action):
            self.input_gradient(rank, instruction)
        both = {**rank.slots(instruction.writes), **rank.slots(instruction.reads)}
        self._weight_gradient(rank, instruction, both)

    def _weight_gradient(self, rank: _Rank, instruction: Instruction, slots: dict[SlotKind, Slot]) -> None:
        stage, microbatch, part = _cell(instruction.action)
        if not self.case.stages[stage].has_linears:
            return
        square, x = self._saved(rank, slots, L, stage, part, 2)
        dy, dk, dx = self._read(rank, slots, W, stage, part, 3)
        if self._is_of_last_unit(instruction.action):
            rank.gradients[f"v{stage}"] = (rank.gradients[f"v{stage}"] + square * dy) % PRIME
        if _is_of_first_unit(instruction.action):
            rank.gradients[f"u{stage}"] = (rank.gradients[f"u{stage}"] + x * dk) % PRIME
            if stage == 0:
                self._embedding_gradient(rank, microbatch, part, dx)

    def _is_of_last_unit(self, action: Action) -> bool:
        """Whether it is for the stage's last unit, whose weights are ``v`` and ``head``."""
        buckets = self.case.buckets[action.stage] if self.case.buckets else ()
        return action.part is None or not buckets or action.part == buckets[0]

    def _embedding_gradient(self, rank: _Rank, microbatch: int, part: int, dx: int) -> None:
        rank.gradients["e"] = (rank.gradients["e"] + self.model.tokens[microbatch, part] * dx) % PRIME

    def _input(self, rank: _Rank, instruction: Instruction) -> int:
        stage, microbatch, part = _cell(instruction.action)
        if stage == 0:
            return self._weight(rank, "e") * self.model.tokens[microbatch, part] % PRIME
        (x,) = self._read(rank, rank.slots(instruction.reads), X, stage, part, 1)
        return x

    def _save(self, rank: _Rank, instruction: Instruction, x: int) -> None:
        """Keep what backward needs, where the Program gives a place for it: all of it, or of what R makes the rest of
        some share.
        """
        stage, _, part = _cell(instruction.action)
        written = rank.slots(instruction.writes)
        for kept, rest in _REST.items():
            if kept in written:
                numbers = self._needed_by_backward(kept, stage, x)
                some = [3 * x % PRIME] * len(numbers) if self._has(rest, stage) else numbers
                self._write(rank, written, kept, stage, part, some)

    def _save_rest(self, rank: _Rank, instruction: Instruction, x: int) -> None:
        """Where the Program gives a place for it, what backward needs besides the share that was kept."""
        stage, _, part = _cell(instruction.action)
        written = rank.slots(instruction.writes)
        for kept, rest in _REST.items():
            if rest in written:
                self._write(rank, written, rest, stage, part, self._rest_of(rank, instruction, kept, x))

    def _rest_of(self, rank: _Rank, instruction: Instruction, kept: SlotKind, x: int) -> list[int]:
        stage, _, part = _cell(instruction.action)
        numbers = self._needed_by_backward(kept, stage, x)
        some = [0] * len(numbers)
        if self._has(kept, stage):
            some = self._read(rank, rank.slots(instruction.reads), kept, stage, part, len(numbers))
        return [(whole - share) % PRIME for whole, share in zip(numbers, some, strict=True)]

    def _remake_inside(self, rank: _Rank, instruction: Instruction) -> None:
        """What no R left for a backward, it makes again: in the memory that forwards use too, or for its W."""
        stage, _, part = _cell(instruction.action)
        read, written = rank.slots(instruction.reads), rank.slots(instruction.writes)
        for kept, rest in _REST.items():
            if self._has(rest, stage) and rest not in read:
                left = self._rest_of(rank, instruction, kept, self._input(rank, instruction))
                if rest in written:
                    self._write(rank, written, rest, stage, part, left)
                else:
                    rank.shared[rest], rank.forwarded = left, {}

    def _saved(
        self, rank: _Rank, slots: dict[SlotKind, Slot], kept: SlotKind, stage: int, part: int, count: int
    ) -> list[int]:
        """What was kept and what was made again, together."""
        found = [
            self._read(rank, slots, kind, stage, part, count) if kind in slots else self._shared(rank, kind)
            for kind in (kept, _REST[kept])
            if self._has(kind, stage)
        ]
        return [sum(numbers) % PRIME for numbers in zip(*found, strict=True)]

    @staticmethod
    def _shared(rank: _Rank, kind: SlotKind) -> list[int]:
        if kind not in rank.shared:
            raise Crash(f"no {kind}, in a slot or in shared memory")
        return rank.shared[kind]

    def _needed_by_backward(self, kept: SlotKind, stage: int, x: int) -> list[int]:
        return [self._factor(stage, x)] if kept is A else [x * x % PRIME, x]

    def _has(self, kind: SlotKind, stage: int) -> bool:
        return self.case.sizes(kind, stage, 1) > 0

    def _factor(self, stage: int, x: int) -> int:
        return (2 * self.model.weights[f"v{stage}"] * x + self.model.weights[f"b{stage}"]) % PRIME

    def _key_gradient(
        self, rank: _Rank, read: dict[SlotKind, Slot], written: dict[SlotKind, Slot], stage: int, part: int, dy: int
    ) -> int:
        keys, sums = self._regions(rank, read, KV, stage), self._regions(rank, written, DKV, stage)
        if part == len(keys) - 1:
            for region in sums:
                _store(region, [0])
        ((key,), prefix) = _load(keys[part], 1), self._prefix(keys, part)
        for before in range(part + 1):
            (total,) = _load(sums[before], 1)
            own = dy * prefix if before == part else 0
            _store(sums[before], [(total + position_weight(before) * dy * key + own) % PRIME])
        (dk,) = _load(sums[part], 1)
        return dk

    @staticmethod
    def _prefix(keys: Sequence[memoryview], part: int) -> int:
        return sum(position_weight(before) * _load(keys[before], 1)[0] for before in range(part + 1)) % PRIME

    def _regions(self, rank: _Rank, slots: dict[SlotKind, Slot], kind: SlotKind, stage: int) -> list[memoryview]:
        """One view per slice: of the slot that holds a whole micro-batch, or of each slice's own."""
        slot = _slot(slots, kind)
        slices = self.case.slices_of(slot.microbatch)
        if slot.slice is not None:
            place = (kind, stage, slot.microbatch)
            own = [other for other in rank.program.slots if (other.kind, other.stage, other.microbatch) == place]
            if len(own) != len(slices):
                raise Crash("a slice has no slot of its own")
            return [self._view(rank, other, stage, other.slice or 0) for other in sorted(own, key=_slice_of)]
        num_bytes = self.case.bytes_of(slot.microbatch, kind, stage, sum(slices))
        view = rank.view(slot, num_bytes)
        width = num_bytes // sum(slices)
        bounds = [width * tokens for tokens in accumulate(slices, initial=0)]
        return [view[first:stop] for first, stop in pairwise(bounds)]

    def _read(
        self, rank: _Rank, slots: dict[SlotKind, Slot], kind: SlotKind, stage: int, part: int, count: int
    ) -> list[int]:
        return _load(self._view(rank, _slot(slots, kind), stage, part), count)

    def _write(
        self, rank: _Rank, slots: dict[SlotKind, Slot], kind: SlotKind, stage: int, part: int, numbers: list[int]
    ) -> None:
        _store(self._view(rank, _slot(slots, kind), stage, part), numbers)

    def _view(self, rank: _Rank, slot: Slot, stage: int, part: int) -> memoryview:
        tokens = self.case.slices_of(slot.microbatch)[part]
        return rank.view(slot, self.case.bytes_of(slot.microbatch, slot.kind, stage, tokens))

    # The end of the step.

    def _members(self, instruction: Instruction) -> list[_Rank]:
        """Of this replica; the others are equal to it."""
        group = instruction.action.group
        if group is Group.TIE:
            owners = self.case.schedule.stage_ranks
            return [self.ranks[member] for member in sorted({owners[stage] for stage in self.case.tie})]
        return self.ranks if group is Group.NORM else []

    @staticmethod
    def _has_started(member: _Rank, instruction: Instruction) -> bool:
        return any(group is instruction.action.group for group, _, _ in member.started)

    def start_reduction(self, rank: _Rank, instruction: Instruction) -> None:
        """What is summed is what is there now: what a later action adds is lost."""
        key = (instruction.action.group, instruction.action.stage, instruction.action.part)
        if key in rank.started:
            raise Crash("starts a reduction twice")
        if instruction.action.group is Group.TIE and rank not in self._members(instruction):
            raise Crash("joins a group that it is not in")
        rank.started[key] = dict(rank.gradients)

    def finish_reduction(self, rank: _Rank, instruction: Instruction) -> None:
        group, stage, part = instruction.action.group, instruction.action.stage, instruction.action.part
        if (group, stage, part) not in rank.started:
            raise Crash("waits for a reduction that it did not start")
        if group is Group.DP:
            own = rank.started[group, stage, part]
            names = self._names_of(instruction.action)
            summed = {name: NUM_REPLICAS * own.get(name, 0) % PRIME for name in names if name in rank.weights}
            rank.gradients.update(summed)
            return
        if group is Group.TP:
            name = f"u{stage}"
            if name in rank.weights and _is_of_first_unit(instruction.action):
                rank.gradients[name] = NUM_SHARDS * rank.started[group, stage, part].get(name, 0) % PRIME
            return
        members = self._members(instruction)
        theirs = [own for member in members for (joined, _, _), own in member.started.items() if joined is group]
        if group is Group.TIE:
            total = sum(own.get("e", 0) + own.get("head", 0) for own in theirs) % PRIME
            rank.gradients.update({name: total for name in ("e", "head") if name in rank.weights})
        else:
            pairs = zip(members, theirs, strict=True)
            rank.norm = sum(own.get(name, 0) for member, own in pairs for name in member.weights) % PRIME

    def optimize(self, rank: _Rank, instruction: Instruction) -> None:
        if rank.norm is None:
            raise Crash("steps without the norm")
        for name, value in rank.weights.items():
            rank.stepped[name] = (value - rank.norm * rank.gradients[name]) % PRIME

    def start_gather(self, rank: _Rank, instruction: Instruction) -> None:
        """Other replicas have what is there now."""
        gathered = (instruction.action.stage, instruction.action.part)
        if gathered in rank.gathering:
            raise Crash("gathers twice")
        rank.gathering[gathered] = dict(rank.stepped)

    def finish_gather(self, rank: _Rank, instruction: Instruction) -> None:
        gathered = (instruction.action.stage, instruction.action.part)
        if gathered not in rank.gathering:
            raise Crash("waits for a gather that it did not start")
        stepped = rank.gathering[gathered]
        rank.weights.update({name: stepped[name] for name in self._names_of(instruction.action) if name in stepped})

    def _names(self, stage: int) -> list[str]:
        """The weights of a stage."""
        return [f"v{stage}", f"u{stage}", *["e"][: stage == 0], *["head"][: stage == len(self.case.stages) - 1]]

    def _names_of(self, action: Action) -> list[str]:
        """The weights of the action's units."""
        return [
            name
            for name in self._names(action.stage)
            if (self._is_of_last_unit(action) if name[0] in "vh" else _is_of_first_unit(action))
        ]


def _is_of_first_unit(action: Action) -> bool:
    """Whether it is for the stage's first unit, whose weights are ``u`` and ``e``."""
    return action.part is None or action.part.first == 0


_SEND_WAITS = frozenset({Kind.WAIT_SEND_F, Kind.WAIT_SEND_B})
_WAITS = _SEND_WAITS | {Kind.WAIT_RECV_F, Kind.WAIT_RECV_B}

_TABLE: dict[Kind, Callable[[_Interpreter, _Rank, Instruction], None]] = {
    Kind.F: _Interpreter.forward,
    Kind.R: _Interpreter.recompute,
    Kind.I: _Interpreter.input_gradient,
    Kind.W: _Interpreter.weight_gradient,
    Kind.B: _Interpreter.backward,
    Kind.OVERLAP: _Interpreter.pair,
    Kind.SEND_F: _Interpreter.start,
    Kind.SEND_B: _Interpreter.start,
    Kind.POST_RECV_F: _Interpreter.start,
    Kind.POST_RECV_B: _Interpreter.start,
    **dict.fromkeys(_WAITS, _Interpreter.nothing),
    Kind.FREE: _Interpreter.nothing,
    Kind.START_REDUCE: _Interpreter.start_reduction,
    Kind.WAIT_REDUCE: _Interpreter.finish_reduction,
    Kind.STEP: _Interpreter.optimize,
    Kind.START_GATHER: _Interpreter.start_gather,
    Kind.WAIT_GATHER: _Interpreter.finish_gather,
}


def _cell(action: Action) -> tuple[int, int, int]:
    if action.microbatch is None or action.slice is None:
        raise Crash("an action without micro-batch or slice")
    return action.stage, action.microbatch, action.slice


def _slice_of(slot: Slot) -> int:
    return slot.slice or 0


def _slot(slots: dict[SlotKind, Slot], kind: SlotKind) -> Slot:
    if kind not in slots:
        raise Crash(f"no slot {kind}")
    return slots[kind]


def _store(view: memoryview, numbers: Sequence[int]) -> None:
    """Fill the whole view with the numbers, again and again."""
    words = b"".join(number.to_bytes(WORD, "little") for number in numbers)
    view[:] = (words * (len(view) // len(words) + 1))[: len(view)]


def _load(view: memoryview, count: int) -> list[int]:
    """The numbers that fill the view; nothing else may be in it."""
    words = [int.from_bytes(view[at : at + WORD], "little") for at in range(0, len(view), WORD)]
    if any(word != words[at % count] for at, word in enumerate(words)):
        raise Crash("the contents of a slot are torn")
    return words[:count]
