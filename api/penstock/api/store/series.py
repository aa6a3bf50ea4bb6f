"""Time series over steps: points, roll-ups of 16 and of 256 steps, and charts of at most 500 points.

A series is one metric of one job, of one rank or (rank -1) over all ranks. Points are stored by attempt: an attempt
that resumed at an earlier step deletes nothing of the one before, and a chart shows the newest. Roll-ups are updated in
the transaction of their points, so that a chart of a million points reads a few thousand rows. Smallest, largest, first
and last value are exact at any length (`penstock.core.curves`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Insert,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    tuple_,
)

from penstock.api.store.engine import upsert
from penstock.api.store.rows import Keys, put, select_rows
from penstock.api.store.schema import points, rollups, series
from penstock.core.curves import (
    MEDIAN_STEPS,
    Curve,
    CurvePoint,
    StepValue,
    Usual,
    point_of,
    thinned,
    usual,
)
from penstock.core.records import WARM_UP_STEPS

ROLLUP_STEPS = (16, 256)
MOST_POINTS = 500
ALL_RANKS = -1


class Point(NamedTuple):
    """Value of a series after a step."""

    name: str
    rank: int
    step: int
    value: float


_Row = tuple[int, int, int, float]  # series, attempt, step, value


def add_points(connection: Connection, new: Mapping[tuple[str, int], Sequence[Point]], now: float) -> None:
    """Store points by uid and attempt, and update their roll-ups.

    A stored step is not overwritten.
    """
    finite = {of: [point for point in some if math.isfinite(point.value)] for of, some in new.items()}
    series_keys = {(uid, point.name, point.rank) for (uid, _), some in finite.items() for point in some}
    if not series_keys:
        return
    ids = _ids(connection, series_keys)
    rows = sorted(
        (ids[uid, point.name, point.rank], attempt, point.step, point.value)
        for (uid, attempt), some in finite.items()
        for point in some
    )
    put(connection, _keep, rows)
    put(connection, _merge, [rollup for steps in ROLLUP_STEPS for rollup in _rolled_up(rows, steps, now)])


def _ids(connection: Connection, series_keys: set[tuple[str, str, int]]) -> dict[tuple[str, str, int], int]:
    uids = sorted({uid for uid, _, _ in series_keys})
    known = _known_ids(connection, uids)
    missing = series_keys - known.keys()
    if not missing:
        return known
    put(connection, _add, sorted(missing))
    return _known_ids(connection, uids)


def _known_ids(connection: Connection, uids: Sequence[str]) -> dict[tuple[str, str, int], int]:
    rows = select_rows(connection, _of_jobs, [(uid,) for uid in uids])
    return {(uid, name, rank): number for uid, name, rank, number in rows}


def _of_jobs(keys: Keys) -> Select[Any]:
    mine = series.c.uid.in_([uid for (uid,) in keys])
    return select(series.c.uid, series.c.name, series.c.rank, series.c.id).where(mine)


@functools.cache
def _add(dialect: str) -> Insert:
    return upsert(dialect, series).on_conflict_do_nothing()


def _rolled_up(rows: Sequence[_Row], steps: int, now: float) -> Iterator[tuple[Any, ...]]:
    """Yield values of roll-ups of that many steps, from the sorted rows, in the order of their columns."""
    for (number, attempt, bucket), some in groupby(rows, key=lambda row: (row[0], row[1], row[2] // steps)):
        part = list(some)
        values = [row[3] for row in part]
        _, _, last_step, last = part[-1]
        statistics_of_bucket = (len(values), sum(values), min(values), max(values))
        yield number, steps, attempt, bucket, *statistics_of_bucket, last_step, last, now


@functools.cache
def _keep(dialect: str) -> Insert:
    return upsert(dialect, points).on_conflict_do_nothing()


@functools.cache
def _merge(dialect: str) -> Insert:
    """Return the statement that merges a roll-up into the stored one."""
    adding = upsert(dialect, rollups)
    new, old = adding.excluded, rollups.c
    is_later = new.last_step >= old.last_step
    lesser, greater = (func.min, func.max) if dialect == "sqlite" else (func.least, func.greatest)
    return adding.on_conflict_do_update(
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


# Charts
#
# Several attempts may have taken the same step: the value of the newest attempt counts. The steps of an attempt
# therefore count up to the first step of any later attempt, which may be in the middle of a roll-up. Such a roll-up is
# computed again from its points before that step. If its points are no longer stored, it counts as a whole, so that no
# valid value is left out.


class _Attempt(NamedTuple):
    """Valid steps of an attempt: from ``begin`` on, before ``limit``. ``is_exact``: its first point is stored."""

    begin: int
    limit: float
    last_step: int
    num_points: int
    is_exact: bool


_Attempts = dict[int, dict[int, _Attempt]]  # by series and attempt, the newest attempt first


class _Part(NamedTuple):
    point: CurvePoint
    last_step: int


def charts(
    connection: Connection, uid: str, ranks: Sequence[int] = (ALL_RANKS,), most: int = MOST_POINTS
) -> dict[tuple[str, int], Curve]:
    """Return every series of the job with steps, by name and rank, in at most ``most`` points each."""
    known = {number: key[1:] for key, number in _known_ids(connection, [uid]).items() if key[2] in ranks}
    attempts = _attempts(connection, known)
    spans = {number: _span(own) for number, own in attempts.items()}
    parts_by_series = _raw(connection, {number for number, span in spans.items() if span <= most}, attempts)
    for steps in ROLLUP_STEPS:
        fits = {number for number, span in spans.items() if span <= most * steps or steps == ROLLUP_STEPS[-1]}
        parts_by_series |= _rolled(connection, fits - parts_by_series.keys(), steps, attempts)
    firsts = _firsts(connection, parts_by_series, attempts)
    return {
        key: Curve(
            points=thinned([part.point for part in parts_by_series[number]], most),
            first=firsts.get(number),
            last=StepValue(parts_by_series[number][-1].last_step, parts_by_series[number][-1].point.last),
        )
        for number, key in sorted(known.items(), key=lambda item: item[1])
        if parts_by_series.get(number)
    }


def usual_of(connection: Connection, uid: str, name: str, curve: Curve) -> Usual:
    """Return the usual value of a series over all ranks that has a value at every step, such as the step time.

    It is the median of the last stored points, or the mean by ``curve``, the series' curve, if no points are stored.
    """
    number = _known_ids(connection, [uid])[uid, name, ALL_RANKS]
    values: list[float] = []
    behind = curve.last.step + 1
    for attempt, own in _attempts(connection, [number])[number].items():
        row = points.c
        chosen = select(row.step, row.value).where(row.series == number, row.attempt == attempt, row.step < behind)
        left = MEDIAN_STEPS + WARM_UP_STEPS - len(values)
        for step, value in connection.execute(chosen.order_by(row.step.desc()).limit(left)):
            if step != behind - 1:
                break
            values.append(value)
            behind = step
        if behind > own.begin or len(values) == MEDIAN_STEPS + WARM_UP_STEPS:
            break
    if (typical := usual(values[::-1])) is not None:
        return typical
    total = math.fsum(point.mean * (point.count / curve.count) for point in curve.points)
    return Usual(value=total, count=curve.count, is_median=False)


def values_at(connection: Connection, uid: str, name: str, attempts: Mapping[int, int]) -> dict[int, float]:
    """Return the stored values of a series over all ranks at steps of the given attempts."""
    number = _known_ids(connection, [uid]).get((uid, name, ALL_RANKS))
    if number is None:
        return {}
    keys = [(number, attempt, step, step + 1) for step, attempt in attempts.items()]
    return {step: value for _, _, step, value in select_rows(connection, _within, keys)}


def _attempts(connection: Connection, numbers: Collection[int]) -> _Attempts:
    row, coarsest = rollups.c, ROLLUP_STEPS[-1]
    chosen = select(
        row.series, row.attempt, func.min(row.bucket), func.max(row.last_step), func.sum(row.count), *_heads()
    ).where(row.series.in_(sorted(numbers)), row.steps == coarsest)
    rows = connection.execute(chosen.group_by(row.series, row.attempt).order_by(row.series, row.attempt.desc()))
    by_series: _Attempts = {}
    limit = math.inf
    for number, attempt, bucket, last_step, count, finer, first in rows:
        if number not in by_series:
            by_series[number], limit = {}, math.inf
        is_exact = first is not None and finer is not None and first // ROLLUP_STEPS[0] == finer
        begin = first if is_exact else bucket * coarsest if finer is None else finer * ROLLUP_STEPS[0]
        by_series[number][attempt] = _Attempt(begin, limit, last_step, count, is_exact)
        limit = min(limit, begin)
    return by_series


def _heads() -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Expressions of the first of the finest roll-ups, and of the first point, of a series' attempt."""
    finer = rollups.alias()
    own = (finer.c.series == rollups.c.series, finer.c.attempt == rollups.c.attempt)
    bucket = select(func.min(finer.c.bucket)).where(*own, finer.c.steps == ROLLUP_STEPS[0])
    mine = (points.c.series == rollups.c.series, points.c.attempt == rollups.c.attempt)
    step = select(func.min(points.c.step)).where(*mine)
    return bucket.correlate(rollups).scalar_subquery(), step.correlate(rollups).scalar_subquery()


