"""Competition of jobs for the same places, and their order, where no queue such as Kueue decides.

A scheduler places pods one by one. Two attempts of three pods each that come at once to three free places may get two
and one, and neither starts. Only an order of the jobs can resolve that: by priority, then by waiting time, with four
rules (`penstock.core.lifecycle` decides by them, ADR 0029):

1. Of attempts that are short of places and want the same, all but the first in order give way.
2. A job that gave way, or was held, is in line. It is launched when no competing attempt is short or was launched from
   the line and is not placed yet, and no competing job in line is ahead of it: one at a time.
3. Whenever a job gives up because places are missing, the job that has been in line longest is promoted: it is launched
   next, at any priority. A high-priority job that never fits, because of its size or because other pods hold the places
   for days, therefore delays a job by two minutes for each job that has been in line longer.
4. A job that is not in line is held, and so joins the line, only while a competing attempt is placed in part: with
   enough places no job waits for another.

Jobs compete if some node might take pods of both: they request the same device, and their node selectors do not exclude
each other. Taints are ignored, so two jobs may count as competitors by mistake. That costs a wait of two minutes at
most, because an attempt without progress in placement is given up after that time while others wait for it.

The state of a job is read from the condition Admitted in its status, so it outlives the operator. Only promotions (rule
3) are not stored: a restarted operator chooses the next job by rule 2.
"""

from __future__ import annotations

import bisect
import enum
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.core.job import Device, PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus, ConditionType, JobStatus


class PlacementState(enum.StrEnum):
    """State of a job in a competition: the reason of its condition Admitted, where that does not hold."""

    IN_LINE = "WaitsForPlaces"
    PLACING = "Placing"
    SHORT = "Unschedulable"
    IN_PART = "PlacedInPart"


_STATES = {state.value: state for state in PlacementState}
_ATTEMPTS = (PlacementState.PLACING, PlacementState.SHORT, PlacementState.IN_PART)
_SHORT = (PlacementState.SHORT, PlacementState.IN_PART)

Order = tuple[int, float, str]
"""Priority, the highest first; since when the job waits; its uid."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The places that a job can have: nodes with a device and labels."""

    device: str
    selector: frozenset[tuple[str, str]] = frozenset()

    def competes(self, other: Pool) -> bool:
        """Whether some node might take pods of both."""
        if self.device != other.device:
            return False
        selector = dict(self.selector)
        return all(selector.get(name, value) == value for name, value in other.selector)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A job that competes for places. It ``gave_up`` if its newest attempt was ended because places were missing."""

    uid: str
    namespace: str
    name: str
    pool: Pool
    order: Order
    state: PlacementState | None = None
    gave_up: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Competition:
    """Competition for a job's places: the job it waits for before its launch, the job its attempt gives way to, and
    whether others wait for its attempt. Names are empty where there is no such job.
    """

    held_by: str = ""
    gives_way_to: str = ""
    followed: bool = False


NO_COMPETITION = Competition()


def pool_of(job: PipelineJob) -> Pool:
    """The places that the job's pods can have."""
    kubernetes = job.spec.kubernetes
    device = kubernetes.accelerator_resource if job.spec.resources.device is Device.CUDA else "cpu"
    return Pool(device, frozenset(kubernetes.node_selector.items()))


def waiting_since(status: JobStatus) -> float | None:
    """Time since when the job waits for places: when its condition Admitted became false, or when it was resumed."""
    conditions = (status.condition(kind) for kind in (ConditionType.ADMITTED, ConditionType.SUSPENDED))
    ended = [waited for waited in conditions if waited is not None and waited.status is ConditionStatus.FALSE]
    return max((waited.last_transition_time or 0.0 for waited in ended), default=None)


def contender(job: PipelineJob, status: JobStatus) -> Contender | None:
    """The job as a competitor; none if a queue decides when it starts."""
    return None if job.spec.kubernetes.queue_name else competitor(job, status)


def competitor(job: PipelineJob, status: JobStatus) -> Contender:
    """The job as one that has or wants places, whether Kueue or the operator starts it."""
    admitted = status.condition(ConditionType.ADMITTED)
    queued = status.phase is Phase.QUEUED and admitted is not None and admitted.status is ConditionStatus.FALSE
    state = _STATES.get(admitted.reason) if queued and admitted is not None else None
    # A job that gave places up joins the end of the line. Otherwise a few jobs that never fit would always be ahead.
    since = status.phase_entered_at if state is PlacementState.IN_LINE else waiting_since(status)
    return Contender(
        uid=job.metadata.uid,
        namespace=job.metadata.namespace or "",
        name=job.metadata.name,
        pool=pool_of(job),
        order=(-job.spec.run_policy.priority, since if since is not None else float("inf"), job.metadata.uid),
        state=state,
        gave_up=status.phase is Phase.RECOVERING and status.reason == PlacementState.IN_PART,
    )


