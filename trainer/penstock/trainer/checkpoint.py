"""Checkpoints: torch's distributed format keyed by global names, complete or not there at all.

    <root>/a<attempt>/step-<step>/   the tensors, their index.json, and manifest.json, written last

Nothing in a checkpoint is run as code (`penstock.trainer.checkpoint_index`).

A checkpoint is written beside its place and renamed into it once every rank is done, so a folder of that name is whole.
An attempt writes only below its own folder and prunes other attempts' only after it has committed one itself. Any
number of stages, replicas or shards reads any checkpoint: what is stored are tensors by global name, each element once.

One that turns out corrupt is set aside under a name that is no checkpoint's (see `penstock.trainer.restoring`), and
removed like other leftovers of an earlier attempt.
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
from penstock.trainer.together import FailedError, rank_in, size_of, together

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 2**20
"""A hundred thousand ranks, with a file each."""
_FOLDER = re.compile(r"^a(\d+)/step-(\d+)$")
_PARTIAL, _CORRUPT = ".partial-", ".corrupt-"

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Kind (``weights``, ``exp_avg``, ``exp_avg_sq``) -> global name, or the rank's own (`HeldShard`) -> its tensor."""


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
    """What a checkpoint holds: the model after ``step`` steps. Its file also has a digest of itself, ``sha256``."""

    step: int
    model: ModelSpec
    precision: Precision
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, order=True, slots=True)
class Checkpoint:
    """A complete checkpoint; a later step is newer, and of equal steps the later attempt's."""

    step: int
    attempt: int
    folder: Path


class CorruptError(UserError):
    """A checkpoint is not, or cannot be read, as it was written."""


def find_checkpoints(root: Path) -> list[Checkpoint]:
    """The complete checkpoints below ``root``, newest first."""
    found = []
    for manifest in root.glob(f"a*/step-*/{MANIFEST}"):
        match = _FOLDER.match(manifest.parent.relative_to(root).as_posix())
        if match:
            attempt, step = map(int, match.groups())
            found.append(Checkpoint(step=step, attempt=attempt, folder=manifest.parent))
    return sorted(found, reverse=True)


# Reading


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        CorruptError: it is missing or not what was written.
        UserError: another version of penstock wrote it.
    """
    with _corrupt_if_failed(folder):
        content = _read_content(folder)
    return _interpreted(folder, content)


def _read_content(folder: Path) -> dict[str, Any]:
    """The manifest's plain form, as it was written."""
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
    """The manifest, after every file was compared with it; raises `CorruptError` naming the first that differs."""
    manifest = read_manifest(folder)
    with _corrupt_if_failed(folder):
        _check_files(folder, manifest.files)
    return manifest


def _check_files(folder: Path, files: Sequence[StoredFile]) -> None:
    for stored in files:
        path = folder / stored.name
        try:
            found = path.stat()
            is_right = stat.S_ISREG(found.st_mode) and found.st_size == stored.num_bytes
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
    """Fill ``tensors`` in place, which are whole or those of a ``shard``; all ranks of ``group`` call it together, and
    what it raises all of them raise.

    Raises:
        CorruptError: the checkpoint is not what was written.
        UserError: it is of another model than ``model``, or of another type of number.
    """
    manifest = _verify_together(folder, group)
    _require_model(folder, manifest.model, model)
    wanted = _flat(tensors, shard)
    index: dict[str, Parts] = {}
    with _corrupt_if_failed(folder):
        together(lambda: index.update(_index(folder, manifest)), group)
    try:
        together(lambda: _check_types(index, wanted), group)
    except FailedError as error:
        raise _unusable(folder, str(error)) from None
    with _corrupt_if_failed(folder):
        together(lambda: _fill(folder, index, wanted), group)
    return manifest


def _index(folder: Path, manifest: CheckpointManifest) -> dict[str, Parts]:
    return read_index(folder, {file.name: file.num_bytes for file in manifest.files})


def _verify_together(folder: Path, group: dist.ProcessGroup | None) -> CheckpointManifest:
    """The manifest as the first rank reads it, after each rank compared its share of the files."""
    with _corrupt_if_failed(folder):
        content, *_ = together(lambda: _read_content(folder) if rank_in(group) == 0 else {}, group)
    manifest = _interpreted(folder, content)
    own_files = manifest.files[rank_in(group) :: size_of(group)]
    with _corrupt_if_failed(folder):
        together(lambda: _check_files(folder, own_files), group)
    return manifest


