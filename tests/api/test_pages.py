"""Pages as a browser gets them. What it makes of them is in tests/integration/test_pages_browser.py."""

from __future__ import annotations

import dataclasses
import gzip
import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.http.routes import pages
from penstock.api.pages import static
from penstock.api.pages.job import event_text
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.core.explanation import Explanation
from penstock.core.lifecycle import AttemptState, Phase
from penstock.planner.worker.protocol import Answer
from tests.support.executing import World
from tests.support.fake_planner import FakePlanner
from tests.support.fake_supervisors import Script
from tests.support.filled_job import enter, running_job
from tests.support.frontiers import frontier
from tests.support.planning import DEVICE, cluster
from tests.support.sample_run import explained_plan, sample_plan
from tests.support.service import NOW, Clock, add_job, client_of, new_service
from tests.support.whatif import asked_for, plan_queue_of, turn_until

HTML = {"Accept": "text/html,application/xhtml+xml"}
VOID = {"meta", "link"}
SHOWN = ["/", "/jobs/default/tiny", "/compare?job=default/tiny&job=default/tiny", "/submit", "/whatif", "/profiles"]


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    made = new_service(tmp_path, clock=clock)
    yield made
    made.close()


class Reader(HTMLParser):
    """Text, headings and links; fails where elements are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert not any(name.startswith("on") for name in found), "scripts stand in files"
        self.links += [found[name] or "" for name in ("href", "src", "action") if name in found]
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["script"]:
            self.text.append(data)


def read(client: TestClient, path: str, status: int = 200) -> Reader:
    """The page, which is well-formed, and names every element once."""
    answer = client.get(path, headers=HTML)
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    assert "script-src 'self';" in answer.headers["content-security-policy"]
    reader = Reader()
    reader.feed(answer.text)
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids)
    return reader


def words(reader: Reader) -> str:
    return re.sub(r"\s+", " ", " ".join(reader.text))


def test_a_running_job_s_page_says_everything(service: Service) -> None:
    running_job(service)
    found = words(read(client_of(service), "/jobs/default/tiny"))
    for said in (
        "tiny",
        "Running",
        "Step 9 of 10",
        "Loss and speed",
        "The plan",
        "One step, predicted and measured",
        "Memory",
        "Why this plan",
        "Events",
        "Submitted by somebody",
        "compiled",
        "Suspend",
        "Delete",
    ):
        assert said in found


def test_a_job_without_a_plan_says_so(service: Service) -> None:
    add_job(service)
    found = words(read(client_of(service), "/jobs/default/tiny"))
    assert "The planner decides once" in found
    assert "Pending, Submitted, for 0s." in found


def test_what_failed_stands_above_everything_else(service: Service) -> None:
    uid = running_job(service).uid
    enter(service, uid, Phase.FAILED, "rank 1: out of memory\n  remedy: pin fewer layers")
    found = words(read(client_of(service), "/jobs/default/tiny"))
    assert "rank 1: out of memory" in found
    assert found.index("pin fewer layers") < found.index("Loss and speed")
    assert "remedy:" not in found
    assert "Suspend" not in found


KILLED = Script(
    end=AttemptState.FAILED,
    message="rank 1 was killed in step 5 at 1F3.2",
    last_words=("step 4 <b>of</b> 10", "torch.OutOfMemoryError: CUDA out of memory.", "RuntimeError: later"),
)


@pytest.mark.parametrize("limit", [0, 1], ids=["failed", "tried again"])
def test_a_lost_rank_s_first_failing_line_comes_with_a_remedy(service: Service, clock: Clock, limit: int) -> None:
    """Nobody else could say one: nothing but the rank's last words tells why it is gone."""
    world = World(service, clock)
    world.supervisors.scripts = [KILLED]
    world.until(world.submit(backoffLimit=limit), Phase.RECOVERING if limit else Phase.FAILED)
    found = words(read(client_of(service), "/jobs/default/tiny"))
    told = [KILLED.message, KILLED.last_words[1], "the log of rank 1", "from the last checkpoint", *KILLED.last_words]
    assert [found.find(text) for text in told[:4]] == sorted(found.index(text) for text in told[:4])
    assert all(text in found for text in told)
    assert ("Retry continues" in found) == (limit == 0)
    assert ("the job continues from the last checkpoint" in found) == (limit == 1)


