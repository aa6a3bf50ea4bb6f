"""Times messages between every two ranks, both ways.

A card that is limited by a bucket of tokens lets some of a message that comes after a pause through at once: at 100
Mbit/s 64 KiB took half of their time in round trips, where each way rests while the other is used. Where a link
matters, a step's messages follow each other. So they are measured in rows, and a first row, which finds a full bucket,
does not count.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from penstock.core.profile import LinkRecord
from penstock.trainer.clock import Clock
from penstock.trainer.comm import GroupName, ProcessGroups

SMALLEST_BYTES = 64
MESSAGE_BYTES = (2**16, 2**19, 2**21)
CALLS, ROW, ROWS = 9, 3, 3
"""Round trips, messages in a row, and rows of each size."""

DIGITS = 5
"""That are kept of what is measured, which by itself repeats to two or three."""

LEAST_SECONDS_PER_BYTE = 1e-15
"""What a link is taken to need if the messages were too small to show it."""


def tournament(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every two ranks meet once (the circle method)."""
    players: list[int | None] = list(range(num_ranks)) + ([None] if num_ranks % 2 else [])
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def undisturbed(pairs: Sequence[tuple[int, int]], nodes: Sequence[Hashable]) -> list[list[tuple[int, int]]]:
    """The pairs in as few rounds as go one after the other, in which no two share a node's network card."""
    rounds: list[tuple[set[Hashable], list[tuple[int, int]]]] = [(set(), [])]
    for pair in pairs:
        ends = {nodes[rank] for rank in pair}
        cards = ends if len(ends) > 1 else set()
        free = next((each for each in rounds if not each[0] & cards), None)
        if free is None:
            rounds.append(free := (set(), []))
        free[0].update(cards)
        free[1].append(pair)
    return [chosen for _, chosen in rounds]


def measure_links(groups: ProcessGroups, rank: int, nodes: Sequence[Hashable], clock: Clock) -> list[LinkRecord]:
    """The rank's outgoing channels, fitted to latency + bytes / bandwidth; all ranks call it together.

    ``nodes`` says of every rank behind which network card it is.
    """
    records: list[LinkRecord] = []
    rounds = (undisturbed(pairs, nodes) for pairs in tournament(len(nodes)))
    for pairs in itertools.chain.from_iterable(rounds):
        groups.open(GroupName("F", pair) for pair in pairs)
        for first, second in (pair for pair in pairs if rank in pair):
            line = _Line(second if rank == first else first, groups[GroupName("F", (first, second))], groups.device)
            for source in (first, second):
                if rank == source:
                    records.append(_record(rank, line.peer, *_measured(line, clock)))
                else:
                    _answer(line)
        dist.barrier()
    return records


@dataclass(frozen=True, slots=True)
class _Line:
    """What leads to one other rank."""

    peer: int
    group: dist.ProcessGroup
    device: torch.device

    def send(self, size: int, count: int = 1) -> None:
        """Messages that follow each other."""
        message = self._message(size)
        _finish([dist.isend(message, self.peer, self.group) for _ in range(count)])

    def receive(self, size: int, count: int = 1) -> None:
        """All are waited for at once, as a step's are."""
        message = self._message(size)
        _finish([dist.irecv(message, self.peer, self.group) for _ in range(count)])

    def _message(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


def _finish(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is no member of the group"
        work.wait()


def _measured(line: _Line, clock: Clock) -> tuple[float, list[float]]:
    """The latency, and what messages of each size take in a row, apart from it."""

    def seconds(size: int, count: int) -> float:
        begin = clock()
        line.send(size, count)
        line.receive(SMALLEST_BYTES)
        return clock() - begin

    round_trip = statistics.median([seconds(SMALLEST_BYTES, 1) for _ in range(CALLS + 2)][2:])
    rows = [statistics.median([seconds(size, ROW) for _ in range(ROWS + 1)][1:]) for size in MESSAGE_BYTES]
    return round_trip / 2, [max(row - round_trip, 0.0) / ROW for row in rows]


def _answer(line: _Line) -> None:
    """The other side of `_measured`."""
    for size, count, times in ((SMALLEST_BYTES, 1, CALLS + 2), *((size, ROW, ROWS + 1) for size in MESSAGE_BYTES)):
        for _ in range(times):
            line.receive(size, count)
            line.send(SMALLEST_BYTES)


def _record(source: int, target: int, latency: float, in_rows: Sequence[float]) -> LinkRecord:
    """A message by itself takes the latency, and then as long as one of a row."""
    sizes = (SMALLEST_BYTES, *MESSAGE_BYTES)
    seconds = (latency, *(latency + each for each in in_rows))
    fitted, per_byte = fit_line(sizes, seconds)
    error = float(np.mean([abs(fitted + size * per_byte - s) / s for size, s in zip(sizes, seconds, strict=True)]))
    return LinkRecord(
        source=source,
        target=target,
        latency_seconds=_rounded(fitted),
        bytes_per_second=_rounded(1.0 / max(per_byte, LEAST_SECONDS_PER_BYTE)),
        error=_rounded(error),
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.{DIGITS}g}")


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, seconds per byte), neither below nothing, by least squares of relative errors."""
    design = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=np.float64)], axis=1) / np.array(seconds)[:, None]
    latency, per_byte = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
    if latency < 0 or per_byte < 0:  # the best of the edges, where one of them is nothing
        alone = design.sum(axis=0) / np.square(design).sum(axis=0)
        errors = np.square(design * alone - 1).sum(axis=0)
        latency, per_byte = (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
    return float(latency), float(per_byte)
