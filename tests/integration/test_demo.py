"""`penstock demo`: a job through a service of its own, and nothing left behind."""

from __future__ import annotations

import json
import re
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.core.host.locks import Lock, machine_lock_path
from tests.support.command import Command, ended, tiny_job
from tests.support.serving import processes_of, wait_until


def command(folder: Path) -> Command:
    return Command(folder, {"XDG_CONFIG_HOME": str(folder / "untouched")})


def arguments(folder: Path, length: int = 32, **spec: Any) -> tuple[str | Path, ...]:
    """Of a demonstration of a tiny job."""
    data = {"source": "data://text", "tokenizer": {"train": "bytes"}, "sequenceLength": length}
    job = tiny_job(folder, data=data, **spec)
    return "demo", job, "--folder", folder / "demo", "--data", f"text={folder / 'text'}"


def test_a_job_is_trained_and_summed_up(tmp_path: Path) -> None:
    out, said = command(tmp_path)(*arguments(tmp_path), "--output", "json")
    summary = json.loads(out)
    assert (summary["phase"], summary["steps"]) == ("Succeeded", 120)
    assert summary["lastLoss"] < summary["firstLoss"]
    assert summary["predictedStepSeconds"] > 0
    assert summary["measuredStepSeconds"] > 0
    assert summary["tokensPerSecond"] > 0
    assert "schedule" in summary["plan"]
    assert summary["reasons"]
    assert summary["sample"].strip()
    assert ">Succeeded</span>" in Path(summary["report"]).read_text()
    assert re.search(r"http://127\.0\.0\.1:\d+/login#\S+", said)
    assert "tiny  Running" in said
    assert not (tmp_path / "untouched").exists()
    wait_until(lambda: processes_of(tmp_path) == [], seconds=60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_whoever_stops_it_leaves_nothing_running(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """But a process that only now hears of its end."""
    demo = command(tmp_path).start(*arguments(tmp_path, training={"globalBatch": 2, "steps": 100_000}))
    wait_until(lambda: any((tmp_path / "demo" / "runs").glob("*/logs/*/*/attempt_0/0/stdout.log")))
    demo.send_signal(number)
    _, said = ended(demo, code)
    assert "stopping" in said
    wait_until(lambda: processes_of(tmp_path) == [], seconds=60)


def test_a_user_s_mistake_is_told_once(tmp_path: Path) -> None:
    out, said = command(tmp_path)(*arguments(tmp_path, length=1_000_000), code=2)
    assert "tiny  Failed" in said
    assert said.count("longer than the data") == 1
    assert "remedy " in said
    assert "Traceback" not in said
    assert out == ""
    wait_until(lambda: processes_of(tmp_path) == [], seconds=60)


def test_a_job_that_fails_fails_the_demonstration(tmp_path: Path) -> None:
    _, said = command(tmp_path)(*arguments(tmp_path, runPolicy={"activeDeadlineSeconds": 1}), code=1)
    assert "tiny  Failed  DeadlineExceeded" in said
    assert said.count("ran longer than activeDeadlineSeconds 1") == 1
    wait_until(lambda: processes_of(tmp_path) == [], seconds=60)


def test_it_does_not_wait_for_a_service_that_has_the_machine(tmp_path: Path) -> None:
    path = machine_lock_path({"XDG_STATE_HOME": str(tmp_path / "state")}, tmp_path, socket.gethostname())
    path.parent.mkdir(parents=True)
    with closing(Lock(path, "somebody")) as service:
        assert service.take()
        _, said = command(tmp_path)(*arguments(tmp_path, length=1_000_000), code=2)
    assert "another service launches jobs on this machine" in said
    assert "Failed" in said


def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "penstock.db").write_text("no database")
    _, said = command(tmp_path)(*arguments(tmp_path), code=1)
    assert "the service did not start" in said
    assert "Traceback" not in said
