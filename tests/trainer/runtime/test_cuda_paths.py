"""What is different on CUDA, seen on stand-ins: which calls are made, and the arithmetic on what they give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from penstock.core.errors import UserError
from penstock.core.model import Family
from penstock.planner.realise import program_of
from penstock.trainer import memory
from penstock.trainer.comm import Mesh, ProcessGroups, group_names
from penstock.trainer.recorder import CudaRecorder, make_recorder
from penstock.trainer.worker import own_device
from tests.support.small_plans import small_plan

GPU = torch.device("cuda", 0)


class Event:
    """Stands for `torch.cuda.Event`; every record happens half a millisecond after the one before."""

    ticks: Iterator[int] = itertools.count()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1
        self.waited_for = False

    def record(self) -> None:
        self.at = next(Event.ticks)

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, other: Event) -> float:
        return 0.5 * (other.at - self.at)


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    return calls


def test_events_are_placed_on_the_hosts_clock(synchronised: list[str]) -> None:
    recorder = make_recorder(2, GPU)
    assert isinstance(recorder, CudaRecorder)
    recorder = CudaRecorder(2, clock=lambda: 7_000_000_000)
    for position in range(3):
        recorder.mark(position)
    assert recorder.times_ns().tolist() == [7_000_000_000, 7_000_500_000, 7_001_000_000]
    assert synchronised == ["synchronize"], "only the first mark waits for the device"


def test_messages_have_nccl_alone_and_all_ranks_can_also_meet_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[int], str]] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend: made.append((ranks, backend)))
    monkeypatch.setattr(dist, "get_rank", lambda: -1)
    program = program_of(small_plan(family=Family.GPT2, pp=2, dp=2))
    ProcessGroups(GPU).open(group_names(program, Mesh(dp=2, pp=2)))
    *others, last = made
    assert last == ([0, 1, 2, 3], "cpu:gloo,cuda:nccl")
    assert {backend for _, backend in others} == {"nccl"}
    assert [ranks for ranks, _ in others] == [[0, 1]] * 2 + [[2, 3]] * 2 + [[0, 1], [2, 3]] + [[0, 2], [1, 3]]


def test_memory_is_what_torch_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12345)
    memory.reset_peak(GPU)
    assert resets == [GPU]
    assert memory.peak_bytes(GPU) == 12345


def test_every_rank_has_a_device_of_its_own() -> None:
    assert [own_device(rank, 2) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(UserError, match=r"rank 2 has no device of its own: 2 can be seen(.|\n)*remedy"):
        own_device(2, 2)
