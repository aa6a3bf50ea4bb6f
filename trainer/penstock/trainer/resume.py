"""Resumes a run from its newest complete checkpoint. All ranks take the same one, and the first rank cleans up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from penstock.core.errors import RunError, UserError
from penstock.core.model import ModelSpec
from penstock.trainer.checkpoint import MANIFEST, CorruptError, Tensors, find_checkpoints, load, set_aside
from penstock.trainer.checkpoint_shards import HeldShard
from penstock.trainer.collectives import FailedError, gather, rank_in, run_on_all_ranks

MOST_VANISHED = 10
"""After this many checkpoints that were deleted while they were read, resuming fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A model after ``step`` steps. ``corrupt`` has name and defect of every newer checkpoint that was skipped."""

    step: int
    corrupt: tuple[str, ...] = ()


def load_newest(
    root: Path,
    tensors: Tensors,
    model: ModelSpec,
    *,
    shard: HeldShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> Restored | None:
    """Fill ``tensors`` from the newest complete checkpoint below ``root``. Returns None if there is no checkpoint.

    ``tensors`` are whole tensors, or those of ``shard``. Collective over ``group``. Corrupt checkpoints are skipped,
    and set aside once a complete one is found. A checkpoint that is deleted meanwhile is not corrupt: an earlier
    attempt that still runs deletes old checkpoints when it writes a newer one.

    Raises:
        UserError: all checkpoints are corrupt, or one belongs to another model.
        RunError: a corrupt checkpoint cannot be set aside, or checkpoints were deleted while they were read and no
            complete one is left.
    """
    corrupt: dict[Path, str] = {}
    num_vanished = 0
    while num_vanished < MOST_VANISHED and (folder := _newest(root, corrupt, group)):
        try:
            step = load(folder, tensors, model, shard=shard, group=group).step
        except CorruptError as error:
            if _is_there(folder, group):
                corrupt[folder] = f"{folder.relative_to(root)} {error.what}"
            else:
                num_vanished += 1
            continue
        _set_aside(tuple(corrupt), group)
        return Restored(step=step, corrupt=tuple(corrupt.values()))
    if num_vanished:  # the tensors may hold parts of a deleted checkpoint
        raise RunError(f"checkpoints in {root} vanish while they are read: another attempt works there")
    if corrupt:
        raise _none_is_whole(root, tuple(corrupt.values()))
    return None


def _newest(root: Path, passed_over: Collection[Path], group: dist.ProcessGroup | None) -> Path | None:
    """The newest checkpoint that the first rank finds. Hosts that share a folder may observe changes late."""
    folders = (checkpoint.folder for checkpoint in find_checkpoints(root))
    newest, *_ = gather(next((folder for folder in folders if folder not in passed_over), None), group)
    return newest


def _is_there(folder: Path, group: dist.ProcessGroup | None) -> bool:
    exists, *_ = gather((folder / MANIFEST).exists(), group)
    return exists


def _set_aside(folders: Sequence[Path], group: dist.ProcessGroup | None) -> None:
    """Rename corrupt checkpoints, which would otherwise count as kept ones and as the newest."""

    def act() -> None:
        for folder in folders if rank_in(group) == 0 else ():
            set_aside(folder)

    try:
        run_on_all_ranks(act, group)
    except FailedError as error:
        raise RunError(f"a corrupt checkpoint cannot be set aside: {error}") from None


def _none_is_whole(root: Path, corrupt: Sequence[str]) -> UserError:
    return UserError(
        what=f"none is whole: {'; '.join(corrupt)}",
        where=f"checkpoints in {root}",
        remedy=f"restore a complete one, or remove {root}, and resume: without checkpoints the run starts over",
    )
