"""Chooses the (micro-batch, slice length, prefix) points to measure: few, but spread enough to fit costs to them."""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_LENGTH = 16
NUM_LENGTHS = 6
_REPEATED_TOKENS, _FEWEST, _MOST = 1536, 3, 6
_SINGLE_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Point:
    """B sequences of n tokens after a prefix of c tokens. Held-out points test the fit and are not used for it.

    At a ``single`` point only one unit of each kind is measured for all blocks. Its data exceed the caches, so the next
    unit finds them cold anyway.
    """

    batch: int
    length: int
    prefix: int
    held_out: bool = False
    single: bool = False

    @property
    def tokens(self) -> int:
        """B n."""
        return self.batch * self.length

    @property
    def repeats(self) -> int:
        """Number of repetitions. Short passes have more, since they are noisier and cost less. Single points have more,
        since a repetition gives one sample for all blocks instead of one for each block.
        """
        return min(max(_REPEATED_TOKENS * (_SINGLE_FACTOR if self.single else 1) // self.tokens, _FEWEST), _MOST)

    @property
    def whole(self) -> bool:
        """Whether all passes are measured, or only those of blocks, which depend on the prefix."""
        return self.prefix == 0 or self.held_out


def profile_grid(sequence_length: int, batches: tuple[int, ...], largest: int) -> tuple[Point, ...]:
    """Points to time.

    For one sequence: its length and halvings of it, with no prefix and the largest prefix, since costs are linear in
    the prefix. For several sequences: lengths that give the same number of tokens as other points, which separates the
    cost of attention within a slice (B n^2) from that of the matrices (B n). Also ``largest`` whole sequences, the
    maximum of an action. Without that point, plans of one slice would be extrapolated to several times the tokens of
    any point. More points did not improve predictions of other points.
    """
    lengths = halvings(sequence_length)
    points = dict.fromkeys(Point(1, n, c) for n in lengths for c in (0, sequence_length - n))
    for batch in batches:
        points |= dict.fromkeys(Point(batch, n, 0) for n in (lengths[2::2] or lengths[-1:]) if batch > 1)
    _add_whole_microbatch(points, sequence_length, largest)
    for length, prefix in _between(sequence_length):
        points[Point(1, length, prefix, held_out=True)] = None
    return tuple(points)


def sparse_grid(sequence_length: int, batches: tuple[int, ...], largest: int) -> tuple[Point, ...]:
    """Points to time at a further degree of tensor parallelism: about half of those of `profile_grid`.

    The time of a shard is as smooth in tokens and prefix as that of a whole unit, and the time of collectives is
    proportional to the tokens. One held-out point tests this.
    """
    lengths = halvings(sequence_length)[::2]
    points = dict.fromkeys(Point(1, n, c) for n in lengths for c in (0, sequence_length - n))
    points[Point(max(batches), lengths[:2][-1], 0)] = None
    _add_whole_microbatch(points, sequence_length, largest)
    for length, prefix in _between(sequence_length)[-1:]:
        points[Point(1, length, prefix, held_out=True)] = None
    return tuple(points)


def transient_grid(sequence_length: int, batches: tuple[int, ...]) -> tuple[Point, ...]:
    """Points at which memory is measured, once: all lengths at the end of a sequence, and whole micro-batches."""
    points = dict.fromkeys(Point(1, n, sequence_length - n) for n in halvings(sequence_length))
    return tuple(points | dict.fromkeys(Point(batch, sequence_length, 0) for batch in batches))


def _add_whole_microbatch(points: dict[Point, None], sequence_length: int, largest: int) -> None:
    """Add the largest whole micro-batch. Short sequences, which have few halvings, may have that point already."""
    if Point(largest, sequence_length, 0) not in points:
        points[Point(largest, sequence_length, 0, single=True)] = None


def halvings(sequence_length: int) -> list[int]:
    """The sequence length, its half, its quarter and so on, down to a thirty-second or `SHORTEST_LENGTH`."""
    lengths = [sequence_length]
    while len(lengths) < NUM_LENGTHS and lengths[-1] // 2 >= SHORTEST_LENGTH:
        lengths.append(lengths[-1] // 2)
    return lengths


def _between(sequence_length: int) -> list[tuple[int, int]]:
    """Pairs (length, prefix) that lie between the points of the grid in both dimensions."""
    pairs = [(3 * sequence_length // 16, 5 * sequence_length // 16), (3 * sequence_length // 8, sequence_length // 2)]
    return [(length, prefix) for length, prefix in pairs if length > 0]
