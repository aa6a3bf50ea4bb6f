"""Checkpoints in PyTorch's distributed format, with an index of their own. A checkpoint is complete or does not exist.

    <root>/a<attempt>/step-<step>/   the tensors, their index.json, and manifest.json, which is written last

Reading a checkpoint runs no code from it (`penstock.trainer.checkpoint_index`).

A checkpoint is written to a partial folder next to its final place and renamed once every rank is done, so a folder
with the final name and a manifest is complete. An attempt writes only below its own folder. It prunes checkpoints of
other attempts only after it has committed one itself. A run with any number of stages, replicas or shards can read any
checkpoint: tensors are stored by global name, each element once.

A corrupt checkpoint is renamed so that it no longer counts as one (`penstock.trainer.resume`), and removed with the
other leftovers of earlier attempts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from penstock.core import jsontext
from penstock.core.errors import RunError, UserError
from penstock.core.layout import Precision
from penstock.core.manifest import Manifest, camel
from penstock.core.model import Family, ModelSpec
from penstock.core.profile import digest
from penstock.core.serialization.files import sync_file, sync_folder
from penstock.core.units import format_bytes
from penstock.trainer.checkpoint_index import (
    INDEX,
    IndexWriter,
    Parts,
    PiecePlanner,
    fill,
    is_plain_name,
    read_index,
    read_limited,
)
from penstock.trainer.checkpoint_shards import Held, HeldShard
from penstock.trainer.collectives import FailedError, rank_in, run_on_all_ranks, size_of

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 2**20
"""Enough for a hundred thousand ranks with a file each."""
_FOLDER = re.compile(r"^a(\d+)/step-(\d+)$")
_PARTIAL, _CORRUPT = ".partial-", ".corrupt-"

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Kind (``weights``, ``exp_avg``, ``exp_avg_sq``) -> name, global or the rank's own (`HeldShard`) -> tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile(Manifest):
    """One file of a checkpoint as it was written."""

    name: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not is_plain_name(self.name):
            raise UserError(what=f"{self.name!r} is no name of a file of a checkpoint", where="name")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest(Manifest):
    """Content of a checkpoint: the model after ``step`` steps. The file also has a digest of itself, ``sha256``."""

    step: int
    model: ModelSpec
    precision: Precision
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, order=True, slots=True)
class Checkpoint:
    """A complete checkpoint. The order is by step, then by attempt; the largest is the newest."""

    step: int
    attempt: int
    folder: Path


class CorruptError(UserError):
    """A checkpoint cannot be read, or differs from what was written."""


def find_checkpoints(root: Path) -> list[Checkpoint]:
    """The complete checkpoints below ``root``, newest first."""
    checkpoints = []
    for manifest in root.glob(f"a*/step-*/{MANIFEST}"):
        match = _FOLDER.match(manifest.parent.relative_to(root).as_posix())
        if match:
            attempt, step = map(int, match.groups())
            checkpoints.append(Checkpoint(step=step, attempt=attempt, folder=manifest.parent))
    return sorted(checkpoints, reverse=True)


# Reading


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint in ``folder``.

    Raises:
        CorruptError: the manifest is missing or differs from what was written.
        UserError: another version of penstock wrote it.
    """
    with _corrupt_if_failed(folder):
        content = _read_content(folder)
    return _interpreted(folder, content)


def _read_content(folder: Path) -> dict[str, Any]:
    """The content of the manifest file, after a check of its digest."""
    try:
        content = jsontext.load(read_limited(folder / MANIFEST, MAX_MANIFEST_BYTES))
    except OSError as error:
        raise FailedError(f"has no readable {MANIFEST} ({error.strerror})") from None
    except ValueError as error:
        raise FailedError(f"is corrupt: {MANIFEST} is no JSON ({error})") from None
    if not isinstance(content, dict) or content.pop("sha256", None) != digest(content):
        raise FailedError(f"is corrupt: {MANIFEST} is not what was written")
    return content


def _interpreted(folder: Path, content: dict[str, Any]) -> CheckpointManifest:
    try:
        return CheckpointManifest.from_manifest(content)
    except UserError as error:
        raise _unusable(folder, f"was written by another version of penstock: {error.where} {error.what}") from None


def _unusable(folder: Path, what: str, kind: type[UserError] = UserError) -> UserError:
    return kind(what=what, where=f"checkpoint {folder}", remedy="name another checkpoint, or train without one")


@contextlib.contextmanager
def _corrupt_if_failed(folder: Path) -> Iterator[None]:
    try:
        yield
    except FailedError as error:
        raise _unusable(folder, str(error), CorruptError) from None


