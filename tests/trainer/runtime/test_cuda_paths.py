"""Process groups and devices of CUDA ranks. What torch itself does there is tested in `tests/trainer/cuda`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.core.errors import UserError
from penstock.core.mesh import Mesh
from penstock.core.model import Family
from penstock.planner.compile import program_of
from penstock.trainer.comm import MAX_BLOCKS, ProcessGroups, group_names
from penstock.trainer.worker import own_device
from tests.support.not_run import missing
from tests.support.small_plans import small_plan

GPU = torch.device("cuda", 0)


def test_messages_use_only_nccl_and_all_ranks_share_a_host_group(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_ranks_have_separate_devices() -> None:
    assert [own_device(rank, 2) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(UserError, match=r"rank 2 has no device of its own: 2 are visible(.|\n)*remedy"):
        own_device(2, 2)
