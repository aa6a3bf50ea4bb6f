"""Hidden and exposed recomputation in a step: hidden as far as its rank would have waited in its place.

R needs no message. If a backward waits for the gradient of the next stage, the R before it runs in that time and costs
nothing; the part of R that is left when the gradient arrives delays the backward, and with it other ranks.

Without R its rank would be earlier by R's duration d. It keeps that lead until it needs a message: an action that waits
for a message begins when it arrives, with or without R. Let the rank reach an action at t, and let the action's last
message arrive at A. Then at most max(t - A, 0) of the lead remains, and the rest is hidden. At the first action that
sends a message of its own the remaining lead is exposed, since the other rank has to wait; likewise at the end of the
step. W and the backward of the first stage send nothing, so a lead persists over them; leads of several R add up.

Messages are assumed to arrive at their measured times. Between stages on one rank there are none. A backward of the
last stage waits for no gradient, so an R before it hides nothing by itself: it delays the gradient that this backward
sends.

Example: R takes 10 on rank 0 from 100 on, then its B begins, whose gradient rank 1 sent until 107. Without R the B
would have begun at 107 and not at 110: of R 7 are hidden and 3 exposed. Had the gradient arrived at 112, with rank 0
waiting for it from 110 on, all 10 would be hidden; had it arrived at 90, none.

A message arrives at the end of its SEND. In a simulated step that is its arrival at the receiver. In a measured step
SEND ends as soon as the message is handed over, since nothing measures its arrival; so recomputation during the time
that the message was under way counts as exposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.core.errors import UserError
from penstock.core.schedule import BACKWARD_KINDS, COMPUTE_KINDS, Action, Kind, flatten, parse_action
from penstock.core.timeline import Activity, Event, Timeline

NEVER = -1
"""Before every time of a step: the arrival of an input that needs no message."""

_SENDS = {Kind.SEND_F: 1, Kind.SEND_B: -1}
"""The receiving stage, relative to the sender's."""
_WAITS = frozenset({Kind.WAIT_RECV_F, Kind.WAIT_RECV_B})

