"""Ranks started by torchrun: how they stop, how they fail, and what is said of it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent import launch as launch_module
from penstock.agent.launch import MALLOC, RANKS_FILE, Failure, LaunchSpec, Nodes, Outcome, Ranks, launch
from penstock.core.errors import UserError
from penstock.core.run.rank_status import State, StatusFile, status_path
from penstock.core.schedule import parse_action
from penstock.planner.compile import program_of
from tests.support.launched_rank import FATAL_STEP, plan_for
from tests.support.repository import ROOT

PATIENCE_SECONDS = 120.0


def spec_for(folder: Path, behaviour: str, *, num_ranks: int = 2, port: int | None = None) -> LaunchSpec:
    return LaunchSpec(
        module="tests.support.launched_rank",
        arguments=(str(folder), behaviour),
        num_ranks=num_ranks,
        threads_per_rank=1,
        log_folder=folder / "logs",
        status_folder=folder,
        port=port,
        environment={"PYTHONPATH": str(ROOT)},
    )


def wait_for(condition: Callable[[], bool], ranks: Ranks) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        outcome = ranks.poll()
        assert outcome is None, outcome
        assert time.monotonic() < deadline
        time.sleep(0.05)


def training(ranks: Ranks) -> bool:
    return all(s is not None and s.state is State.RUNNING and s.step >= 2 for s in ranks.statuses())


def pids(ranks: Ranks) -> list[int]:
    return [status.pid for status in ranks.statuses() if status is not None]


def test_sigterm_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    ranks = launch(spec_for(tmp_path, "train"))
    wait_for(lambda: training(ranks), ranks)
    os.kill(pids(ranks)[1], signal.SIGTERM)
    outcome = ranks.wait(PATIENCE_SECONDS)
    assert outcome is not None
    assert (outcome.exit_code, outcome.failure) == (0, None)
    assert len({(tmp_path / f"last-{rank}").read_text() for rank in range(2)}) == 1
    assert [status.state for status in ranks.statuses() if status] == [State.DONE] * 2


def test_a_killed_rank_is_named_with_its_action(tmp_path: Path) -> None:
    ranks = launch(spec_for(tmp_path, "train", num_ranks=3))
    wait_for(lambda: training(ranks), ranks)
    victim = pids(ranks)[1]
    os.kill(victim, signal.SIGKILL)
    outcome = ranks.wait(PATIENCE_SECONDS)
    assert outcome is not None
    failure = outcome.failure
    assert failure is not None
    assert outcome.exit_code != 0
    assert (failure.rank, failure.refused) == (1, False)
    assert f"rank 1 (process {victim}) was killed" in failure.message
    if failure.action:
        program = program_of(plan_for(3)).ranks[1]
        assert parse_action(failure.action) in [instruction.action for instruction in program.instructions]
        assert f"in step {failure.step} at {failure.action}" in failure.message
    survivors = [status for rank, status in enumerate(ranks.statuses()) if rank != 1 and status]
    assert [status.state for status in survivors] == [State.FAILED] * 2
    for status in survivors:
        assert re.search(r"rank [02], step \d+: \S+( on channel \S+)? failed: ", status.error)


def test_a_failing_rank_says_why_and_its_peers_name_the_channel(tmp_path: Path) -> None:
    """Also: ranks are called by their numbers; their environment is fixed, down to the devices that they may use."""
    ranks = launch(dataclasses.replace(spec_for(tmp_path, "fail"), devices=("3", "1")))
    wait_for(lambda: len(pids(ranks)) == 2, ranks)
    environment = Path(f"/proc/{pids(ranks)[0]}/environ").read_text().split("\0")
    assert [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids(ranks)] == ["rank 0", "rank 1"]
    assert {f"{name}={value}" for name, value in MALLOC.items()} <= set(environment)
    assert {"OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", "CUDA_VISIBLE_DEVICES=3,1"} <= set(environment)
    outcome = ranks.wait(PATIENCE_SECONDS)
    assert outcome is not None
    failure = outcome.failure
    assert failure is not None
    assert (failure.rank, failure.step, failure.action) == (1, FATAL_STEP, "1STEP")
    assert failure.message == f"rank 1, step {FATAL_STEP}: 1STEP failed: the disk is full"
    log = ranks.log_path(1)
    assert log is not None
    assert failure.message in log.read_text()
    peer = ranks.statuses()[0]
    assert peer is not None
    assert peer.state is State.FAILED
    assert re.search(r"rank 0, step \d+: 0(WAIT|SEND|POST)_\S+ on channel (0->1F|1->0B) failed: ", peer.error)


def test_ranks_that_are_not_numbered_from_0_are_known_by_their_names(tmp_path: Path) -> None:
    """As on the second of two hosts. They are processes 0 and 1 of their launch, and so are their logs."""
    done = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    done.wait()
    ranks = Ranks(dataclasses.replace(spec_for(tmp_path, "train"), names=(5, 3)), done)
    assert not ranks.all_started()
    for rank, process in ((5, 0), (3, 1)):
        StatusFile(status_path(tmp_path, rank), done.pid).start(["1F0.0"])
        (tmp_path / "logs" / "none" / "attempt_0" / str(process)).mkdir(parents=True)
        (tmp_path / "logs" / "none" / "attempt_0" / str(process) / "stderr.log").write_text(f"rank {rank}")
    assert ranks.all_started()
    logs = [ranks.log_path(rank) for rank in (5, 3)]
    assert [log.read_text() for log in logs if log] == ["rank 5", "rank 3"]
    StatusFile(status_path(tmp_path, 5), done.pid).finish(1)
    outcome = ranks.poll()
    assert outcome is not None
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.message) == (
        3,
        f"rank 3 (process {done.pid}) was killed outside of a step",
    )


def test_the_place_of_a_host_is_told_to_torchrun_and_the_names_to_whoever_reads_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    environments: list[dict[str, str]] = []

    def start(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        environments.append(env)
        return really_start(["true"])

    really_start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    nodes = Nodes(node_rank=1, num_nodes=3, master="127.0.0.1", port=29401)
    ranks = launch(dataclasses.replace(spec_for(tmp_path, "train"), nodes=nodes, names=(2, 3)))
    assert ranks.wait(PATIENCE_SECONDS) is not None
    assert {
        *("--nnodes=3", "--node-rank=1", "--nproc-per-node=2"),
        *("--master-addr=127.0.0.1", "--master-port=29401", "--max-restarts=0"),
    } <= set(commands[0])
    assert environments[0]["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert environments[0]["GLOO_SOCKET_IFNAME"] == environments[0]["NCCL_SOCKET_IFNAME"] == "lo"
    assert json.loads((tmp_path / "logs" / RANKS_FILE).read_text()) == [2, 3]


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(tmp_path)], cwd=ROOT)
    ranks = Ranks(spec_for(tmp_path, "train"), launcher)
    wait_for(lambda: training(ranks), ranks)
    started = pids(ranks)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(_is_alive(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


_LAUNCHER = """
import sys
from pathlib import Path
from penstock.agent.launch import LaunchSpec, launch
folder = Path(sys.argv[1])
launch(LaunchSpec(
    module="tests.support.launched_rank", arguments=(str(folder), "train"), num_ranks=2, threads_per_rank=1,
    log_folder=folder / "logs", status_folder=folder,
)).wait()
"""


def test_ranks_that_had_hardly_started_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    """They ask the kernel to end them with it only after a second or two, and it is gone by then."""
    ranks = launch(spec_for(tmp_path, "train"))
    wait_for(lambda: len(children(ranks.pid)) == 2, ranks)
    started = children(ranks.pid)
    assert ranks.statuses() == [None, None]
    ranks.kill()
    assert ranks.wait(PATIENCE_SECONDS) is not None
    end = time.monotonic() + PATIENCE_SECONDS
    while any(map(_is_alive, started)):
        assert time.monotonic() < end, "a rank lives on"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Of the process's threads."""
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in found for child in text.split()]