def _span(own: Mapping[int, _Attempt]) -> int:
    return (
        max(own_attempt.last_step for own_attempt in own.values())
        - min(own_attempt.begin for own_attempt in own.values())
        + 1
    )


def _raw(connection: Connection, numbers: Collection[int], attempts: _Attempts) -> dict[int, list[_Part]]:
    """Return the points of those series whose points are all stored."""
    if not numbers:
        return {}
    row = points.c
    chosen = select(row.series, row.attempt, row.step, row.value).where(row.series.in_(sorted(numbers)))
    parts_by_series: dict[int, list[_Part]] = {}
    for number, rows in groupby(connection.execute(chosen.order_by(row.series, row.step)), key=lambda row: row[0]):
        kept, own = list(rows), attempts[number]
        if len(kept) == sum(own_attempt.num_points for own_attempt in own.values()):
            parts_by_series[number] = [
                _Part(point_of([StepValue(step, value)], attempt), step)
                for _, attempt, step, value in kept
                if step < own[attempt].limit
            ]
    return parts_by_series


def _rolled(
    connection: Connection, numbers: Collection[int], steps: int, attempts: _Attempts
) -> dict[int, list[_Part]]:
    """Return the roll-ups of those series, as far as their steps are valid."""
    if not numbers:
        return {}
    row = rollups.c
    point_columns = (row.min, row.sum / row.count, row.max, row.last, row.count, row.last_step)
    chosen = select(row.series, row.attempt, row.bucket * steps, *point_columns)
    chosen = chosen.where(row.series.in_(sorted(numbers)), row.steps == steps)
    parts_by_series: dict[int, list[_Part]] = {number: [] for number in numbers}
    split: dict[tuple[int, int, int], _Part] = {}
    for number, attempt, first, least, mean, greatest, last, count, last_step in connection.execute(chosen):
        own = attempts[number][attempt]
        point = CurvePoint(max(first, own.begin), attempt, least, mean, greatest, last, count)
        if last_step < own.limit:
            parts_by_series[number].append(_Part(point, last_step))
        elif first < own.limit:
            split[number, attempt, first] = _Part(point, last_step)
    for (number, *_), part in _truncated(connection, split, steps, attempts).items():
        parts_by_series[number].append(part)
    return {
        number: sorted(parts, key=lambda part: part.point.step) for number, parts in parts_by_series.items() if parts
    }


