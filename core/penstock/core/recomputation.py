"""Recomputation in a step: which part of it is hidden, since its rank would have waited in its place, and which is not.

R needs nothing of other ranks. Where a backward waits for the gradient of the next stage, the R before it runs in that
time and costs nothing; what of R is left when the gradient arrives delays the backward, and with it other ranks.

Without R its rank would be d earlier, d being R's duration. It keeps that lead until it needs a message: an action that
waits for one begins when that arrives, R or no R. So an action that its rank reached at t, and whose last message
arrived at A, leaves of a lead of d what is left of max(t - A, 0), and hides the rest. At the first action that sends a
message of its own the lead that is left is exposed, since the other rank has to wait for it; so it is at the end of the
step. W and the backward of the first stage send nothing, so a lead lasts over them; it adds up over several R.

Messages are taken to arrive when they did. Between stages on one rank there are none, so the last stage's R hides
nothing by itself: an R that precedes a backward of the last stage delays the gradient which that sends.

Example: R takes 10 on rank 0 from 100 on, then its B begins, whose gradient rank 1 sent until 107. Without R the B
would have begun at 107 and not at 110: of R 7 are hidden and 3 exposed. Had the gradient arrived at 112, with rank 0
waiting for it from 110 on, all 10 would be hidden; had it arrived at 90, none.

The arrival is the end of the sender's SEND. Simulated steps know it. Measured ones know when a message was sent, and
that it came later where its receiver still waits for it then; the time that it was under way counts as exposed
otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.core.errors import UserError
from penstock.core.schedule import COMPUTE_KINDS, Action, Kind, flatten, parse_action
from penstock.core.timeline import Activity, Event, Timeline

NEVER = -1
"""Before every time of a step: when something was there that nothing brought."""

_BACKWARDS = frozenset({Kind.B, Kind.I})
_SENDS = {Kind.SEND_F: 1, Kind.SEND_B: -1}
"""To which stage, counted from the sender's."""
_WAITS = frozenset({Kind.WAIT_RECV_F, Kind.WAIT_RECV_B})