def test_a_remedy_that_is_known_is_the_only_one(service: Service) -> None:
    uid = running_job(service).uid
    message = "rank 1: no room\n  remedy: pin fewer layers"
    service.write(uid, lambda c: jobs.enter_phase(c, uid, Phase.FAILED, "BackoffLimitExceeded", message, NOW))
    found = words(read(client_of(service), "/jobs/default/tiny"))
    assert "pin fewer layers" in found
    assert "from the last checkpoint" not in found


def test_ranks_are_charted_side_by_side(service: Service) -> None:
    running_job(service)
    answer = client_of(service).get("/jobs/default/tiny", headers=HTML).text
    assert "Rank by rank" in answer
    figures = json.loads(re.findall(r'id="figures">(.*?)</script>', answer, re.DOTALL)[0])["figures"]
    for name in ("rank-busy", "rank-peak"):
        traces = figures[name]["data"]
        assert [trace["name"] for trace in traces] == ["rank 0", "rank 1"]
        assert all(trace["x"] == [120] for trace in traces)
        assert f'data-figure="{name}"' in answer


def test_what_a_job_left_can_be_downloaded(service: Service) -> None:
    uid = running_job(service).uid
    folder = service.settings.runs / uid / "checkpoints" / "a1" / "step-5"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (service.settings.runs / uid / "metrics.jsonl").write_text("{}\n")
    client = client_of(service)
    found = read(client, "/jobs/default/tiny")
    assert f"out://{uid}/1/5" in words(found)
    (link,) = [link for link in found.links if link.endswith("metrics.jsonl")]
    assert client.get(link).text == "{}\n"


def test_who_may_only_look_is_offered_nothing_else(service: Service) -> None:
    running_job(service)
    found = words(read(client_of(service, Role.VIEWER), "/jobs/default/tiny"))
    for offered in ("Suspend", "Delete", "What if", "Submit "):
        assert offered not in found


def test_what_jobs_say_is_text(service: Service) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    uid = running_job(service, line=evil).uid
    enter(service, uid, Phase.FAILED, evil)
    answer = client_of(service).get("/jobs/default/tiny", headers=HTML)
    assert evil not in answer.text
    assert html.escape(evil, quote=False) in answer.text
    read(client_of(service), "/jobs/default/tiny")


def test_the_list_filters_sorts_and_turns_pages(service: Service) -> None:
    for number in range(53):
        add_job(service, f"job-{number:02}")
    enter(service, add_job(service, "queued").uid, Phase.QUEUED)
    client = client_of(service)
    first = read(client, "/?sort=name")
    assert "job-00" in words(first)
    assert "job-52" not in words(first)
    (following,) = [link for link in first.links if "cursor=" in link]
    second = read(client, following)
    assert "job-52" in words(second)
    assert "First page" in words(second)
    assert "job-01" not in words(read(client, "/?phase=Queued"))
    assert "queued" in words(read(client, "/?phase=Queued"))
    assert "No job matches" in words(read(client, "/?name=none"))


def test_an_empty_list_says_what_to_do(service: Service) -> None:
    assert "penstock submit job.yaml" in words(read(client_of(service), "/"))


def test_a_list_shows_ones_own_namespace(service: Service) -> None:
    add_job(service, "mine", namespace="mine")
    add_job(service, "yours", namespace="yours")
    found = words(read(client_of(service, Role.VIEWER, "mine"), "/"))
    assert "mine" in found
    assert "yours" not in found