def _is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_port_that_is_taken_anywhere_is_refused_at_once(tmp_path: Path, address: str) -> None:
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port: {port} cannot be used: Address already in use"):
            launch(spec_for(tmp_path, "train", port=port))


# What is said of ranks, by their status files alone; a process that only ends or sleeps stands for torchrun.


@pytest.fixture
def ended(tmp_path: Path) -> Ranks:
    process = subprocess.Popen(["false"])
    process.wait()
    return Ranks(spec_for(tmp_path, "train", num_ranks=3), process)


def file_of(folder: Path, rank: int, pid: int) -> StatusFile:
    status = StatusFile(status_path(folder, rank), pid)
    status.start(["0F0.0", "0STEP"])
    status.cursor[0] = rank
    status.cursor[1] = 1
    return status


def test_the_first_to_give_up_explains_the_others(tmp_path: Path, ended: Ranks) -> None:
    for rank, ended_ns in ((0, 30), (1, 10), (2, 20)):
        file_of(tmp_path, rank, os.getpid()).fail(f"reason {rank}", ended_ns)
    assert ended.poll() == Outcome(
        exit_code=1, failure=Failure(rank=1, step=1, action="0STEP", message="reason 1", refused=False)
    )


def test_a_mistake_of_the_users_is_told_apart(tmp_path: Path, ended: Ranks) -> None:
    file_of(tmp_path, 0, os.getpid()).fail("lost rank 2", 30)
    file_of(tmp_path, 2, os.getpid()).fail("spec.data: is too short", 20, refused=True)
    outcome = ended.poll()
    assert outcome is not None
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.refused) == (2, True)


