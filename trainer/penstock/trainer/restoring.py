"""Which checkpoint a run goes on from: the newest that is whole. All ranks decide alike; the first one cleans up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from penstock.core.errors import RunError, UserError
from penstock.core.model import ModelSpec
from penstock.trainer.checkpoint import CorruptError, Tensors, find_checkpoints, load, set_aside
from penstock.trainer.together import FailedError, gather, rank_in, together


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A model that has taken ``step`` steps; ``corrupt`` names newer checkpoints that were passed over, and why."""

    step: int
    corrupt: tuple[str, ...] = ()


def load_newest(
    root: Path, tensors: Tensors, model: ModelSpec, *, group: dist.ProcessGroup | None = None
) -> Restored | None:
    """Fill ``tensors`` from the newest whole checkpoint below ``root``; none if there is no checkpoint at all.

    All ranks of ``group`` call it together. Corrupt ones are passed over, and set aside once a whole one is found.

    Raises:
        UserError: there are checkpoints and none is whole, or one is of another model.
        RunError: a corrupt one cannot be set aside.
    """
    corrupt: dict[Path, str] = {}
    found, *_ = gather(find_checkpoints(root), group)  # what the first rank sees
    for folder in (each.folder for each in found):
        try:
            step = load(folder, tensors, model, group=group).step
        except CorruptError as error:
            corrupt[folder] = f"{folder.relative_to(root)} {error.what}"
            continue
        _set_aside(tuple(corrupt), group)
        return Restored(step=step, corrupt=tuple(corrupt.values()))
    if corrupt:
        raise _none_is_whole(root, tuple(corrupt.values()))
    return None


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
