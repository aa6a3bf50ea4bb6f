"""Pages as a browser gets them. What it makes of them is in tests/integration/test_pages_browser.py."""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.api.pages import static
from penstock.api.pages.job import event_text
from penstock.api.pages.job_data import step_metrics
from penstock.api.routes import pages
from penstock.api.service import Service
from penstock.api.store.series import ChartPoint
from penstock.core.lifecycle import Phase
from tests.support.filled_job import enter, running_job
from tests.support.service import NOW, Clock, add_job, client_of, new_service

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
        "What happened",
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
    assert "Suspend" not in found
    assert "Delete" not in found


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
    assert "No job is like that" in words(read(client, "/?name=none"))


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
    assert "dp 1 × tp 1 × pp 2" in found
    assert "9 of 10 7 of 10 0 of 10" in found
    differing = re.findall(r'<tr class="differs"><td class="key">([^<]*)', answer)
    assert {"steps", "loss", "schedule"} <= set(differing)
    assert read(client, "/").links.count("/compare") == 1


def test_profiles_are_listed_and_shown(service: Service) -> None:
    client = client_of(service)
    assert "No machine was measured yet" in words(read(client, "/profiles"))
    running_job(service)
    listed = read(client, "/profiles")
    (link,) = [link for link in listed.links if link.startswith("/profiles/")]
    assert "newest" in words(listed)
    found = words(read(client, link))
    for said in ("What layers cost", "Cost model", "Bandwidth between ranks", "Machine and versions"):
        assert said in found
    assert client.get("/profiles/none", headers=HTML).status_code == 404


def test_an_answer_is_shown_as_far_as_it_is(service: Service) -> None:
    client = client_of(service)
    base = re.search(r'id="base">(.*?)</script>', client.get("/whatif", headers=HTML).text)
    assert base is not None
    made = client.post("/v1/plans", json=json.loads(base[1]))
    assert made.status_code == 202, made.text
    request = made.json()["id"]
    assert "Queued: 0 candidates" in words(read(client, f"/plans/{request}"))
    client.delete(f"/v1/plans/{request}")
    assert "Canceled" in words(read(client, f"/plans/{request}"))
    stranger = client_of(service, Role.VIEWER, "elsewhere")
    assert stranger.get(f"/plans/{request}", headers=HTML).status_code == 403
    assert client.get("/plans/none", headers=HTML).status_code == 404


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
    assert "To the jobs" in words(reader)


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


def test_events_are_sentences() -> None:
    assert event_text("phase", {"phase": "Failed", "reason": "Lost", "message": "a\nb"}) == "Failed (Lost: a)"
    assert event_text("phase", {"phase": "Queued", "reason": "", "message": ""}) == "Queued"
    assert event_text("launched", {"attempt": 2, "ranks": 4, "resumeFrom": 3}) == "Attempt 2 launched on 4 ranks"
    assert event_text("something", {"of": "later"}) == "something: later"


def test_a_validation_goes_to_the_step_shown_before_it() -> None:
    def chart(*steps: int) -> list[ChartPoint]:
        return [ChartPoint(step=s, attempt=1, min=s, mean=s, max=s, last=s) for s in steps]

    names = ("loss", "step_seconds", "tokens_per_second", "learning_rate", "gradient_norm", "peak_bytes")
    charts = {(name, -1): chart(0, 10, 20) for name in names} | {("validation_loss", -1): chart(9, 25)}
    assert [(entry.step, entry.validation_loss) for entry in step_metrics(charts)] == [(0, 9), (10, None), (20, 25)]
    assert step_metrics({("loss", -1): chart(0)}) == ()


def test_the_clock_of_the_service_counts(service: Service, clock: Clock) -> None:
    running_job(service)
    clock.now = NOW + 120
    assert "last heard of 2m ago" in words(read(client_of(service), "/jobs/default/tiny"))