Message = tuple[int, Kind, int, int, int]
"""The rank that receives it, F or B, and the stage, micro-batch and slice that it is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeTime:
    """Nanoseconds that R took: ``hidden_ns`` of them in place of waiting, ``exposed_ns`` on top of all else."""

    hidden_ns: int = 0
    exposed_ns: int = 0

    @property
    def total_ns(self) -> int:
        """All of it."""
        return self.hidden_ns + self.exposed_ns

    @property
    def hidden_share(self) -> float:
        """From 0 to 1; 0 where nothing is made again."""
        return self.hidden_ns / self.total_ns if self.total_ns else 0.0

    @property
    def hidden_text(self) -> str:
        """How much of it is hidden, for people."""
        return f"{100 * self.hidden_share:.1f} % of it hidden"

    def __add__(self, other: RecomputeTime) -> RecomputeTime:
        return RecomputeTime(hidden_ns=self.hidden_ns + other.hidden_ns, exposed_ns=self.exposed_ns + other.exposed_ns)


def recompute_times(timeline: Timeline) -> tuple[RecomputeTime, ...]:
    """Of every rank; empty where no rank makes anything again."""
    if not any(event.activity is Activity.COMPUTE and "R" in event.action for event in timeline.events):
        return ()
    step = _Step(timeline)
    times = tuple(_of_rank(step, rank) for rank in range(timeline.num_ranks))
    return times if any(time.total_ns for time in times) else ()


def over_ranks(times: Iterable[RecomputeTime]) -> RecomputeTime:
    """Of all ranks."""
    return sum(times, RecomputeTime())


@dataclass(frozen=True, slots=True)
class _Work:
    """A compute event: ``reached_ns`` is when its rank was ready for it, and waited for messages if there were none."""

    actions: tuple[Action, ...]
    reached_ns: int
    duration_ns: int


class _Step:
    """The compute of every rank in order, who owns which stage, and when messages arrived."""

    def __init__(self, timeline: Timeline) -> None:
        self.by_rank: list[list[tuple[Event, Action]]] = [[] for _ in range(timeline.num_ranks)]
        for event in sorted(timeline.events, key=lambda each: (each.start_ns, each.stop_ns)):
            action = _action_of(event)
            if action is not None and 0 <= event.rank < timeline.num_ranks:
                self.by_rank[event.rank].append((event, action))
        self.owners = self._owners()
        self.arrivals = self._arrivals()

    def _owners(self) -> Mapping[int, Sequence[int]]:
        """The ranks of each stage: one of every replica and shard, in their order."""
        owners: defaultdict[int, set[int]] = defaultdict(set)
        for rank, events in enumerate(self.by_rank):
            for _, action in events:
                if action.is_compute:
                    for each in flatten((action,)):
                        owners[each.stage].add(rank)
        return {stage: sorted(ranks) for stage, ranks in owners.items()}

    def is_alone(self, stage: int, rank: int) -> bool:
        """Whether the rank does not have that stage, or there is none."""
        return stage in self.owners and rank not in self.owners[stage]

    def _peer(self, rank: int, stage: int, other: int) -> int | None:
        """The rank with the ``other`` stage of the same replica and shard."""
        own, theirs = self.owners.get(stage, ()), self.owners.get(other, ())
        return theirs[own.index(rank)] if len(own) == len(theirs) and rank in own else None

    def _arrivals(self) -> Mapping[Message, int]:
        """When each message had been sent: after its SEND, or where that took no time after what made it."""
        arrivals: dict[Message, int] = {}
        for rank, events in enumerate(self.by_rank):
            for event, action in events:
                for each in flatten((action,)):
                    if each.kind is Kind.F:
                        self._sent(arrivals, rank, each, Kind.F, 1, event.stop_ns)
                    elif each.kind in _BACKWARDS:
                        self._sent(arrivals, rank, each, Kind.B, -1, event.stop_ns)
                    elif each.kind in _SENDS:
                        kind = Kind.F if each.kind is Kind.SEND_F else Kind.B
                        self._sent(arrivals, rank, each, kind, _SENDS[each.kind], event.stop_ns)
        return arrivals

    def _sent(
        self, arrivals: dict[Message, int], rank: int, action: Action, kind: Kind, direction: int, stop_ns: int
    ) -> None:
        target = action.stage + direction
        peer = self._peer(rank, action.stage, target)
        if peer is not None and peer != rank:
            message = (peer, kind, target, action.microbatch or 0, action.slice or 0)
            arrivals[message] = max(arrivals.get(message, NEVER), stop_ns)

    def works(self, rank: int) -> Iterator[_Work]:
        """What the rank computes, in order."""
        waits_from: int | None = None
        for event, action in self.by_rank[rank]:
            if action.kind in _WAITS:
                waits_from = event.start_ns if waits_from is None else waits_from
            elif action.is_compute:
                reached = event.start_ns if waits_from is None else waits_from
                yield _Work(tuple(flatten((action,))), reached, event.duration_ns)
                waits_from = None

    def arrived_ns(self, rank: int, action: Action) -> int:
        """When the message was there that the action needs."""
        kind = Kind.F if action.kind is Kind.F else Kind.B if action.kind in _BACKWARDS else None
        if kind is None:
            return NEVER
        return self.arrivals.get((rank, kind, action.stage, action.microbatch or 0, action.slice or 0), NEVER)

    def sends(self, rank: int, action: Action) -> bool:
        """Whether another rank waits for what the action makes."""
        direction = 1 if action.kind is Kind.F else -1 if action.kind in _BACKWARDS else 0
        return bool(direction) and self.is_alone(action.stage + direction, rank)


def _of_rank(step: _Step, rank: int) -> RecomputeTime:
    hidden = exposed = lead = 0
    for work in step.works(rank):
        if all(action.kind is Kind.R for action in work.actions):
            lead += work.duration_ns
            continue
        arrived = max(step.arrived_ns(rank, action) for action in work.actions)
        kept = min(lead, max(work.reached_ns - arrived, 0))
        hidden, lead = hidden + lead - kept, kept
        if any(step.sends(rank, action) for action in work.actions):
            exposed, lead = exposed + lead, 0
    return RecomputeTime(hidden_ns=hidden, exposed_ns=exposed + lead)


def _action_of(event: Event) -> Action | None:
    """The event's action, if that computes, sends or waits for a message."""
    wanted = {
        Activity.COMPUTE: COMPUTE_KINDS | {Kind.OVERLAP},
        Activity.TRANSFER: frozenset(_SENDS),
        Activity.WAIT: _WAITS,
    }.get(event.activity)
    if wanted is None:
        return None
    try:
        action = parse_action(event.action)
    except UserError:
        return None
    return action if action.kind in wanted else None
