"""Records in the store: nothing lost, nothing twice, and charts that say what the points say."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, func, select, update

from penstock.api.service import Service
from penstock.api.store import attempts, ingest, lines, profiles, series
from penstock.api.store.ingest import MOST_RANKS, Batch, EarlyAttemptError, ForeignJobError, StaleAttemptError
from penstock.api.store.jobs import NoSuchJobError, StoredJob, get
from penstock.api.store.schema import jobs, log_lines, points, rollups
from penstock.api.store.schema import series as series_table
from penstock.api.store.series import ALL_RANKS, Point
from penstock.core.curves import CurvePoint, usual
from penstock.core.errors import UserError
from penstock.core.lifecycle import Launch
from penstock.core.profile import Profile
from penstock.core.records import LogLine, Record, RecordKind
from penstock.core.timeline import Activity, Event, Source, Timeline
from tests.support.sample_run import sample_profile
from tests.support.service import NOW, add_job, step_records


def begun(service: Service, attempt: int = 1) -> StoredJob:
    """A job whose newest attempt has this number."""
    made = add_job(service, "tiny-")
    return begin(service, made.uid, attempt)


def begin(service: Service, uid: str, attempt: int) -> StoredJob:
    def change(connection: Connection) -> StoredJob:
        connection.execute(update(jobs).where(jobs.c.uid == uid).values(attempt=attempt))
        return get(connection, uid)

    return service.write(uid, change)


def take(service: Service, records: Sequence[Record]) -> int:
    batch = Batch.of(records, NOW)
    return service.submit_joint(batch.uid, ingest.take, batch).result()


def chart(service: Service, uid: str, most: int = 500) -> tuple[CurvePoint, ...]:
    return service.read(lambda connection: series.charts(connection, uid, most=most)[("loss", ALL_RANKS)].points)


def test_what_is_sent_is_kept_and_acknowledged(service: Service) -> None:
    job = begun(service)
    assert take(service, step_records(job.uid, range(1, 4))) == 5
    assert [(each.step, each.last) for each in chart(service, job.uid)] == [(1, 4.999), (2, 4.998), (3, 4.997)]
    progress = service.read(lambda c: get(c, job.uid)).progress
    assert progress is not None
    assert (progress.step, progress.loss, progress.step_seconds) == (4, 4.997, 0.5)


def profile_record(uid: str, measured: Profile) -> Record:
    return Record(
        uid=uid, attempt=1, source="profile", sequence=0, recorded_at=NOW, kind=RecordKind.PROFILE, profile=measured
    )


def test_a_profile_is_kept_once_and_whole(service: Service) -> None:
    """Anyone who plans for an attempt on other machines finds it here."""
    job = begun(service)
    measured = replace(sample_profile(), num_ranks=3, hosts=(0, 1, 0))
    sent = Record.from_manifest(json.loads(json.dumps(profile_record(job.uid, measured).to_manifest())))
    for _ in range(2):
        assert take(service, [sent]) == 0
    assert service.read(lambda connection: profiles.find(connection, measured.digest)) == measured
    assert [stored.digest for stored in service.read(profiles.every)] == [measured.digest]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"key": replace(sample_profile().key, host="h" * 256)}, "key.host"),
        ({"model_digest": "d" * 65}, "modelDigest"),
        ({"num_ranks": 2**31}, "numRanks"),
        ({"num_ranks": 0}, "numRanks"),
    ],
)
def test_a_profile_that_there_is_no_room_for_is_refused_before_others_are_kept_with_it(
    change: dict[str, Any], where: str
) -> None:
    with pytest.raises(UserError) as caught:
        Batch.of([profile_record("u-1", replace(sample_profile(), **change))], NOW)
    assert caught.value.where == f"records[0].profile.{where}"


def test_steps_tell_where_the_job_stands_without_a_checkpoint(service: Service) -> None:
    """Or a job would seem to hang between two checkpoints."""
    job = begun(service)
    records = step_records(job.uid, range(4))
    take(service, [record for record in records if record.kind is RecordKind.METRICS])
    progress = service.read(lambda c: get(c, job.uid)).progress
    assert progress is not None
    assert (progress.step, progress.last_checkpoint, progress.reported_at) == (4, None, NOW)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.tuples(st.integers(0, 19), st.integers(1, 20)), max_size=8))
def test_sending_again_changes_nothing(service: Service, cuts: list[tuple[int, int]]) -> None:
    """Whatever pieces are sent, again and again, what is kept is what each step was once."""
    job = begun(service)
    records = step_records(job.uid, range(10))
    furthest = -1
    for start, length in cuts:
        piece = records[: max(start, furthest + 1) + length][min(start, furthest + 1) :]
        furthest = max(furthest, piece[-1].sequence)
        assert take(service, piece) == furthest
    take(service, records)
    taken = service.read(lambda c: c.execute(select(func.count()).select_from(points)).scalar_one())
    assert taken % 60 == 0
    assert [each.step for each in chart(service, job.uid)] == list(range(10))
    counted = select(func.sum(rollups.c.count), rollups.c.steps).group_by(rollups.c.steps, rollups.c.series)
    assert {count for count, _ in service.read(lambda c: c.execute(counted).all())} == {10}


def test_an_attempt_that_is_not_known_yet_is_refused(service: Service) -> None:
    job = begun(service, attempt=2)
    with pytest.raises(EarlyAttemptError, match="attempt 3, but the newest known attempt is 2"):
        take(service, step_records(job.uid, range(2), attempt=3))


def test_an_older_attempt_is_taken_in_until_it_is_closed(service: Service) -> None:
    """Its records may come late: a killed shipper is followed by another, perhaps after the next attempt has begun."""
    job = begun(service)
    launch(service, job.uid, 1)
    records = step_records(job.uid, range(8))
    take(service, records[:4])
    begin(service, job.uid, 2)
    launch(service, job.uid, 2)
    take(service, step_records(job.uid, range(5, 7), attempt=2))
    now = service.read(lambda c: get(c, job.uid)).progress
    take(service, records)
    assert len({each.step for each in chart(service, job.uid)}) == 7
    counted = select(func.count()).select_from(points.join(series_table, series_table.c.id == points.c.series))
    of_loss = counted.where(series_table.c.name == "loss")
    assert service.read(lambda c: c.execute(of_loss).scalar_one()) == 8 + 2
    assert service.read(lambda c: get(c, job.uid)).progress == now, "an older attempt says nothing of where the job is"
    service.write(job.uid, lambda c: attempts.close(c, job.uid, 1, NOW))
    with pytest.raises(StaleAttemptError, match="attempt 1, which is closed; the newest attempt is 2"):
        take(service, records)
    take(service, step_records(job.uid, range(5, 9), attempt=2))


@pytest.mark.parametrize("together", [False, True])
def test_an_older_attempt_never_says_where_the_job_is(service: Service, together: bool) -> None:
    """Not in one transaction with the newest either, whichever comes first."""
    job = begun(service, attempt=2)
    batches = [Batch.of(step_records(job.uid, range(stop), attempt=n), NOW) for n, stop in ((2, 3), (1, 9))]
    for some in [batches, batches[::-1]] if together else [[batch] for batch in batches]:
        service.write(job.uid, lambda connection, some=some: ingest.take(connection, some))  # type: ignore[misc]
    found = service.read(lambda c: get(c, job.uid)).progress
    assert found is not None
    assert (found.attempt, found.step) == (2, 3)


def launch(service: Service, uid: str, attempt: int) -> None:
    started = Launch(attempt, 2, None)
    service.write(uid, lambda connection: attempts.add(connection, uid, started, (), NOW))


def test_an_unknown_job_is_refused(service: Service) -> None:
    with pytest.raises(NoSuchJobError):
        take(service, step_records("nobody", range(1)))


def test_another_namespace_s_job_is_refused_alone(service: Service) -> None:
    """What is kept together with it stays."""
    mine, other = begun(service), begun(service)
    batches = [
        Batch.of(step_records(job.uid, range(2)), NOW, namespace=namespace)
        for job, namespace in ((mine, "default"), (other, "team"))
    ]
    kept, refused = service.write("together", lambda connection: ingest.take(connection, batches))
    assert kept == 3
    assert isinstance(refused, ForeignJobError)
    assert len(chart(service, mine.uid)) == 2
    assert service.read(lambda c: get(c, other.uid)).progress is None


def test_a_chart_shows_the_newest_attempt(service: Service) -> None:
    """Attempt 1 came to step 7; attempt 2 began again at 5 and is at 6."""
    job = begun(service)
    take(service, step_records(job.uid, range(8)))
    begin(service, job.uid, 2)
    take(service, step_records(job.uid, range(5, 7), attempt=2))
    assert [(each.step, each.attempt) for each in chart(service, job.uid)] == [
        (0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("steps", "most"), [(100, 500), (600, 500), (5_000, 100), (3_000, 7)])
def test_a_long_chart_is_rolled_up_without_losing_anything(service: Service, steps: int, most: int) -> None:
    job = begun(service)
    values = [math.sin(step / 50) + step % 7 for step in range(steps)]
    new = [Point("loss", ALL_RANKS, step, value) for step, value in enumerate(values)]
    for start in range(0, steps, 333):
        some = new[start : start + 333]
        service.write(job.uid, partial(series.add_points, new={(job.uid, 1): some}, now=NOW))
    found = chart(service, job.uid, most)
    assert len(found) <= most
    starts = [each.step for each in found]
    assert starts == sorted(set(starts))
    for each, stop in zip(found, [*starts[1:], steps], strict=True):
        part = values[each.step : stop]
        assert (each.min, each.max, each.last) == (min(part), max(part), part[-1])
    assert found[0].step == 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 700)), min_size=1, max_size=4),
    spike=st.integers(0, 10**6),
    most=st.sampled_from([1, 3, 40, 500]),
)
def test_a_chart_hides_no_step_that_counts_and_shows_no_other(
    service: Service, runs: list[tuple[int, int]], spike: int, most: int
) -> None:
    """Attempts begin anywhere, also in the middle of a roll-up, of which then only some steps count."""
    job = begun(service)
    counting: dict[int, float] = {}
    reached = 0
    for attempt, (begin, length) in enumerate(runs, 1):
        begin = min(begin, reached)
        steps = range(begin, begin + length)
        values = {step: (1e6 if step == begin + spike % length else attempt * 1e3 + step % 89) for step in steps}
        new = [Point("loss", ALL_RANKS, step, value) for step, value in values.items()]
        service.write(job.uid, partial(series.add_points, new={(job.uid, attempt): new}, now=NOW))
        counting = {step: value for step, value in counting.items() if step < begin} | values
        reached = max(counting) + 1
    curve = service.read(lambda connection: series.charts(connection, job.uid, most=most)[("loss", ALL_RANKS)])
    steps_in_order = sorted(counting)
    assert len(curve.points) <= most
    assert (curve.min, curve.max) == (min(counting.values()), max(counting.values()))
    assert curve.first == (steps_in_order[0], counting[steps_in_order[0]])
    assert curve.last == (steps_in_order[-1], counting[steps_in_order[-1]])
    assert curve.count == len(counting)
    found = service.read(lambda connection: series.usual_of(connection, job.uid, "loss", curve))
    assert found == usual([counting[step] for step in steps_in_order])


def test_numbers_that_are_none_are_left_out(service: Service) -> None:
    job = begun(service)
    new = [Point("loss", ALL_RANKS, 1, math.nan), Point("loss", ALL_RANKS, 2, 1.0), Point("x", ALL_RANKS, 1, math.inf)]
    service.write(job.uid, lambda c: series.add_points(c, {(job.uid, 1): new}, NOW))
    assert list(service.read(lambda c: series.charts(c, job.uid))) == [("loss", ALL_RANKS)]


def test_sampled_steps_tell_of_each_rank_once(service: Service) -> None:
    """A timeline that is sent again counts once, in points and in roll-ups; ranks beyond the first are left out."""
    job = begun(service)
    measured = Timeline(
        source=Source.MEASURED,
        num_ranks=MOST_RANKS + 2,
        step_ns=30,
        step=3,
        events=(
            Event(1, Activity.COMPUTE, "1F0.0", 0, 10),
            Event(1, Activity.WAIT, "1WAIT", 10, 20),
            Event(1, Activity.COMPUTE, "1B0.0", 20, 25),
        ),
        peak_bytes=tuple(range(MOST_RANKS + 2)),
    )
    told = Record(
        uid=job.uid,
        attempt=1,
        source="rank-0",
        sequence=0,
        recorded_at=NOW,
        kind=RecordKind.TIMELINE,
        timeline=measured,
    )
    for _ in range(2):
        take(service, [told])
    every = range(MOST_RANKS + 2)
    found = service.read(lambda connection: series.charts(connection, job.uid, every))
    assert {rank for _, rank in found} == set(range(MOST_RANKS))
    assert found["busy_seconds", 1].points == (CurvePoint(3, 1, 15e-9, 15e-9, 15e-9, 15e-9),)
    assert found["busy_seconds", 0].points == (CurvePoint(3, 1, 0.0, 0.0, 0.0, 0.0),)
    assert found["peak_bytes", 5].points == (CurvePoint(3, 1, 5.0, 5.0, 5.0, 5.0),)
    counts = service.read(lambda connection: connection.execute(select(rollups.c.count)).scalars().all())
    assert set(counts) == {1}


def log_records(uid: str, ranks: Sequence[int], first: int = 0) -> list[Record]:
    return [
        Record(
            uid=uid,
            attempt=1,
            source="host",
            sequence=first + i,
            recorded_at=NOW + i,
            kind=RecordKind.LOG,
            log=LogLine(rank=rank, level="info", message=f"line {first + i}"),
        )
        for i, rank in enumerate(ranks)
    ]


def test_lines_are_numbered_by_rank(service: Service) -> None:
    job = begun(service)
    take(service, log_records(job.uid, [0, 1, 0]))
    take(service, log_records(job.uid, [1, 0], first=3))
    kept = select(log_lines.c.rank, log_lines.c.number, log_lines.c.message).where(log_lines.c.uid == job.uid)
    rows = service.read(lambda c: c.execute(kept.order_by(log_lines.c.rank, log_lines.c.number)).all())
    assert [tuple(row) for row in rows] == [
        (0, 1, "line 0"), (0, 2, "line 2"), (0, 3, "line 4"), (1, 1, "line 1"), (1, 2, "line 3"),
    ]  # fmt: skip


def test_the_newest_lines_of_each_rank_are_kept(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_LINES", 3)
    job = begun(service)
    take(service, log_records(job.uid, [0, 1]))
    for start in range(2, 12, 2):
        take(service, log_records(job.uid, [0, 0], first=start))
    take(service, log_records(job.uid, [1] * 7, first=12))
    kept = select(log_lines.c.rank, log_lines.c.number, log_lines.c.message).where(log_lines.c.uid == job.uid)
    rows = service.read(lambda c: c.execute(kept.order_by(log_lines.c.rank, log_lines.c.number)).all())
    assert [tuple(row) for row in rows] == [
        (0, 9, "line 9"), (0, 10, "line 10"), (0, 11, "line 11"),
        (1, 6, "line 16"), (1, 7, "line 17"), (1, 8, "line 18"),
    ]  # fmt: skip


def test_a_line_that_no_database_takes_is_kept_as_far_as_it_can_be(service: Service) -> None:
    job = begun(service)
    log = LogLine(rank=-1, level="x" * 40, message="a\0b" + "c" * 10_000)
    take(service, [replace(log_records(job.uid, [0])[0], log=log)])
    kept = select(log_lines).where(log_lines.c.uid == job.uid)
    row = service.read(lambda c: c.execute(kept).one())
    assert (row.rank, row.level, row.message[:4], len(row.message)) == (-1, "x" * 15, "a\ufffdbc", 8192)


@pytest.mark.parametrize("rank", [-2, 2**31])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    record = replace(log_records("a", [0])[0], log=LogLine(rank=rank, level="info", message=""))
    with pytest.raises(UserError, match=r"records\[0\].log.rank: .* is not a rank"):
        Batch.of([record], NOW)


def test_a_batch_is_of_one_source_and_in_order() -> None:
    one, two = step_records("a", range(1))
    other = step_records("b", range(1))
    with pytest.raises(UserError, match="at least one"):
        Batch.of([], NOW)
    with pytest.raises(UserError, match=r"records\[1\].sequence: 0 does not follow 1"):
        Batch.of([two, one], NOW)
    with pytest.raises(UserError, match=r"records\[1\]: is of another source"):
        Batch.of([one, *other], NOW)
