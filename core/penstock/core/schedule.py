"""The order of work as data: actions with a textual form, and schedules as one list of actions per rank.

The text form follows ``torch.distributed.pipelining`` and adds the slice: ``1F3.2`` is stage 1, forward, micro-batch 3,
slice 2. Without a slice it is torch's own form. A schedule's text is CSV: one row per rank, blank cells allowed.
"""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from penstock.core.errors import UserError, shown
from penstock.core.limits import EXACT, MOST_SCHEDULE_CHARACTERS, characters, up_to
from penstock.core.manifest import Checked, mistyped


class Kind(enum.StrEnum):
    """Kind of an action. The first five are compute. A schedule has only these and overlaps of them, a Program has
    all.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's own name for the input-gradient pass
    W = "W"
    R = "R"
    OVERLAP = "OVERLAP_F_B"
    POST_RECV_F = "POST_RECV_F"
    POST_RECV_B = "POST_RECV_B"
    WAIT_RECV_F = "WAIT_RECV_F"
    WAIT_RECV_B = "WAIT_RECV_B"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    FREE = "FREE"
    START_REDUCE = "START_REDUCE"
    WAIT_REDUCE = "WAIT_REDUCE"
    STEP = "STEP"
    START_GATHER = "START_GATHER"
    WAIT_GATHER = "WAIT_GATHER"


COMPUTE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R})

BACKWARD_KINDS = frozenset({Kind.B, Kind.I})
"""Actions that take the gradient of the output of their stage."""


class Group(enum.StrEnum):
    """The ranks that a reduction or a gather joins: replicas, tensor-parallel peers, the copies of a tied matrix, all
    ranks for the norm.
    """

    DP = "dp"
    TP = "tp"
    TIE = "tie"
    NORM = "norm"

    @property
    def is_of_peers(self) -> bool:
        """Whether each rank joins only the ranks at its own place, and does not wait for the others of its pipeline."""
        return self in (Group.DP, Group.TP)


@dataclass(frozen=True, slots=True)
class Part:
    """Units [first, stop) of a stage, counted from its first: the work of one of several R of a slice.

    In a Program also a part of a stage's first forward and the parameters that it needs, or a part of its last backward
    and the gradients that it completes (`penstock.core.buckets`).
    """

    first: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise UserError(
                what=f"units {self.first} to {self.stop} are no part of a stage",
                remedy="write the first unit and the one after the last, such as [0:2], or one unit, such as [2]",
            )

    def __str__(self) -> str:
        return f"[{self.first}]" if self.stop == self.first + 1 else f"[{self.first}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Action:
    """One action. ``microbatch`` and ``slice`` are None for actions without them (reductions, STEP); ``part`` is None
    for the whole stage. In a schedule only R may be for a part, in a Program also F, B, W, reductions over peers, and
    gathers.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    slice: int | None = None
    group: Group | None = None
    children: tuple[Action, ...] = ()
    part: Part | None = None

    def __str__(self) -> str:
        if self.kind is Kind.OVERLAP:
            return f"({';'.join(map(str, self.children))}){self.kind.value}"
        group = f"({self.group.value})" if self.group else ""
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        slice_ = "" if self.slice is None else f".{self.slice}"
        return f"{self.stage}{self.kind.value}{group}{microbatch}{slice_}{self.part or ''}"

    @property
    def is_compute(self) -> bool:
        """Whether it runs the model (an overlap runs its children)."""
        return self.kind in COMPUTE_KINDS or self.kind is Kind.OVERLAP

    @property
    def is_pair(self) -> bool:
        """Whether it is an overlap that can be one instruction: of a forward and a backward, B or I, of different
        micro-batches, so that neither needs the other.
        """
        if self.kind is not Kind.OVERLAP or len(self.children) != 2:
            return False
        first, second = self.children
        kinds = {first.kind, second.kind}
        return Kind.F in kinds and bool(kinds & {Kind.B, Kind.I}) and first.microbatch != second.microbatch

    @property
    def resumes(self) -> bool:
        """Whether it continues a recomputation that another R began."""
        return self.kind is Kind.R and self.part is not None and self.part.first > 0


_NAMES = "|".join(sorted((kind.value for kind in Kind if kind is not Kind.OVERLAP), key=len, reverse=True))
_NUMBER = "[0-9]{1,7}"
_PART = rf"\[({_NUMBER})(?::({_NUMBER}))?\]"
_ACTION = re.compile(rf"^({_NUMBER})({_NAMES})(?:\((\w+)\))?(?:({_NUMBER})(?:\.({_NUMBER}))?)?(?:{_PART})?$")
_OVERLAP = re.compile(r"^\((.+)\)OVERLAP_F_B$")


def parse_action(text: str, where: str = "") -> Action:
    """The action written as ``text``; raises `UserError` naming ``where``."""
    overlap = _OVERLAP.match(text)
    if overlap:
        children = tuple(_parse_one(part, where) for part in re.split(r"[;,]", overlap.group(1)))
        return Action(Kind.OVERLAP, children[0].stage, children=children)
    return _parse_one(text, where)


