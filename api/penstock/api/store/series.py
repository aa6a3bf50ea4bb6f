"""Numbers over steps: points, roll-ups of 16 and of 256 steps, and charts of at most 500 points.

A series is one number of one job, of one rank or (rank -1) of all together. Points are kept by attempt: an attempt that
began again at an earlier step takes nothing away from the one before, and a chart shows the newest. Roll-ups are kept
up to date in the transaction of their points, so that a chart of a million points reads a few thousand rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Insert, Select, and_, bindparam, case, delete, func, select, tuple_

from penstock.api.store.engine import upsert
from penstock.api.store.rows import Keys, ask, put
from penstock.api.store.schema import points, rollups, series

ROLLUP_STEPS = (16, 256)
MOST_POINTS = 500
ALL_RANKS = -1


class Point(NamedTuple):
    """The value of a series after a step."""

    name: str
    rank: int
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """Steps from ``step`` on, as one: all the same where nothing was rolled up."""

    step: int
    attempt: int
    min: float
    mean: float
    max: float
    last: float


_Row = tuple[int, int, int, float]  # series, attempt, step, value


def add_points(connection: Connection, new: Mapping[tuple[str, int], Sequence[Point]], now: float) -> None:
    """Keep points, by the uid and attempt that they are of, and bring their roll-ups up to date.

    A step that is there already stays as it is.
    """
    finite = {of: [point for point in some if math.isfinite(point.value)] for of, some in new.items()}
    wanted = {(uid, point.name, point.rank) for (uid, _), some in finite.items() for point in some}
    if not wanted:
        return
    ids = _ids(connection, wanted)
    rows = sorted(
        (ids[uid, point.name, point.rank], attempt, point.step, point.value)
        for (uid, attempt), some in finite.items()
        for point in some
    )
    put(connection, _keep, rows)
    put(connection, _merge, [rollup for steps in ROLLUP_STEPS for rollup in _rolled_up(rows, steps, now)])


def _ids(connection: Connection, wanted: set[tuple[str, str, int]]) -> dict[tuple[str, str, int], int]:
    uids = sorted({uid for uid, _, _ in wanted})
    known = _known_ids(connection, uids)
    missing = wanted - known.keys()
    if not missing:
        return known
    put(connection, _add, sorted(missing))
    return _known_ids(connection, uids)


def _known_ids(connection: Connection, uids: Sequence[str]) -> dict[tuple[str, str, int], int]:
    rows = ask(connection, _of_jobs, [(uid,) for uid in uids])
    return {(uid, name, rank): number for uid, name, rank, number in rows}


def _of_jobs(keys: Keys) -> Select[Any]:
    mine = series.c.uid.in_([uid for (uid,) in keys])
    return select(series.c.uid, series.c.name, series.c.rank, series.c.id).where(mine)


@functools.cache
def _add(dialect: str) -> Insert:
    adding: Insert = upsert(dialect, series).on_conflict_do_nothing()
    return adding


def _rolled_up(rows: Sequence[_Row], steps: int, now: float) -> Iterator[tuple[Any, ...]]:
    """What the rows, which are sorted, add to roll-ups of so many steps; in the order of their columns."""
    for (number, attempt, bucket), some in groupby(rows, key=lambda row: (row[0], row[1], row[2] // steps)):
        part = list(some)
        values = [row[3] for row in part]
        _, _, last_step, last = part[-1]
        told = (len(values), sum(values), min(values), max(values))
        yield number, steps, attempt, bucket, *told, last_step, last, now


@functools.cache
def _keep(dialect: str) -> Insert:
    keeping: Insert = upsert(dialect, points).on_conflict_do_nothing()
    return keeping


@functools.cache
def _merge(dialect: str) -> Insert:
    """Adds a roll-up to the one that is there."""
    adding = upsert(dialect, rollups)
    new, old = adding.excluded, rollups.c
    is_later = new.last_step >= old.last_step
    lesser, greater = (func.min, func.max) if dialect == "sqlite" else (func.least, func.greatest)
    merged: Insert = adding.on_conflict_do_update(
        index_elements=list(rollups.primary_key),
        set_={
            "count": old.count + new.count,
            "sum": old.sum + new.sum,
            "min": lesser(old.min, new.min),
            "max": greater(old.max, new.max),
            "last": case((is_later, new.last), else_=old.last),
            "last_step": greater(old.last_step, new.last_step),
            "received_at": new.received_at,
        },
    )
    return merged


# Charts


def charts(
    connection: Connection, uid: str, ranks: Sequence[int] = (ALL_RANKS,), most: int = MOST_POINTS
) -> dict[tuple[str, int], list[ChartPoint]]:
    """Every series of the job over its steps, by name and rank, in at most ``most`` points each."""
    known = {number: key[1:] for key, number in _known_ids(connection, [uid]).items() if key[2] in ranks}
    spans = _spans(connection, known)
    found = _read(connection, {number for number, span in spans.items() if span <= most}, _raw)
    for steps in ROLLUP_STEPS:
        fits = {number for number, span in spans.items() if span <= most * steps or steps == ROLLUP_STEPS[-1]}
        found |= _read(connection, fits - found.keys(), functools.partial(_rolled, steps=steps))
    return {
        key: _thinned(found.get(number, []), most) for number, key in sorted(known.items(), key=lambda item: item[1])
    }


def _spans(connection: Connection, numbers: Collection[int]) -> dict[int, int]:
    """How many steps a series goes over."""
    row, coarsest = rollups.c, ROLLUP_STEPS[-1]
    span = (func.max(row.last_step) - func.min(row.bucket) * coarsest + 1).label("span")
    chosen = select(row.series, span).where(row.series.in_(sorted(numbers)), row.steps == coarsest)
    rows = connection.execute(chosen.group_by(row.series))
    return {each.series: each.span for each in rows}


def _read(
    connection: Connection, numbers: Collection[int], made: Callable[[Collection[int]], Select[Any]]
) -> dict[int, list[ChartPoint]]:
    """The newest points of those series that have any."""
    if not numbers:
        return {}
    rows = connection.execute(made(numbers))
    return {number: _newest(some) for number, some in groupby(rows, key=itemgetter(0))}


def _raw(numbers: Collection[int]) -> Select[Any]:
    row = points.c
    chosen = select(row.series, row.step, row.attempt, row.value, row.value, row.value, row.value)
    return chosen.where(row.series.in_(sorted(numbers))).order_by(row.series, row.attempt.desc(), row.step)


def _rolled(numbers: Collection[int], steps: int) -> Select[Any]:
    row = rollups.c
    columns = (row.series, row.bucket * steps, row.attempt, row.min, row.sum / row.count, row.max, row.last)
    chosen = select(*columns).where(row.series.in_(sorted(numbers)), row.steps == steps)
    return chosen.order_by(row.series, row.attempt.desc(), row.bucket)


def _newest(rows: Iterable[Sequence[Any]]) -> list[ChartPoint]:
    """Of every attempt, newest first, the steps before the next one began."""
    found: list[ChartPoint] = []
    attempt, begin, limit = None, math.inf, math.inf
    for _, *values in rows:
        point = ChartPoint(*values)
        if point.attempt != attempt:
            attempt, limit = point.attempt, begin
            begin = min(begin, point.step)
        if point.step < limit:
            found.append(point)
    return sorted(found, key=lambda point: point.step)


def _thinned(found: list[ChartPoint], most: int) -> list[ChartPoint]:
    """Neighbours joined until they are few enough; a point's mean is that of its parts."""
    together = -(-len(found) // most) if found else 1
    if together == 1:
        return found
    return [_joined(found[i : i + together]) for i in range(0, len(found), together)]


def _joined(parts: Sequence[ChartPoint]) -> ChartPoint:
    return ChartPoint(
        step=parts[0].step,
        attempt=parts[-1].attempt,
        min=min(part.min for part in parts),
        mean=sum(part.mean for part in parts) / len(parts),
        max=max(part.max for part in parts),
        last=parts[-1].last,
    )


Bucket = tuple[int, int, int, int]
"""The key of a row of roll-ups: series, how many steps it covers, attempt, and which of those it is."""


def old_buckets(
    connection: Connection, before: float, after: Bucket, most: int, *, with_points: bool = False
) -> list[Bucket]:
    """Roll-ups that last changed before that time, in the order of their keys, from behind ``after`` on.

    ``with_points`` asks for those alone whose points are still there.
    """
    key = (rollups.c.series, rollups.c.steps, rollups.c.attempt, rollups.c.bucket)
    behind = and_(rollups.c.series >= after[0], tuple_(*key) > tuple_(*after))
    chosen = select(*key).where(behind, rollups.c.received_at < before)
    if with_points:
        fine = ROLLUP_STEPS[0]
        first = rollups.c.bucket * fine
        own = (points.c.series == rollups.c.series, points.c.attempt == rollups.c.attempt)
        inside = select(points.c.step).where(*own, points.c.step >= first, points.c.step < first + fine)
        chosen = chosen.where(rollups.c.steps == fine, inside.exists())
    rows = connection.execute(chosen.order_by(*key).limit(most))
    return [(number, steps, attempt, bucket) for number, steps, attempt, bucket in rows]


def forget_points(connection: Connection, old: Sequence[Bucket]) -> None:
    """Drop the points below these roll-ups, which stay."""
    own = (points.c.series == bindparam("old_series"), points.c.attempt == bindparam("old_attempt"))
    within = (points.c.step >= bindparam("old_first"), points.c.step < bindparam("old_stop"))
    rows = [
        {
            "old_series": number,
            "old_attempt": attempt,
            "old_first": bucket * steps,
            "old_stop": (bucket + 1) * steps,
        }
        for number, steps, attempt, bucket in old
    ]
    connection.execute(delete(points).where(*own, *within), rows)


def forget_rollups(connection: Connection, old: Sequence[Bucket]) -> None:
    """Drop these roll-ups."""
    names = ("series", "steps", "attempt", "bucket")
    own = [rollups.c[name] == bindparam(f"old_{name}") for name in names]
    rows = [{f"old_{name}": value for name, value in zip(names, key, strict=True)} for key in old]
    connection.execute(delete(rollups).where(*own), rows)
