"""Process groups and devices of CUDA ranks. What torch itself does there is tested in `tests/trainer/cuda`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.core.errors import UserError
from penstock.core.model import Family
from penstock.planner.realise import program_of
from penstock.trainer import memory
from penstock.trainer.clock import CudaTimer, action_timer
from penstock.trainer.comm import MAX_BLOCKS, Mesh, ProcessGroups, group_names
from penstock.trainer.recorder import CudaRecorder, make_recorder
from penstock.trainer.units.backends import CudaFlash, PlainAttention, build_backend
from penstock.trainer.worker import own_device
from tests.support.not_run import missing
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


def test_a_visit_is_timed_without_waiting_between_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting after every pass adds a launch and a wait to each, and tells the planner that short slices are slow."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    timer = action_timer(GPU)
    assert isinstance(timer, CudaTimer)
    taken = timer([functools.partial(calls.append, name) for name in "abc"])
    assert calls == ["sleep", "a", "b", "c", "synchronize"]
    assert [each.device for each in taken] == [0.0005] * 3
    assert all(0 < each.host < 1 for each in taken)


def test_messages_have_nccl_alone_and_all_ranks_can_also_meet_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    if not dist.is_nccl_available():
        missing("fakecuda", "torch is not its CUDA build: it has no settings of NCCL")
    made: list[tuple[list[int], str]] = []
    blocks: list[int | None] = []

    def new_group(ranks: list[int], backend: str, pg_options: Any) -> None:
        made.append((ranks, backend))
        blocks.append(pg_options and pg_options.config.max_ctas)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: -1)
    program = program_of(small_plan(family=Family.GPT2, pp=2, dp=2))
    ProcessGroups(GPU).open(group_names(program, Mesh(dp=2, pp=2)))
    *others, last = made
    assert last == ([0, 1, 2, 3], "cpu:gloo,cuda:nccl")
    assert {backend for _, backend in others} == {"nccl"}
    assert blocks == [MAX_BLOCKS] * 4 + [None] * 5, "only what spins next to compute is limited"
    assert [ranks for ranks, _ in others] == [[0, 1]] * 2 + [[2, 3]] * 2 + [[0, 1], [2, 3]] + [[0, 2], [1, 3]]


def test_memory_is_all_that_is_taken_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GB 72 are free: 3 are reserved by torch, of which 1 is live, and 5 are the context's and NCCL's."""
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (72, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9)
    memory.reset_peak(GPU)
    assert resets == [GPU]
    assert memory.held_bytes(GPU) == 8
    assert memory.peak_bytes(GPU) == 15
    assert (memory.tensor_bytes(GPU), memory.peak_tensor_bytes(GPU)) == (1, 9)


@pytest.mark.parametrize(
    ("has_driver", "capability", "backend"),
    [(True, (7, 5), PlainAttention), (True, (8, 0), CudaFlash), (True, (9, 0), CudaFlash), (False, None, CudaFlash)],
)
def test_flash_attention_runs_where_the_device_has_it(
    monkeypatch: pytest.MonkeyPatch, has_driver: bool, capability: tuple[int, int], backend: type
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(build_backend(GPU, torch.bfloat16, 64, 128)) is backend


def test_every_rank_has_a_device_of_its_own() -> None:
    assert [own_device(rank, 2) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(UserError, match=r"rank 2 has no device of its own: 2 can be seen(.|\n)*remedy"):
        own_device(2, 2)
