"""Pages in a real Chromium, of a real server; what jobs do is put into its store: nothing waits for training."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route, expect

from penstock.api.service import Service
from penstock.api.settings import Limits
from penstock.api.store import jobs
from penstock.core.lifecycle import Phase
from penstock.core.plan import Plan
from penstock.core.serialization import yamltext
from penstock.view.report import report
from tests.support import chromium
from tests.support.filled_job import enter, report_step, run_job, running_job
from tests.support.listening import answering
from tests.support.sample_report import sample_report
from tests.support.sample_run import explained_plan, sample_plan
from tests.support.service import add_job, client_of, job_manifest, new_service

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.timeout(300)]

PATIENCE_MILLISECONDS = 60_000
EXPECTED = ("ERR_CONNECTION", "ERR_INCOMPLETE", "401 (Unauthorized)", "404 (Not Found)", "422 (Unprocess", "409 (Conf")
"""What the browser says of answers that a test asks for."""


class Site:
    """A service that can go away and come back on the same port."""

    def __init__(self, service: Service) -> None:
        self.service, self._port = service, 0
        self._server: AbstractContextManager[str] | None = None
        self.url = ""
        self.start()

    def start(self) -> None:
        self._server = answering(self.service, self._port)
        self.url = self._server.__enter__()
        self._port = urlsplit(self.url).port or 0

    def stop(self) -> None:
        assert self._server is not None
        self._server.__exit__(None, None, None)

    def uid(self, name: str) -> str:
        return self.service.read(lambda connection: jobs.find(connection, "default", name)).uid


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.browser() as found:
        yield found


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    service = new_service(tmp_path_factory.mktemp("pages"), limits=Limits())
    found = Site(service)
    yield found
    found.stop()
    service.close()


class Faults:
    """What the browser complained about."""

    def __init__(self, page: Page) -> None:
        self.found: list[str] = []
        page.on("pageerror", lambda error: self.found.append(str(error)))
        page.on("console", self._said)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(text in message.text for text in EXPECTED):
            self.found.append(message.text)


@pytest.fixture
def page(browser: Browser, site: Site) -> Iterator[Page]:
    """A page of somebody who signed in; every complaint of the browser fails the test."""
    context = browser.new_context(base_url=site.url, viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    expect.set_options(timeout=PATIENCE_MILLISECONDS)
    opened = context.new_page()
    faults = Faults(opened)
    sign_in(opened, site)
    yield opened
    context.close()
    assert not faults.found


def sign_in(page: Page, site: Site) -> None:
    """As `penstock ui` does: a link of a minute, whose code no log sees."""
    link = client_of(site.service).post("/v1/login-links").json()["path"]
    page.goto(link)
    expect(page.locator(".who")).to_have_text("a-admin (admin)")


def manifest(name: str) -> str:
    return yamltext.dump(job_manifest(name))


def submit(page: Page, text: str) -> None:
    page.goto("/submit")
    page.get_by_role("textbox", name="manifest").fill(text)
    page.get_by_role("button", name="Submit").click()


def shows(page: Page, phase: str) -> None:
    expect(page.locator("main .phase")).to_have_text(phase)


def step(page: Page) -> int:
    found = re.search(r"Step ([\d,]+)", page.locator(".progress b").inner_text())
    assert found is not None
    return int(found[1].replace(",", ""))


def test_a_job_is_submitted_watched_suspended_resumed_and_deleted(page: Page, site: Site) -> None:
    submit(page, manifest("watched"))
    page.wait_for_url("**/jobs/default/watched")
    expect(page.locator("#connection")).to_have_text("live")
    service, uid = site.service, site.uid("watched")
    run_job(service, uid, steps=6)
    shows(page, "Running")
    expect(page.locator("[data-figure=loss] .main-svg").first).to_be_visible()
    expect(page.locator("#plan svg").first).to_be_visible()
    assert step(page) == 7
    report_step(service, uid, 9)
    expect(page.locator(".progress b")).to_have_text("Step 9 of 10")  # nobody asked for the page again
    page.get_by_role("button", name="Suspend").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    enter(service, uid, Phase.SUSPENDED)
    shows(page, "Suspended")
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Suspend")).to_be_visible()
    enter(service, uid, Phase.QUEUED)
    shows(page, "Queued")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    page.wait_for_url(site.url + "/")
    service.write(uid, lambda connection: jobs.mark_deleted(connection, uid, service.clock()))
    expect(page.get_by_role("link", name="watched")).to_have_count(0)


def test_a_lost_connection_is_shown_and_comes_back(page: Page, site: Site) -> None:
    uid = running_job(site.service, "outlives").uid
    page.goto("/jobs/default/outlives")
    expect(page.locator("#connection")).to_have_text("live")
    site.stop()
    expect(page.locator("#connection")).to_have_text("connection lost, trying again")
    report_step(site.service, uid, 10)
    site.start()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator(".progress b")).to_have_text("Step 10 of 10")


def test_charts_that_could_not_be_loaded_are_drawn_once_the_connection_is_back(page: Page, site: Site) -> None:
    running_job(site.service, "charted")
    page.route("**/static/plotly.js*", lambda route: route.abort("connectionrefused"))
    with page.expect_event("requestfailed", lambda request: "plotly" in request.url):
        page.goto("/jobs/default/charted")
        page.locator("[data-figure]").first.scroll_into_view_if_needed()
    page.unroute_all()
    expect(page.locator("#connection")).to_have_text("live")
    site.stop()
    expect(page.locator("#connection")).to_have_text("connection lost, trying again")
    site.start()
    expect(page.locator(".js-plotly-plot").first).to_be_visible()


def test_a_mistake_is_shown_with_its_place_and_remedy(page: Page) -> None:
    submit(page, manifest("wrong").replace("kvHeads: 1", "kvHeads: 3"))
    expect(page.get_by_role("alert")).to_contain_text("spec.model")
    assert "kvHeads: 3" in page.get_by_role("textbox", name="manifest").input_value(), "what was written stays"


def test_a_failed_job_says_why_on_top_and_is_retried(page: Page, site: Site) -> None:
    uid = running_job(site.service, "hopeless").uid
    enter(site.service, uid, Phase.FAILED, "rank 1: out of memory\n  remedy: pin fewer layers")
    page.goto("/jobs/default/hopeless")
    expect(page.locator(".failure strong")).to_have_text("rank 1: out of memory")
    page.get_by_role("button", name="Retry").click()
    page.wait_for_url("**/jobs/default/hopeless-2")
    shows(page, "Pending")


def test_jobs_are_marked_in_the_list_and_compared(page: Page, site: Site) -> None:
    for name in ("first", "second"):
        running_job(site.service, name)
    page.goto("/")
    for name in ("first", "second"):
        page.get_by_role("checkbox", name=name).check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/compare?**")
    expect(page.get_by_role("heading", name="Comparison")).to_be_visible()
    expect(page.locator("[data-figure=loss] .main-svg").first).to_be_visible()


FONTS = {
    "own": "/* the machine's */",
    "wide": '* { font-family: "DejaVu Sans", Verdana, sans-serif !important }',
    "monospaced": '* { font-family: "DejaVu Sans Mono", "Courier New", monospace !important }',
    "spaced": "* { letter-spacing: .05em !important }",
}
"""Which fonts a reader's machine has is not known; the last stands for any that is wider than these."""
CLIPPED = """() => [...document.querySelectorAll("main .drawing svg")].flatMap((svg) => {
  const edge = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter((text) => {
    const box = text.getBoundingClientRect();
    return box.width && (box.right > edge.right + 1 || box.left < edge.left - 1);
  }).map((text) => text.textContent);
})"""
AXE = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
SEVERE = ("moderate", "serious", "critical")


