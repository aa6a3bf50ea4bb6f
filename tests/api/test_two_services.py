"""Two services on one database, each with a folder of its own: what the other has is told to be there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.core.lifecycle import Phase
from tests.support.run_files import add_checkpoint, lay_out
from tests.support.service import NOW, Clock, add_job, client_of, job_manifest, new_service

PATH = "/v1/jobs/default/tiny"
FILES = [
    ("GET", f"{PATH}/checkpoints"),
    ("POST", f"{PATH}/checkpoints/1/4/export"),
    ("GET", f"{PATH}/artifacts"),
    ("GET", f"{PATH}/artifacts/metrics.jsonl"),
    ("POST", f"{PATH}/retry"),
]


@pytest.fixture
def here(database: str, tmp_path: Path, clock: Clock) -> Iterator[Service]:
    with closing(new_service(tmp_path / "here", database, clock, executor="here")) as made:
        yield made


@pytest.fixture
def there(here: Service, database: str, tmp_path: Path, clock: Clock) -> Iterator[Service]:
    with closing(new_service(tmp_path / "there", database, clock, executor="there")) as made:
        yield made


@pytest.fixture
def uid(here: Service) -> str:
    """A job that failed after its fourth step; it was run here."""
    made, launched = add_job(here).uid, {"attempt": 1, "ranks": 1}
    here.write(made, lambda c: jobs.add_event(c, made, "launched", launched, NOW, attempt=1, executor="here"))
    here.write(made, lambda c: jobs.enter_phase(c, made, Phase.FAILED, "Because", "", NOW))
    lay_out(here.settings.runs / made)
    add_checkpoint(here.settings.runs / made, 1, 4)
    return made


@pytest.mark.usefixtures("uid")
@pytest.mark.parametrize(("method", "path"), FILES)
def test_who_has_the_files_is_told(here: Service, there: Service, method: str, path: str) -> None:
    answer = client_of(there).request(method, path)
    document = answer.json()
    assert (answer.status_code, document["type"].rpartition("/")[2]) == (421, "elsewhere")
    assert document["detail"].endswith("with the executor here")
    assert "FOLDER/executor" in document["remedy"]
    assert client_of(here).request(method, path).is_success


def test_a_retry_stays_where_its_checkpoint_is(here: Service, there: Service, uid: str) -> None:
    """Anyone who asks there makes no job; anyone who asks here makes one that is no other executor's."""
    assert client_of(there).post(f"{PATH}/retry").status_code == 421
    assert len(here.read(lambda c: jobs.unfinished(c, "there"))) == 0
    made = client_of(here).post(f"{PATH}/retry").json()
    assert made["spec"]["checkpoint"]["resumeFrom"] == f"out://{uid}/1/4"
    assert here.read(lambda c: jobs.get(c, made["metadata"]["uid"])).executor == "here"


def test_so_does_another_job_that_begins_there(here: Service, uid: str) -> None:
    manifest = job_manifest("next")
    manifest["spec"]["checkpoint"] = {"resumeFrom": f"out://{uid}/1/4"}
    client = client_of(here)
    uids = [client.post("/v1/jobs", json=each).json()["metadata"]["uid"] for each in (manifest, job_manifest("free"))]
    assert [job.executor for job in here.read(lambda c: [jobs.get(c, each) for each in uids])] == ["here", None]


@pytest.mark.parametrize("of", [PATH, f"{PATH}/events", f"{PATH}/metrics", f"{PATH}/logs"])
def test_all_else_is_answered_anywhere(here: Service, there: Service, uid: str, of: str) -> None:
    assert client_of(here).get(of).json() == client_of(there).get(of).json()


def test_a_page_says_who_has_the_files(there: Service, uid: str) -> None:
    page = client_of(there).get("/jobs/default/tiny", headers={"Accept": "text/html"})
    assert page.status_code == 200
    assert page.text.count("they are with the executor here") == 2


def test_a_job_that_nobody_ran_has_no_files_anywhere(here: Service, there: Service) -> None:
    add_job(here)
    for client in (client_of(here), client_of(there)):
        assert [client.get(f"{PATH}/{kind}").json() for kind in ("checkpoints", "artifacts")] == [{"items": []}] * 2


def test_files_that_were_removed_are_gone(here: Service, uid: str) -> None:
    """By an administrator, from the folder where they lay: no other service has them."""
    shutil.rmtree(here.settings.runs / uid)
    client: TestClient = client_of(here)
    assert client.get(f"{PATH}/artifacts").json() == {"items": []}
