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
from penstock.core.layout import Parameter, Precision, declared_parameters
from penstock.core.mesh import Mesh
from penstock.core.model import ModelSpec
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.sharding import Piece
from penstock.trainer import checkpoint
from penstock.trainer.checkpoint import Tensors
from penstock.trainer.checkpoint_shards import Held, HeldShard
from penstock.trainer.comm import everyone
from penstock.trainer.resume import Restored, load_newest
from penstock.trainer.stages import stage_numbers
from tests.support.worker_pool import PoolRank

PARTS = ("weights", "exp_avg", "exp_avg_sq")

Loaded = dict[str, dict[str, npt.NDArray[np.float32]]]


def stored_value(part: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """What every checkpoint of these tests holds under a name."""
    key = hashlib.sha256(f"{part}/{name}".encode()).digest()[:6]
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(key, "little")))


def shard_of(model: ModelSpec, stages: list[tuple[int, int]], tp: int = 1, shard: int = 0) -> HeldShard:
    """What a shard holds of the tensors of some stages."""
    declared: dict[str, Parameter] = {}
    for stage in stages:
        declared = {**declared_parameters(model, *stage), **declared}
    return HeldShard(declared, tp, shard)


def stored_tensors(
    model: ModelSpec, stages: list[tuple[int, int]], tp: int = 1, shard: int = 0, kinds: tuple[str, ...] = PARTS
) -> dict[str, dict[str, Tensor]]:
    """The tensors of some stages as a checkpoint holds them, or as one shard holds them in its memory."""
    declared = shard_of(model, stages).declared
    return {
        kind: {name: cut(own, stored_value(kind, name, own.shape), tp, shard) for name, own in declared.items()}
        for kind in kinds
    }


def cut(parameter: Parameter, value: Tensor, tp: int, shard: int) -> Tensor:
    """A shard's own tensor, out of the whole one."""
    pieces = [value.narrow(parameter.axis, piece.start, piece.size) for piece in parameter.pieces(tp, shard)]
    return torch.cat(pieces, parameter.axis)


class AllShards(HeldShard):
    """One process that writes, of whole tensors, what every shard of ``tp`` owns: its files are as theirs would be."""

    def held(self, name: str, tensor: Tensor) -> Held:
        """Every owned piece, one shard's after the other's."""
        parameter = self.declared[name]
        shards = (HeldShard(self.declared, self.tp, shard) for shard in range(self.tp))
        parts = (shard.held(name, cut(parameter, tensor, self.tp, shard.shard)) for shard in shards)
        written = [owned for part in parts for owned in part.owned()]
        memory = torch.cat([values.reshape(box.chunk(parameter.shape)[1]) for box, values in written], parameter.axis)
        lines = [(box.rows, box.columns)[parameter.axis] for box, _ in written]
        return Held(
            memory, parameter.shape, parameter.axis, tuple(Piece(each.start, each.stop, True) for each in lines)
        )


def save_divided(root: Path, model: ModelSpec, tp: int, kinds: tuple[str, ...] = PARTS) -> Path:
    """The checkpoint of step 5 that ``tp`` shards of a whole model write; its folder."""
    whole = [(0, model.num_units)]
    tensors, shards = stored_tensors(model, whole, kinds=kinds), shard_of(model, whole, tp)
    everything = AllShards(shards.declared, tp, 0)
    return checkpoint.save(root, 1, 5, tensors, model, Precision.FP32, keep=1, shard=everything).folder


def blank(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """The same places with nothing in them."""
    return {part: {name: torch.full_like(t, torch.nan) for name, t in named.items()} for part, named in tensors.items()}


def spoil(path: Path) -> None:
    """Flip a bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _mesh(plan: Plan) -> Mesh:
    return Mesh(dp=plan.dp, tp=plan.tp, pp=plan.pp)


def _own(plan: Plan, program: Program, rank: int) -> tuple[dict[str, dict[str, Tensor]], HeldShard]:
    """A rank's tensors, and what they are of the model."""
    mesh = _mesh(plan)
    stages = [plan.stages[number] for number in stage_numbers(program.ranks[mesh.pipeline_rank(rank)])]
    shard = mesh.shard(rank)
    return stored_tensors(plan.model, stages, plan.tp, shard), shard_of(plan.model, stages, plan.tp, shard)


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
    tensors, shard = _own(plan, program, me.rank)
    group = me.groups[everyone(_mesh(plan))]
    largest = limit[1] if limit is not None and limit[0] == me.rank else resource.RLIM_INFINITY
    with file_size_limit(largest):
        try:
            checkpoint.save(root, 1, step, tensors, plan.model, plan.precision, keep=keep, shard=shard, group=group)
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
    expected, shard = _own(plan, program, me.rank)
    tensors = blank(expected)
    group = me.groups[everyone(_mesh(plan))]
    manifest = checkpoint.load(folder, tensors, plan.model, shard=shard, group=group)
    equal = all(torch.equal(tensors[part][name], expected[part][name]) for part in PARTS for name in expected[part])
    return manifest.step, equal


def restore_rank(me: PoolRank, plan: Plan, program: Program, root: Path) -> tuple[Restored | None, bool]:
    """Go on from what is there; what was restored, and whether every value is the stored one."""
    expected, shard = _own(plan, program, me.rank)
    tensors = blank(expected)
    group = me.groups[everyone(_mesh(plan))]
    restored = load_newest(root, tensors, plan.model, shard=shard, group=group)
    equal = all(torch.equal(tensors[part][name], expected[part][name]) for part in PARTS for name in expected[part])
    return restored, equal


def refused_rank(me: PoolRank, plan: Plan, program: Program, folder: Path) -> str:
    """Load what cannot be loaded, and give the error."""
    tensors, shard = _own(plan, program, me.rank)
    try:
        checkpoint.load(folder, blank(tensors), plan.model, shard=shard, group=me.groups[everyone(_mesh(plan))])
    except UserError as error:
        return str(error)
    return ""
