"""Pages in a real Chromium, of a real service that runs real jobs."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from penstock.planner import yamltext
from tests.support import chromium
from tests.support.serving import Served, served, served_job

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.timeout(900)]

PATIENCE_MILLISECONDS = 240_000
WIDTHS = (1440, 390)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.browser() as found:
        yield found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("pages")) as found:
        yield found


class Faults:
    """What the browser complained about."""

    def __init__(self, page: Page) -> None:
        self.found: list[str] = []
        page.on("pageerror", lambda error: self.found.append(str(error)))
        page.on("console", self._said)

    def _said(self, message: ConsoleMessage) -> None:
        expected = ("ERR_CONNECTION", "ERR_INCOMPLETE", "401 (Unauthorized)", "404 (Not Found)", "422 (Unprocess")
        if message.type == "error" and not any(text in message.text for text in expected):
            self.found.append(message.text)


@pytest.fixture
def page(browser: Browser, service: Served) -> Iterator[Page]:
    """A page whose every complaint fails the test."""
    context = browser.new_context(base_url=f"http://127.0.0.1:{service.port}", viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    expect.set_options(timeout=PATIENCE_MILLISECONDS)
    opened = context.new_page()
    faults = Faults(opened)
    sign_in(opened, service)
    yield opened
    context.close()
    assert not faults.found


def sign_in(page: Page, service: Served) -> None:
    """As `penstock ui` does: a link of a minute, whose code no log sees."""
    link = service.client.post("/v1/login-links").json()["path"]
    page.goto(link)
    page.wait_for_url("**/")
    expect(page.locator(".who")).to_have_text("first (admin)")


def manifest(name: str, steps: int) -> str:
    training = {"globalBatch": 2, "steps": steps, "optimizer": {"learningRate": 1e-2}}
    return yamltext.dump(served_job(name, training=training))


def submit(page: Page, name: str, steps: int) -> None:
    page.goto("/submit")
    page.get_by_role("textbox", name="manifest").fill(manifest(name, steps))
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(f"**/jobs/default/{name}")


def phase(page: Page, wanted: str) -> None:
    expect(page.locator("main .phase")).to_have_text(wanted)


def step(page: Page) -> int:
    found = re.search(r"Step ([\d,]+)", page.locator(".progress b").inner_text())
    assert found is not None
    return int(found[1].replace(",", ""))


def test_a_job_is_submitted_watched_suspended_resumed_and_deleted(page: Page) -> None:
    submit(page, "watched", 3000)
    expect(page.locator("#connection")).to_have_text("live")
    phase(page, "Running")
    expect(page.locator(".progress b")).to_be_visible()
    expect(page.locator("[data-figure=loss] .main-svg").first).to_be_visible()
    expect(page.locator("#plan svg").first).to_be_visible()
    before = step(page)
    page.wait_for_function(
        "before => (document.querySelector('.progress progress')?.value ?? 0) > before", arg=before
    )  # nobody asked for the page again
    page.get_by_role("button", name="Suspend").click()
    phase(page, "Suspended")
    suspended_at = step(page)
    assert suspended_at < 3000
    page.get_by_role("button", name="Resume").click()
    phase(page, "Running")
    page.wait_for_function(
        "before => (document.querySelector('.progress progress')?.value ?? 0) > before", arg=suspended_at
    )
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    page.wait_for_url("**/")
    expect(page.get_by_role("link", name="watched")).to_have_count(0)


def test_a_lost_connection_is_shown_and_comes_back(page: Page, service: Served) -> None:
    submit(page, "outlives", 3000)
    phase(page, "Running")
    service.end(signal.SIGKILL)
    expect(page.locator("#connection")).to_have_text("connection lost, trying again")
    service.start()
    expect(page.locator("#connection")).to_have_text("live")
    before = step(page)
    page.wait_for_function("before => (document.querySelector('.progress progress')?.value ?? 0) > before", arg=before)
    service.client.delete("/v1/jobs/default/outlives")


def test_a_mistake_is_shown_with_its_place_and_remedy(page: Page) -> None:
    page.goto("/submit")
    box = page.get_by_role("textbox", name="manifest")
    box.fill(manifest("wrong", 3).replace("kvHeads: 1", "kvHeads: 3"))
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("alert")).to_contain_text("spec.model")
    assert "kvHeads: 3" in box.input_value(), "what was written stays"


def test_a_failed_job_says_why_on_top(page: Page, service: Served) -> None:
    service.submit("hopeless", resources={"ranks": 2, "memoryPerRank": "300Mi"})
    page.goto("/jobs/default/hopeless")
    phase(page, "Failed")
    expect(page.locator(".failure strong")).to_be_visible()
    page.get_by_role("button", name="Retry").click()
    page.wait_for_url("**/jobs/default/hopeless-*")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_its_window_and_serves_the_keyboard(
    page: Page, service: Served, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    paths = ["/", "/submit", "/jobs/default/hopeless", "/compare?job=default/hopeless&job=default/outlives"]
    for path in [*paths, "/jobs/default/none"]:
        page.goto(path)
        room, needed = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
        assert needed <= room, path
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") in ("skip", ""), path


def test_jobs_are_marked_in_the_list_and_compared(page: Page, service: Served) -> None:
    page.goto("/")
    for name in ("hopeless", "outlives"):
        if page.get_by_role("checkbox", name=name).count():
            page.get_by_role("checkbox", name=name).check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/compare?**")
    expect(page.get_by_role("heading", name="Comparison")).to_be_visible()