def test_a_rank_that_vanished_explains_even_those_that_gave_up_before_it_was_noticed(
    tmp_path: Path, ended: Ranks
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    file_of(tmp_path, 0, os.getpid()).fail("lost rank 1", 10)
    file_of(tmp_path, 1, gone.pid)
    file_of(tmp_path, 2, os.getpid()).finish(5)
    outcome = ended.poll()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.message == f"rank 1 (process {gone.pid}) was killed in step 1 at 0STEP"


def test_a_rank_that_dies_after_its_peers_gave_up_for_it_explains_them(tmp_path: Path) -> None:
    """Connections of a dying process close before it is seen to be dead."""
    with subprocess.Popen(["sleep", "60"]) as dying, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as torchrun:
        ranks = Ranks(spec_for(tmp_path, "train"), torchrun)
        file_of(tmp_path, 0, os.getpid()).fail("lost rank 1", 10)
        file_of(tmp_path, 1, dying.pid)
        assert ranks.poll() is None
        dying.kill()
        dying.wait()
        torchrun.terminate()
        outcome = ranks.wait(PATIENCE_SECONDS)
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.rank == 1


def test_ranks_that_do_not_start_leave_their_last_words(tmp_path: Path, ended: Ranks) -> None:
    log = tmp_path / "logs" / "none_abc" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("Traceback\nModuleNotFoundError: No module named 'torch'\n")
    outcome = ended.poll()
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.rank is None
    assert outcome.failure.message == (
        "the ranks did not start (exit code 1): ModuleNotFoundError: No module named 'torch'"
    )


def test_running_ranks_have_no_outcome_and_can_be_waited_for_in_vain(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ranks = Ranks(spec_for(tmp_path, "train", num_ranks=1), process)
    assert ranks.statuses() == [None]
    file_of(tmp_path, 0, process.pid)
    assert ranks.wait(0.1) is None
    ranks.stop()
    outcome = ranks.wait(PATIENCE_SECONDS)
    assert outcome is not None
    assert outcome.exit_code == -signal.SIGTERM


def test_ranks_that_outlast_a_failure_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.agent.launch.GRACE_SECONDS", 0.1)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ranks = Ranks(spec_for(tmp_path, "train"), process)
    file_of(tmp_path, 0, process.pid)
    file_of(tmp_path, 1, os.getpid()).fail("it rained", 1)
    outcome = ranks.wait(PATIENCE_SECONDS)
    assert outcome is not None
    assert outcome.exit_code == -signal.SIGKILL
    assert outcome.failure is not None
    assert outcome.failure.message == "it rained"


def ended_with(folder: Path, program: str) -> Ranks:
    """Ranks that have ended, whose result another host writes."""
    process = subprocess.Popen([program], start_new_session=True)
    process.wait()
    return Ranks(dataclasses.replace(spec_for(folder, "train"), result=folder / "result.json"), process)


def test_ranks_that_succeeded_run_until_their_result_is_visible(tmp_path: Path) -> None:
    ranks = ended_with(tmp_path, "true")
    assert ranks.poll() is None
    assert ranks.wait(0.1) is None
    (tmp_path / "result.json").touch()
    assert ranks.poll() == Outcome(exit_code=0, failure=None)


def test_a_result_that_does_not_come_is_awaited_for_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "RESULT_SECONDS", 0.1)
    ranks = ended_with(tmp_path, "true")
    assert ranks.poll() is None
    assert ranks.wait(10.0) == Outcome(exit_code=0, failure=None)


def test_killed_ranks_wait_for_no_result(tmp_path: Path) -> None:
    ranks = ended_with(tmp_path, "true")
    assert ranks.poll() is None
    ranks.kill()
    assert ranks.poll() == Outcome(exit_code=0, failure=None)


def test_a_failure_is_reported_without_a_result(tmp_path: Path) -> None:
    outcome = ended_with(tmp_path, "false").poll()
    assert outcome is not None
    assert outcome.failure is not None
