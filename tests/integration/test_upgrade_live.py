"""A job that a supervisor of version 0.1.0 runs while its service is replaced by this one: it is not restarted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.core.host.ports import free_port
from penstock.core.run.folder import RunDir
from tests.support.command import rank_status
from tests.support.old_code import OldServed, unpacked
from tests.support.old_service import spec
from tests.support.serving import Served, kill_all, wait_until

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]

MANY = 100_000


@contextmanager
def services(folder: Path, cache: Path) -> Iterator[tuple[OldServed, Served]]:
    """One of 0.1.0 that runs, and one of this version that is to take its place."""
    port = free_port()
    old = OldServed(folder, port, (), cache, code=unpacked(folder / "code"))
    try:
        old.start()
        yield old, Served(folder, port, (), cache)
    finally:
        kill_all(folder)


def loss_of(service: Served, name: str) -> dict[str, Any]:
    """What the service has of the job's losses, if there are any yet."""
    found = service.client.get(f"/v1/jobs/default/{name}/metrics").json()["series"]
    return next((each for each in found if each["name"] == "loss"), {"count": 0})


def recorded(run: RunDir) -> list[tuple[int, float]]:
    return [(entry.step, entry.loss) for entry in run.read_metrics()]


def launched(service: Served, name: str) -> list[Any]:
    events = service.client.get(f"/v1/jobs/default/{name}/events", params={"limit": 1000}).json()["items"]
    return [each["body"].get("resumeFrom") for each in events if each["kind"] == "launched"]


@pytest.mark.long
def test_a_supervisor_of_0_1_0_goes_on_under_the_new_service(tmp_path: Path) -> None:
    with services(tmp_path, tmp_path / "cache") as (old, new):
        run = RunDir(old.run_dir(old.submit("live", **spec(MANY))))
        old.wait_for("live", "Running")
        old.wait_for_step("live", 5)
        rank = rank_status(run, 0).pid
        assert str(tmp_path / "code").encode() in Path(f"/proc/{rank}/environ").read_bytes(), "this is no rank of 0.1.0"
        old.end(signal.SIGKILL)

        new.command("database", "upgrade", "--folder", tmp_path / "data")
        new.start()
        at_start = new.steps_done(run.root.name)
        assert (new.status("live")["phase"], new.status("live")["attempt"]) == ("Running", 1)
        wait_until(lambda: loss_of(new, "live")["count"] > at_start)
        assert rank_status(run, 0).pid == rank
        assert launched(new, "live") == [None]

        assert new.client.post("/v1/jobs/default/live/suspend").status_code == 200
        assert new.wait_for("live", "Suspended")["attempt"] == 1
        before = recorded(run)
        assert [step for step, _ in before] == list(range(len(before)))
        wait_until(lambda: loss_of(new, "live")["count"] >= len(before))
        loss = loss_of(new, "live")
        assert loss["count"] == len(before), "a step is there twice"
        assert (loss["last"]["step"], loss["last"]["value"]) == before[-1]

        assert new.client.post("/v1/jobs/default/live/resume").status_code == 200
        wait_until(lambda: new.status("live")["attempt"] == 2 and len(recorded(run)) > len(before))
        assert launched(new, "live") == [None, len(before)]
        assert recorded(run)[: len(before)] == before
        assert str(tmp_path / "code").encode() not in Path(f"/proc/{rank_status(run, 0).pid}/environ").read_bytes()
        assert new.client.delete("/v1/jobs/default/live").status_code == 202
        new.end(signal.SIGTERM)
