"""Which (micro-batch, slice length, prefix) points are measured: few enough to be quick, spread enough to fit."""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_LENGTH = 16
NUM_LENGTHS = 6
_REPEATED_TOKENS, _FEWEST, _MOST = 1536, 3, 6
_SINGLE_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Point:
    """B sequences of n tokens after c tokens. Held-out points test the fit and take no part in it.

    At a ``single`` point one unit of each kind stands for all blocks: so much data passes through it that the next one
    finds the caches cold anyway.
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
        """How often it is measured: the shorter a pass, the noisier its time, and the less it costs. A single block has
        a sample each time, several have as many.
        """
        return min(max(_REPEATED_TOKENS * (_SINGLE_FACTOR if self.single else 1) // self.tokens, _FEWEST), _MOST)

    @property
    def whole(self) -> bool:
        """Whether all passes are measured here, or only those of blocks whose prefix, or neighbours', matters."""
        return self.prefix == 0 or self.held_out


def profile_grid(sequence_length: int, batches: tuple[int, ...], largest: int) -> tuple[Point, ...]:
    """Points to time.

    One sequence: halvings of its length, with none and all of the possible prefix, since costs are linear in it.
    Several: two lengths that share their number of tokens with other points, which tells attention inside a slice
    (B n^2) from the matrices (B n). And ``largest`` whole sequences, the most that an action may have: without them
    plans of one slice would be priced at several times the tokens of any point. More points than these did not make
    predictions of others any better.
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
    """Points to time at a further degree of tensor parallelism: about half as many, spread as those of `profile_grid`.

    What a shard takes is as smooth in tokens and prefix as what one device does, and collectives are in proportion to
    tokens; one point tests whether that holds.
    """
    lengths = halvings(sequence_length)[::2]
    points = dict.fromkeys(Point(1, n, c) for n in lengths for c in (0, sequence_length - n))
    points[Point(max(batches), lengths[:2][-1], 0)] = None
    _add_whole_microbatch(points, sequence_length, largest)
    for length, prefix in _between(sequence_length)[-1:]:
        points[Point(1, length, prefix, held_out=True)] = None
    return tuple(points)


def transient_grid(sequence_length: int, batches: tuple[int, ...]) -> tuple[Point, ...]:
    """Points whose memory is measured, once: all lengths at the sequence's end, and whole micro-batches."""
    points = dict.fromkeys(Point(1, n, sequence_length - n) for n in halvings(sequence_length))
    return tuple(points | dict.fromkeys(Point(batch, sequence_length, 0) for batch in batches))


def _add_whole_microbatch(points: dict[Point, None], sequence_length: int, largest: int) -> None:
    """Of short sequences, which have few halvings, it may be among the points already."""
    if Point(largest, sequence_length, 0) not in points:
        points[Point(largest, sequence_length, 0, single=True)] = None


def halvings(sequence_length: int) -> list[int]:
    """The sequence length and its halves, down to a thirty-second."""
    lengths = [sequence_length]
    while len(lengths) < NUM_LENGTHS and lengths[-1] // 2 >= SHORTEST_LENGTH:
        lengths.append(lengths[-1] // 2)
    return lengths


def _between(sequence_length: int) -> list[tuple[int, int]]:
    """Points that lie between those of the grid in both directions."""
    wanted = [(3 * sequence_length // 16, 5 * sequence_length // 16), (3 * sequence_length // 8, sequence_length // 2)]
    return [(length, prefix) for length, prefix in wanted if length > 0]
