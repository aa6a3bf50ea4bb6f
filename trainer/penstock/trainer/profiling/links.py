"""Times messages between all pairs of ranks, in both directions.

The sender controls the measurement. Before every series of messages it sends their size and number to its peer, so it
can repeat a series whose times are implausible. All messages use the group of all ranks. With a group for each pair,
like the channels of a step, a hundred ranks would need thousands of groups, each of them a communicator with buffers
on NCCL.

A network card whose rate is limited by a token bucket sends the first bytes after a pause without delay. In round trips
each direction pauses while the other one is used: at 100 Mbit/s, messages of 64 KiB took half of their time at that
rate. In a step, messages follow each other without pauses wherever the speed of the link matters. So the time of a
*row* is measured: `ROW` messages one right after the other. Rows follow each other, too. The first row, which starts
with a full bucket, is not counted.

On a busy machine a round trip may take longer than a row of large messages at another time. A line that is fitted to
such times may have a negative slope, or one of almost zero, which no link has. The measurement is then repeated, and
done `MOST_ATTEMPTS` times at most. If all fail, the link is recorded as `bounded`, with the speed of the largest
messages and their spread as the error.

Example: a round trip of 64 bytes takes 0.2 ms, so the latency is about 0.1 ms. A row of three messages of 2 MiB takes
6.2 ms, so one takes (6.2 - 0.2) / 3 = 2 ms, and the bandwidth is 2 MiB / 2 ms = 1,000 MiB/s.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from penstock.core.profile import LinkRecord
from penstock.trainer.clock import Clock

SMALLEST_BYTES = 64
MESSAGE_BYTES = (2**16, 2**19, 2**21)
CALLS, ROW, ROWS = 9, 3, 3
"""Number of round trips, of messages in a row, and of rows of each size."""

LONGEST_ROW_SECONDS = 0.25
"""Messages larger than `MESSAGE_BYTES` are measured only if a row of them is expected to take at most this long, by the
time of the size before.
"""

MOST_ATTEMPTS = 3

LEAST_EXPLAINED = 0.1
"""Least share of the largest rows' time that the fitted bandwidth has to explain. Below it, noise decides the fit."""

LEAST_BOUNDED_ERROR = 0.5
"""Least error of a bounded link, however well its times agree, since the share of latency in them is unknown."""

DIGITS = 5
"""Significant digits of stored results. Measurements reproduce two or three."""

_END = (0, 0, 0)
"""The announcement that ends a sender's measurement."""