def test_jobs_are_compared(service: Service) -> None:
    running_job(service, "first")
    running_job(service, "second", steps=6)
    add_job(service, "third")
    client = client_of(service)
    path = "/compare?job=default/first&job=default/second&job=default/third"
    answer = client.get(path, headers=HTML).text
    found = words(read(client, path))
    assert "dp 1 x tp 1 x pp 2" in found
    assert "9 of 10 7 of 10 0 of 10" in found
    differing = re.findall(r'<tr class="differs"><td class="key">([^<]*)', answer)
    assert {"steps", "loss", "schedule"} <= set(differing)
    assert "speed, measured" in found
    assert re.search(r"speed, predicted [\d,]+ tokens/s per device", found)
    assert read(client, "/").links.count("/compare") == 1


def test_profiles_are_listed_and_shown(service: Service) -> None:
    client = client_of(service)
    assert "No machine was measured yet" in words(read(client, "/profiles"))
    running_job(service)
    listed = read(client, "/profiles")
    (link,) = [link for link in listed.links if link.startswith("/profiles/")]
    assert "newest" in words(listed)
    found = words(read(client, link))
    for said in ("Costs of layers", "Cost model", "Bandwidth between ranks", "Machine and versions"):
        assert said in found
    assert client.get("/profiles/none", headers=HTML).status_code == 404


def test_an_answer_is_shown_as_far_as_it_is(service: Service) -> None:
    client = client_of(service)
    made = client.post("/v1/plans", json=base_of(client, "/whatif"))
    assert made.status_code == 202, made.text
    request = made.json()["id"]
    assert made.json()["cost"] is None
    assert "Queued: 0 candidates" in words(read(client, f"/plans/{request}"))
    client.delete(f"/v1/plans/{request}")
    assert "Canceled" in words(read(client, f"/plans/{request}"))
    stranger = client_of(service, Role.VIEWER, "elsewhere")
    assert stranger.get(f"/plans/{request}", headers=HTML).status_code == 403
    assert client.get("/plans/none", headers=HTML).status_code == 404


def base_of(client: TestClient, path: str) -> dict[str, Any]:
    """The question that the page begins with."""
    found = re.search(r'id="base">(.*?)</script>', client.get(path, headers=HTML).text)
    assert found is not None
    base: dict[str, Any] = json.loads(found[1])
    return base


def chosen(client: TestClient, path: str) -> list[str]:
    return re.findall(r'<option value="([^"]*)" selected', client.get(path, headers=HTML).text)


def test_what_if_begins_with_a_job_that_is_there(service: Service) -> None:
    job = add_job(service, "mine", namespace="team")
    client = client_of(service, Role.EDITOR, "team")
    (link,) = [link for link in read(client, "/jobs/team/mine").links if link.startswith("/whatif?")]
    base, spec = base_of(client, link), job.manifest["spec"]
    assert (base["job"]["spec"]["model"], base["job"]["spec"]["training"]) == (spec["model"], spec["training"])
    assert (base["job"]["metadata"]["namespace"], base["job"]["metadata"]["name"]) == ("team", "mine")
    assert chosen(client, link) == ["2", "80Gi", "250e9", "2", "32", "2"]
    assert "/jobs/team/mine" in read(client, link).links
    assert client.post("/v1/plans", json=base).status_code == 202


def test_what_if_is_asked_in_ones_own_namespace(service: Service) -> None:
    client = client_of(service, Role.EDITOR, "team")
    assert client.post("/v1/plans", json=base_of(client, "/whatif")).status_code == 202


def test_what_if_is_for_those_who_may_plan(service: Service) -> None:
    add_job(service)
    viewer, stranger = client_of(service, Role.VIEWER), client_of(service, Role.EDITOR, "elsewhere")
    for client, path in (
        (viewer, "/whatif"),
        (viewer, "/whatif?job=default/tiny"),
        (stranger, "/whatif?job=default/tiny"),
    ):
        assert client.get(path, headers=HTML).status_code == 403
    assert not any("whatif" in link for link in read(viewer, "/").links if not link.startswith("/static/"))
    editor = client_of(service, Role.EDITOR)
    assert editor.get("/whatif?job=default/none", headers=HTML).status_code == 404
    assert editor.get("/whatif?job=tiny", headers=HTML).status_code == 400