def _truncated(
    connection: Connection, split: Mapping[tuple[int, int, int], _Part], steps: int, attempts: _Attempts
) -> dict[tuple[int, int, int], _Part]:
    """Return parts of roll-ups in whose middle a later attempt began, up to that step."""
    values: dict[tuple[int, int, int], list[StepValue]] = {key: [] for key in split}
    keys = [(number, attempt, first, first + steps) for number, attempt, first in split]
    rows = set(map(tuple, select_rows(connection, _within, keys)))
    for number, attempt, step, value in sorted(rows):
        values[number, attempt, step // steps * steps].append(StepValue(step, value))
    truncated = {}
    for key, part in split.items():
        number, attempt, _ = key
        before = [value for value in values[key] if value.step < attempts[number][attempt].limit]
        if len(values[key]) != part.point.count:
            truncated[key] = part
        elif before:
            truncated[key] = _Part(point_of(before, attempt), before[-1].step)
    return truncated


def _within(keys: Keys) -> Select[Any]:
    row = points.c
    ranges = (
        and_(row.series == number, row.attempt == attempt, row.step >= first, row.step < stop)
        for number, attempt, first, stop in keys
    )
    return select(row.series, row.attempt, row.step, row.value).where(or_(*ranges))


def _firsts(
    connection: Connection, parts_by_series: Mapping[int, Sequence[_Part]], attempts: _Attempts
) -> dict[int, StepValue]:
    """Return the first value of those series, where it is stored."""
    keys = []
    for number, parts in parts_by_series.items():
        if parts:
            attempt = parts[0].point.attempt
            if (own := attempts[number][attempt]).is_exact:
                keys.append((number, attempt, own.begin, own.begin + 1))
    return {number: StepValue(step, value) for number, _, step, value in select_rows(connection, _within, keys)}


Bucket = tuple[int, int, int, int]
"""Key of a roll-up: series, number of steps, attempt, and index."""


def old_buckets(
    connection: Connection, before: float, after: Bucket, most: int, *, with_points: bool = False
) -> list[Bucket]:
    """Return roll-ups that last changed before that time, in the order of their keys, after ``after``.

    With ``with_points``, only those whose points are still stored.
    """
    key = (rollups.c.series, rollups.c.steps, rollups.c.attempt, rollups.c.bucket)
    behind = and_(rollups.c.series >= after[0], tuple_(*key) > tuple_(*after))
    chosen = select(*key).where(behind, rollups.c.received_at < before)
    if with_points:
        fine = ROLLUP_STEPS[0]
        first = rollups.c.bucket * fine
        own = (points.c.series == rollups.c.series, points.c.attempt == rollups.c.attempt)
        inside = select(points.c.step).where(*own, points.c.step >= first, points.c.step < first + fine)
        chosen = chosen.where(rollups.c.steps == fine, inside.where(_is_later()).exists())
    rows = connection.execute(chosen.order_by(*key).limit(most))
    return [(number, steps, attempt, bucket) for number, steps, attempt, bucket in rows]


def forget_points(connection: Connection, old: Sequence[Bucket]) -> None:
    """Delete the points of these roll-ups, which stay."""
    _forget_within(connection, old, _is_later())


def _is_later() -> ColumnElement[bool]:
    """Condition of points that are not the first of their attempt. The first one is kept as long as its roll-up, so
    that a chart's start stays exact.
    """
    earlier = points.alias()
    own = (earlier.c.series == points.c.series, earlier.c.attempt == points.c.attempt)
    return exists().where(*own, earlier.c.step < points.c.step).correlate(points)


def _forget_within(connection: Connection, old: Sequence[Bucket], *those: ColumnElement[bool]) -> None:
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
    connection.execute(delete(points).where(*own, *within, *those), rows)


def forget_rollups(connection: Connection, old: Sequence[Bucket]) -> None:
    """Delete these roll-ups, and the rest of their points."""
    if finest := [bucket for bucket in old if bucket[1] == ROLLUP_STEPS[0]]:
        _forget_within(connection, finest)
    names = ("series", "steps", "attempt", "bucket")
    own = [rollups.c[name] == bindparam(f"old_{name}") for name in names]
    rows = [{f"old_{name}": value for name, value in zip(names, key, strict=True)} for key in old]
    connection.execute(delete(rollups).where(*own), rows)
