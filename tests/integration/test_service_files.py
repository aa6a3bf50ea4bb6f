"""What a real job prints and leaves, seen from the command line: its log, its files, its model, and a retry of it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import read_status, status_path
from penstock.trainer.writing import exported
from tests.support.command import ended
from tests.support.serving import PATIENCE_SECONDS, Served, served, wait_until

STEPS, EVERY = 60, 20
LONG = {"training": {"globalBatch": 2, "steps": 3000, "optimizer": {"learningRate": 1e-3}}}

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, measurements: Path) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("files"), cache=measurements) as found:
        yield found


@pytest.fixture(scope="module")
def followed(service: Served) -> list[str]:
    """What `penstock logs -f` shows of a job from its submission to its end."""
    service.submit("finished")
    out, _ = ended(service.command.start("logs", "finished", "-f"), 0, PATIENCE_SECONDS)
    return out.splitlines()


@pytest.fixture(scope="module")
def finished(service: Served, followed: list[str]) -> str:
    """The uid of that job."""
    assert service.status("finished")["phase"] == "Succeeded"
    return service.uid("finished")


def test_the_lines_of_every_rank_are_shown(service: Served, finished: str) -> None:
    lines = service.command("logs", "finished")[0].splitlines()
    assert "  0 | rank 0 of 2 is ready on cpu" in lines
    assert "  1 | rank 1 of 2 is ready on cpu" in lines
    written = [line for line in lines if "checkpoint written" in line]
    assert written == [f"  0 | step {step} of {STEPS}: checkpoint written" for step in (20, 40, 60)]
    assert len(lines) == len(set(lines)), "no line twice"
    of_one = service.command("logs", "finished", "--rank", "1")[0].splitlines()
    assert of_one == [line for line in lines if line.startswith("  1 |")]
    assert service.command("logs", "finished", "--rank", "0", "--tail", "1")[0] == written[-1] + "\n"


def test_a_log_is_followed_to_the_job_s_end(service: Served, finished: str, followed: list[str]) -> None:
    assert followed[-1] == f"  0 | step {STEPS} of {STEPS}: checkpoint written"
    assert sorted(followed) == sorted(service.command("logs", "finished")[0].splitlines())


def test_a_rank_that_fails_says_why(service: Served) -> None:
    """What it printed last is there although another attempt follows soon."""
    uid = service.submit("broken", runPolicy={"backoffLimit": 1}, **LONG)
    service.wait_for_step("broken", EVERY + 5)
    os.kill(rank_of(service, uid), signal.SIGKILL)
    for part in (service.run_dir(uid) / "checkpoints").glob("a1/*/__0_0.distcp"):
        part.write_bytes(b"")
    wait_until(lambda: service.status("broken")["phase"] == "Failed")
    wait_until(lambda: "is corrupt" in service.command("logs", "broken", "--rank", "0")[0])
    service.client.delete("/v1/jobs/default/broken")


def rank_of(service: Served, uid: str) -> int:
    found = read_status(status_path(service.run_dir(uid) / "status", 1))
    assert found is not None
    return found.pid


def test_files_are_listed_and_downloaded(service: Served, finished: str, tmp_path: Path) -> None:
    listed = [each["name"] for each in json.loads(service.command("download", "finished", "-o", "json")[0])]
    assert {"metrics.jsonl", "plan.json", "profile.json", "timeline.json", "result.json"} <= set(listed)
    assert not [name for name in listed if "checkpoint" in name or "outbox" in name or name == "job.yaml"]
    told = service.command("download", "finished", "metrics.jsonl", "logs/*", "--to", tmp_path)[0].splitlines()
    assert str(tmp_path / "metrics.jsonl") in told
    run = service.run_dir(finished)
    for path in map(Path, told):
        assert path.read_bytes() == (run / path.relative_to(tmp_path)).read_bytes()
    _, error = service.command("download", "finished", "job.yaml", code=2)
    assert "job.yaml matches no file" in error


def test_an_exported_checkpoint_is_one_that_transformers_reads(service: Served, finished: str, tmp_path: Path) -> None:
    told = service.command("download", "finished", "--export", "--to", tmp_path)[0].splitlines()
    folder = tmp_path / "exports" / f"a1-step-{STEPS}"
    assert {Path(path).name for path in told} >= {"model.safetensors", "config.json"}
    newest = service.client.get("/v1/jobs/default/finished/checkpoints").json()["items"][0]
    assert (newest["step"], newest["export"]["state"]) == (STEPS, "done")
    exported(RunDir(service.run_dir(finished)), tmp_path / "ours")
    model, ours = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "ours"))
    ids = torch.arange(32).reshape(1, 32)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, ours(ids).logits)
    older = service.client.post("/v1/jobs/default/finished/checkpoints/1/20/export")
    assert older.status_code == 202
    wait_until(lambda: state_of(service, 20) == "done")


def state_of(service: Served, step: int) -> Any:
    items = service.client.get("/v1/jobs/default/finished/checkpoints").json()["items"]
    (found,) = [each["export"] for each in items if each["step"] == step]
    return found and found["state"]


@pytest.mark.long
def test_a_retry_goes_on_at_the_right_step(service: Served) -> None:
    uid = service.submit("cut", runPolicy={"activeDeadlineSeconds": 0, "backoffLimit": 0}, **LONG)
    service.wait_for_step("cut", 45)
    os.kill(rank_of(service, uid), signal.SIGKILL)
    wait_until(lambda: service.status("cut")["phase"] == "Failed")
    shown = service.command("status", "cut")[0]
    assert "was killed" in shown
    assert "read penstock logs cut --rank 1; penstock retry cut continues from the last checkpoint" in shown
    page = service.client.get("/jobs/default/cut", headers={"Accept": "text/html"}).text
    assert '<a href="#log">the log of rank 1</a>; Retry continues from the last checkpoint.' in page
    items = service.client.get("/v1/jobs/default/cut/checkpoints").json()["items"]
    newest = next(each for each in items if each["complete"])  # before it there may be one whose writer was killed
    assert newest["step"] % EVERY == 0
    told = json.loads(service.command("retry", "cut", "-o", "json")[0])[0]
    assert told["metadata"]["name"] == "cut-2"
    assert told["spec"]["checkpoint"]["resumeFrom"] == newest["uri"]
    service.wait_for_step("cut-2", 5)
    metrics = (service.run_dir(service.uid("cut-2")) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[0])["step"] == newest["step"]
    service.wait_for("cut-2", "Running")
    _, refused = service.command("retry", "cut-2", code=2)
    assert "the job is Running" in refused
    service.command("delete", "cut-2")


def test_top_shows_jobs_as_they_change(service: Served) -> None:
    service.submit("watched")
    shown = on_a_terminal(service, "top", until="Profiling")
    assert "watched" in shown
    service.command("delete", "watched")


def on_a_terminal(service: Served, *arguments: str, until: str) -> str:
    """What a command shows on a terminal until the text appears; then Ctrl-C ends it well."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, **service.command.environment, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown, deadline = "", time.monotonic() + PATIENCE_SECONDS
    try:
        while until not in shown:
            assert time.monotonic() < deadline, shown
            shown += read_some(ours)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            read_some(ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert process.returncode == 0
    return shown


def read_some(terminal: int) -> str:
    """What came within a moment; a terminal that its process has left cannot be read."""
    with contextlib.suppress(OSError):
        if select.select([terminal], [], [], 0.2)[0]:
            return os.read(terminal, 65_536).decode(errors="replace")
    return ""


def test_a_job_is_reproduced_by_pasting(service: Served, finished: str, tmp_path: Path) -> None:
    found = service.client.get("/v1/jobs/default/finished/reproduce").json()
    assert set(found["versions"]) == {"penstock", "torch"}
    _, document, submit = found["commands"]
    subprocess.run(["sh", "-c", document], cwd=tmp_path, check=True)
    program, *arguments = submit.split()
    assert program == "penstock"
    service.command(arguments[0], tmp_path / arguments[1], *arguments[2:])
    service.wait_for("finished-2", "Succeeded")
    assert losses(service, service.uid("finished-2")) == losses(service, finished)


def losses(service: Served, uid: str) -> list[float]:
    return [entry.loss for entry in RunDir(service.run_dir(uid)).read_metrics()]