def test_a_plan_with_a_price_says_what_it_costs(service: Service) -> None:
    body = asked_for(described=cluster(device=dataclasses.replace(DEVICE, price_per_hour=1.5)))
    client = client_of(service)
    request = client.post("/v1/plans", json=body).json()["id"]
    plan_queue = plan_queue_of(service, FakePlanner())
    turn_until(plan_queue, lambda: client.get(f"/v1/plans/{request}").json()["state"] == "Succeeded")
    cost = client.get(f"/v1/plans/{request}").json()["cost"]
    seconds = sample_plan().prediction.step_seconds  # type: ignore[union-attr]
    assert cost["perHour"] == 3.0
    assert cost["wholeJob"] == pytest.approx(3.0 * seconds / 3600 * 10)
    assert "cost of an hour 3.00" in words(read(client, f"/plans/{request}"))


def test_a_plan_with_a_frontier_shows_it(service: Service) -> None:
    """A table and a picture; the page offers it, and has a price without which there is none."""
    client, plan = client_of(service), explained_plan()
    assert plan.prediction is not None
    points, seconds = frontier([(3600.0, 90.0), (7200.0, 80.0)]), plan.prediction.step_seconds
    explanation = dataclasses.replace(plan.prediction.explanation or Explanation(), frontier=points)
    plan = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, explanation=explanation))
    request = client.post("/v1/plans", json=asked_for() | {"frontier": True}).json()["id"]
    plan_queue = plan_queue_of(service, FakePlanner(answer=Answer(plan=plan)))
    turn_until(plan_queue, lambda: client.get(f"/v1/plans/{request}").json()["state"] == "Succeeded")
    answer = client.get(f"/v1/plans/{request}").json()
    assert answer["plan"]["prediction"]["explanation"]["frontier"]["points"] == [
        point.to_manifest() for point in points.points
    ]
    assert answer["runTime"]["seconds"] == pytest.approx(10 * seconds)
    page = client.get(f"/plans/{request}", headers=HTML).text
    assert "Time against money" in page
    assert page.count("<circle") == 4  # of a wide and a narrow picture
    offered = client.get("/whatif", headers=HTML).text
    assert 'name="frontier"' in offered
    assert "job.spec.pricePerDeviceHour" in offered


def test_a_plan_says_how_fast_it_is_and_what_would_help(service: Service) -> None:
    client, plan = client_of(service), explained_plan()
    request = client.post("/v1/plans", json=asked_for() | {"whatIf": True}).json()["id"]
    plan_queue = plan_queue_of(service, FakePlanner(answer=Answer(plan=plan)))
    turn_until(plan_queue, lambda: client.get(f"/v1/plans/{request}").json()["state"] == "Succeeded")
    found = words(read(client, f"/plans/{request}"))
    speed = plan.speed()
    assert speed is not None
    assert f"of a device {speed.tokens_per_second_per_device:,.0f} tokens/s MFU {speed.utilization_text}" in found
    assert "What would help" in found
    assert "new search: dp 1 x tp 1 x pp 4" in found


@pytest.mark.parametrize("query", ["", "job=default/tiny", "job=tiny&job=tiny", "job=a/b" + "&job=a/b" * 4])
def test_what_cannot_be_compared_is_refused(service: Service, query: str) -> None:
    answer = client_of(service).get(f"/compare?{query}", headers=HTML)
    assert answer.status_code == 400


@pytest.mark.parametrize("path", ["/jobs/default/none", "/nowhere", "/?sort=wrong", "/?cursor=wrong"])
def test_what_is_not_there_is_a_page_too(service: Service, path: str) -> None:
    reader = Reader()
    answer = client_of(service).get(path, headers=HTML)
    assert answer.status_code in (404, 422)
    reader.feed(answer.text)
    assert "All jobs" in words(reader)