Message = tuple[int, Kind, int, int, int]
"""The receiving rank, F or B, and the stage, micro-batch and slice that it is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeTime:
    """Nanoseconds of R: ``hidden_ns`` instead of waiting, ``exposed_ns`` on top of everything else."""

    hidden_ns: int = 0
    exposed_ns: int = 0

    @property
    def total_ns(self) -> int:
        """All nanoseconds."""
        return self.hidden_ns + self.exposed_ns

    @property
    def hidden_share(self) -> float:
        """The hidden fraction; 0 without recomputation."""
        return self.hidden_ns / self.total_ns if self.total_ns else 0.0

    @property
    def hidden_text(self) -> str:
        """Text of the hidden share."""
        return f"{100 * self.hidden_share:.1f} % of it hidden"

    def __add__(self, other: RecomputeTime) -> RecomputeTime:
        return RecomputeTime(hidden_ns=self.hidden_ns + other.hidden_ns, exposed_ns=self.exposed_ns + other.exposed_ns)


def recompute_times(timeline: Timeline) -> tuple[RecomputeTime, ...]:
    """The recomputation of every rank; empty if no rank recomputes anything."""
    if not any(event.activity is Activity.COMPUTE and "R" in event.action for event in timeline.events):
        return ()
    step = _Step(timeline)
    times = tuple(_rank_time(step, rank) for rank in range(timeline.num_ranks))
    return times if any(time.total_ns for time in times) else ()


def over_ranks(times: Iterable[RecomputeTime]) -> RecomputeTime:
    """The sum over all ranks."""
    return sum(times, RecomputeTime())


@dataclass(frozen=True, slots=True)
class _Work:
    """A compute event; at ``reached_ns`` its rank was ready for it, except for messages."""

    actions: tuple[Action, ...]
    reached_ns: int
    duration_ns: int


class _Step:
    """The compute of every rank in order, the ranks of each stage, and the arrivals of messages."""

    def __init__(self, timeline: Timeline) -> None:
        self.by_rank: list[list[tuple[Event, Action]]] = [[] for _ in range(timeline.num_ranks)]
        for event in sorted(timeline.events, key=lambda event: (event.start_ns, event.stop_ns)):
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
                    for child in flatten((action,)):
                        owners[child.stage].add(rank)
        return {stage: sorted(ranks) for stage, ranks in owners.items()}

    def is_elsewhere(self, stage: int, rank: int) -> bool:
        """Whether the stage exists and the rank does not have it."""
        return stage in self.owners and rank not in self.owners[stage]

    def _peer(self, rank: int, stage: int, other: int) -> int | None:
        """The rank with the ``other`` stage of the same replica and shard."""
        own_ranks, other_ranks = self.owners.get(stage, ()), self.owners.get(other, ())
        return other_ranks[own_ranks.index(rank)] if len(own_ranks) == len(other_ranks) and rank in own_ranks else None

    def _arrivals(self) -> Mapping[Message, int]:
        """The time at which each message had been sent: the end of its SEND, or of the action that made it if there is
        no event of the SEND.
        """
        arrivals: dict[Message, int] = {}
        for rank, events in enumerate(self.by_rank):
            for event, action in events:
                for child in flatten((action,)):
                    if child.kind is Kind.F:
                        self._sent(arrivals, rank, child, Kind.F, 1, event.stop_ns)
                    elif child.kind in BACKWARD_KINDS:
                        self._sent(arrivals, rank, child, Kind.B, -1, event.stop_ns)
                    elif child.kind in _SENDS:
                        kind = Kind.F if child.kind is Kind.SEND_F else Kind.B
                        self._sent(arrivals, rank, child, kind, _SENDS[child.kind], event.stop_ns)
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
        """The compute events of the rank, in order."""
        waits_from: int | None = None
        for event, action in self.by_rank[rank]:
            if action.kind in _WAITS:
                waits_from = event.start_ns if waits_from is None else waits_from
            elif action.is_compute:
                reached = event.start_ns if waits_from is None else waits_from
                yield _Work(tuple(flatten((action,))), reached, event.duration_ns)
                waits_from = None

    def arrived_ns(self, rank: int, action: Action) -> int:
        """The arrival of the message that the action needs."""
        kind = Kind.F if action.kind is Kind.F else Kind.B if action.kind in BACKWARD_KINDS else None
        if kind is None:
            return NEVER
        return self.arrivals.get((rank, kind, action.stage, action.microbatch or 0, action.slice or 0), NEVER)

    def sends(self, rank: int, action: Action) -> bool:
        """Whether another rank waits for the result of the action."""
        direction = 1 if action.kind is Kind.F else -1 if action.kind in BACKWARD_KINDS else 0
        return bool(direction) and self.is_elsewhere(action.stage + direction, rank)


def _rank_time(step: _Step, rank: int) -> RecomputeTime:
    hidden = exposed = lead = 0
    for work in step.works(rank):
        if all(action.kind is Kind.R for action in work.actions):
            lead += work.duration_ns
            continue
        arrived = max(step.arrived_ns(rank, action) for action in work.actions)
        kept_lead = min(lead, max(work.reached_ns - arrived, 0))
        hidden, lead = hidden + lead - kept_lead, kept_lead
        if any(step.sends(rank, action) for action in work.actions):
            exposed, lead = exposed + lead, 0
    return RecomputeTime(hidden_ns=hidden, exposed_ns=exposed + lead)


def _action_of(event: Event) -> Action | None:
    """The event's action, if that computes, sends or waits for a message."""
    kinds = {
        Activity.COMPUTE: COMPUTE_KINDS | {Kind.OVERLAP},
        Activity.TRANSFER: frozenset(_SENDS),
        Activity.WAIT: _WAITS,
    }.get(event.activity)
    if kinds is None:
        return None
    try:
        action = parse_action(event.action)
    except UserError:
        return None
    return action if action.kind in kinds else None
