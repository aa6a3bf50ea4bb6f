"""How the agent starts ranks, forked or spawned: what they share, what they are called, and that all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from penstock.agent.launch import LaunchSpec, Outcome, Ranks, launch
from penstock.core.job import Device
from tests.support.repository import ROOT

PATIENCE_SECONDS = 120.0
CODE = """
import os, sys, tempfile, time
from pathlib import Path
import torch
rank, folder = os.environ["RANK"], Path(__file__).parent
loaded = "penstock.trainer.worker_train" in sys.modules
is_bad_fork = torch.cuda._is_in_bad_fork()
told = f"{loaded} {os.getpid()} {os.getppid()} {tempfile.gettempdir()} {is_bad_fork} {sys.argv[1:]} {__name__}"
(folder / f"rank-{rank}").write_text(told)
if rank in sys.argv[1:]:
    while not (folder / "go").exists():
        time.sleep(0.01)
    sys.exit(3)
"""


TRAINING = "penstock.trainer.worker_train"


def launched(folder: Path, *arguments: str, device: Device = Device.CPU, preloaded: str = "") -> Ranks:
    (folder / "own_rank.py").write_text(CODE)
    temporary = folder / "temporary"
    temporary.mkdir()
    return launch(
        LaunchSpec(
            module="own_rank",
            arguments=arguments,
            device=device,
            preloaded=preloaded,
            num_ranks=2,
            threads_per_rank=1,
            log_folder=folder / "logs",
            status_folder=folder / "status",
            environment={"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder))), "TMPDIR": str(temporary)},
        )
    )


def lines_of(folder: Path, rank: int) -> list[str]:
    path, end = folder / f"rank-{rank}", time.monotonic() + PATIENCE_SECONDS
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, f"rank {rank} does not begin"
        time.sleep(0.01)
    return path.read_text().split()


def test_ranks_share_preloaded_modules_and_run_as_separate_main_modules(tmp_path: Path) -> None:
    ranks = launched(tmp_path, "-v", "x", preloaded=TRAINING)
    assert ranks.wait(PATIENCE_SECONDS) == Outcome(exit_code=0, failure=None)
    first, second = lines_of(tmp_path, 0), lines_of(tmp_path, 1)
    assert first[:1] == second[:1] == ["True"]
    assert first[5:] == second[5:] == ["['-v',", "'x']", "__main__"]
    assert first[3] == second[3] == str(tmp_path / "temporary")
    assert first[1] != second[1]
    assert first[2] == second[2] == str(ranks.pid)


SLOWLY_FORKED = """
import os, time
forked_ns = []
os.register_at_fork(before=lambda: time.sleep(0.3), after_in_child=lambda: forked_ns.append(time.monotonic_ns()))
"""
TIMES = """
import os, time
from pathlib import Path
import slowly_forked
rank = os.environ["RANK"]
(Path(__file__).parent / f"times-{rank}").write_text(f"{slowly_forked.forked_ns[-1]} {time.monotonic_ns()}")
"""


def test_no_rank_begins_before_all_are_forked(tmp_path: Path) -> None:
    """A rank that runs code in the agent may hold a lock, which would be locked forever in a rank forked then."""
    (tmp_path / "slowly_forked.py").write_text(SLOWLY_FORKED)
    (tmp_path / "timed_rank.py").write_text(TIMES)
    ranks = launch(
        LaunchSpec(
            module="timed_rank",
            arguments=(),
            preloaded="slowly_forked",
            num_ranks=3,
            threads_per_rank=1,
            log_folder=tmp_path / "logs",
            status_folder=tmp_path / "status",
            environment={"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))},
        )
    )
    assert ranks.wait(PATIENCE_SECONDS) == Outcome(exit_code=0, failure=None)
    forked, began = zip(*(map(int, (tmp_path / f"times-{rank}").read_text().split()) for rank in range(3)), strict=True)
    assert max(forked) <= min(began)


@pytest.mark.skipif(torch.version.cuda is None, reason="NOT RUN: PyTorch without CUDA forbids nothing")
@pytest.mark.parametrize("preloaded", ["", TRAINING])
def test_cuda_ranks_can_use_cuda(tmp_path: Path, preloaded: str) -> None:
    """Torch's agent asks which accelerators there are, and a process forked after that can never use CUDA."""
    ranks = launched(tmp_path, "-v", "x", device=Device.CUDA, preloaded=preloaded)
    assert ranks.wait(PATIENCE_SECONDS) == Outcome(exit_code=0, failure=None)
    first, second = lines_of(tmp_path, 0), lines_of(tmp_path, 1)
    assert first[3:] == second[3:] == [str(tmp_path / "temporary"), "False", "['-v',", "'x']", "__main__"]
    assert first[:1] == second[:1] == ["False"]  # a rank that is a new Python shares nothing
    assert first[2] == second[2] == str(ranks.pid)


def test_only_requested_modules_are_loaded(tmp_path: Path) -> None:
    assert launched(tmp_path).wait(PATIENCE_SECONDS) == Outcome(exit_code=0, failure=None)
    assert lines_of(tmp_path, 0)[0] == "False"


@pytest.mark.parametrize("device", Device)
def test_a_rank_that_is_done_ends_when_another_fails(tmp_path: Path, device: Device) -> None:
    ranks = launched(tmp_path, "1", device=device)
    done, failing = (int(lines_of(tmp_path, rank)[1]) for rank in (0, 1))
    assert ranks.poll() is None
    (tmp_path / "go").touch()
    outcome = ranks.wait(PATIENCE_SECONDS)
    assert outcome is not None
    assert outcome.exit_code == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in (done, failing))


def test_a_module_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    outcome = launched(tmp_path, preloaded="no_such_module").wait(PATIENCE_SECONDS)
    assert outcome is not None
    assert outcome.failure is not None
    assert "No module named 'no_such_module'" in outcome.failure.message


@pytest.mark.parametrize("device", Device)
def test_a_signal_to_the_agent_ends_ranks(tmp_path: Path, device: Device) -> None:
    ranks = launched(tmp_path, "0", "1", device=device)
    pids = [int(lines_of(tmp_path, rank)[1]) for rank in (0, 1)]
    os.kill(ranks.pid, signal.SIGTERM)
    assert ranks.wait(PATIENCE_SECONDS) is not None
    alive = subprocess.run(["ps", "-o", "pid=", *map(str, pids)], capture_output=True, text=True, check=False)
    assert alive.stdout == ""
    assert not list((tmp_path / "temporary").iterdir())
