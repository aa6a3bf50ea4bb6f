"""Jobs and requests for plans that an older service stored and this one takes no more: they are shown, and say why."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.store import jobs, plan_requests
from penstock.api.store.documents import pack
from penstock.api.store.jobs import StoredJob
from penstock.api.store.plan_requests import State
from penstock.api.store.schema import plan_requests as requests_table
from penstock.cli.main import main
from penstock.client import Client, Place, ServiceError
from penstock.core import limits
from penstock.core.lifecycle import Phase
from tests.support.application import Application, here
from tests.support.filled_job import enter, running_job
from tests.support.listening import answering, bearer
from tests.support.sample_run import sample_plan
from tests.support.service import NOW, Clock, add_job, client_of, new_service
from tests.support.whatif import add_request

HTML = {"Accept": "text/html"}
ENDED = (Phase.SUCCEEDED, Phase.FAILED)
EXCESS = {"checkpoint": {"keep": limits.EXACT + 1}, "resources": {"ranks": 10**12}}
"""Parts of a spec beyond limits that version 0.1.0 did not have."""
UNREADABLE: dict[str, Any] = {"model": {"family": "perceptron"}}
"""What no limit explains: a cluster may store it where its definition is older."""
PLACES = {"spec.resources.ranks": EXCESS, "spec.model.family": UNREADABLE}


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


def stored_before(service: Service, stored: StoredJob, parts: Mapping[str, Any]) -> StoredJob:
    """The job, with these parts of its spec in place of what this version takes."""
    spec = {name: {**stored.manifest["spec"].get(name, {}), **part} for name, part in parts.items()}
    manifest = {**stored.manifest, "spec": {**stored.manifest["spec"], **spec}}
    changed: dict[str, Any] = {"manifest": manifest, "generation": stored.generation + 1}
    service.write(stored.uid, lambda c: jobs.add_event(c, stored.uid, "spoilt", {}, NOW, **changed))
    return service.read(lambda connection: jobs.get(connection, stored.uid))


def ended_before(service: Service, parts: Mapping[str, Any], phase: Phase = Phase.SUCCEEDED) -> StoredJob:
    """A job that 0.1.0 ran to its end."""
    job = running_job(service)
    enter(service, job.uid, phase)
    return stored_before(service, job, parts)


@pytest.mark.parametrize("phase", [*ENDED, Phase.RUNNING])
@pytest.mark.parametrize("where", PLACES)
def test_its_page_shows_it_and_says_why_it_does_not_run_again(service: Service, where: str, phase: Phase) -> None:
    job = running_job(service)
    if phase is not Phase.RUNNING:
        enter(service, job.uid, phase)
    stored_before(service, job, PLACES[where])
    page = client_of(service).get("/jobs/default/tiny", headers=HTML)
    assert page.status_code == 200, page.text
    text = html.unescape(page.text)
    assert "This version starts no further attempt of the job" in text
    assert where in text
    assert phase.value in text
    assert 'data-call="/v1/jobs/default/tiny/retry"' not in text


@pytest.mark.parametrize("where", PLACES)
def test_the_page_of_one_that_waits_says_why_it_will_not_start(service: Service, where: str) -> None:
    stored_before(service, add_job(service), PLACES[where])
    page = client_of(service).get("/jobs/default/tiny", headers=HTML)
    assert page.status_code == 200, page.text
    assert where in page.text


def test_the_page_of_a_job_that_this_version_takes_says_nothing_of_it(service: Service) -> None:
    enter(service, running_job(service).uid, Phase.SUCCEEDED)
    page = client_of(service).get("/jobs/default/tiny", headers=HTML).text
    assert "no further attempt" not in page
    assert 'data-call="/v1/jobs/default/tiny/retry"' in page


@pytest.mark.parametrize("parts", PLACES.values(), ids=PLACES)
def test_it_is_compared_with_others(service: Service, parts: Mapping[str, Any]) -> None:
    ended_before(service, parts)
    add_job(service, "good")
    page = client_of(service).get("/compare?job=default/tiny&job=default/good", headers=HTML)
    assert page.status_code == 200, page.text


@pytest.mark.parametrize("where", PLACES)
def test_over_rest_it_keeps_its_status_says_why_and_is_deleted(service: Service, where: str) -> None:
    ended_before(service, PLACES[where])
    add_job(service, "good")
    client, path = client_of(service), "/v1/jobs/default/tiny"
    listed = {each["metadata"]["name"]: each["status"]["phase"] for each in client.get("/v1/jobs").json()["items"]}
    assert listed == {"tiny": "Succeeded", "good": "Pending"}
    for part in ("", "/events", "/metrics", "/logs", "/plans", "/timeline", "/checkpoints", "/artifacts"):
        assert client.get(path + part).status_code == 200, part
    for verb in ("suspend", "resume"):
        answer = client.post(f"{path}/{verb}")
        assert (answer.status_code, answer.json()["status"]["phase"]) == (200, "Succeeded"), answer.text
    refused = client.post(f"{path}/retry")
    assert (refused.status_code, refused.json()["where"]) == (409, where), refused.text
    assert refused.json()["remedy"]
    assert client.delete(path).status_code == 202


def test_what_reproduces_it_is_told_of_one_beyond_limits(service: Service) -> None:
    """The commands install the version that ran it, and that takes it."""
    stored_before(service, add_job(service), EXCESS)
    answer = client_of(service).get("/v1/jobs/default/tiny/reproduce")
    assert answer.status_code == 200, answer.text
    assert answer.json()["manifest"]["spec"]["checkpoint"] == EXCESS["checkpoint"]


def test_what_reproduces_it_is_refused_with_a_reason_where_nobody_can_tell(service: Service) -> None:
    ended_before(service, UNREADABLE)
    answer = client_of(service).get("/v1/jobs/default/tiny/reproduce")
    assert (answer.status_code, answer.json()["where"]) == (409, "spec.model.family"), answer.text


def test_a_plan_like_one_beyond_limits_can_be_asked_for(service: Service) -> None:
    ended_before(service, EXCESS)
    assert client_of(service).get("/whatif?job=default/tiny", headers=HTML).status_code == 200


@pytest.mark.parametrize("parts", PLACES.values(), ids=PLACES)
def test_clients_list_it_among_the_others(service: Service, parts: Mapping[str, Any]) -> None:
    ended_before(service, parts)
    add_job(service, "good")
    with Client(here(service), transport=Application(service)) as client:
        found = {job.name: job for job in client.jobs()}
        assert {name: job.status.phase for name, job in found.items()} == {
            "tiny": Phase.SUCCEEDED,
            "good": Phase.PENDING,
        }
        assert found["tiny"].manifest["spec"]["model"]["layers"] == 2
        assert client.get(Place(name="tiny")) == found["tiny"]
        assert [job.status.phase for job in client.follow(Place(name="tiny"))] == [Phase.SUCCEEDED]
        with pytest.raises(ServiceError, match="this version of penstock does not accept"):
            client.retry(Place(name="tiny"))
        client.delete(Place(name="tiny"))


@pytest.mark.parametrize("where", PLACES)
def test_the_command_line_lists_and_shows_it(
    service: Service,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended_before(service, PLACES[where])
    add_job(service, "good")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PENSTOCK_TOKEN", bearer(service, Role.EDITOR)["Authorization"].partition(" ")[2])
    with answering(service) as url:
        for command in (["status"], ["status", "-o", "json"], ["status", "tiny"], ["watch", "tiny"], ["logs", "tiny"]):
            assert main([*command, "--server", url]) == 0, capsys.readouterr().err
            said = capsys.readouterr()
            assert command[0] == "logs" or "tiny" in said.out + said.err
        assert main(["retry", "tiny", "--server", url]) != 0
        assert where in capsys.readouterr().err
        assert main(["delete", "tiny", "--server", url]) == 0


def keep_request(service: Service, name: str, state: State) -> None:
    """A request that 0.1.0 stored, for a plan on so many ranks as nobody may ask for now."""
    add_request(service, name)
    asked = service.read(lambda connection: plan_requests.plan_input(connection, name)).to_manifest()
    asked["job"]["spec"]["resources"] = {"ranks": 10**12}
    plan = sample_plan()
    kept: dict[str, Any] = {"body": pack(asked)}
    if state is State.SUCCEEDED:
        kept |= {"state": state.value, "plan": pack(plan.to_manifest()), "plan_digest": plan.digest, "finished_at": NOW}
    change = requests_table.update().where(requests_table.c.id == name).values(kept)
    service.write(name, lambda connection: connection.execute(change))


@pytest.mark.parametrize("state", [State.QUEUED, State.SUCCEEDED])
def test_a_request_for_a_plan_is_shown_and_forgotten(service: Service, state: State) -> None:
    keep_request(service, "old", state)
    client = client_of(service)
    assert [each["id"] for each in client.get("/v1/plans").json()["items"]] == ["old"]
    answer = client.get("/v1/plans/old")
    assert answer.status_code == 200, answer.text
    assert answer.json()["job"]["spec"]["resources"]["ranks"] == 10**12
    assert client.get("/plans/old", headers=HTML).status_code == 200
    assert client.delete("/v1/plans/old").status_code == 200
