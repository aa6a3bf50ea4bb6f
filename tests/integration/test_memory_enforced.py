"""Jobs whose ranks take more memory than they may, by the command and by the service: ended, once, and explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.agent.run_state import read_state
from penstock.core.lifecycle import Phase
from tests.support.command import Command, laid_out, no_orphans, tiny_job
from tests.support.serving import processes_of, served, wait_until

TOO_LITTLE = {"ranks": 2, "memoryPerRank": "40Mi"}
"""The processes alone take more, before they hold any parameter."""
LIMIT = "limit 80 MiB (memoryPerRank 40 MiB x 2 ranks)"

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


def test_a_run_whose_ranks_take_too_much_ends_with_the_user_s_mistake(tmp_path: Path) -> None:
    run = laid_out(tmp_path / "r")
    with no_orphans(run):
        _, told = Command(tmp_path)("run", tiny_job(tmp_path, resources=TOO_LITTLE), "--run-dir", run.root, code=2)
    assert "spec.resources.memoryPerRank: the attempt's ranks use" in told
    assert LIMIT in told
    assert "remedy" in told
    assert "attempt 2" not in told
    state = read_state(run.root)
    assert (state.phase, state.attempt, state.failures) == (Phase.FAILED, 1, 0)
    assert (state.history[-1].reason, LIMIT in state.message) == ("UserError", True)


def test_a_job_of_a_service_is_ended_once_and_the_next_one_runs(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        hungry = service.submit("hungry", resources=TOO_LITTLE)
        service.submit("modest")
        wait_until(lambda: service.status("hungry")["phase"] == "Failed")
        status = service.status("hungry")
        assert (status["attempt"], status["failures"]) == (1, 0)
        assert LIMIT in status["message"]
        assert "remedy" in status["message"]
        wait_until(lambda: processes_of(service.run_dir(hungry)) == [])
        service.wait_for("modest", "Succeeded")
