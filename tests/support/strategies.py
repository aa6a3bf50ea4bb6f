"""Random pipelines for Hypothesis: schedules in any legal order, and everything that lowering asks for besides."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hypothesis import strategies as st

from penstock.core.layout import SlotKind
from penstock.core.program import Program
from penstock.core.schedule import Action, Kind, Part, Schedule, flatten
from penstock.planner.lowering import Remainder, lower
from penstock.planner.order import Order, from_schedule

Cell = tuple[int, int, int]

_MESSAGE_SLOTS = (
    SlotKind.INPUT,
    SlotKind.OUTPUT,
    SlotKind.SENT_GRADIENT,
    SlotKind.RECEIVED_GRADIENT,
    SlotKind.HEAD_GRADIENT,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWidths:
    """Bytes per token of what a stage keeps, or makes again where R does; 0 where it has no such slot."""

    activations: int
    linear: int
    attention: int
    remade_activations: int
    remade_linear: int

    @property
    def has_linears(self) -> bool:
        """Whether it trains any weight but the ends'."""
        return self.linear + self.remade_linear > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A schedule with all that makes a Program of it."""

    schedule: Schedule
    slices: tuple[int, ...]
    message_width: int
    stages: tuple[StageWidths, ...]
    receive_ahead: int
    late_receives: bool
    dp: bool
    tp: bool
    tie: tuple[int, ...]
    num_units: tuple[int, ...]
    remainder_slices: tuple[int, ...] = ()
    keep_pairs: bool = False
    zero: int = 0
    prefix_by_slice: bool = False
    buckets: tuple[tuple[Part, ...], ...] = ()

    def sizes(self, kind: SlotKind, stage: int, tokens: int) -> int:
        """Bytes of a slot: proportional to its tokens, gradients of attention twice as wide."""
        widths = self.stages[stage]
        if kind in _MESSAGE_SLOTS:
            return tokens * self.message_width
        per_token = {
            SlotKind.ACTIVATIONS: widths.activations,
            SlotKind.LINEAR_INPUTS: widths.linear,
            SlotKind.REMADE_ACTIVATIONS: widths.remade_activations,
            SlotKind.REMADE_LINEAR_INPUTS: widths.remade_linear,
            SlotKind.OUTPUT_GRADIENTS: 2 * (widths.linear + widths.remade_linear),
            SlotKind.KEYS_VALUES: widths.attention,
            SlotKind.KEYS_VALUES_GRADIENTS: 2 * widths.attention,
        }
        return tokens * per_token[kind]

    def remainder_sizes(self, kind: SlotKind, stage: int, tokens: int) -> int:
        """Those of a last micro-batch with slices of its own are others."""
        return 3 * self.sizes(kind, stage, tokens)

    def slices_of(self, microbatch: int) -> tuple[int, ...]:
        """Lengths in tokens."""
        return self.remainder_slices if self.schedule.is_remainder(microbatch) else self.slices

    def bytes_of(self, microbatch: int, kind: SlotKind, stage: int, tokens: int) -> int:
        """Bytes of a slot of the micro-batch."""
        sizes = self.remainder_sizes if self.schedule.is_remainder(microbatch) else self.sizes
        return sizes(kind, stage, tokens)

    @property
    def num_trained(self) -> tuple[int, ...]:
        """Units with gradients of every stage: those of its buckets, or one."""
        buckets = self.buckets or ((),) * self.schedule.num_stages
        return tuple(own[0].stop if own else 1 for own in buckets)

    @property
    def remainder(self) -> Remainder | None:
        """The last micro-batch, where it has slices of its own."""
        return Remainder(self.remainder_sizes, self.remainder_slices) if self.remainder_slices else None

    def lower(self) -> Program:
        """Its Program."""
        return lower(
            self.schedule,
            self.sizes,
            slices=self.slices,
            remainder=self.remainder,
            receive_ahead=self.receive_ahead,
            late_receives=self.late_receives,
            dp=self.dp,
            tp=self.tp,
            tie=self.tie,
            zero=self.zero,
            buckets=self.buckets,
            num_units=self.num_units,
            keep_pairs=self.keep_pairs,
            prefix_by_slice=self.prefix_by_slice,
        )

    @property
    def order(self) -> Order:
        """Its schedule as arrays."""
        return from_schedule(self.schedule, keep_pairs=self.keep_pairs)


@st.composite
def schedules(draw: st.DrawFn, *, pairing: bool = False) -> Schedule:
    """Any legal schedule of up to 4 ranks, 6 stages, 4 micro-batches and 4 slices; with ``pairing`` the children of its
    overlaps can run at once.
    """
    num_ranks = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, num_ranks - 1), max_size=2))
    stage_ranks = draw(st.permutations([*range(num_ranks), *extra]))
    num_microbatches, num_slices = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    splitting = draw(st.sampled_from([0.0, 0.5, 1.0]))
    recomputing = draw(st.sampled_from([0.0, 0.3, 1.0]))
    seed = draw(st.integers(0, 2**32))
    maker = _Maker(random.Random(seed), stage_ranks, num_microbatches, num_slices, pairing=pairing)
    return maker.make(splitting, recomputing)


@st.composite
def _ties(draw: st.DrawFn, stage_ranks: Sequence[int], *, dp: bool) -> tuple[int, ...]:
    """None, or the first stage and some at the end, where the ends are on different ranks or there are replicas."""
    if len(stage_ranks) == 1 or (stage_ranks[0] == stage_ranks[-1] and not dp) or draw(st.booleans()):
        return ()
    return (0, *range(draw(st.integers(1, len(stage_ranks) - 1)), len(stage_ranks)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A legal schedule with random slices, slots, parts of recomputations, and ends of the step; some have other slices
    in their last micro-batch.
    """
    keep_pairs = draw(st.booleans())
    whole = draw(schedules(pairing=keep_pairs))
    num_units = tuple(draw(st.integers(1, MOST_UNITS)) for _ in range(whole.num_stages))
    last = draw(st.integers(0, whole.num_slices)) if whole.num_microbatches > 1 else 0
    schedule = in_parts(whole, num_units, draw(st.integers(0, 2**32))).with_remainder(last)
    lengths = st.integers(1, 5)
    dp = draw(st.booleans())
    in_pairs = _in_pairs_without_r(schedule) if keep_pairs else set[int]()
    return Case(
        schedule=schedule,
        slices=tuple(draw(st.lists(lengths, min_size=schedule.num_slices, max_size=schedule.num_slices))),
        message_width=draw(st.sampled_from([8, 24, 64])),
        stages=tuple(draw(_stage_widths(recomputes=i not in in_pairs)) for i in range(schedule.num_stages)),
        receive_ahead=draw(st.integers(1, 3)),
        late_receives=draw(st.booleans()),
        dp=dp,
        tp=draw(st.booleans()),
        tie=draw(_ties(schedule.stage_ranks, dp=dp)),
        zero=draw(st.integers(0, int(dp))),
        num_units=num_units,
        remainder_slices=tuple(draw(st.lists(lengths, min_size=last, max_size=last))),
        keep_pairs=keep_pairs,
        prefix_by_slice=draw(st.booleans()),
        buckets=draw(_buckets(schedule.num_stages)) if draw(st.booleans()) else (),
    )


