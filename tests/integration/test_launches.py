"""Two programs that want the machine at once: `penstock run` next to another one, and next to a service."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from penstock.core.host.machine_capacity import this_machine
from tests.support.command import Command, ended, laid_out, no_orphans, tiny_job, wait_for_step, wait_until_gone
from tests.support.serving import served, wait_until

ENDLESS = {"training": {"globalBatch": 2, "steps": 100_000, "optimizer": {"learningRate": 1e-3}}}
WHOLE = {"ranks": 2, "memoryPerRank": "1Gi", "threadsPerRank": (this_machine(os.environ).cores + 1) // 2}
"""All cores."""
MODEST = {"ranks": 2, "memoryPerRank": "1Gi"}

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


def test_a_second_run_is_refused_while_the_first_has_the_machine(tmp_path: Path) -> None:
    """It names the run directory of the first, and leaves none of its own. Once the first was killed it runs."""
    first, command = laid_out(tmp_path / "first"), Command(tmp_path)
    with no_orphans(first):
        process = command.start("run", tiny_job(tmp_path, resources=WHOLE, **ENDLESS), "--run-dir", first.root)
        wait_for_step(first, 3, attempt=1)
        _, told = command("run", tiny_job(tmp_path / "b", resources=MODEST), "--run-dir", tmp_path / "b" / "r", code=2)
        assert f"process {process.pid} (run directory {first.root}) holds" in told
        assert "remedy" in told
        assert not (tmp_path / "b" / "r").exists()
        process.kill()
        ended(process, -signal.SIGKILL)
        wait_until_gone(first)
        second = laid_out(tmp_path / "second")
        command("run", tiny_job(tmp_path / "b", resources=MODEST), "--run-dir", second.root)


@pytest.mark.long
def test_a_service_waits_for_a_run_and_a_run_names_the_service_s_job(tmp_path: Path) -> None:
    run, log = laid_out(tmp_path / "first"), tmp_path / "service.log"
    with served(tmp_path, log=log) as service, no_orphans(run):
        process = service.command.start("run", tiny_job(tmp_path, resources=WHOLE, **ENDLESS), "--run-dir", run.root)
        wait_for_step(run, 3, attempt=1)
        service.submit("waits", resources=MODEST, **ENDLESS)
        wait_until(lambda: f"process {process.pid} (run directory {run.root})" in log.read_text())
        assert service.status("waits")["phase"] == "Queued"
        process.terminate()
        ended(process, 128 + signal.SIGTERM)
        service.wait_for_step("waits", 3)
        job = tiny_job(tmp_path / "b", resources=WHOLE)
        _, told = service.command("run", job, "--run-dir", tmp_path / "b" / "r", code=2)
        assert "(job default/waits of a service) holds 2 cores" in told
        service.client.delete("/v1/jobs/default/waits")
