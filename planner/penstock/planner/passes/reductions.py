"""Pass 3, reductions: places of the starts and waits of gradient sums, of the optimizer's step, and of gathers.

Gradients of a tied matrix are summed over its copies (tie); a divided head has one copy per stage. Gradients of which
each shard has only an addend are summed over shards (tp), then the gradients of each stage over replicas (dp), then
their squares over all ranks (norm). A stage's gradients are complete after its last W or B. Then its *chain* begins,
the sums that it joins, each of which needs the result of the one before:

- Tie and dp run concurrently with the rank's other instructions until it waits for them. Tp is waited for where it
  starts: it is short (norms, biases, few heads), its shards reach it at the same time, and so the long one, dp, starts
  as early as possible.
- On the host reductions run next to compute, so the chain of a stage begins directly after its last W and the messages
  that follow it, if its rank still has compute after that, and continues up to the first that is not waited for. The
  rest follows after all compute, before the norm. With one stage per rank there is no compute left.
- A rank with several stages of a tied matrix sums their rows in one reduction over tie, after all compute. Without
  replicas a rank that has all of them sums them with the norm instead.
- With ``late_receives``, for NCCL, all chains begin after all compute. A reduction is a kernel there, with as many
  thread blocks as NCCL chooses; next to those of the channels it would violate the assumption of
  `penstock.core.residency`.

So the terms of every sum and their order are the same wherever reductions start.

If replicas divide the optimizer state (`penstock.core.replicas`), the parameters of all stages are gathered over them
directly after STEP: all gathers start, then all are waited for.

Example, two stages per rank, split backward, dp. Rank 0 ends with stage 2, then stage 0:

    2W0 · 2START_REDUCE(dp) · 0I0 · 0W0 · 0START_REDUCE(dp) · 2WAIT_REDUCE(dp) · 0WAIT_REDUCE(dp) · 0START_REDUCE(norm)

With tp, 2START_REDUCE(tp) · 2WAIT_REDUCE(tp) stand before 2START_REDUCE(dp), and likewise for stage 0. With zero 1 the
rank ends with

    0STEP · 0START_GATHER(dp) · 2START_GATHER(dp) · 0WAIT_GATHER(dp) · 2WAIT_GATHER(dp)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.core.program import Reduction
from penstock.core.schedule import Action, Group, Kind, flatten
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


def add_reductions(
    drafts: Sequence[Draft],
    rank: int,
    stage_ranks: Sequence[int],
    reductions: Sequence[Reduction],
    *,
    late: bool,
    gathers: bool = False,
) -> list[Draft]:
    """The drafts of ``rank`` with its reductions, STEP and, if it ``gathers`` parameters, the gathers; with ``late``
    all are at the end.
    """
    own_stages = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
    groups = [reduction.group for reduction in reductions if rank in reduction.ranks]
    ties = [reduction for reduction in reductions if reduction.group is Group.TIE]
    tied = [stage for reduction in ties for stage in reduction.tied_of(stage_ranks, rank)]
    untied = [stage for stage in own_stages if stage not in tied]
    peers = tuple(group for group in groups if group.is_of_peers)
    chains = {**dict.fromkeys(tied, (Group.TIE, *peers)), **dict.fromkeys(untied, peers)}
    places = {} if late else dict(_complete(drafts))
    for stage in tied if len(tied) > 1 else ():
        places.pop(stage, None)
    early = sorted(places, key=lambda stage: places[stage])
    row: list[Draft] = []
    reached = 0
    for stage in early:
        row += [*drafts[reached : places[stage]], *_begun(stage, chains[stage])]
        reached = places[stage]
    row += drafts[reached:]
    for stage in (*tied[:1], *untied):
        row += [] if stage in places else _begun(stage, chains[stage])
    for stage in tied:
        row += [_wait(Group.TIE, stage)] if stage == tied[0] else []
        row += _begun(stage, peers)
    if Group.DP in groups:
        begun = dict.fromkeys(stage for stage in (*early, *untied) if stage in untied)
        row += [_wait(Group.DP, stage) for stage in (*begun, *tied)]
    row += [
        _start(Group.NORM, own_stages[0]),
        _wait(Group.NORM, own_stages[0]),
        Draft(Action(Kind.STEP, own_stages[0])),
    ]
    for kind in (Kind.START_GATHER, Kind.WAIT_GATHER) if gathers else ():
        row += [Draft(Action(kind, stage, group=Group.DP)) for stage in own_stages]
    return row


def _begun(stage: int, chain: Sequence[Group]) -> Iterator[Draft]:
    """The start of a stage's chain, up to the first reduction that is not waited for where it starts."""
    for group in chain:
        yield _start(group, stage)
        if group is not Group.TP:
            return
        yield _wait(group, stage)


def _complete(drafts: Sequence[Draft]) -> Iterator[tuple[int, int]]:
    """(stage, place) of every stage whose gradients are complete before its rank's last compute."""
    last_positions = {
        action.stage: position
        for position, draft in enumerate(drafts)
        for action in flatten((draft.action,))
        if action.kind in (Kind.B, Kind.W)
    }
    end = max(position for position, draft in enumerate(drafts) if draft.action.is_compute)
    for stage, position in last_positions.items():
        if position < end:
            place = position + 1
            while drafts[place].action.kind in _MESSAGES:
                place += 1
            yield stage, place


def _start(group: Group, stage: int) -> Draft:
    return Draft(Action(Kind.START_REDUCE, stage, group=group))


def _wait(group: Group, stage: int) -> Draft:
    return Draft(Action(Kind.WAIT_REDUCE, stage, group=group))