def test_machines_get_problem_documents(service: Service) -> None:
    answer = client_of(service).get("/nowhere")
    assert answer.headers["content-type"] == "application/problem+json"


def test_every_page_needs_somebody(service: Service) -> None:
    paths = {route.path for route in pages.router.routes if hasattr(route, "path")}
    listed = {"/", "/compare", "/jobs/{namespace}/{name}", "/submit", "/whatif", "/plans/{request}", "/static/{name}"}
    assert paths == listed | {"/profiles", "/profiles/{digest}"}
    add_job(service)
    for path in SHOWN:
        assert client_of(service, None).get(path, headers=HTML).status_code == 401
        assert client_of(service, Role.INGEST).get(path, headers=HTML).status_code == 403
    for path in ("/jobs/default/tiny", "/compare?job=default/tiny&job=elsewhere/tiny"):
        assert client_of(service, Role.EDITOR, "elsewhere").get(path).status_code == 403


def test_files_are_kept_by_browsers_and_named_by_their_content(service: Service) -> None:
    add_job(service)
    client = client_of(service, None)
    linked = {
        link
        for path in [*SHOWN, "/login"]
        for link in read(client_of(service), path).links
        if link.startswith("/static/")
    }
    assert len(linked) == len(static.FILES) - 2, "charts alone need plotly"
    for link in sorted(linked):
        answer = client.get(link)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.content == static.content(link.partition("?")[0].rpartition("/")[2])
    assert client.get("/static/none").status_code == 404


def test_files_travel_compressed_to_who_reads_that(service: Service) -> None:
    client = client_of(service, None)
    plain = client.get("/static/app.css", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with client.stream("GET", "/static/app.css", headers={"Accept-Encoding": "gzip"}) as packed:
        assert gzip.decompress(b"".join(packed.iter_raw())) == plain.content


def test_pages_travel_compressed_and_nothing_else_does(service: Service) -> None:
    running_job(service)
    client = client_of(service)
    plain = client.get("/jobs/default/tiny", headers={**HTML, "Accept-Encoding": "identity"})
    packed = client.get("/jobs/default/tiny", headers={**HTML, "Accept-Encoding": "br;q=0.5, gzip"})
    assert packed.text == plain.text
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "Accept-Encoding"
    assert int(packed.headers["content-length"]) < len(plain.content) / 4
    refused = client.get("/jobs/default/tiny", headers={**HTML, "Accept-Encoding": "gzip;q=0"})
    assert "content-encoding" not in refused.headers
    assert "content-encoding" not in client.get("/v1/jobs").headers
    with client.stream(
        "GET", "/v1/jobs/default/tiny/events", headers={"Accept": "text/event-stream", "Accept-Encoding": "gzip"}
    ) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in stream.headers


def test_events_are_sentences() -> None:
    assert event_text("phase", {"phase": "Failed", "reason": "Lost", "message": "a\nb"}) == "Failed (Lost: a)"
    assert event_text("phase", {"phase": "Queued", "reason": "", "message": ""}) == "Queued"
    assert event_text("launched", {"attempt": 2, "ranks": 4, "resumeFrom": 3}) == "Attempt 2 launched on 4 ranks"
    told = {"type": "Admitted", "status": "False", "reason": "Waiting", "message": "for 2 nodes\nmore"}
    assert event_text("condition", told) == "Admitted is false (Waiting: for 2 nodes)"
    assert event_text("changed", {"by": "eve", "generation": 3}) == "Changed by eve, generation 3"
    assert event_text("something", {"of": "later"}) == "something: later"


def test_the_clock_of_the_service_counts(service: Service, clock: Clock) -> None:
    running_job(service)
    clock.now = NOW + 120
    assert "last report 2m ago" in words(read(client_of(service), "/jobs/default/tiny"))
