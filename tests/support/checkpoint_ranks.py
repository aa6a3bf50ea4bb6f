"""What ranks of a `tests.support.worker_pool` do with checkpoints, and the values they hold."""

from __future__ import annotations

import contextlib
import hashlib
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.errors import RunError, UserError
from penstock.core.layout import parameters
from penstock.core.model import ModelSpec
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.trainer import checkpoint
from penstock.trainer.checkpoint import Tensors
from penstock.trainer.comm import Mesh, everyone
from penstock.trainer.restoring import Restored, load_newest
from penstock.trainer.stages import stage_numbers
from tests.support.worker_pool import PoolRank

PARTS = ("weights", "exp_avg", "exp_avg_sq")

Loaded = dict[str, dict[str, npt.NDArray[np.float32]]]


def stored_value(part: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """What every checkpoint of these tests holds under a name."""
    key = hashlib.sha256(f"{part}/{name}".encode()).digest()[:6]
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(key, "little")))


def stored_tensors(model: ModelSpec, stages: list[tuple[int, int]]) -> dict[str, dict[str, Tensor]]:
    """The tensors of some stages as a checkpoint holds them."""
    declared = {
        p.name: p.shape for first, stop in stages for u in model.units[first:stop] for p in parameters(model, u)
    }
    return {part: {name: stored_value(part, name, shape) for name, shape in declared.items()} for part in PARTS}


def blank(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """The same places with nothing in them."""
    return {part: {name: torch.full_like(t, torch.nan) for name, t in named.items()} for part, named in tensors.items()}


def spoil(path: Path) -> None:
    """Flip a bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _own(plan: Plan, program: Program, rank: int) -> dict[str, dict[str, Tensor]]:
    mesh = Mesh(dp=plan.dp, pp=plan.pp)
    numbers = stage_numbers(program.ranks[mesh.pipeline_rank(rank)])
    return stored_tensors(plan.model, [plan.stages[number] for number in numbers])


def save_rank(
    me: PoolRank,
    plan: Plan,
    program: Program,
    root: Path,
    step: int,
    limit: tuple[int, int] | None = None,
    keep: int = 2,
) -> str:
    """Save as attempt 1 and give the error, if any; rank ``limit[0]`` cannot write files over ``limit[1]`` bytes."""
    tensors = _own(plan, program, me.rank)
    group = me.groups[everyone(Mesh(dp=plan.dp, pp=plan.pp))]
    largest = limit[1] if limit is not None and limit[0] == me.rank else resource.RLIM_INFINITY
    with file_size_limit(largest):
        try:
            checkpoint.save(root, 1, step, tensors, plan.model, plan.precision, keep=keep, group=group)
        except RunError as error:
            return str(error)
    return ""


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond; it stands in for a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def load_rank(me: PoolRank, plan: Plan, program: Program, folder: Path) -> tuple[int, bool]:
    """Load, and say of what step it was and whether every value is the stored one."""
    expected = _own(plan, program, me.rank)
    tensors = blank(expected)
    group = me.groups[everyone(Mesh(dp=plan.dp, pp=plan.pp))]
    manifest = checkpoint.load(folder, tensors, plan.model, group=group)
    equal = all(torch.equal(tensors[part][name], expected[part][name]) for part in PARTS for name in expected[part])
    return manifest.step, equal


def restore_rank(me: PoolRank, plan: Plan, program: Program, root: Path) -> tuple[Restored | None, bool]:
    """Go on from what is there; what was restored, and whether every value is the stored one."""
    expected = _own(plan, program, me.rank)
    tensors = blank(expected)
    group = me.groups[everyone(Mesh(dp=plan.dp, pp=plan.pp))]
    restored = load_newest(root, tensors, plan.model, group=group)
    equal = all(torch.equal(tensors[part][name], expected[part][name]) for part in PARTS for name in expected[part])
    return restored, equal


def refused_rank(me: PoolRank, plan: Plan, program: Program, folder: Path) -> str:
    """Load what cannot be loaded, and give the error."""
    tensors = blank(_own(plan, program, me.rank))
    try:
        checkpoint.load(folder, tensors, plan.model, group=me.groups[everyone(Mesh(dp=plan.dp, pp=plan.pp))])
    except UserError as error:
        return str(error)
    return ""