def all_pages(site: Site) -> list[str]:
    """Of jobs that run, wait, failed with files left behind, and are not there; and everything else."""
    uid = running_job(site.service).uid
    add_job(site.service, "waiting")
    enter(site.service, running_job(site.service, LONG_NAME).uid, Phase.FAILED, "rank 1: out of memory\n  remedy: less")
    folder = site.service.settings.runs / uid / "logs" / "a1" / "none_lbh34pxp" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("x" * 2_000)
    digest = client_of(site.service).get("/v1/profiles").json()["items"][0]["digest"]
    jobs_pages = [f"/jobs/default/{name}" for name in ("tiny", "waiting", LONG_NAME, "none")]
    compared = "/compare?job=default/tiny&job=default/waiting"
    return ["/", "/submit", *jobs_pages, "/profiles", compared, "/whatif", f"/profiles/{digest}"]


def test_changes_are_planned_too_where_that_is_marked(page: Page, site: Site) -> None:
    page.goto(f"{site.url}/whatif")
    with page.expect_request(lambda request: request.method == "POST" and request.url.endswith("/v1/plans")) as asked:
        page.get_by_label("also plan with faster links").check()
    assert (asked.value.post_data_json or {})["whatIf"] is True
    with page.expect_request(lambda request: request.method == "POST" and request.url.endswith("/v1/plans")) as asked:
        page.get_by_label("also plan on fewer devices").check()
    assert (asked.value.post_data_json or {})["frontier"] is True


