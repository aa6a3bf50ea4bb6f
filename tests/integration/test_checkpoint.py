"""Checkpoints written and read by real ranks: any partition reads any other's, and all ranks fail alike."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.layout import num_parameters
from penstock.core.mesh import Mesh
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.planner.compile import program_of
from penstock.trainer import checkpoint
from penstock.trainer.checkpoint import CheckpointManifest
from penstock.trainer.checkpoint_index import read_index
from tests.support.checkpoint_ranks import (
    PARTS,
    load_rank,
    refused_rank,
    restore_rank,
    save_divided,
    save_rank,
    spoil,
    stored_value,
)
from tests.support.small_plans import looped_schedule, small_plan
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")


def on_ranks(pool: WorkerPool, function: Callable[..., Any], plan: Plan, *arguments: Any) -> list[Any]:
    program = program_of(plan)
    pool.open(program, Mesh(dp=plan.dp, tp=plan.tp, pp=plan.pp))
    return pool.run(function, plan, program, *arguments, num_ranks=plan.num_ranks)


def looped_plan(family: Family) -> Plan:
    """Four stages on two ranks, so that a rank holds stages that are no neighbours."""
    schedule = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=1, num_slices=3)
    return small_plan(family=family, schedule=schedule, pp=2, num_stages=4)


def sharded_plan(family: Family, tp: int, pp: int, *, dp: int = 1) -> Plan:
    """Ranks that share their units."""
    return dataclasses.replace(small_plan(family=family, pp=pp, dp=dp), tp=tp)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("saved_by", ["pp 2", "dp 2 x pp 2", "looped", "tp 4", "dp 2 x tp 2 x pp 2"])
def test_any_partition_reads_any_other_s(
    worker_pool: WorkerPool, tmp_path: Path, family: Family, saved_by: str
) -> None:
    plans = {
        "pp 1": small_plan(family=family, pp=1),
        "pp 2": small_plan(family=family, pp=2),
        "pp 4": small_plan(family=family, pp=4),
        "dp 2 x pp 2": small_plan(family=family, pp=2, dp=2),
        "looped": looped_plan(family),
        "tp 2": sharded_plan(family, 2, 1),
        "tp 4": sharded_plan(family, 4, 1),
        "tp 4 x pp 2": sharded_plan(family, 4, 2),
        "dp 2 x tp 2 x pp 2": sharded_plan(family, 2, 2, dp=2),
    }
    assert set(on_ranks(worker_pool, save_rank, plans[saved_by], tmp_path, 7)) == {""}
    (found,) = checkpoint.find_checkpoints(tmp_path)
    for name, plan in plans.items():
        assert set(on_ranks(worker_pool, load_rank, plan, found.folder)) == {(7, True)}, name
    weights = checkpoint.read_weights(found.folder)
    assert all(
        torch.equal(tensor, stored_value("weights", name, tuple(tensor.shape))) for name, tensor in weights.items()
    )
    assert sum(tensor.numel() for tensor in weights.values()) == num_parameters(plans["pp 1"].model)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 1, 2), (1, 4, 1), (2, 4, 2)])
def test_replicas_copies_and_tied_matrices_are_written_once(
    worker_pool: WorkerPool, tmp_path: Path, family: Family, dp: int, tp: int, pp: int
) -> None:
    plan = sharded_plan(family, tp, pp, dp=dp)
    on_ranks(worker_pool, save_rank, plan, tmp_path, 1)
    folder = tmp_path / "a1" / "step-1"
    manifest = checkpoint.verify(folder)
    parts = [part for parts in read_index(folder, sizes_of(manifest)).values() for part in parts]
    num_bytes = sum(part.content_bytes for part in parts)
    assert num_bytes == len(PARTS) * num_parameters(plan.model) * torch.float32.itemsize
    assert len({(part.file, part.offset) for part in parts}) == len(parts)
    alone = save_divided(tmp_path / "alone", plan.model, tp)
    expected = read_index(alone, sizes_of(checkpoint.verify(alone)))
    assert {(part.name, part.part) for part in parts} == {
        (part.name, part.part) for parts in expected.values() for part in parts
    }


def sizes_of(manifest: CheckpointManifest) -> dict[str, int]:
    return {file.name: file.num_bytes for file in manifest.files}


def test_all_shards_go_on_from_the_same_whole_checkpoint(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """Another number of them wrote it, and the newer one is damaged where one of them looks."""
    for step in (1, 2):
        on_ranks(worker_pool, save_rank, sharded_plan(Family.LLAMA, 4, 1), tmp_path, step)
    newer = tmp_path / "a1" / "step-2"
    spoil(newer / checkpoint.read_manifest(newer).files[3].name)
    ((restored, equal),) = set(on_ranks(worker_pool, restore_rank, sharded_plan(Family.LLAMA, 2, 2), tmp_path))
    assert equal
    assert (restored.step, len(restored.corrupt)) == (1, 1)


def test_every_rank_hears_of_corruption_that_one_finds(worker_pool: WorkerPool, tmp_path: Path) -> None:
    plan = small_plan(pp=4)
    on_ranks(worker_pool, save_rank, plan, tmp_path, 1)
    folder = tmp_path / "a1" / "step-1"
    damaged = checkpoint.read_manifest(folder).files[2].name
    spoil(folder / damaged)
    (message,) = set(on_ranks(worker_pool, refused_rank, plan, folder))
    assert f"{damaged} is not what was written" in message


def test_all_ranks_go_on_from_the_same_whole_checkpoint(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """Each of the newer ones is damaged where another rank looks."""
    plan = small_plan(pp=4)
    for step in (1, 2, 3):
        on_ranks(worker_pool, save_rank, plan, tmp_path, step, None, 9)
    for step, number in ((2, 1), (3, 3)):
        folder = tmp_path / "a1" / f"step-{step}"
        spoil(folder / checkpoint.read_manifest(folder).files[number].name)
    ((restored, equal),) = set(on_ranks(worker_pool, restore_rank, plan, tmp_path))
    assert equal
    assert restored.step == 1
    assert [text.split()[0] for text in restored.corrupt] == ["a1/step-3", "a1/step-2"]
    assert [found.step for found in checkpoint.find_checkpoints(tmp_path)] == [1]


def test_every_rank_refuses_another_model(worker_pool: WorkerPool, tmp_path: Path) -> None:
    on_ranks(worker_pool, save_rank, small_plan(pp=2, layers=3), tmp_path, 1)
    (message,) = set(on_ranks(worker_pool, refused_rank, small_plan(pp=2, layers=2), tmp_path / "a1" / "step-1"))
    assert "its layers is 3, here it is 2" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_write_fails_all(worker_pool: WorkerPool, tmp_path: Path, rank: int) -> None:
    plan = small_plan(pp=2)
    on_ranks(worker_pool, save_rank, plan, tmp_path, 1)
    (message,) = set(on_ranks(worker_pool, save_rank, plan, tmp_path, 2, (rank, 2000)))
    assert "step 2 was not written" in message
    assert f"rank {rank}" in message
    only_the_first_is_there(tmp_path)
    assert set(on_ranks(worker_pool, save_rank, plan, tmp_path, 2)) == {""}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes."""
    place = tmp_path / "disk"
    place.mkdir()

    def mounted(num_bytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "penstock-test", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("NOT RUN: a full disk: mounting a small one needs root; a file limit stands in above")
        return place

    yield mounted
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_loses_no_earlier_checkpoint(
    worker_pool: WorkerPool, tmp_path: Path, mount: Callable[[int], Path]
) -> None:
    plan = small_plan(pp=2)
    on_ranks(worker_pool, save_rank, plan, tmp_path, 1)
    whole_pages = [-(-path.stat().st_size // 4096) * 4096 for path in (tmp_path / "a1" / "step-1").iterdir()]
    disk = mount(sum(whole_pages) * 3 // 2)
    assert set(on_ranks(worker_pool, save_rank, plan, disk, 1)) == {""}
    (message,) = set(on_ranks(worker_pool, save_rank, plan, disk, 2))
    assert "step 2 was not written" in message
    only_the_first_is_there(disk)
    assert set(on_ranks(worker_pool, load_rank, plan, disk / "a1" / "step-1")) == {(1, True)}


def only_the_first_is_there(root: Path) -> None:
    assert [found.step for found in checkpoint.find_checkpoints(root)] == [1]
    checkpoint.verify(root / "a1" / "step-1")
    assert [path.name for path in (root / "a1").iterdir()] == ["step-1"]
