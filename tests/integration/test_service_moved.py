"""What a service finds changed at its next start, and jobs that train meanwhile: its port, their token, the machine."""

from __future__ import annotations

import signal
import socket
from contextlib import closing
from pathlib import Path

import pytest

from penstock.api.auth.identity import Role
from penstock.api.start.administration import opened
from penstock.api.store import tokens
from penstock.core.host.locks import Lock, machine_lock_path
from penstock.core.host.ports import free_port
from tests.support.command import ended
from tests.support.serving import served, wait_until

LONG = {"training": {"globalBatch": 2, "steps": 3000, "optimizer": {"learningRate": 1e-3}}}

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


def revoke_what_attempts_report_with(folder: Path) -> None:
    with opened(folder, "") as store:
        (found,) = [each for each in store.read(tokens.every) if each.role is Role.INGEST]
        store.write("tokens", lambda c: tokens.revoke(c, found.id, store.clock()))


@pytest.mark.long
def test_a_job_reports_to_a_service_that_came_back_elsewhere_by_a_new_token(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        uid = service.submit("moves", **LONG)
        service.wait_for_step("moves", 10)
        service.end(signal.SIGKILL)
        before = service.steps_done(uid)
        revoke_what_attempts_report_with(service.folder / "data")
        service.port = free_port()
        service.start()
        wait_until(lambda: (service.status("moves")["progress"] or {"step": 0})["step"] > before)
        assert (service.status("moves")["attempt"], service.status("moves")["failures"]) == (1, 0)
        service.client.delete("/v1/jobs/default/moves")
        wait_until(lambda: service.client.get("/v1/jobs").json()["items"] == [])


def test_a_service_beside_another_says_so_and_launches_once_that_has_ended(tmp_path: Path) -> None:
    path = machine_lock_path({"XDG_STATE_HOME": str(tmp_path / "state")}, tmp_path, socket.gethostname())
    path.parent.mkdir(parents=True)
    with closing(Lock(path, "process 1, folder there")) as other:
        assert other.take()
        with served(tmp_path) as service:
            service.submit("waits", **LONG)
            assert service.wait_for("waits", "Queued")["attempt"] == 0
            other.close()
            wait_until(lambda: service.status("waits")["attempt"] == 1)
            assert service.process is not None
            service.process.send_signal(signal.SIGTERM)
            _, said = ended(service.process, 0)
    assert "another service launches jobs on this machine (process 1, folder there)" in said
