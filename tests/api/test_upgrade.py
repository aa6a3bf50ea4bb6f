"""The database of a service of version 0.1.0 on a cluster, opened by this version: all is there, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.api.store import migrate
from penstock.api.store.engine import make_engine, parse_url
from penstock.kube.resources import JOBS
from tests.support import postgres
from tests.support.fake_apiserver import FakeApiserver, Found
from tests.support.old_mirror import STEPS, restored, token_of
from tests.support.on_cluster import OnCluster, on_cluster
from tests.support.sample_run import sample_plan, sample_profile
from tests.support.service import NOW, Clock, step_records


@pytest.fixture
def here(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Iterator[OnCluster]:
    fake, clock = FakeApiserver(), Clock(NOW + 3600.0)
    with postgres.database(request.getfixturevalue("postgres_url")) as url:
        database = url if kind == "postgresql" else ""
        restored(kind, tmp_path, database, fake)
        engine = make_engine(parse_url(database or f"sqlite:///{tmp_path / 'penstock.db'}"))
        assert migrate.current(engine) == "0003"
        migrate.upgrade(engine)
        engine.dispose()
        with on_cluster(tmp_path, database, fake, clock) as made:
            yield made


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def job_of(here: OnCluster, name: str) -> Found:
    return next(found for (plural, _, _), found in here.fake.objects.items()
                if plural == JOBS.plural and found["metadata"]["name"] == name)  # fmt: skip


def loss_of(here: OnCluster, name: str) -> Found:
    series = here.person("eve", ("get", ""), ("list", "")).get(f"/v1/jobs/default/{name}/metrics").json()["series"]
    return next(each for each in series if each["name"] == "loss")


def test_what_the_cluster_says_is_no_news(here: OnCluster) -> None:
    names = ("waiting", "live", "ended", "lost")
    before = {name: (here.stored(name), here.events(here.stored(name).uid)) for name in names}
    here.mirror()
    here.turn()
    assert {name: (here.stored(name), here.events(here.stored(name).uid)) for name in names} == before
    phases = {name: here.stored(name).phase.value for name in names}
    assert phases == {"waiting": "Queued", "live": "Running", "ended": "Succeeded", "lost": "Recovering"}
    assert here.fake.words("PATCH") == []


def test_steps_plans_and_measurements_are_there(here: OnCluster) -> None:
    eve = here.person("eve", ("get", ""), ("list", ""))
    for name in ("live", "ended", "lost"):
        loss = loss_of(here, name)
        assert (loss["count"], [point["step"] for point in loss["points"]]) == (STEPS, list(range(STEPS)))
        plans = eve.get(f"/v1/jobs/default/{name}/plans").json()["items"]
        assert [plan["digest"] for plan in plans] == [sample_plan().digest]
        assert eve.get(f"/jobs/default/{name}", headers={"Accept": "text/html"}).status_code == 200
    assert eve.get(f"/v1/profiles/{sample_profile().digest}").status_code == 200


def test_a_pod_of_the_old_image_goes_on_reporting(here: OnCluster) -> None:
    """It sends again what was acknowledged before the upgrade, and what follows; the cluster is told of the newest."""
    job = job_of(here, "live")
    here.fake.add_rank(job, 1, token_of("live"))
    here.mirror()
    records = step_records(job["metadata"]["uid"], range(STEPS + 3))
    assert here.send(token_of("live"), records).status_code == 200
    here.turn()
    assert [point["step"] for point in loss_of(here, "live")["points"]] == list(range(STEPS + 3))
    assert here.progress("live")["step"] == STEPS + 3
    assert here.progress("live")["profileRef"] == "live-profile-a1"


def test_what_a_lost_attempt_did_not_send_is_taken_while_the_next_runs(here: OnCluster) -> None:
    job = job_of(here, "lost")
    here.fake.touch(job, phase="Running", attempt=2)
    here.fake.add_rank(job, 2, token_of("lost"))
    here.mirror()
    left = step_records(job["metadata"]["uid"], range(STEPS + 1))
    assert here.send(token_of("lost"), left).status_code == 200
    assert [point["step"] for point in loss_of(here, "lost")["points"]] == list(range(STEPS + 1))
