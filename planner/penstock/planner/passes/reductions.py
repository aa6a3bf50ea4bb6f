"""Pass 3, reductions: where every rank starts and waits for the sums of gradients, and its optimizer's step.

Gradients of a tied matrix are summed over its copies (tie), then those of each stage over replicas (dp), then their
squares over all ranks (norm). A stage's gradients are complete after its last W or B.

- On the host a reduction runs next to compute, so that of a stage starts directly after its last W and the messages
  that follow it, if its rank still has compute after that. It is waited for after all compute, before the norm. With
  one stage per rank nothing is left to compute, and every reduction is waited for where it starts.
- With ``late_receives``, for NCCL, all reductions start after all compute. A reduction is a kernel there, with as many
  thread blocks as NCCL chooses; next to those of the channels it would break what `penstock.core.residency` relies on.

The reduction over dp of a tied stage starts after that over tie is over, since it sums the result. So the terms of
every sum and their order are the same wherever reductions start.

Example, two stages per rank, split backward, dp. Rank 0 ends with stage 2, then stage 0:

    2W0 · 2START_REDUCE(dp) · 0I0 · 0W0 · 0START_REDUCE(dp) · 2WAIT_REDUCE(dp) · 0WAIT_REDUCE(dp) · 0START_REDUCE(norm)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.core.program import Reduction
from penstock.core.schedule import Action, Group, Kind
from penstock.planner.passes.draft import Draft

_MESSAGES = frozenset({Kind.SEND_F, Kind.SEND_B, Kind.WAIT_SEND_F, Kind.WAIT_SEND_B})


def reductions_of(num_ranks: int, dp: bool, tie: tuple[int, int] | None) -> tuple[Reduction, ...]:
    """The groups of a pipeline, in the order in which a gradient passes through them."""
    everyone = tuple(range(num_ranks))
    reductions = [Reduction(Group.NORM, everyone)]
    if dp:
        reductions.insert(0, Reduction(Group.DP, everyone))
    if tie is not None and tie[0] != tie[1]:
        reductions.insert(0, Reduction(Group.TIE, tuple(sorted(tie))))
    return tuple(reductions)


def add_reductions(
    drafts: Sequence[Draft],
    rank: int,
    stage_ranks: Sequence[int],
    reductions: Sequence[Reduction],
    *,
    late: bool,
) -> list[Draft]:
    """The drafts of ``rank`` with the reductions that it joins, and STEP; with ``late`` all stand at the end."""
    own = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
    groups = {reduction.group for reduction in reductions if rank in reduction.ranks}
    tied = [stage for stage in own if stage in (0, len(stage_ranks) - 1)] if Group.TIE in groups else []
    first = [(Group.TIE, stage) for stage in tied]
    first += [(Group.DP, stage) for stage in own if stage not in tied and Group.DP in groups]
    places = {} if late else dict(_complete(drafts))
    early = sorted((places[stage], group, stage) for group, stage in first if stage in places)
    row: list[Draft] = []
    reached = 0
    for place, group, stage in early:
        row += [*drafts[reached:place], _start(group, stage)]
        reached = place
    row += drafts[reached:]
    started = [(group, stage) for _, group, stage in early]
    row += [_start(*piece) for piece in first if piece not in started]
    after_tie = [(Group.DP, stage) for stage in tied if Group.DP in groups]
    row += [_wait(Group.TIE, stage) for stage in tied] + [_start(*piece) for piece in after_tie]
    summed = [piece for piece in (*started, *first, *after_tie) if piece[0] is Group.DP]
    row += [_wait(*piece) for piece in dict.fromkeys(summed)]
    return [*row, _start(Group.NORM, own[0]), _wait(Group.NORM, own[0]), Draft(Action(Kind.STEP, own[0]))]


def _complete(drafts: Sequence[Draft]) -> Iterator[tuple[int, int]]:
    """(stage, place) of every stage whose gradients are complete before its rank's last compute, and where they are."""
    last = {draft.action.stage: at for at, draft in enumerate(drafts) if draft.action.kind in (Kind.B, Kind.W)}
    end = max(at for at, draft in enumerate(drafts) if draft.action.is_compute)
    for stage, at in last.items():
        if at < end:
            place = at + 1
            while drafts[place].action.kind in _MESSAGES:
                place += 1
            yield stage, place


def _start(group: Group, stage: int) -> Draft:
    return Draft(Action(Kind.START_REDUCE, stage, group=group))


def _wait(group: Group, stage: int) -> Draft:
    return Draft(Action(Kind.WAIT_REDUCE, stage, group=group))
