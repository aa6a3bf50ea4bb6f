"""Which (micro-batch, slice length, prefix) points are measured: few enough to be quick, spread enough to fit."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_BATCH = 4
SHORTEST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Point:
    """B sequences of n tokens after c tokens. Held-out points test the fit and take no part in it."""

    batch: int
    length: int
    prefix: int
    held_out: bool = False

    @property
    def tokens(self) -> int:
        """B n."""
        return self.batch * self.length


def profile_grid(sequence_length: int, batches: tuple[int, ...]) -> tuple[Point, ...]:
    """Powers of two of the length with none, half and all of the possible prefix, for one sequence; fewer for more."""
    points: dict[Point, None] = {}
    lengths = _halvings(sequence_length)
    for length in lengths:
        free = sequence_length - length
        for prefix in (0, free // 2, free):
            points[Point(1, length, prefix)] = None
    for batch in batches:
        for length in lengths[1:4:2] if batch > 1 else ():
            for prefix in (0, sequence_length - length):
                points[Point(batch, length, prefix)] = None
    for length, prefix in _between(sequence_length):
        points[Point(1, length, prefix, held_out=True)] = None
    return tuple(points)


def _halvings(sequence_length: int) -> list[int]:
    """The sequence length and its halves, down to a sixteenth."""
    found = [sequence_length]
    while len(found) < 5 and found[-1] // 2 >= SHORTEST_LENGTH:
        found.append(found[-1] // 2)
    return found


def _between(sequence_length: int) -> list[tuple[int, int]]:
    """Points that lie between those of the grid in both directions."""
    wanted = [(3 * sequence_length // 16, 5 * sequence_length // 16), (3 * sequence_length // 8, sequence_length // 2)]
    return [(length, prefix) for length, prefix in wanted if length > 0]


def batches_to_measure(global_batch: int) -> tuple[int, ...]:
    """Micro-batch sizes that a plan could use, up to a bound beyond which costs are in proportion."""
    return tuple(b for b in range(1, min(global_batch, LONGEST_BATCH) + 1) if global_batch % b == 0)
