"""Jobs in the store, on both databases."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, func, select

from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.api.store.jobs import ChangedMeanwhileError, NameTakenError, NoSuchJobError, Query, Reported, StoredJob
from penstock.api.store.schema import metadata
from penstock.core.errors import UserError
from penstock.core.lifecycle import IllegalTransitionError, Phase
from tests.support.filled_job import running_job
from tests.support.service import NOW, Clock, add_job


def find(service: Service, name: str = "tiny") -> StoredJob:
    return service.read(lambda connection: jobs.find(connection, "default", name))


def kinds(service: Service, uid: str) -> list[tuple[int, str]]:
    rows = service.read(lambda connection: jobs.history(connection, uid))
    return [(row.number, row.kind) for row in rows]


def test_a_new_job_is_pending_and_found_by_name_and_uid(service: Service) -> None:
    made = add_job(service, labels={"team": "a"})
    assert (made.phase, made.version, made.generation, made.created_at) == (Phase.PENDING, 2, 1, NOW)
    assert made == find(service) == service.read(lambda connection: jobs.get(connection, made.uid))
    assert made.job.metadata.uid == made.uid
    assert kinds(service, made.uid) == [(1, "created")]


def test_a_name_is_taken_while_its_job_lives(service: Service) -> None:
    first = add_job(service)
    with pytest.raises(NameTakenError, match="default/tiny"):
        add_job(service)
    add_job(service, namespace="other")
    service.write(first.uid, lambda connection: jobs.mark_deleted(connection, first.uid, NOW))
    second = add_job(service)
    assert find(service).uid == second.uid
    assert service.read(lambda connection: jobs.get(connection, first.uid)).deleted_at == NOW


def test_the_latest_is_found_when_none_lives(service: Service) -> None:
    made = [add_job(service)]
    service.write(made[0].uid, lambda connection: jobs.mark_deleted(connection, made[0].uid, NOW))
    made.append(add_job(service))
    service.write(made[1].uid, lambda connection: jobs.mark_deleted(connection, made[1].uid, NOW))
    assert find(service).uid == made[1].uid


def test_what_is_not_there_is_said(service: Service) -> None:
    with pytest.raises(NoSuchJobError):
        find(service)
    with pytest.raises(NoSuchJobError):
        service.write("x", lambda connection: jobs.mark_deleted(connection, "x", NOW))


def test_suspending_changes_the_spec_once(service: Service) -> None:
    made = add_job(service)
    for _ in range(2):
        found = service.write(made.uid, lambda c: jobs.set_suspend(c, made.uid, True, "me", NOW))
        assert found.job.spec.run_policy.suspend
        assert (found.generation, found.version) == (2, 3)
    found = service.write(made.uid, lambda c: jobs.set_suspend(c, made.uid, False, "me", NOW))
    assert not found.job.spec.run_policy.suspend
    assert [kind for _, kind in kinds(service, made.uid)] == ["created", "suspend-requested", "resume-requested"]


def test_phases_follow_the_table(service: Service, clock: Clock) -> None:
    made = add_job(service)
    clock.now += 5
    queued = service.write(made.uid, lambda c: jobs.enter_phase(c, made.uid, Phase.QUEUED, "Accepted", "", clock.now))
    assert (queued.phase, queued.phase_entered_at, queued.finished_at) == (Phase.QUEUED, NOW + 5, None)
    with pytest.raises(IllegalTransitionError):
        service.write(made.uid, lambda c: jobs.enter_phase(c, made.uid, Phase.RUNNING, "", "", clock.now))
    assert find(service) == queued
    failed = service.write(made.uid, lambda c: jobs.enter_phase(c, made.uid, Phase.FAILED, "NoPlan", "why", clock.now))
    assert (failed.finished_at, failed.phase_message) == (NOW + 5, "why")


def test_a_version_guards_a_change(service: Service) -> None:
    made = add_job(service)
    assert service.write(made.uid, lambda c: jobs.require_version(c, made.uid, made.version)) == made
    with pytest.raises(ChangedMeanwhileError, match="version 2, not 1"):
        service.write(made.uid, lambda c: jobs.require_version(c, made.uid, 1))


def test_progress_is_of_the_newest_attempt_and_changes_no_version(service: Service) -> None:
    made = add_job(service)

    def report(**told: Any) -> None:
        reported = Reported(**{"attempt": made.attempt, "reported_at": NOW, **told})
        service.write(made.uid, lambda c: jobs.report(c, [(made.uid, reported)]))

    report(step=2, last_checkpoint=2)
    report(step=3, loss=4.0)
    found = find(service)
    assert found.version == made.version
    assert found.progress is not None
    assert (found.progress.step, found.progress.last_checkpoint, found.progress.loss) == (3, 2, 4.0)
    report(attempt=made.attempt + 1, step=1)
    assert find(service).progress is None


def test_what_is_forgotten_leaves_nothing(service: Service) -> None:
    made = add_job(service, labels={"a": "b"})
    service.write(made.uid, lambda c: jobs.forget(c, made.uid))
    with pytest.raises(NoSuchJobError):
        find(service)
    assert kinds(service, made.uid) == []
    assert add_job(service).labels == {}


def test_what_is_forgotten_takes_nothing_of_others(service: Service) -> None:
    """Also where no foreign key sees to it."""
    running_job(service, "other")
    before = rows(service)
    made = running_job(service, "tiny")
    assert {name for name, number in rows(service).items() if number > before[name]} >= GROWING
    service.write(made.uid, lambda c: jobs.forget(c, made.uid))
    assert rows(service) == before


GROWING = {"jobs", "events", "sources", "series", "points", "rollups", "log_lines", "timelines", "progress"}


def rows(service: Service) -> dict[str, int]:
    """How many there are of what belongs to jobs."""

    def counted(connection: Connection) -> dict[str, int]:
        tables = [each for each in metadata.sorted_tables if {"uid", "series"} & set(each.c.keys())]
        return {each.name: connection.execute(select(func.count()).select_from(each)).scalar_one() for each in tables}

    return service.read(counted)


NAMES = ["ab", "b", "ba", "c", "ca"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sort=st.sampled_from([f"{sign}{name}" for sign in ("", "-") for name in jobs.SORTS]),
    limit=st.integers(1, 4),
    phases=st.sets(st.sampled_from([Phase.PENDING, Phase.QUEUED])),
    labels=st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"), max_size=2),
    part=st.sampled_from(["", "a", "b", "%"]),
)
def test_pages_hold_every_job_once_and_in_order(
    listed: Service, sort: str, limit: int, phases: set[Phase], labels: dict[str, str], part: str
) -> None:
    everything, _ = listed.read(lambda c: jobs.page(c, Query(sort="created")))
    expected = [
        each
        for each in everything
        if (not phases or each.phase in phases) and labels.items() <= each.labels.items() and part in each.name
    ]
    name = sort.removeprefix("-")
    key = {"created": lambda j: j.number, "phase": lambda j: (j.phase.value, j.number)}.get(
        name, lambda j: (getattr(j, name), j.number)
    )
    expected.sort(key=key, reverse=sort.startswith("-"))
    found: list[StoredJob] = []
    cursor = None
    while True:
        query = Query(sort=sort, limit=limit, phases=tuple(phases), labels=labels, name=part, cursor=cursor)
        some, cursor = listed.read(partial(jobs.page, query=query))
        found += some
        if cursor is None:
            break
        assert len(some) == limit
    assert found == expected


@pytest.fixture
def listed(service: Service) -> Service:
    """Five jobs that differ in all that can be asked for."""
    for i, name in enumerate(NAMES):
        made = add_job(service, name, labels={"x": str(1 + i % 2), "y": "1"} if i else {})
        if i % 2:
            queued = partial(jobs.enter_phase, uid=made.uid, phase=Phase.QUEUED, reason="", message="", now=NOW)
            service.write(made.uid, queued)
    return service


@pytest.mark.parametrize("cursor", ["x", "!!!!", "WzEsMl0", "bnVsbA", "WyJuYW1lIiwgMSwgMV0", "é"])
def test_a_bad_cursor_is_refused(service: Service, cursor: str) -> None:
    with pytest.raises(UserError, match="not a valid cursor"):
        service.read(lambda c: jobs.page(c, Query(cursor=cursor)))


def test_an_unknown_order_is_refused(service: Service) -> None:
    with pytest.raises(UserError, match="'colour' is not an order"):
        service.read(lambda c: jobs.page(c, Query(sort="colour")))


def test_a_namespace_shows_its_own(service: Service) -> None:
    add_job(service, namespace="a")
    other = add_job(service, namespace="b")
    found, _ = service.read(lambda c: jobs.page(c, Query(namespaces=("b",))))
    assert [each.uid for each in found] == [other.uid]