def test_a_control_that_moves_between_two_polls_ends_the_polls_of_the_plan_before(page: Page, site: Site) -> None:
    polled: list[str] = []
    held: list[Route] = []
    page.on("request", lambda request: polled.append(request.url) if is_poll(request) else None)
    page.goto(f"{site.url}/whatif")
    for _ in range(3):
        page.wait_for_event("requestfinished", is_poll)  # the plan is shown next, and the pause begins
        page.route("**/v1/plans", lambda route: held.append(route))
        page.get_by_label("also plan with faster links").click()
        page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 400))")  # longer than the pause
        held.pop().continue_()
        page.unroute("**/v1/plans")
    assert f"{site.url}/v1/plans/null" not in polled


def is_poll(request: Request) -> bool:
    """Whether a page asks for the state of a plan."""
    return request.method == "GET" and "/v1/plans/" in request.url


LONG_NAME = "a-job-with-a-name-as-long-as-names-of-jobs-may-be-on-a-cluster"


def assert_fits(page: Page, path: str) -> None:
    """Nothing makes the page scroll sideways, and no word of a drawing is cut off, in any font."""
    for name, style in FONTS.items():
        added = page.add_style_tag(content=style)
        room, needed = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
        assert needed <= room, (path, name)
        assert page.evaluate(CLIPPED) == [] or name == "spaced", (path, name)
        added.evaluate("style => style.remove()")


def barriers(page: Page) -> list[tuple[str, str]]:
    """What axe-core finds of the page, but for minor things."""
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    return [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SEVERE]


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("plan", [sample_plan(), explained_plan()], ids=["plain", "explained"])
def test_a_report_fits_its_window_and_has_no_barrier(page: Page, tmp_path: Path, plan: Plan, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(report(dataclasses.replace(sample_report(), plan=plan)))
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    expect(page.locator("[data-figure=loss] .main-svg").first).to_be_visible()
    assert_fits(page, path.name)
    page.evaluate(AXE)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert barriers(page) == [], scheme


@pytest.mark.parametrize("width", [1440, 390])
def test_every_page_fits_its_window_and_serves_the_keyboard(page: Page, site: Site, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for path in all_pages(site):
        page.emulate_media(color_scheme="dark" if len(path) % 2 else "light")
        page.goto(path)
        assert_fits(page, path)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip", path


@pytest.mark.parametrize("width", [1440, 390])
def test_no_page_has_a_barrier(page: Page, site: Site, width: int) -> None:
    """By axe-core, in both themes, of which the narrow pages have the same colours: minor findings are let pass."""
    page.set_viewport_size({"width": width, "height": 900})
    for path in all_pages(site):
        page.goto(path)
        page.evaluate(AXE)
        for scheme in ("light", "dark") if width > 1000 else ("dark",):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            assert barriers(page) == [], (path, scheme)


def test_plotly_is_loaded_only_where_a_chart_needs_it(page: Page, site: Site) -> None:
    running_job(site.service)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in ("/", "/submit", "/profiles", "/jobs/default/none"):
        page.goto(path)
        page.wait_for_load_state("load")
    assert not [url for url in asked if "plotly" in url]
    page.goto("/jobs/default/tiny")
    page.locator("[data-figure]").first.scroll_into_view_if_needed()
    expect(page.locator("[data-figure=loss] .main-svg").first).to_be_visible()
    assert len([url for url in asked if "plotly" in url]) == 1
