"""What `penstock serve` tells others: the webhook, across a kill of the service, and Prometheus by a token's file."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from penstock.cli.main import main
from penstock.core.lifecycle import Phase
from tests.support.filled_job import enter, running_job
from tests.support.receiver import SECRET, receiving
from tests.support.service import Clock, new_service
from tests.support.serving import served, wait_until

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


def fill(folder: Path) -> str:
    """The uid of a job that has just ended, in a service that is not running."""
    (folder / "data").mkdir()
    service = new_service(folder / "data", clock=Clock(time.time()))
    uid = enter(service, running_job(service).uid, Phase.FAILED, "out of luck").uid
    service.close()
    return uid


def test_a_service_that_is_killed_during_the_call_calls_again(tmp_path: Path) -> None:
    uid = fill(tmp_path)
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    with receiving() as receiver:
        receiver.holding = True
        options = ("--webhook", receiver.url, "--webhook-secret", tmp_path / "secret")
        with served(tmp_path, *options) as service:
            wait_until(lambda: len(receiver.calls) == 1)
            service.end(signal.SIGKILL)
            receiver.holding = False
            receiver.released.set()
            service.start()
            wait_until(lambda: len(receiver.calls) == 2)
            service.end(signal.SIGTERM)
            service.start()
            time.sleep(2)
        first, second = receiver.calls
        assert first.body == second.body
        assert first.headers["webhook-id"] == uid
        assert second.proves(SECRET)
        assert second.message["url"] == f"http://127.0.0.1:{service.port}/jobs/default/tiny"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--webhook", "http://127.0.0.1/"), "--webhook: needs the other one of --webhook and --webhook-secret"),
        (("--webhook-secret", "secret"), "--webhook-secret: needs the other one of --webhook and --webhook-secret"),
        (("--webhook", "http://127.0.0.1/", "--webhook-secret", "gone"), "--webhook-secret: cannot be read"),
        (("--webhook", "127.0.0.1", "--webhook-secret", "secret"), "--webhook: is not a URL for POST requests"),
        (("--webhook", "http://127.0.0.1/", "--webhook-secret", "short"), "--webhook-secret: is shorter than 16"),
    ],
)
def test_what_makes_no_webhook_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "short").write_bytes(b"1234")
    given = [str(tmp_path / each) if each in ("secret", "short", "gone") else each for each in options]
    assert main(["serve", "--folder", str(tmp_path / "data"), *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "data").exists()


def test_a_viewer_s_token_scrapes(tmp_path: Path) -> None:
    """As docs/guides/monitoring.md has it."""
    with served(tmp_path) as service:
        command = ("token", "create", "prometheus", "--role", "viewer", "--folder", tmp_path / "data")
        secret, _ = service.command(*command)
        bearer = {"Authorization": f"Bearer {secret.strip()}"}
        answer = httpx.get(f"http://127.0.0.1:{service.port}/metrics", headers=bearer, trust_env=False)
        assert answer.status_code == 200
        assert 'penstock_jobs{phase="Running"} 0.0' in answer.text