@st.composite
def _buckets(draw: st.DrawFn, num_stages: int) -> tuple[tuple[Part, ...], ...]:
    """Of every stage none, or several from the last units to the first."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    parts = [tuple(_parts(rng.randint(1, MOST_UNITS + 1), rng))[::-1] for _ in range(num_stages)]
    return tuple(own if len(own) > 1 else () for own in parts)


MOST_UNITS = 3
"""Of a case's stage."""


def in_parts(schedule: Schedule, num_units: Sequence[int], seed: int) -> Schedule:
    """The schedule with some recomputations in parts, each anywhere between the one before it and the backward."""
    rng = random.Random(seed)
    rows = [list(row) for row in schedule.ranks]
    for row in rows:
        whole = [action for action in row if action.kind is Kind.R and num_units[action.stage]]
        for action in [action for action in whole if rng.random() < 0.5]:
            at = row.index(action)
            row[at : at + 1] = []
            for part in _parts(num_units[action.stage], rng):
                end = next(place for place, each in enumerate(row) if place >= at and _is_backward(each, action))
                at = rng.randint(at, end)
                row.insert(at, replace(action, part=part))
                at += 1
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def _parts(num_units: int, rng: random.Random) -> Iterator[Part]:
    first = 0
    while first < num_units:
        stop = rng.randint(first + 1, num_units)
        yield Part(first, stop)
        first = stop


def _is_backward(action: Action, recompute: Action) -> bool:
    cell = (recompute.stage, recompute.microbatch, recompute.slice)
    backward = [each for each in flatten([action]) if each.kind in (Kind.B, Kind.I)]
    return any((each.stage, each.microbatch, each.slice) == cell for each in backward)


def _in_pairs_without_r(schedule: Schedule) -> set[int]:
    """The stages that may not recompute anything, since a backward of a pair cannot do it inside."""
    actions = list(flatten(action for row in schedule.ranks for action in row))
    again = {(action.stage, action.microbatch, action.slice) for action in actions if action.kind is Kind.R}
    pairs = [action for row in schedule.ranks for action in row if action.is_pair]
    backwards = [child for pair in pairs for child in pair.children if child.kind is not Kind.F]
    return {each.stage for each in backwards if (each.stage, each.microbatch, each.slice) not in again}


