"""`penstock ui` against a real service, with a browser that only writes down what it was started with."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from tests.support.command import Command
from tests.support.listening import answering, bearer
from tests.support.service import new_service

BROWSER = """#!/bin/sh
echo "$1" > "$(dirname "$0")/opened"
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = new_service(tmp_path)
    yield made
    made.close()


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    with answering(service) as found:
        yield found


@pytest.fixture
def command(service: Service, url: str, tmp_path: Path) -> Command:
    browser = tmp_path / "browser"
    browser.write_text(BROWSER)
    browser.chmod(0o700)
    environment = {
        "PENSTOCK_SERVER": url,
        "PENSTOCK_TOKEN": bearer(service, Role.VIEWER)["Authorization"].partition(" ")[2],
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "BROWSER": f"{browser} %s",
    }
    return Command(tmp_path, environment)


def signs_in(url: str, link: str) -> bool:
    place, _, code = link.partition("#")
    assert place == f"{url}/login"
    answer = httpx.post(place, data={"code": code}, headers={"Origin": url}, trust_env=False)
    return answer.status_code == 303


def test_the_link_is_printed(command: Command, url: str) -> None:
    printed, _ = command("ui", "--print")
    assert signs_in(url, printed.strip())


def test_a_browser_is_opened_by_a_file_that_nobody_else_reads(command: Command, url: str, tmp_path: Path) -> None:
    """What a program was started with is for every user of the machine to read."""
    _, told = command("ui")
    opened = (tmp_path / "opened").read_text().strip()
    assert "psl_" not in opened
    page = Path(opened.removeprefix("file://"))
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    (link,) = re.findall(r"url=([^\"]+)\"", page.read_text())
    assert link in told
    assert signs_in(url, link)


def test_without_a_browser_the_link_is_for_another(command: Command, url: str, tmp_path: Path) -> None:
    (tmp_path / "browser").write_text("#!/bin/sh\nexit 1\n")
    command.environment["PATH"] = str(tmp_path)
    _, told = command("ui")
    assert "no browser was found" in told
    assert signs_in(url, re.findall(r"opening (\S+)", told)[0])


def test_a_service_that_is_away_is_told(command: Command) -> None:
    command.environment["PENSTOCK_TOKEN"] = "pst_wrong"
    _, told = command("ui", code=2)
    assert "the token is unknown, expired or revoked" in told
