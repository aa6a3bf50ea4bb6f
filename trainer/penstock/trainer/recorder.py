"""Records when every instruction of a step ran, and merges the ranks' records into one timeline.

The instructions of a rank run one after the other. So one mark between two instructions is both the end of the first
and the start of the second. On the CPU a mark is a reading of the monotonic clock. On CUDA, where the host only
launches kernels, it is an event on the stream.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.host.clocks import boot_id
from penstock.core.mesh import Mesh
from penstock.core.program import Program, RankProgram
from penstock.core.schedule import COMPUTE_KINDS, Kind
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.trainer.units.collectives import Work

Clock = Callable[[], int]
"""Monotonic nanoseconds."""

TimedPair = tuple[torch.cuda.Event, torch.cuda.Event]

_ROUNDS = 16


class HostWaits:
    """Waits of the host for other shards. ``total_ns`` is their sum so far."""

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self._clock = clock
        self.total_ns = 0

    def wait(self, work: Work) -> None:
        """Wait for the work, and add the time."""
        begin = self._clock()
        work.wait()
        self.total_ns += self._clock() - begin


class CudaWaits:
    """Waits of the device for other shards in one step, each between two events on the waiting stream.

    The host only enqueues a wait. The stream stops between the events until the collective is complete, so collectives
    that compute hides take no time here. Nothing is recorded outside of a sampled step.
    """

    def __init__(self) -> None:
        self._pairs: list[TimedPair] = []
        self._is_sampled = False
        self.count = 0

    def begin(self) -> None:
        """Begin a sampled step. Its events replace those of the previous one, which must be complete on the device."""
        self.count, self._is_sampled = 0, True

    def end(self) -> None:
        """End the sampled step."""
        self._is_sampled = False

    def wait(self, work: Work) -> None:
        """Make the current stream wait for the work."""
        if not self._is_sampled:
            work.wait()
            return
        if self.count == len(self._pairs):
            self._pairs.append((_timing_event(), _timing_event()))
        before, after = self._pairs[self.count]
        before.record()
        work.wait()
        after.record()
        self.count += 1

    def totals_ns(self) -> Tensor:
        """[count + 1] int64: sums of the first 0, 1, ... waits of the step, which must be complete on the device."""
        waits_ns = [round(before.elapsed_time(after) * 1e6) for before, after in self._pairs[: self.count]]
        return torch.tensor([0, *waits_ns], dtype=torch.int64).cumsum(0)


class HostRecorder:
    """Marks of one step on the host's clock. A mark costs two stores and a clock reading.

    ``waits`` measures the rank's waits for its shards.
    """

    def __init__(
        self, num_instructions: int, clock: Clock = time.perf_counter_ns, waits: HostWaits | None = None
    ) -> None:
        self._times = array("q", bytes(8 * (num_instructions + 1)))
        self._totals = array("q", self._times)
        self._clock, self._waits = clock, waits or HostWaits()

    def mark(self, position: int) -> None:
        self._times[position] = self._clock()
        self._totals[position] = self._waits.total_ns

    def waits_ns(self) -> Tensor:
        """[instructions + 1] int64: time waited for shards up to every mark of the newest step."""
        return torch.tensor(self._totals, dtype=torch.int64)

    def times_ns(self) -> Tensor:
        """The marks of the newest step, [instructions + 1] int64 nanoseconds."""
        return torch.tensor(self._times, dtype=torch.int64)


class CudaRecorder:
    """Marks of one step on the device's current stream, placed on the host's clock.

    ``waits`` measures the rank's waits for its shards.
    """

    def __init__(
        self, num_instructions: int, clock: Clock = time.perf_counter_ns, waits: CudaWaits | None = None
    ) -> None:
        self._events = [_timing_event() for _ in range(num_instructions + 1)]
        self._counts = [0] * len(self._events)
        self._clock, self._waits = clock, waits or CudaWaits()
        self._start_ns = 0

    def mark(self, position: int) -> None:
        """Record an event. The first mark synchronises the device, to relate the device's times to the host's clock."""
        if position == 0:
            torch.cuda.synchronize()
            self._start_ns = self._clock()
            self._waits.begin()
        self._events[position].record()
        self._counts[position] = self._waits.count
        if position == len(self._events) - 1:
            self._waits.end()

    def waits_ns(self) -> Tensor:
        """As `HostRecorder.waits_ns`, of the device; waits for the device."""
        self._events[-1].synchronize()
        return self._waits.totals_ns()[self._counts]

    def times_ns(self) -> Tensor:
        """The marks of the newest step, [instructions + 1] int64 nanoseconds. Synchronises with the device."""
        first, last = self._events[0], self._events[-1]
        last.synchronize()
        elapsed_ns = [round(first.elapsed_time(event) * 1e6) for event in self._events]
        return torch.tensor(elapsed_ns, dtype=torch.int64) + self._start_ns


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def waits_on(device: torch.device) -> HostWaits | CudaWaits:
    """Measurement of waits for shards on the device."""
    return CudaWaits() if device.type == "cuda" else HostWaits()


def make_recorder(num_instructions: int, waits: HostWaits | CudaWaits) -> HostRecorder | CudaRecorder:
    """The recorder of the device that ``waits`` measures."""
    match waits:
        case HostWaits():
            return HostRecorder(num_instructions, waits=waits)
        case CudaWaits():
            return CudaRecorder(num_instructions, waits=waits)


def merge(
    program: Program,
    mesh: Mesh,
    times_ns: Sequence[Sequence[int]],
    *,
    source: Source,
    step: int | None = None,
    peak_bytes: tuple[int, ...] = (),
    waits_ns: Sequence[Sequence[int]] = (),
) -> Timeline:
    """Merge the marks of all global ranks, which are on one clock, into a timeline that starts at the earliest mark.

    ``waits_ns`` holds for every mark how long the rank had waited for its shards. It is empty where that is unknown.
    """
    begin = min(times[0] for times in times_ns)
    return Timeline(
        source=source,
        num_ranks=mesh.num_ranks,
        step_ns=max(times[-1] for times in times_ns) - begin,
        events=tuple(
            event
            for rank, (times, waits) in enumerate(zip_longest(times_ns, waits_ns, fillvalue=()))
            for event in _events(rank, program.ranks[mesh.pipeline_rank(rank)], times, waits, begin)
        ),
        peak_bytes=peak_bytes,
        step=step,
    )


def _events(
    rank: int, program: RankProgram, times_ns: Sequence[int], waits_ns: Sequence[int], begin: int
) -> Iterator[Event]:
    waits = [after - before for before, after in pairwise(waits_ns)] or [0] * len(program.instructions)
    for instruction, (start, stop), waited in zip(program.instructions, pairwise(times_ns), waits, strict=True):
        action = instruction.action
        if action.kind is not Kind.FREE:
            collective_ns = min(waited, stop - start) if action.is_compute else 0
            yield Event(rank, _ACTIVITIES[action.kind], str(action), start - begin, stop - begin, collective_ns)


_ACTIVITIES = {
    **dict.fromkeys((*COMPUTE_KINDS, Kind.OVERLAP), Activity.COMPUTE),
    **dict.fromkeys((Kind.POST_RECV_F, Kind.POST_RECV_B, Kind.SEND_F, Kind.SEND_B), Activity.TRANSFER),
    **dict.fromkeys((Kind.WAIT_RECV_F, Kind.WAIT_RECV_B, Kind.WAIT_SEND_F, Kind.WAIT_SEND_B), Activity.WAIT),
    **dict.fromkeys((Kind.START_REDUCE, Kind.WAIT_REDUCE, Kind.START_GATHER, Kind.WAIT_GATHER), Activity.REDUCE),
    Kind.STEP: Activity.STEP,
}


def gather_times(
    times_ns: Tensor, program: Program, mesh: Mesh, group: dist.ProcessGroup, *, clock: Clock = time.perf_counter_ns
) -> list[list[int]]:
    """Gather every rank's marks, converted to the first rank's clock. Collective over the host group of all ranks."""
    return gather_marks(times_ns - clock_offset_ns(group, clock=clock), program, mesh, group)


def gather_marks(marks: Tensor, program: Program, mesh: Mesh, group: dist.ProcessGroup) -> list[list[int]]:
    """Gather every rank's values at its marks [instructions + 1]. Collective over the host group of all ranks."""
    lengths = [1 + len(program.ranks[mesh.pipeline_rank(rank)].instructions) for rank in range(mesh.num_ranks)]
    padded = torch.zeros(max(lengths), dtype=torch.int64)
    padded[: len(marks)] = marks
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [times[:length].tolist() for times, length in zip(gathered, lengths, strict=True)]