@st.composite
def _stage_widths(draw: st.DrawFn, *, recomputes: bool) -> StageWidths:
    """Without any R in its schedule, a stage that ``recomputes`` does so inside its backwards."""
    return StageWidths(
        activations=draw(st.sampled_from([0, 8, 56, 72])),
        linear=draw(st.sampled_from([0, 16, 80])),
        attention=draw(st.sampled_from([0, 8, 32])),
        remade_activations=draw(st.sampled_from([0, 8, 56])) if recomputes else 0,
        remade_linear=draw(st.sampled_from([0, 16, 80])) if recomputes else 0,
    )


class _Maker:
    """Puts actions in a random order in which each comes after what it needs.

    Uniform choices rarely let one rank run far ahead of another, so every kind on every rank also gets a random liking,
    and often the best liked goes first; that yields orders like GPipe's on one rank and 1F1B's on the next.
    """

    def __init__(
        self,
        rng: random.Random,
        stage_ranks: Sequence[int],
        num_microbatches: int,
        num_slices: int,
        *,
        pairing: bool,
    ) -> None:
        self.rng = rng
        self.pairing = pairing
        self.stage_ranks = tuple(stage_ranks)
        self.num_microbatches = num_microbatches
        self.num_slices = num_slices
        self.liking = {(rank, kind): rng.random() for rank in stage_ranks for kind in Kind}
        self.eagerness = rng.choice([0.0, 0.8])

    def make(self, splitting: float, recomputing: float) -> Schedule:
        needs = dict(self._needs(splitting, recomputing))
        followers: defaultdict[Action, list[Action]] = defaultdict(list)
        for action, before in needs.items():
            for other in before:
                followers[other].append(action)
        missing = {action: len(before) for action, before in needs.items()}
        ready = [action for action, count in missing.items() if not count]
        ranks: list[list[Action]] = [[] for _ in range(max(self.stage_ranks) + 1)]
        while ready:
            action = self._choose(ready)
            own = ranks[self.stage_ranks[action.stage]]
            partner = self._partner(action, ready) if self.pairing else None
            if partner is None:
                own.append(action)
            else:
                own.append(Action(Kind.OVERLAP, action.stage, children=(action, partner)))
            for follower in [each for done in (action, partner) if done is not None for each in followers[done]]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        return Schedule(
            ranks=tuple(tuple(self._overlapped(actions)) for actions in ranks),
            num_stages=len(self.stage_ranks),
            num_microbatches=self.num_microbatches,
            num_slices=self.num_slices,
        )

    def _choose(self, ready: list[Action]) -> Action:
        if self.rng.random() < self.eagerness:
            at = max(range(len(ready)), key=lambda at: self.liking[self.stage_ranks[ready[at].stage], ready[at].kind])
        else:
            at = self.rng.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        return ready.pop()

    def _partner(self, action: Action, ready: list[Action]) -> Action | None:
        """Another action that can run now and is often a pair with this one, taken out of those that are ready."""
        for other in ready:
            is_pair = Action(Kind.OVERLAP, action.stage, children=(action, other)).is_pair
            if is_pair and self.stage_ranks[other.stage] == self.stage_ranks[action.stage] and self.rng.random() < 0.7:
                ready.remove(other)
                return other
        return None

    def _needs(self, splitting: float, recomputing: float) -> Iterator[tuple[Action, list[Action]]]:
        """Every action with those that it has to come after."""
        shape = (len(self.stage_ranks), self.num_microbatches, self.num_slices)
        backward = {cell: self._backward_kind(splitting) for cell in product(*map(range, shape))}
        for (stage, microbatch, part), kind in backward.items():
            forward, cell = Action(Kind.F, stage, microbatch, part), (stage, microbatch, part)
            before = self._existing(shape, (stage - 1, microbatch, part), (stage, microbatch, part - 1))
            yield forward, [Action(Kind.F, *other) for other in before]
            after = self._existing(shape, (stage + 1, microbatch, part), (stage, microbatch, part + 1))
            needs = [forward, *(Action(backward[other], *other) for other in after)]
            if self.rng.random() < recomputing:
                yield Action(Kind.R, *cell), [forward]
                needs.append(Action(Kind.R, *cell))
            yield Action(kind, *cell), needs
            if kind is Kind.I:
                yield Action(Kind.W, *cell), [Action(Kind.I, *cell)]

    def _backward_kind(self, splitting: float) -> Kind:
        return Kind.I if self.rng.random() < splitting else Kind.B

    @staticmethod
    def _existing(shape: Cell, *cells: Cell) -> list[Cell]:
        return [cell for cell in cells if all(0 <= at < limit for at, limit in zip(cell, shape, strict=True))]

    def _overlapped(self, actions: Sequence[Action]) -> Iterator[Action]:
        """The actions, some neighbours of two kinds as an overlap."""
        left = list(actions)
        while left:
            first = left.pop(0)
            if self.pairing:
                yield first
                continue
            pair = {first.kind, left[0].kind} if left else set()
            if pair in ({Kind.F, Kind.B}, {Kind.F, Kind.I}) and self.rng.random() < 0.2:
                children = (first, left.pop(0))
                yield Action(Kind.OVERLAP, first.stage, children=children)
            else:
                yield first
