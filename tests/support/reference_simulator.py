"""A slow simulator that follows a lowered Program instruction by instruction, in plain Python integers.

It shares nothing with the compiled one but the cost tables and the rules: time goes from instant to instant; at every
instant, until nothing changes, ranks run as far as they can and transfers end and start.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.core.program import Channel, Instruction, Program, RankProgram
from penstock.core.schedule import COMPUTE_KINDS, Action, Group, Kind, Part, flatten
from penstock.planner.order import KINDS
from penstock.planner.simulate.costs import Bucket, Costs

MILLION = 1_000_000

POSTS = {Kind.POST_RECV_F, Kind.POST_RECV_B}
RECEIVES = {Kind.WAIT_RECV_F, Kind.WAIT_RECV_B}
SENDS = {Kind.SEND_F, Kind.SEND_B}
RELEASES = {Kind.WAIT_SEND_F, Kind.WAIT_SEND_B}


@dataclass
class Line:
    """One channel: when each message was sent and posted, how long it takes alone, and what is left of it."""

    channel: Channel
    sent_at: list[int] = field(default_factory=list)
    posted_at: list[int] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    num_arrived: int = 0
    left: int | None = None

    @property
    def has_message(self) -> bool:
        return self.left is None and min(len(self.sent_at), len(self.posted_at)) > self.num_arrived


@dataclass
class Worker:
    """One rank: where it is, until when its instruction lasts, and its account of time and bytes."""

    program: RankProgram
    position: int = 0
    until: int | None = None
    left: int | None = None
    waiting_since: int | None = None
    compute: int = 0
    bubble: int = 0
    reduction: int = 0
    optimizer: int = 0
    communication: int = 0
    end: int = 0
    live: int = 0
    peak: int = 0
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    began: int = 0

    @property
    def pending(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None


class ReferenceSimulator:
    """Runs one step; afterwards ``makespan`` and the workers' accounts hold the result."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        self.workers = [Worker(rank) for rank in program.ranks]
        self.lines = {channel: Line(channel) for channel in program.channels}
        self.stage_ranks = {
            action.stage: rank.rank
            for rank in program.ranks
            for instruction in rank.instructions
            for action in flatten((instruction.action,))
            if action.kind in COMPUTE_KINDS
        }
        self.with_r = {
            (action.stage, action.microbatch, action.slice)
            for rank in program.ranks
            for instruction in rank.instructions
            for action in flatten((instruction.action,))
            if action.kind is Kind.R
        }
        self.joined: dict[Group, dict[int, int]] = {}
        self.over: dict[tuple[Group, int, Part | None], int] = {}
        self.gathered: dict[tuple[int, Part | None], int] = {}
        self.free: defaultdict[tuple[Group, int], int] = defaultdict(int)
        self.makespan = self._run()

    def _run(self) -> int:
        now = 0
        while True:
            while self._round(now):
                pass
            later = list(self._next_times(now))
            if not later:
                break
            after = min(later)
            speeds = [(line, self._line_speed(line)) for line in self.lines.values() if line.left is not None]
            for rank, worker in enumerate(self.workers):
                if worker.left is not None:
                    worker.left -= (after - now) * self._speed(rank)
            for line, speed in speeds:
                assert line.left is not None
                line.left -= (after - now) * speed
            now = after
        assert all(worker.pending is None for worker in self.workers), "ranks wait forever"
        last = max(worker.end for worker in self.workers)
        for worker in self.workers:
            worker.bubble += last - worker.end
        return last

    def _round(self, now: int) -> bool:
        """Let ranks and transfers that are over go on, and transfers start; true if anything changed."""
        moved = [self._finish_transfer(line) for line in self.lines.values()]
        moved += [self._advance(rank, now) for rank in range(len(self.workers))]
        moved += [self._start_transfer(line) for line in self.lines.values()]
        return any(moved)

    def _next_times(self, now: int) -> Iterator[int]:
        for rank, worker in enumerate(self.workers):
            if worker.left is not None:
                yield now + max(0, -(-worker.left // self._speed(rank)))
            elif worker.until is not None:
                yield worker.until
        for line in self.lines.values():
            if line.left is not None:
                yield now + max(0, -(-line.left // self._line_speed(line)))

    # Transfers

    def _cards(self, line: Line) -> list[tuple[int, int]]:
        """(side, card): the sender's and the receiver's."""
        hosts = self.costs.hosts
        source, target = line.channel.source, line.channel.target
        inside = hosts.host_of[source] == hosts.host_of[target]
        cards = hosts.local_cards if inside else hosts.network_cards
        return [(side, cards[rank]) for side, rank in enumerate((source, target)) if cards[rank] >= 0]

    def _needed(self, line: Line, side: int) -> int:
        """The part of that card that the line takes alone; the same for all stages that use the line."""
        direction = 0 if line.channel.direction == "F" else 1
        hop = 1 - 2 * direction
        ends = (line.channel.source, line.channel.target)
        users = [s for s, rank in self.stage_ranks.items() if (rank, self.stage_ranks.get(s + hop)) == ends]
        return int(self.costs.card_ppm[side, direction, max(users)])

    def _line_speed(self, line: Line) -> int:
        """Millionths of its full speed, with those that share its cards now."""
        speed = MILLION
        for card in self._cards(line):
            sharing = [other for other in self.lines.values() if other.left is not None and card in self._cards(other)]
            needs = {id(other): self._needed(other, card[0]) for other in sharing}
            needed = needs.pop(id(line))
            share = max(MILLION - sum(needs.values()), MILLION // len(sharing))
            speed = min(speed, share * MILLION // needed)
        return speed

    def _start_transfer(self, line: Line) -> bool:
        if not line.has_message:
            return False
        line.left = MILLION * line.durations[line.num_arrived]
        return True

    def _finish_transfer(self, line: Line) -> bool:
        if line.left is None or line.left > 0:
            return False
        line.left = None
        line.num_arrived += 1
        return True

    # Ranks

    def _advance(self, rank: int, now: int) -> bool:
        """Run at most one instruction, or end the one that lasts until now."""
        worker = self.workers[rank]
        if worker.left is not None:
            if worker.left > 0:
                return False
            worker.left = None
            worker.compute += now - worker.began
            self._complete(worker, now)
            return True
        if worker.until is not None:
            if worker.until > now:
                return False
            worker.until = None
            self._complete(worker, now)
            return True
        instruction = worker.pending
        return instruction is not None and self._begin(rank, worker, instruction, now)

    def _begin(self, rank: int, worker: Worker, instruction: Instruction, now: int) -> bool:
        kind = instruction.action.kind
        if instruction.action.is_compute:
            worker.left = MILLION * self._work_ns(instruction)
            worker.began = now
        elif kind in RECEIVES | RELEASES:
            return self._wait(worker, instruction, now)
        elif kind in POSTS | SENDS:
            cost = self.costs.instructions.post_ns if kind in POSTS else self.costs.instructions.send_ns
            worker.communication += cost
            worker.until = now + cost
        elif kind is Kind.START_REDUCE:
            self._start_reduction(rank, instruction, now)
            worker.until = now
        elif kind is Kind.WAIT_REDUCE:
            return self._reduce(rank, worker, instruction, now)
        elif kind is Kind.START_GATHER:
            action, link = instruction.action, (Group.DP, rank)
            in_bucket = action.part is not None
            duration = self._bucket(action).gather_ns if in_bucket else self.costs.gather_ns[action.stage]
            self.free[link] = max(self.free[link], now) + duration
            self.gathered[action.stage, action.part] = self.free[link]
            worker.until = now
        elif kind is Kind.WAIT_GATHER:
            worker.until = max(self.gathered[instruction.action.stage, instruction.action.part], now)
            worker.reduction += worker.until - now
        elif kind is Kind.STEP:
            worker.optimizer = (self.costs.optimizer_ns or (0,) * len(self.workers))[rank]
            worker.until = now + worker.optimizer
        else:
            worker.until = now
        return True

    def _wait(self, worker: Worker, instruction: Instruction, now: int) -> bool:
        assert instruction.channel is not None
        line = self.lines[instruction.channel]
        if worker.waiting_since is None:
            worker.waiting_since = now
        if line.num_arrived <= instruction.sequence:
            return False
        ready = max(line.sent_at[instruction.sequence], line.posted_at[instruction.sequence])
        worker.bubble += max(0, min(ready, now) - worker.waiting_since)
        worker.communication += now - max(ready, worker.waiting_since) if now > worker.waiting_since else 0
        worker.waiting_since = None
        receives = instruction.action.kind in RECEIVES
        costs = self.costs.instructions
        cost = costs.wait_receive_ns if receives else costs.wait_send_ns
        worker.communication += cost
        worker.until = now + cost
        return True

    def _start_reduction(self, rank: int, instruction: Instruction, now: int) -> None:
        action = instruction.action
        assert action.group is not None
        if action.group.is_of_peers:
            durations = self.costs.reduce_ns.get(action.group, (0,) * self.program.num_stages)
            duration = durations[action.stage]
            if action.part is not None:
                duration = self._bucket(action).reduce_ns[action.group]
            link = (action.group, rank)
            self.free[link] = max(self.free[link], now) + duration
            self.over[action.group, action.stage, action.part] = self.free[link]
        else:
            self.joined.setdefault(action.group, {})[rank] = now

    def _reduce(self, rank: int, worker: Worker, instruction: Instruction, now: int) -> bool:
        group = instruction.action.group
        assert group is not None
        if worker.waiting_since is None:
            worker.waiting_since = now
        if group.is_of_peers:
            begin, over = now, self.over[group, instruction.action.stage, instruction.action.part]
        else:
            (reduction,) = [each for each in self.program.reductions if each.group is group]
            joined = self.joined.get(group, {})
            if set(joined) != set(reduction.ranks):
                return False
            per_rank = self.costs.reduce_ns.get(group, (0,) * len(self.workers))
            begin = max(joined.values())
            over = begin + max(per_rank[each] for each in reduction.ranks)
        worker.bubble += max(begin - worker.waiting_since, 0)
        worker.reduction += max(over - max(begin, worker.waiting_since), 0)
        worker.waiting_since = None
        worker.until = max(now, over)
        return True

    def _complete(self, worker: Worker, now: int) -> None:
        instruction = worker.pending
        assert instruction is not None
        if instruction.action.is_compute:
            worker.spans[str(instruction.action)] = (worker.began, now)
        if instruction.channel is not None and instruction.action.kind in SENDS:
            line = self.lines[instruction.channel]
            line.sent_at.append(now)
            line.durations.append(self._transfer_ns(instruction))
        if instruction.channel is not None and instruction.action.kind in POSTS:
            self.lines[instruction.channel].posted_at.append(now)
        slots = worker.program.slots
        worker.live += sum(slots[index].num_bytes for index in instruction.acquires)
        worker.peak = max(worker.peak, worker.live + instruction.transient_bytes)
        worker.live -= sum(slots[index].num_bytes for index in instruction.frees)
        worker.position += 1
        worker.end = now

    # Costs

    def _place(self, action: Action) -> tuple[int, int, int]:
        return KINDS.index(action.kind), action.stage, self._column(action)

    def _column(self, action: Action) -> int:
        """Slices of a last micro-batch that has its own come after those of the others."""
        num_slices = len(self.program.slice_capacities)
        return (action.slice or 0) + num_slices * self.program.is_remainder(action.microbatch)

    def _work_ns(self, instruction: Instruction) -> int:
        action = instruction.action
        if action.children:
            return self._pair_ns(action.children)
        whole = self._whole_ns(action)
        part = action.part
        if part is None:
            return whole
        if action.kind is not Kind.R:
            place = (Kind.B, Kind.W, Kind.F).index(action.kind)
            buckets = self.costs.buckets[action.stage]
            done = [0, *(whole * bucket.done_ppm[place] // MILLION for bucket in buckets)]
            at = buckets.index(self._bucket(action))
            return done[at + 1] - done[at]
        until = [int(row[self._column(action)]) for row in self.costs.remade_ns[action.stage]]
        return whole - until[-1] + until[part.stop] - until[part.first]

    def _whole_ns(self, action: Action) -> int:
        """With what its slice recomputes inside, if nothing was before."""
        _, *place = self._place(action)
        has_r = (action.stage, action.microbatch, action.slice) in self.with_r
        inside = self.costs.inside_ns is not None and action.kind in (Kind.B, Kind.I) and not has_r
        return int(self.costs.compute_ns[self._place(action)]) + (
            int(self.costs.inside_ns[*place]) if inside and self.costs.inside_ns is not None else 0
        )

    def _bucket(self, action: Action) -> Bucket:
        (bucket,) = [each for each in self.costs.buckets[action.stage] if each.part == action.part]
        return bucket

    def _pair_ns(self, children: Sequence[Action]) -> int:
        """Both one after the other, less what their collectives take next to the other's compute."""
        serial = sum(self._whole_ns(child) for child in children)
        if self.costs.collectives is None:
            return serial
        passes = [self.costs.collectives.segments_of(self._place(child)).tolist() for child in children]
        hidden = sum(sum(segment) for each in passes for segment in each) - in_turns(passes)
        return max(serial - hidden, 0)

    def _factor(self, instruction: Instruction) -> int:
        """How much slower, in millionths, an action is next to all others of its host; of a pair, weighed by work."""
        places = [self._place(each) for each in flatten((instruction.action,))]
        factors = [int(self.costs.slowdown_ppm[place]) for place in places]
        if len(factors) == 1:
            return factors[0]
        work = [self._whole_ns(each) for each in flatten((instruction.action,))]
        return round(sum(map(operator.mul, factors, work)) / sum(work)) if sum(work) else MILLION

    def _transfer_ns(self, instruction: Instruction) -> int:
        direction = 0 if instruction.action.kind is Kind.SEND_F else 1
        return int(self.costs.transfer_ns[direction, instruction.action.stage, self._column(instruction.action)])

    def _speed(self, rank: int) -> int:
        """Millionths of a nanosecond of work per nanosecond, with those that compute on the rank's host now."""
        hosts = self.costs.hosts
        residents = [other for other, host in enumerate(hosts.host_of) if host == hosts.host_of[rank]]
        num_residents = hosts.replicas * len(residents)
        num_computing = hosts.replicas * sum(self.workers[other].left is not None for other in residents)
        instruction = self.workers[rank].pending
        assert instruction is not None
        factor = self._factor(instruction)
        if num_residents == 1:
            return MILLION
        return MILLION * MILLION // (MILLION + (factor - MILLION) * (num_computing - 1) // (num_residents - 1))


def in_turns(passes: Sequence[Sequence[Sequence[int]]]) -> int:
    """Nanoseconds of two passes of (compute, collective) segments that take turns on one device, nanosecond by
    nanosecond; their collectives follow each other on one link.
    """
    left = [[list(segment) for segment in each] for each in passes]
    on_link: list[tuple[int, int]] = []
    now = turn = 0
    while any(left):
        turn = turn if left[turn] else 1 - turn
        compute, collective = left[turn].pop(0)
        while compute or any(owner == turn for owner, _ in on_link):
            compute -= all(owner != turn for owner, _ in on_link)
            now, on_link = now + 1, _later(on_link)
        on_link += [(turn, collective)] if collective else []
        turn = 1 - turn
    return now + sum(nanoseconds for _, nanoseconds in on_link)


def _later(on_link: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The link's queue (whose, nanoseconds left) a nanosecond later."""
    (owner, nanoseconds), *others = on_link or [(0, 1)]
    return [(owner, nanoseconds - 1), *others] if nanoseconds > 1 else others
