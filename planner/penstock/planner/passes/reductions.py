"""Pass 3, reductions: places of the starts and waits of gathers, of gradient sums, and of the optimizer's step.

Gradients of a tied matrix are summed over its copies (tie); a divided head has one copy per stage. Gradients of which
each shard has only an addend are summed over shards (tp), then the gradients of each stage over replicas (dp), then
their squares over all ranks (norm). A stage's gradients are complete after its last W or B. Then its *chain* begins,
the sums that it joins, each of which needs the result of the one before:

- Tie and dp run concurrently with the rank's other instructions until it waits for them. Tp is waited for where it
  starts: it is short (norms, biases, few heads), its shards reach it at the same time, and so the long one, dp, starts
  as early as possible.
- On the host reductions run next to compute. If the rank still has compute after a stage's last W, the stage's chain
  begins there, after the messages that follow the W, and goes on up to the first reduction that is not waited for at
  once. The rest follows after all compute, before the norm. With one stage per rank there is no compute left.
- A rank with several stages of a tied matrix sums their rows in one reduction over tie, after all compute. Without
  replicas a rank that has all of them sums them with the norm instead.
- With ``late_receives``, for NCCL, all chains begin after all compute. A reduction is a kernel there, with as many
  thread blocks as NCCL chooses; next to those of the channels it would violate the assumption of
  `penstock.core.residency`.

So the terms of every sum and their order are the same wherever reductions start.

A stage may be summed over shards and replicas in buckets (`penstock.core.buckets`). Then its last W or B is in parts,
and the chain of each bucket begins directly after its part. Messages follow the last part. In stage 0 the last bucket
has the embedding, which may be tied: only this bucket waits for the tie. The other stages of a tie have no buckets. A
stage's last backward is never in a pair: the pair's forward would need a later backward.

If replicas divide the optimizer state (`penstock.core.replicas`), a step begins with shards of the parameters that the
step before it has updated, and gathers them. All gathers of a rank start first, in the order in which its forwards need
them, and each is waited for directly before the first of these. The first forward of a stage with buckets is in parts,
from the first units to the last, and each part waits for its bucket only: the next buckets are gathered while it runs.
With ``late_receives`` there are no parts, and all gathers are waited for before anything else.

Example, two stages per rank, split backward, dp. Rank 0 ends with stage 2, then stage 0:

    2W0 · 2START_REDUCE(dp) · 0I0 · 0W0 · 0START_REDUCE(dp) · 2WAIT_REDUCE(dp) · 0WAIT_REDUCE(dp) · 0START_REDUCE(norm)

With stage 0 in two buckets of two units each, the end of its backward is

    0I0 · 0W0[2:4] · 0START_REDUCE(dp)[2:4] · 0W0[0:2] · 0START_REDUCE(dp)[0:2]

With tp, 2START_REDUCE(tp) · 2WAIT_REDUCE(tp) stand before 2START_REDUCE(dp), and likewise for stage 0. With zero 1 the
rank begins with

    0START_GATHER(dp)[0:2] · 0START_GATHER(dp)[2:4] · 2START_GATHER(dp) ·
    0WAIT_GATHER(dp)[0:2] · 0F0[0:2] · 0WAIT_GATHER(dp)[2:4] · 0F0[2:4] · 2WAIT_GATHER(dp) · 2F0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.core.program import Reduction
from penstock.core.schedule import Action, Group, Kind, Part, flatten
from penstock.planner.passes.draft import Draft

_MESSAGES = frozenset({Kind.SEND_F, Kind.SEND_B, Kind.WAIT_SEND_F, Kind.WAIT_SEND_B})


def reductions_of(
    stage_ranks: Sequence[int], *, dp: bool, tp: bool, tie: tuple[int, ...] = ()
) -> tuple[Reduction, ...]:
    """The groups of a pipeline, in the order in which they reduce a gradient.

    ``dp``: there are other replicas. ``tp``: shards have gradients to sum. ``tie``: the stages with rows of a tied
    matrix. If stages of one rank share rows that are also summed over replicas, the rank sums them first, so that
    replicas may divide the sums.
    """
    everyone = tuple(range(max(stage_ranks) + 1))
    tied_ranks = tuple(sorted({stage_ranks[stage] for stage in tie}))
    is_tied = len(tied_ranks) > 1 or (dp and len(tie) > 1)
    reductions = [Reduction(Group.TIE, tied_ranks, tie)] if is_tied else []
    reductions += [Reduction(Group.TP, everyone)] if tp else []
    reductions += [Reduction(Group.DP, everyone)] if dp else []
    return (*reductions, Reduction(Group.NORM, everyone))


@dataclass(frozen=True, slots=True)
class _Piece:
    """The gradients of a stage or its parameters, or a bucket of them."""

    stage: int
    part: Part | None = None


Buckets = Sequence[tuple[Part, ...]]
"""The buckets of every stage, in the order in which backward completes them; none if the stage is summed as a whole."""


def add_reductions(
    drafts: Sequence[Draft],
    rank: int,
    stage_ranks: Sequence[int],
    reductions: Sequence[Reduction],
    *,
    late: bool,
    gathers: bool = False,
    buckets: Buckets = (),
) -> list[Draft]:
    """The drafts of ``rank`` with its reductions, STEP and, if it ``gathers`` parameters, the gathers. With ``late``
    all reductions are at the end, and all gathers at the start.
    """
    own_stages = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
    groups = [reduction.group for reduction in reductions if rank in reduction.ranks]
    peers = tuple(group for group in groups if group.is_of_peers)
    ties = [reduction for reduction in reductions if reduction.group is Group.TIE]
    tied_stages = [stage for reduction in ties for stage in reduction.tied_of(stage_ranks, rank)]
    may_cut = {stage for stage in own_stages if peers and not late and (stage == 0 or stage not in tied_stages)}
    cut = {stage: own for stage, own in enumerate(buckets) if own and stage in may_cut}
    drafts, parts = _in_parts(drafts, cut, _last_backwards(drafts))
    if gathers:
        drafts, _ = _in_parts(drafts, {stage: own[::-1] for stage, own in parts.items()}, _first_forwards(drafts))
    pieces = {stage: [_Piece(stage, part) for part in parts.get(stage, (None,))] for stage in own_stages}
    tied = [pieces[stage][-1] for stage in tied_stages]
    untied = [piece for stage in own_stages for piece in pieces[stage] if piece not in tied]
    chains = {**dict.fromkeys(tied, (Group.TIE, *peers)), **dict.fromkeys(untied, peers)}
    places = {} if late else dict(_complete(drafts, pieces))
    for piece in tied if len(tied) > 1 else ():
        places.pop(piece, None)
    early = sorted(places, key=lambda piece: places[piece])
    row: list[Draft] = []
    reached = 0
    for piece in early:
        row += [*drafts[reached : places[piece]], *_begun(piece, chains[piece])]
        reached = places[piece]
    row += drafts[reached:]
    for piece in (*tied[:1], *untied):
        row += [] if piece in places else _begun(piece, chains[piece])
    for piece in tied:
        row += [_wait(Group.TIE, _Piece(piece.stage))] if piece == tied[0] else []
        row += _begun(piece, peers)
    if Group.DP in groups:
        begun = dict.fromkeys(piece for piece in (*early, *untied) if piece in untied)
        row += [_wait(Group.DP, piece) for piece in (*begun, *tied)]
    first = _Piece(own_stages[0])
    row += [_start(Group.NORM, first), _wait(Group.NORM, first), Draft(Action(Kind.STEP, own_stages[0]))]
    return _gathered(row, itertools.chain.from_iterable(pieces.values()), late=late) if gathers else row


def _gathered(row: Sequence[Draft], pieces: Iterable[_Piece], *, late: bool) -> list[Draft]:
    """The row with the gathers of all ``pieces``."""
    missing = set(pieces)
    needed: dict[int, _Piece] = {}
    for position, draft in enumerate(row):
        piece = _Piece(draft.action.stage, draft.action.part)
        if draft.action.kind is Kind.F and piece in missing:
            needed[position] = piece
            missing.remove(piece)
    gathered = list(row)
    for position, piece in reversed(needed.items()):
        gathered.insert(0 if late else position, _draft(Kind.WAIT_GATHER, Group.DP, piece))
    return [*(_draft(Kind.START_GATHER, Group.DP, piece) for piece in needed.values()), *gathered]


def _in_parts(
    drafts: Sequence[Draft], buckets: Mapping[int, tuple[Part, ...]], positions: Mapping[int, int]
) -> tuple[list[Draft], dict[int, tuple[Part, ...]]]:
    """The drafts, with each stage's action at its position split by buckets, and the parts of the stages that were
    split.
    """
    cut: dict[int, tuple[Part, ...]] = {}
    row: list[Draft] = []
    for position, draft in enumerate(drafts):
        action = draft.action
        parts = buckets.get(action.stage, ())
        if parts and positions.get(action.stage) == position:
            cut[action.stage] = parts
            row += [replace(draft, action=replace(action, part=part)) for part in parts]
        else:
            row.append(draft)
    return row, cut


def _begun(piece: _Piece, chain: Sequence[Group]) -> Iterator[Draft]:
    """The start of a piece's chain, up to the first reduction that is not waited for where it starts."""
    for group in chain:
        yield _start(group, piece)
        if group is not Group.TP:
            return
        yield _wait(group, piece)