def jitter(uid: str, attempt: int) -> float:
    """A pseudorandom number from 0 to 1 for each attempt, the same at every call."""
    digest = hashlib.sha256(f"{uid}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


@dataclass(slots=True)
class _Members:
    """The contenders of one pool, in order, by state."""

    ordered: dict[PlacementState, list[Order]] = field(default_factory=lambda: {state: [] for state in PlacementState})

    def first(self, states: Iterable[PlacementState], other_than: str = "") -> Order | None:
        """The first in order with one of these states, except the job with the uid ``other_than``."""
        firsts = []
        for state in states:
            members = self.ordered[state]
            firsts += [order for order in members[:2] if order[2] != other_than][:1]
        return min(firsts, default=None)


class Places:
    """All contenders. Not thread-safe.

    A call costs O(pools), plus O(contenders) when a job gave up, plus O(promoted jobs of pools that do not compete).
    """

    def __init__(self) -> None:
        self._contenders: dict[str, Contender] = {}
        self._pools: dict[Pool, _Members] = {}
        self._promoted: dict[str, None] = {}  # jobs in line, in the order of their promotion

    def put(self, uid: str, current: Contender | None) -> list[str]:
        """Store a job's state; return the uids of jobs whose decisions may change by it."""
        known = self._contenders.get(uid)
        gave_up = current is not None and current.gave_up
        current = current if current is not None and current.state is not None else None
        if known == current:
            return []
        if known is not None:
            self._remove(known)
        if current is not None:
            self._contenders[uid] = current
            members = self._pools.setdefault(current.pool, _Members())
            bisect.insort(members.ordered[_state(current)], current.order)
        if current is None or current.state is not PlacementState.IN_LINE:
            self._promoted.pop(uid, None)
        if known is not None and gave_up:
            self._promote(known)
        pools = {changed.pool for changed in (known, current) if changed is not None}
        affected = [self._first(pool, group, uid) for pool in pools for group in (_SHORT, (PlacementState.IN_LINE,))]
        affected += [self._first_promoted(other) for pool in pools for other in self._pools if pool.competes(other)]
        return sorted({first.uid for first in affected if first is not None} - {uid})

    def _promote(self, own: Contender) -> None:
        """Promote the competitor that has been in line longest and is not promoted."""
        waiting = (
            other
            for other in self._contenders.values()
            if other.state is PlacementState.IN_LINE
            and other.uid not in self._promoted
            and other.pool.competes(own.pool)
        )
        longest = min(waiting, key=lambda other: other.order[1:], default=None)
        if longest is not None:
            self._promoted[longest.uid] = None

    def _first_promoted(self, pool: Pool) -> Contender | None:
        """Return the first promoted job that competes for places of the pool."""
        promoted = (self._contenders[uid] for uid in self._promoted)
        return next((other for other in promoted if other.pool.competes(pool)), None)

    def competition(self, own: Contender) -> Competition:
        """The competition for the job's places."""
        short = self._first(own.pool, _SHORT, own.uid)
        is_ahead = short is not None and short.order < own.order
        return Competition(
            held_by=_named(self._before(own), own),
            gives_way_to=_named(short, own) if is_ahead else "",
            followed=self._first(own.pool, (PlacementState.IN_LINE,), own.uid) is not None,
        )

    def _before(self, own: Contender) -> Contender | None:
        """The job that this one waits for before its launch."""
        if own.state is not PlacementState.IN_LINE:
            return self._first(own.pool, (PlacementState.IN_PART,), own.uid)
        attempt = self._first(own.pool, _ATTEMPTS, own.uid)
        if attempt is not None:
            return attempt
        promoted = self._first_promoted(own.pool)
        if promoted is not None:
            return promoted if promoted.uid != own.uid else None
        ahead = self._first(own.pool, (PlacementState.IN_LINE,), own.uid)
        return ahead if ahead is not None and ahead.order < own.order else None

    def _first(self, pool: Pool, states: Iterable[PlacementState], other_than: str) -> Contender | None:
        placement_states = tuple(states)
        firsts = (members.first(placement_states, other_than) for members in self._competing(pool))
        order = min((first for first in firsts if first is not None), default=None)
        return self._contenders[order[2]] if order is not None else None

    def _competing(self, pool: Pool) -> Iterator[_Members]:
        return (members for other, members in self._pools.items() if pool.competes(other))

    def _remove(self, known: Contender) -> None:
        del self._contenders[known.uid]
        members = self._pools[known.pool]
        ordered = members.ordered[_state(known)]
        del ordered[bisect.bisect_left(ordered, known.order)]
        if not any(members.ordered.values()):
            del self._pools[known.pool]


def holders(own: Contender, running: Iterable[Contender]) -> str:
    """Message with the penstock jobs that hold the places that the job lacks."""
    competing = [other for other in running if other.uid != own.uid and other.pool.competes(own.pool)]
    if not competing:
        return "pods that are not penstock's, or nodes without the requested resources, hold the rest"
    named = sorted({_named(other, own) for other in competing})
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return f"held by {', '.join(named[:3])}{more}"


def _named(other: Contender | None, own: Contender) -> str:
    """Name of a job for messages; names of other namespaces' jobs are not disclosed."""
    if other is None:
        return ""
    return f"job {other.name}" if other.namespace == own.namespace else "a job of another namespace"


def _state(member: Contender) -> PlacementState:
    assert member.state is not None, "a contender without a state is not kept"
    return member.state