def tournament(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, in which every pair of ranks occurs once (circle method)."""
    players: list[int | None] = list(range(num_ranks)) + ([None] if num_ranks % 2 else [])
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def undisturbed(pairs: Sequence[tuple[int, int]], nodes: Sequence[Hashable]) -> list[list[tuple[int, int]]]:
    """Divide ``pairs`` into rounds in which no two pairs use the same node's network card.

    Each pair joins the first round in which its nodes' cards are free. Pairs within a node use no card.
    """
    rounds: list[tuple[set[Hashable], list[tuple[int, int]]]] = [(set(), [])]
    for pair in pairs:
        ends = {nodes[rank] for rank in pair}
        cards = ends if len(ends) > 1 else set()
        free = next((round_ for round_ in rounds if not round_[0] & cards), None)
        if free is None:
            rounds.append(free := (set(), []))
        free[0].update(cards)
        free[1].append(pair)
    return [chosen for _, chosen in rounds]


def message_sizes(largest: int) -> tuple[int, ...]:
    """Sizes to measure if the largest message of a step has ``largest`` bytes: fixed sizes, then by factors of 4."""
    sizes = list(MESSAGE_BYTES)
    while sizes[-1] < largest:
        sizes.append(min(4 * sizes[-1], largest))
    return tuple(sizes)


def measure_links(
    device: torch.device, rank: int, nodes: Sequence[Hashable], clock: Clock, sizes: Sequence[int]
) -> list[LinkRecord]:
    """Measure the rank's outgoing links and fit them to latency + bytes / bandwidth. Collective.

    ``nodes`` has the node of every rank; ranks of a node share a network card. ``sizes`` are those of `message_sizes`.
    """
    records: list[LinkRecord] = []
    rounds = (undisturbed(pairs, nodes) for pairs in tournament(len(nodes)))
    for pairs in itertools.chain.from_iterable(rounds):
        for first, second in (pair for pair in pairs if rank in pair):
            link = PeerLink(second if rank == first else first, device)
            for source in (first, second):
                if rank == source:
                    records.append(measured_link(link, rank, clock, sizes))
                else:
                    link.answer()
        dist.barrier()
    return records


class Link(Protocol):
    """Link to another rank, as `measured_link` uses it."""

    @property
    def peer(self) -> int:
        """The other rank."""
        ...

    def lead(self, size: int, count: int, times: int) -> Iterator[Callable[[], None]]:
        """Yield ``times`` exchanges: each sends ``count`` messages of ``size`` bytes and receives a small answer."""
        ...

    def end(self) -> None:
        """End the measurement of this direction."""
        ...


@dataclass(frozen=True, slots=True)
class PeerLink:
    """Link to one other rank."""

    peer: int
    device: torch.device

    def lead(self, size: int, count: int, times: int) -> Iterator[Callable[[], None]]:
        self._order(size, count, times)
        message, small = self._message(size), self._message(SMALLEST_BYTES)

        def exchange() -> None:
            _finish([dist.isend(message, self.peer) for _ in range(count)])
            _finish([dist.irecv(small, self.peer)])

        for _ in range(times):
            yield exchange

    def end(self) -> None:
        self._order(*_END)

    def answer(self) -> None:
        """Receive and answer the peer's messages until it ends the measurement.

        Like a step, it posts the receives of a whole row before it waits.
        """
        small, order = self._message(SMALLEST_BYTES), torch.zeros(3, dtype=torch.int64, device=self.device)
        while True:
            _finish([dist.irecv(order, self.peer)])
            size, count, times = order.tolist()
            _finish([dist.isend(small, self.peer)])
            if not times:
                return
            message = self._message(size)
            for _ in range(times):
                _finish([dist.irecv(message, self.peer) for _ in range(count)])
                _finish([dist.isend(small, self.peer)])

    def _order(self, *order: int) -> None:
        """Announce a series to the peer and wait for its confirmation, so that it is ready to receive."""
        _finish([dist.isend(torch.tensor(order, dtype=torch.int64, device=self.device), self.peer)])
        _finish([dist.irecv(self._message(SMALLEST_BYTES), self.peer)])

    def _message(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


def _finish(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is no member of the group"
        work.wait()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of round trips of the smallest message, and of rows of messages by message size."""

    round_trips: tuple[float, ...]
    rows: Mapping[int, tuple[float, ...]]


def measured_link(link: Link, rank: int, clock: Clock, sizes: Sequence[int]) -> LinkRecord:
    """Measure the link from ``rank``. Returns the line through the medians of the first plausible attempt, or a bound
    from all attempts.
    """
    attempts: list[Times] = []
    record = None
    while record is None and len(attempts) < MOST_ATTEMPTS:
        attempts.append(_measured(link, clock, sizes))
        record = fitted_link(rank, link.peer, attempts[-1])
    link.end()
    return record or bounded_link(rank, link.peer, attempts)


def _measured(link: Link, clock: Clock, sizes: Sequence[int]) -> Times:
    def seconds(size: int, count: int, times: int, uncounted: int) -> tuple[float, ...]:
        taken = []
        for exchange in link.lead(size, count, times + uncounted):
            begin = clock()
            exchange()
            taken.append(clock() - begin)
        return tuple(taken[uncounted:])

    round_trips = seconds(SMALLEST_BYTES, 1, CALLS, 2)
    rows: dict[int, tuple[float, ...]] = {}
    for size in sizes:
        if rows and size not in MESSAGE_BYTES:
            before = max(rows)
            if statistics.median(rows[before]) * size / before > LONGEST_ROW_SECONDS:
                break
        rows[size] = seconds(size, ROW, ROWS, 1)
    return Times(round_trips, rows)


def fitted_link(source: int, target: int, times: Times) -> LinkRecord | None:
    """The line through the medians: a single message takes the latency plus the time of one message within a row.

    None if the line is implausible: the largest messages took no longer than the smallest ones, or the fitted bandwidth
    explains less than `LEAST_EXPLAINED` of the largest rows' time.
    """
    round_trip = statistics.median(times.round_trips)
    rows = {size: statistics.median(row) for size, row in times.rows.items()}
    in_rows = {size: max(row - round_trip, 0.0) / ROW for size, row in rows.items()}
    sizes = (SMALLEST_BYTES, *in_rows)
    seconds = (round_trip / 2, *(round_trip / 2 + row_seconds for row_seconds in in_rows.values()))
    latency, per_byte = fit_line(sizes, seconds)
    smallest, largest = min(in_rows), max(in_rows)
    explained = per_byte * ROW * largest
    if in_rows[largest] <= in_rows[smallest] or explained < LEAST_EXPLAINED * rows[largest]:
        return None
    errors = [abs(latency + size * per_byte - s) / s for size, s in zip(sizes, seconds, strict=True)]
    return _record(source, target, latency, 1.0 / per_byte, float(np.mean(errors)))


def bounded_link(source: int, target: int, attempts: Sequence[Times]) -> LinkRecord:
    """Record of a link without a plausible line: the speed of its largest messages bounds its bandwidth from below."""
    largest = min(max(times.rows) for times in attempts)
    rows = [seconds for times in attempts for seconds in times.rows[largest]]
    round_trips = [seconds for times in attempts for seconds in times.round_trips]
    middle = statistics.median(rows)
    low, _, high = statistics.quantiles(rows, n=4)
    error = max((high - low) / middle, LEAST_BOUNDED_ERROR)
    latency, speed = statistics.median(round_trips) / 2, ROW * largest / middle
    return _record(source, target, latency, speed, error, bounded=True)


def _record(
    source: int, target: int, latency: float, bytes_per_second: float, error: float, *, bounded: bool = False
) -> LinkRecord:
    return LinkRecord(
        source=source,
        target=target,
        latency_seconds=_rounded(latency),
        bytes_per_second=_rounded(bytes_per_second),
        error=_rounded(error),
        bounded=bounded,
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.{DIGITS}g}")


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, seconds per byte), both at least 0, by least squares of relative errors."""
    design = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=np.float64)], axis=1) / np.array(seconds)[:, None]
    latency, per_byte = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
    if latency < 0 or per_byte < 0:  # the constrained optimum has one of them at zero: take the one of less error
        alone = design.sum(axis=0) / np.square(design).sum(axis=0)
        errors = np.square(design * alone - 1).sum(axis=0)
        latency, per_byte = (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
    return float(latency), float(per_byte)