def _complete(drafts: Sequence[Draft], pieces: Mapping[int, Sequence[_Piece]]) -> Iterator[tuple[_Piece, int]]:
    """(piece, place) of all gradients that are complete before their rank's last compute."""
    end = max(position for position, draft in enumerate(drafts) if draft.action.is_compute)
    for stage, last in _last_backwards(drafts).items():
        for behind, piece in enumerate(reversed(pieces[stage])):
            position = last - behind
            if position < end:
                place = position + 1
                while drafts[place].action.kind in _MESSAGES:
                    place += 1
                yield piece, place


def _last_backwards(drafts: Sequence[Draft]) -> dict[int, int]:
    """The position of the last B or W of every stage."""
    return {
        action.stage: position
        for position, draft in enumerate(drafts)
        for action in flatten((draft.action,))
        if action.kind in (Kind.B, Kind.W)
    }


def _first_forwards(drafts: Sequence[Draft]) -> dict[int, int]:
    """The position of the first F of every stage. It is in no pair: the backward next to it would follow an F."""
    forwards = [(draft.action.stage, at) for at, draft in enumerate(drafts) if draft.action.kind is Kind.F]
    return dict(reversed(forwards))


def _start(group: Group, piece: _Piece) -> Draft:
    return _draft(Kind.START_REDUCE, group, piece)


def _wait(group: Group, piece: _Piece) -> Draft:
    return _draft(Kind.WAIT_REDUCE, group, piece)


def _draft(kind: Kind, group: Group, piece: _Piece) -> Draft:
    """A reduction over tie names the whole stage, also if the stage has buckets."""
    part = piece.part if group.is_of_peers else None
    return Draft(Action(kind, piece.stage, group=group, part=part))