def _require_model(folder: Path, stored: ModelSpec, wanted: ModelSpec) -> None:
    """Rotary positions are no part of a llama's weights: it may go on with another bound."""
    for field in dataclasses.fields(ModelSpec):
        theirs, ours = getattr(stored, field.name), getattr(wanted, field.name)
        if theirs != ours and not (field.name == "positions" and wanted.family is Family.LLAMA):
            raise _unusable(folder, f"is of another model: its {camel(field.name)} is {theirs}, here it is {ours}")


def _check_types(index: Mapping[str, Parts], wanted: Sequence[tuple[str, Held]]) -> None:
    for name, held in wanted:
        stored, *_ = index.get(name, (None,))
        if stored is None or stored.shape != held.shape:
            raise FailedError(f"holds no {name} of shape {list(held.shape)}")
        if stored.torch_dtype != held.tensor.dtype:
            raise FailedError(f"holds {name} as {stored.torch_dtype}, this run uses {held.tensor.dtype}")


def _fill(folder: Path, index: Mapping[str, Parts], wanted: Sequence[tuple[str, Held]]) -> None:
    for name, held in wanted:
        for stored in index[name]:
            fill(folder, stored, held)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint by global name, in one process; raises `CorruptError` if it is corrupt."""
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
    """Write a checkpoint from all ranks of ``group`` and prune old ones down to ``keep``. A rank's ``tensors`` are
    whole, or those of a ``shard``.

    Raises `RunError` on every rank if any rank could not write; what was there before is untouched. A later attempt of
    the job may be the reason: it removes what this one has not finished (`prune`).
    """
    folder = root / f"a{attempt}" / f"step-{step}"
    partial = folder.with_name(f"{_PARTIAL}{folder.name}")
    first = rank_in(group) == 0
    try:
        together(lambda: _make_empty(partial) if first else None, group)
        written = together(lambda: _write(partial, _flat(tensors, shard), group), group)
        files = tuple(file for owned in written for file in owned)
        manifest = CheckpointManifest(step=step, model=model, precision=precision, files=files)
        together(lambda: _commit(partial, folder, manifest) if first else None, group)
    except FailedError as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {step} was not written to {root}: {error}{_taken_over(root, attempt)}; "
            "earlier checkpoints are untouched"
        ) from None
    saved = Checkpoint(step=step, attempt=attempt, folder=folder)
    if first:
        prune(root, saved, keep)
    return saved


def _taken_over(root: Path, attempt: int) -> str:
    """That a later attempt has gone on from here, if one has; this one was cut off and taken for lost."""
    latest = attempt
    with contextlib.suppress(OSError):
        latest = max((each.attempt for each in find_checkpoints(root)), default=attempt)
    return f" (attempt {latest} has taken over this job)" if latest > attempt else ""


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write(partial: Path, held: Sequence[tuple[str, Held]], group: dist.ProcessGroup | None) -> list[StoredFile]:
    """Write one rank's part and describe its files."""
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
    """By names of the checkpoint; of one tensor there may be several parts."""
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
    """Keep the newest ``keep`` checkpoints, and nothing of what earlier attempts left unfinished or corrupt.

    ``saved`` was just committed, so those of earlier attempts than its own count as well; later attempts' are not
    touched. It stays itself, though an earlier attempt that was cut off from us may still go on and be at later steps.
    """
    for old in find_checkpoints(root)[keep:]:
        if old.attempt <= saved.attempt and old != saved:
            _remove(old.folder)
    for earlier, prefix in itertools.product(range(saved.attempt), (_PARTIAL, _CORRUPT)):
        for left in root.glob(f"a{earlier}/{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)


def set_aside(folder: Path) -> None:
    """Rename a corrupt checkpoint, so that it counts as none; a later attempt's first checkpoint has it removed."""
    aside = folder.with_name(f"{_CORRUPT}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _remove(folder: Path) -> None:
    """The manifest goes first: what is half removed must not look whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _reason(error: CheckpointException) -> str:
    """The first rank's own exception, in one line."""
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {failure}".splitlines()[0]


def _quietly(function: Callable[..., object], *arguments: object, **named: object) -> None:
    """Without torch's warning that it is alone, which is no news to the caller."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        function(*arguments, **named)