def _parse_one(text: str, where: str) -> Action:
    """An action other than an overlap; overlaps are not nested."""
    match = _ACTION.match(text)
    if match is None or (match.group(3) and match.group(3) not in set(Group)):
        raise UserError(
            what=f"{shown(text)} is not an action",
            where=where,
            remedy="write stage, kind, micro-batch and slice, such as 1F3.2; kinds: F, B, I, W, R",
        )
    stage, kind, group, microbatch, slice_, first, stop = match.groups()
    return Action(
        Kind(kind),
        int(stage),
        None if microbatch is None else int(microbatch),
        None if slice_ is None else int(slice_),
        Group(group) if group else None,
        part=None if first is None else _part(int(first), stop, where),
    )


def _part(first: int, stop: str | None, where: str) -> Part:
    try:
        return Part(first, first + 1 if stop is None else int(stop))
    except UserError as error:
        raise UserError(what=error.what, where=where, remedy=error.remedy) from None


def read_action(value: Any, path: str) -> Action:
    """The action of a manifest; raises `UserError` with ``path`` for anything but an action's text."""
    if not isinstance(value, str):
        raise mistyped(value, "an action's text", path)
    return parse_action(value, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Compute actions per rank, in the order in which each rank runs them.

    Every stage is on one rank; a rank may hold several stages. Slices of a micro-batch are numbered from 0; every
    compute action names one. If ``num_remainder_slices`` is not 0, the last micro-batch has that many slices, at most
    as many as the others: it may be a smaller one (`penstock.core.plan.Plan`). A Schedule is only well-formed; the
    Program's proof shows whether the order can run.
    """

    ranks: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int
    num_slices: int
    num_remainder_slices: int = 0

    def __post_init__(self) -> None:
        owners: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in flatten(actions):
                self._check(action, rank, owners)

    def _check(self, action: Action, rank: int, owners: dict[int, int]) -> None:
        if action.kind not in COMPUTE_KINDS:
            raise UserError(what=f"{action} is not a compute action", where=f"rank {rank}", remedy="leave it out")
        if action.part is not None and action.kind is not Kind.R:
            raise UserError(
                what=f"{action} is for a part of its stage", where=f"rank {rank}", remedy="write parts of R alone"
            )
        if owners.setdefault(action.stage, rank) != rank:
            raise UserError(
                what=f"stage {action.stage} is on ranks {owners[action.stage]} and {rank}",
                where=f"rank {rank}: {action}",
                remedy="keep all actions of a stage on one rank",
            )
        for name, value, count in (
            ("stage", action.stage, self.num_stages),
            ("micro-batch", action.microbatch, self.num_microbatches),
            ("slice", action.slice, self.num_slices_of(action.microbatch)),
        ):
            if value is None or not 0 <= value < count:
                raise UserError(what=f"{name} {value} is not in 0..{count - 1}", where=f"rank {rank}: {action}")

    def is_remainder(self, microbatch: int | None) -> bool:
        """Whether the micro-batch is the last one, with its own slices."""
        return self.num_remainder_slices > 0 and microbatch == self.num_microbatches - 1

    def num_slices_of(self, microbatch: int | None) -> int:
        """Number of slices of the micro-batch."""
        return self.num_remainder_slices if self.is_remainder(microbatch) else self.num_slices

    def column_of(self, action: Action) -> int:
        """The action's column in cost tables: by its slice; those of a remainder follow the others."""
        return (action.slice or 0) + (self.num_slices if self.is_remainder(action.microbatch) else 0)

    def with_remainder(self, num_slices: int) -> Schedule:
        """The schedule with only the first ``num_slices`` slices in its last micro-batch; 0 keeps all.

        A slice needs no later slice in forward, and in backward its own forward and the existing later slices. So the
        order of the other actions can run if this one can.
        """
        last = self.num_microbatches - 1 if num_slices else None

        def is_there(action: Action) -> bool:
            return last is None or action.microbatch != last or (action.slice or 0) < num_slices

        return replace(
            self,
            ranks=tuple(tuple(_only(actions, is_there)) for actions in self.ranks),
            num_remainder_slices=num_slices,
        )

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of every stage; raises `UserError` for a stage without actions."""
        owners = {action.stage: rank for rank, actions in enumerate(self.ranks) for action in flatten(actions)}
        missing = next((stage for stage in range(self.num_stages) if stage not in owners), None)
        if missing is not None:
            raise UserError(what=f"stage {missing} has no actions", where="schedule", remedy="give it F and B actions")
        return tuple(owners[stage] for stage in range(self.num_stages))

    @property
    def recomputed_units(self) -> dict[int, int]:
        """The numbers of units that the parts cover together, by stage, for stages that are recomputed in parts."""
        units: dict[int, int] = {}
        for action in (action for actions in self.ranks for action in flatten(actions)):
            if action.part is not None:
                units[action.stage] = max(units.get(action.stage, 0), action.part.stop)
        return units

    @property
    def recomputed_stages(self) -> frozenset[int]:
        """The stages that have an R."""
        actions = (action for actions in self.ranks for action in flatten(actions))
        return frozenset(action.stage for action in actions if action.kind is Kind.R)

    def to_csv(self) -> str:
        """One row per rank, one cell per action."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[str(action) for action in actions] for actions in self.ranks])
        return text.getvalue()


def flatten(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions with every overlap replaced by its children, in order."""
    for action in actions:
        if action.kind is Kind.OVERLAP:
            yield from flatten(action.children)
        else:
            yield action


def without_overlaps(actions: Iterable[Action], *, keep_pairs: bool) -> Iterator[Action]:
    """The actions with overlaps replaced by their children, except pairs that are one instruction (``keep_pairs``)."""
    for action in actions:
        if keep_pairs and action.is_pair:
            yield action
        else:
            yield from flatten((action,))


def _only(actions: Iterable[Action], is_wanted: Callable[[Action], bool]) -> Iterator[Action]:
    """The wanted actions; of an overlap its wanted children, alone if there is only one."""
    for action in actions:
        if action.kind is Kind.OVERLAP:
            children = tuple(filter(is_wanted, action.children))
            yield from (replace(action, children=children),) if len(children) > 1 else children
        elif is_wanted(action):
            yield action


CSV = "csv"
"""The generator of an imported schedule, whose recipe is its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec(Checked):
    """A schedule by its recipe: generator and version regenerate it on every rank from the plan's shape.

    ``text`` is for schedules that cannot be regenerated: the CSV of an imported one, or the recorded order of one that
    was made from costs.
    """

    generator: Annotated[str, characters(), "a schedule's name, or `csv`"]
    version: Annotated[int, up_to(EXACT), "of the generator"] = 1
    text: Annotated[str, characters(MOST_SCHEDULE_CHARACTERS), "the actions of an imported schedule, as CSV"] = ""


def import_spec(text: str, where: str) -> tuple[ScheduleSpec, tuple[str, ...]]:
    """The recipe of the schedule in ``text``, and warnings about dropped actions.

    The recipe holds the normalised text: no communication, no blank cells.
    """
    schedule, warnings = parse_schedule(text, where)
    return ScheduleSpec(generator=CSV, text=schedule.to_csv()), warnings


def parse_schedule(text: str, where: str = "schedule") -> tuple[Schedule, tuple[str, ...]]:
    """A schedule from CSV, penstock's or torch's, and warnings about dropped actions.

    torch's communication actions are dropped (they are regenerated) and so are its FSDP actions, with a warning.
    Overlaps are kept. Without slices every micro-batch is one slice, number 0. The last micro-batch may have fewer
    slices than the others.
    """
    dropped: set[str] = set()
    rows: list[list[Action]] = []
    for number, cells in enumerate(_cells(text, where), start=1):
        rows.append([a for cell in cells if cell for a in _import_cell(cell, f"{where}, line {number}", dropped)])
    while rows and not rows[-1]:
        rows.pop()
    actions = [action for row in rows for action in flatten(row)]
    if not actions:
        raise UserError(what="holds no actions", where=where, remedy="give one row of actions per rank")
    last = max(action.microbatch or 0 for action in actions)
    num_slices = 1 + max(action.slice or 0 for action in actions)
    num_last = 1 + max(action.slice or 0 for action in actions if action.microbatch in (None, last))
    schedule = Schedule(
        ranks=tuple(tuple(row) for row in rows),
        num_stages=1 + max(action.stage for action in actions),
        num_microbatches=1 + last,
        num_slices=num_slices,
        num_remainder_slices=num_last if num_last < num_slices else 0,
    )
    return schedule, tuple(f"{name} actions are not used here and were dropped" for name in sorted(dropped))


def _cells(text: str, where: str) -> Iterator[list[str]]:
    """The cells of every row; raises `UserError` for text that is not CSV, and for more than any schedule has."""
    if len(text) > MOST_SCHEDULE_CHARACTERS:
        raise UserError(
            what=f"has {len(text):,} characters, more than {MOST_SCHEDULE_CHARACTERS:,}",
            where=where,
            remedy="use fewer micro-batches or slices",
        )
    reader = csv.reader(io.StringIO(text))
    try:
        for row in reader:
            yield [cell.strip() for cell in row]
    except csv.Error as error:
        place = f"{where}, line {reader.line_num}"
        raise UserError(what=f"is not CSV: {error}", where=place, remedy="write one action in each cell") from None


_TORCH_COMMUNICATION = re.compile(r"^\d+(SEND|RECV)_[FB]\d+$")
_TORCH_FSDP = re.compile(r"^\d+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)\d*$")


def _import_cell(cell: str, where: str, dropped: set[str]) -> list[Action]:
    fsdp = _TORCH_FSDP.match(cell)
    if fsdp:
        dropped.add(fsdp.group(1))
        return []
    if _TORCH_COMMUNICATION.match(cell):
        return []
    return [_with_slice(parse_action(cell, where))]


def _with_slice(action: Action) -> Action:
    if action.kind is Kind.OVERLAP:
        children = tuple(_with_slice(child) for child in action.children)
        return Action(action.kind, action.stage, children=children)
    return action if action.slice is not None else replace(action, slice=0)