def clock_offset_ns(
    group: dist.ProcessGroup, *, clock: Clock = time.perf_counter_ns, machine: str | None = None
) -> int:
    """Nanoseconds by which this rank's clock is ahead of the first rank's. Collective.

    Ranks of one machine (one boot) share the monotonic clock, so their offset is exactly zero. Every other rank pings
    the first one several times. The fastest round trip gives the offset, with both ways taken as equally long (like
    NTP, RFC 5905, section 8).
    """
    own_machine = machine or boot_id()
    machines: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(machines, own_machine, group=group)
    others = [rank for rank, name in enumerate(machines) if name != machines[0]]
    own = dist.get_rank(group)
    if own == 0:
        for rank in others:
            _answer_pings(rank, group, clock)
    return _measure_offset_ns(group, clock) if own in others else 0


def _answer_pings(rank: int, group: dist.ProcessGroup, clock: Clock) -> None:
    ping = torch.zeros(1, dtype=torch.int64)
    for _ in range(_ROUNDS):
        dist.recv(ping, group=group, group_src=rank)
        dist.send(torch.tensor([clock()]), group=group, group_dst=rank)


def _measure_offset_ns(group: dist.ProcessGroup, clock: Clock) -> int:
    answer = torch.zeros(1, dtype=torch.int64)
    rounds = []
    for _ in range(_ROUNDS):
        sent = clock()
        dist.send(answer, group=group, group_dst=0)
        dist.recv(answer, group=group, group_src=0)
        received = clock()
        rounds.append((received - sent, (sent + received) // 2 - int(answer.item())))
    return min(rounds)[1]
