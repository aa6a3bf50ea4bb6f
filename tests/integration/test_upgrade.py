"""A service of version 0.1.0 that was killed at its work is upgraded: nothing is lost, no attempt is restarted."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.core.host.clocks import boot_id
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.serialization.manifest_files import write
from penstock.core.supervision import AttemptReport, Claim
from tests.support import postgres
from tests.support.old_service import KINDS, restored
from tests.support.serving import Served, served, wait_until

SLEEPING = (sys.executable, "-c", "import time; time.sleep(3600)")

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@dataclass
class Upgraded:
    """The service of this version, what 0.1.0 said of its jobs, and a process in the place of a live supervisor."""

    service: Served
    expected: dict[str, Any]
    supervisor: subprocess.Popen[bytes]

    def uid(self, name: str) -> str:
        uid: str = self.expected[name]["uid"]
        return uid

    def folder(self, name: str) -> AttemptFolder:
        return AttemptFolder(self.service.run_dir(self.uid(name)), 1)

    def read(self, name: str, part: str, **query: Any) -> Any:
        answer = self.service.client.get(f"/v1/jobs/default/{name}/{part}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def losses(self, name: str) -> list[tuple[int, float]]:
        """The loss of every step that the service has, each once."""
        series = self.read(name, "metrics", points=500)["series"]
        loss = next((each for each in series if each["name"] == "loss"), None)
        if loss is None:
            return []
        assert loss["count"] == len(loss["points"])
        return [(point["step"], point["last"]) for point in loss["points"]]

    def recorded(self, name: str) -> list[tuple[int, float]]:
        """The loss of every step that ranks of 0.1.0 wrote."""
        return [(step, loss) for _, step, loss in self.expected[name]["steps"]]


@contextmanager
def _supervising(folder: AttemptFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A process that the attempt's claim names, as it named the supervisor of 0.1.0."""
    with subprocess.Popen(SLEEPING, start_new_session=True) as process:
        try:
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
            claim = Claim(pid=process.pid, started_ticks=int(ticks), boot_id=boot_id())
            folder.claim.write_text(json.dumps(claim.to_manifest()))
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module", params=KINDS)
def upgraded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    folder = tmp_path_factory.mktemp("upgraded")
    with ExitStack() as stack:
        options: tuple[str, ...] = ()
        if request.param == "postgresql":
            url = stack.enter_context(postgres.database(stack.enter_context(postgres.server())))
            options = ("--database", url)
        expected = restored(request.param, folder, *options[1:])
        live = AttemptFolder(folder / "data" / "runs" / expected["live"]["uid"], 1)
        supervisor = stack.enter_context(_supervising(live))
        command = Served(folder, 0, options, folder / "cache").command
        command("database", "upgrade", "--folder", folder / "data", *options)
        yield Upgraded(stack.enter_context(served(folder, *options)), expected, supervisor)


def test_every_job_is_there_with_its_history_and_its_log(upgraded: Upgraded) -> None:
    for name, job in upgraded.expected.items():
        events = [each["kind"] for each in upgraded.read(name, "events", limit=1000)["items"]]
        assert events[: len(job["events"])] == job["events"], name
        lines = [each["message"] for each in upgraded.read(name, "logs", limit=1000)["items"]]
        assert lines[: len(job["logs"])] == job["logs"], name
    for name in ("ended", "failed", "paused"):
        assert upgraded.service.status(name)["phase"] == upgraded.expected[name]["phase"]
        assert upgraded.losses(name) == upgraded.recorded(name)
        page = upgraded.service.client.get(f"/jobs/default/{name}", headers={"Accept": "text/html"})
        assert page.status_code == 200, page.text


def test_tokens_of_before_open_what_they_opened(upgraded: Upgraded) -> None:
    reader = {"Authorization": f"Bearer {upgraded.expected['ended']['token']}"}
    url = str(upgraded.service.client.base_url)
    assert httpx.get(f"{url}/v1/jobs", headers=reader, trust_env=False).status_code == 200
    refused = httpx.post(f"{url}/v1/jobs/default/paused/resume", headers=reader, trust_env=False)
    assert refused.status_code == 403


def test_what_ended_unheard_of_is_collected_once(upgraded: Upgraded) -> None:
    """It ended while no service was there, and its shipper was killed: most of its steps lay in its outbox alone."""
    upgraded.service.wait_for("ending", "Succeeded")
    wait_until(lambda: len(upgraded.losses("ending")) == len(upgraded.recorded("ending")))
    assert upgraded.losses("ending") == upgraded.recorded("ending")
    assert upgraded.service.status("ending")["attempt"] == 1
    assert upgraded.service.phases("ending")[-2:] == ["Running", "Succeeded"]


def test_a_live_attempt_is_taken_over_and_reports_to_the_new_service(upgraded: Upgraded) -> None:
    """Its shipper, the process of 0.1.0, sends what it has; what that did not send is collected after the end."""
    service, folder = upgraded.service, upgraded.folder("live")
    assert (service.status("live")["phase"], service.status("live")["attempt"]) == ("Running", 1)
    outbox = folder.root / "outbox" / "a1-rank-0.jsonl"
    lines = [line for line in outbox.read_bytes().splitlines() if line.endswith(b"}")]
    body = gzip.compress(b'{"records":[' + b",".join(lines[: len(lines) // 2]) + b"]}")
    token = {"Authorization": f"Bearer {(service.folder / 'data' / 'ingest-token').read_text().strip()}"}
    headers = {**token, "Content-Type": "application/json", "Content-Encoding": "gzip"}
    url = f"{service.client.base_url}/v1/ingest"
    assert httpx.post(url, content=body, headers=headers, trust_env=False).status_code == 200
    assert (service.status("live")["phase"], upgraded.supervisor.poll()) == ("Running", None)

    report = AttemptReport(state=AttemptState.SUCCEEDED, profile=Step.DONE, num_ranks=1, last_checkpoint=32)
    write(folder.report, report)
    service.wait_for("live", "Succeeded")
    wait_until(lambda: len(upgraded.losses("live")) >= len(upgraded.recorded("live")))
    assert upgraded.losses("live") == upgraded.recorded("live")
    assert service.status("live")["attempt"] == 1
    assert [each["kind"] for each in upgraded.read("live", "events", limit=1000)["items"]].count("launched") == 1


@pytest.mark.parametrize("upgraded", ["sqlite"], indirect=True)
def test_a_suspended_job_goes_on_from_the_checkpoint_of_before(upgraded: Upgraded) -> None:
    service, before = upgraded.service, upgraded.recorded("paused")
    begin = len(before)
    assert service.client.delete("/v1/jobs/default/waiting").status_code == 202
    assert service.client.post("/v1/jobs/default/paused/resume").status_code == 200
    wait_until(lambda: len(upgraded.losses("paused")) >= begin + 3)
    service.client.post("/v1/jobs/default/paused/suspend")
    service.wait_for("paused", "Suspended")  # as the other tests find it
    events = upgraded.read("paused", "events", limit=1000)["items"]
    assert [each["body"]["resumeFrom"] for each in events if each["kind"] == "launched"] == [None, begin]
    losses = upgraded.losses("paused")
    assert losses[:begin] == before
    assert [step for step, _ in losses] == list(range(len(losses)))
