"""Which checkpoint a run goes on from: the newest that is whole. All ranks decide alike; the first one cleans up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from penstock.core.errors import RunError, UserError
from penstock.core.model import ModelSpec
from penstock.trainer.checkpoint import MANIFEST, CorruptError, Tensors, find_checkpoints, load, set_aside
from penstock.trainer.checkpoint_shards import HeldShard
from penstock.trainer.collectives import FailedError, gather, rank_in, together

MOST_VANISHED = 10
"""Checkpoints that may vanish while they are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A model that has taken ``step`` steps; ``corrupt`` names newer checkpoints that were passed over, and why."""

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
    """Fill ``tensors``, which are whole or those of a ``shard``, from the newest whole checkpoint below ``root``; none
    if there is no checkpoint at all.

    All ranks of ``group`` call it together. Corrupt ones are passed over, and set aside once a whole one is found. One
    that vanishes meanwhile is not corrupt: an earlier attempt that still lives removes it for one that is newer.

    Raises:
        UserError: there are checkpoints and none is whole, or one is of another model.
        RunError: a corrupt one cannot be set aside, or they vanish again and again.
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
    if num_vanished:  # the tensors may hold half of one
        raise RunError(f"checkpoints in {root} vanish while they are read: another attempt works there")
    if corrupt:
        raise _none_is_whole(root, tuple(corrupt.values()))
    return None


def _newest(root: Path, passed_over: Collection[Path], group: dist.ProcessGroup | None) -> Path | None:
    """As the first rank sees it; hosts that share a folder may see changes at different times."""
    folders = (checkpoint.folder for checkpoint in find_checkpoints(root))
    newest, *_ = gather(next((folder for folder in folders if folder not in passed_over), None), group)
    return newest


def _is_there(folder: Path, group: dist.ProcessGroup | None) -> bool:
    exists, *_ = gather((folder / MANIFEST).exists(), group)
    return exists


def _set_aside(folders: Sequence[Path], group: dist.ProcessGroup | None) -> None:
    """They would count among those that are kept, and for the newest."""

    def act() -> None:
        for folder in folders if rank_in(group) == 0 else ():
            set_aside(folder)

    try:
        together(act, group)
    except FailedError as error:
        raise RunError(f"a corrupt checkpoint cannot be set aside: {error}") from None


def _none_is_whole(root: Path, corrupt: Sequence[str]) -> UserError:
    return UserError(
        what=f"none is whole: {'; '.join(corrupt)}",
        where=f"checkpoints in {root}",
        remedy=f"put a whole one back, or remove {root}, and resume: without checkpoints the run begins anew",
    )