def verify(folder: Path) -> CheckpointManifest:
    """Compare every file with the manifest and return it; raises `CorruptError` naming the first difference."""
    manifest = read_manifest(folder)
    with _corrupt_if_failed(folder):
        _check_files(folder, manifest.files)
    return manifest


def _check_files(folder: Path, files: Sequence[StoredFile]) -> None:
    for stored in files:
        path = folder / stored.name
        try:
            status = path.stat()
            is_right = stat.S_ISREG(status.st_mode) and status.st_size == stored.num_bytes
            is_same = is_right and _sha256(path) == stored.sha256
        except FileNotFoundError:
            raise FailedError(f"is corrupt: {stored.name} is missing") from None
        except OSError as error:
            raise FailedError(f"is corrupt: {stored.name} cannot be read ({error.strerror})") from None
        if not is_same:
            raise FailedError(f"is corrupt: {stored.name} is not what was written")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(
    folder: Path,
    tensors: Tensors,
    model: ModelSpec,
    *,
    shard: HeldShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> CheckpointManifest:
    """Fill ``tensors`` in place: whole tensors, or those of a ``shard``. Collective over ``group``; an error on one
    rank is raised on all ranks.

    Raises:
        CorruptError: the checkpoint differs from what was written.
        UserError: the checkpoint belongs to another ``model``, or its weights have another data type.
    """
    manifest = _verify_together(folder, group)
    _require_model(folder, manifest.model, model)
    targets = _flat(tensors, shard)
    index: dict[str, Parts] = {}
    with _corrupt_if_failed(folder):
        run_on_all_ranks(lambda: index.update(_index(folder, manifest)), group)
    try:
        run_on_all_ranks(lambda: _check_types(index, targets), group)
    except FailedError as error:
        raise _unusable(folder, str(error)) from None
    with _corrupt_if_failed(folder):
        run_on_all_ranks(lambda: _fill(folder, index, targets), group)
    return manifest


def _index(folder: Path, manifest: CheckpointManifest) -> dict[str, Parts]:
    return read_index(folder, {file.name: file.num_bytes for file in manifest.files})


def _verify_together(folder: Path, group: dist.ProcessGroup | None) -> CheckpointManifest:
    """Return the manifest that the first rank reads, after every rank has verified its share of the files."""
    with _corrupt_if_failed(folder):
        content, *_ = run_on_all_ranks(lambda: _read_content(folder) if rank_in(group) == 0 else {}, group)
    manifest = _interpreted(folder, content)
    own_files = manifest.files[rank_in(group) :: size_of(group)]
    with _corrupt_if_failed(folder):
        run_on_all_ranks(lambda: _check_files(folder, own_files), group)
    return manifest


def _require_model(folder: Path, stored: ModelSpec, expected: ModelSpec) -> None:
    """Raise `UserError` for a checkpoint of another model. A llama may differ in ``positions``, which no weight depends
    on.
    """
    for field in dataclasses.fields(ModelSpec):
        stored_value, expected_value = getattr(stored, field.name), getattr(expected, field.name)
        if stored_value != expected_value and not (field.name == "positions" and expected.family is Family.LLAMA):
            raise _unusable(
                folder, f"is of another model: its {camel(field.name)} is {stored_value}, here it is {expected_value}"
            )


def _check_types(index: Mapping[str, Parts], targets: Sequence[tuple[str, Held]]) -> None:
    """Raise `FailedError` for other shapes or types of weights. Moments of another type are converted when read."""
    for name, held in targets:
        stored, *_ = index.get(name, (None,))
        if stored is None or stored.shape != held.shape:
            raise FailedError(f"holds no {name} of shape {list(held.shape)}")
        if stored.torch_dtype != held.tensor.dtype and name.startswith("weights/"):
            raise FailedError(f"holds {name} as {stored.torch_dtype}, this run uses {held.tensor.dtype}")


def _fill(folder: Path, index: Mapping[str, Parts], targets: Sequence[tuple[str, Held]]) -> None:
    for name, held in targets:
        for stored in index[name]:
            fill(folder, stored, held)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a checkpoint by global name, in one process; raises `CorruptError` if it is corrupt."""
    manifest = verify(folder)
    with _corrupt_if_failed(folder):
        index = {name: parts for name, parts in _index(folder, manifest).items() if name.startswith("weights/")}
        weights = {name: torch.empty(part.shape, dtype=part.torch_dtype) for name, (part, *_) in index.items()}
        _fill(folder, index, [(name, Held.whole(tensor)) for name, tensor in weights.items()])
    return {name.removeprefix("weights/"): tensor for name, tensor in weights.items()}


# Writing


def save(
    root: Path,
    attempt: int,
    step: int,
    tensors: Tensors,
    model: ModelSpec,
    precision: Precision,
    *,
    keep: int,
    shard: HeldShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> Checkpoint:
    """Write a checkpoint from all ranks of ``group`` and prune old ones down to ``keep``. The ``tensors`` of a rank are
    whole, or those of a ``shard``.

    Raises `RunError` on every rank if any rank could not write; earlier checkpoints are then untouched. One cause is a
    later attempt of the job, which removes unfinished checkpoints of this one (`prune`).
    """
    folder = root / f"a{attempt}" / f"step-{step}"
    partial = folder.with_name(f"{_PARTIAL}{folder.name}")
    is_first_rank = rank_in(group) == 0
    try:
        run_on_all_ranks(lambda: _make_empty(partial) if is_first_rank else None, group)
        written = run_on_all_ranks(lambda: _write(partial, _flat(tensors, shard), group), group)
        files = tuple(file for owned in written for file in owned)
        manifest = CheckpointManifest(step=step, model=model, precision=precision, files=files)
        run_on_all_ranks(lambda: _commit(partial, folder, manifest) if is_first_rank else None, group)
    except FailedError as error:
        if is_first_rank:
            shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {step} was not written to {root}: {error}{_taken_over(root, attempt)}; "
            "earlier checkpoints are untouched"
        ) from None
    saved = Checkpoint(step=step, attempt=attempt, folder=folder)
    if is_first_rank:
        prune(root, saved, keep)
    return saved


def _taken_over(root: Path, attempt: int) -> str:
    """Part of an error message: names a later attempt, if this one lost its connection and was taken for dead."""
    latest = attempt
    with contextlib.suppress(OSError):
        latest = max((checkpoint.attempt for checkpoint in find_checkpoints(root)), default=attempt)
    return f" (attempt {latest} has taken over this job)" if latest > attempt else ""


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write(partial: Path, held: Sequence[tuple[str, Held]], group: dist.ProcessGroup | None) -> list[StoredFile]:
    """Write one rank's part of a checkpoint and describe its files."""
    writer, planner = IndexWriter(partial), PiecePlanner(held)
    try:
        _quietly(state_dict_saver.save, {}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        free = format_bytes(shutil.disk_usage(partial).free)  # torch's reason may not say that the disk is full
        raise FailedError(f"{_reason(error)} ({free} are free there)") from None
    rank = rank_in(group)
    paths = sorted(partial.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        paths.append(partial / INDEX)
    return [StoredFile(name=path.name, num_bytes=path.stat().st_size, sha256=_sha256(path)) for path in paths]


def _flat(tensors: Tensors, shard: HeldShard | None) -> list[tuple[str, Held]]:
    """The tensors by their checkpoint names. Several parts of the same tensor may occur."""
    named = [(kind, name, tensor) for kind, by_name in tensors.items() for name, tensor in by_name.items()]
    if shard is None:
        return [(f"{kind}/{name}", Held.whole(tensor)) for kind, name, tensor in named]
    return [(f"{kind}/{shard.global_name(name)}", shard.held(name, tensor)) for kind, name, tensor in named]


def _commit(partial: Path, folder: Path, manifest: CheckpointManifest) -> None:
    content = manifest.to_manifest()
    with (partial / MANIFEST).open("w") as file:
        json.dump({**content, "sha256": digest(content)}, file, indent=1)
        sync_file(file)
    sync_folder(partial)
    if folder.exists():
        _remove(folder)
    partial.rename(folder)
    for changed in (folder.parent, folder.parent.parent):
        sync_folder(changed)


def prune(root: Path, saved: Checkpoint, keep: int) -> None:
    """Keep the newest ``keep`` checkpoints; remove unfinished and corrupt ones of earlier attempts.

    ``saved`` was just committed, so checkpoints of earlier attempts may be removed, too. Those of later attempts are
    not touched. ``saved`` is never removed: an earlier attempt without a connection may still run and have reached
    later steps.
    """
    for old in find_checkpoints(root)[keep:]:
        if old.attempt <= saved.attempt and old != saved:
            _remove(old.folder)
    for earlier, prefix in itertools.product(range(saved.attempt), (_PARTIAL, _CORRUPT)):
        for leftover in root.glob(f"a{earlier}/{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def set_aside(folder: Path) -> None:
    """Rename a corrupt checkpoint, so that it no longer counts. The first checkpoint of a later attempt removes it."""
    aside = folder.with_name(f"{_CORRUPT}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _remove(folder: Path) -> None:
    """Remove the manifest first: a half-removed checkpoint must not look complete."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _reason(error: CheckpointException) -> str:
    """The exception of the first failed rank, in one line."""
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {failure}".splitlines()[0]


def _quietly(function: Callable[..., object], *arguments: object, **keywords: object) -> None:
    """Call ``function`` without torch's warning that there is no process group, which is expected here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        function(*arguments, **keywords)
