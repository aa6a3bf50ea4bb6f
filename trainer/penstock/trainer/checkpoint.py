"""Checkpoints: torch's distributed format keyed by global names, complete or not there at all.

    <root>/a<attempt>/step-<step>/   the tensors, and manifest.json, written last

A checkpoint is written beside its place and renamed into it once every rank is done, so a folder of that name is whole.
An attempt writes only below its own folder and prunes other attempts' only after it has committed one itself. Any
number of stages or replicas reads any checkpoint: what is stored are tensors by global name, each once.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.core.errors import RunError, UserError
from penstock.core.layout import Precision
from penstock.core.manifest import Manifest
from penstock.core.model import ModelSpec

T = TypeVar("T")

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"^a(\d+)/step-(\d+)$")

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Part (``weights``, ``exp_avg``, ``exp_avg_sq``) -> global name -> this rank's tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile(Manifest):
    """One file of a checkpoint as it was written."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest(Manifest):
    """What a checkpoint holds: the model after ``step`` steps."""

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


def find_checkpoints(root: Path) -> list[Checkpoint]:
    """The complete checkpoints below ``root``, newest first."""
    found = []
    for manifest in root.glob(f"a*/step-*/{MANIFEST}"):
        match = _FOLDER.match(manifest.parent.relative_to(root).as_posix())
        if match:
            attempt, step = map(int, match.groups())
            found.append(Checkpoint(step=step, attempt=attempt, folder=manifest.parent))
    return sorted(found, reverse=True)


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of the checkpoint in ``folder``; raises `UserError` if it is missing or not one."""
    try:
        return CheckpointManifest.from_manifest(json.loads((folder / MANIFEST).read_text()))
    except OSError as error:
        raise _corrupt(folder, f"has no readable {MANIFEST} ({error.strerror})") from None
    except (ValueError, UserError) as error:
        raise _corrupt(folder, f"has a broken {MANIFEST}: {error}") from None


def _corrupt(folder: Path, what: str) -> UserError:
    return UserError(what=what, where=f"checkpoint {folder}", remedy="resume from another checkpoint, or start anew")


def verify(folder: Path) -> CheckpointManifest:
    """The manifest, after every file was compared with it; raises `UserError` naming the first that differs."""
    manifest = read_manifest(folder)
    for stored in manifest.files:
        path = folder / stored.name
        if not path.is_file():
            raise _corrupt(folder, f"lacks {stored.name}")
        if path.stat().st_size != stored.num_bytes or _sha256(path) != stored.sha256:
            raise _corrupt(folder, f"is corrupt: {stored.name} is not what was written")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(
    root: Path,
    attempt: int,
    step: int,
    tensors: Tensors,
    model: ModelSpec,
    precision: Precision,
    *,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Checkpoint:
    """Write a checkpoint from all ranks of ``group`` and prune old ones down to ``keep``.

    Raises `RunError` on every rank if any rank could not write; what was there before is untouched.
    """
    folder = root / f"a{attempt}" / f"step-{step}"
    partial = folder.with_name(f".partial-{folder.name}")
    if _first(group):
        shutil.rmtree(partial, ignore_errors=True)
    _barrier(group)
    problem = _write(partial, tensors, group)
    stored = _gather((problem, _own_files(partial, group)), group)
    problems = [each for each, _ in stored if each]
    if not problems and _first(group):
        files = tuple(file for _, owned in stored for file in owned)
        manifest = CheckpointManifest(step=step, model=model, precision=precision, files=files)
        problems = _commit(partial, folder, manifest)
    (problems,) = _gather(problems, group)[:1]
    if problems:
        if _first(group):
            shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"checkpoint of step {step} was not written: {problems[0]}; earlier checkpoints are untouched")
    if _first(group):
        prune(root, attempt, keep)
    return Checkpoint(step=step, attempt=attempt, folder=folder)


def _write(partial: Path, tensors: Tensors, group: dist.ProcessGroup | None) -> str:
    try:
        partial.mkdir(parents=True, exist_ok=True)
        state_dict_saver.save(
            _flat(tensors), checkpoint_id=partial, process_group=group, no_dist=not dist.is_initialized()
        )
    except CheckpointException as error:
        return _reason(error)
    except OSError as error:
        return str(error)
    return ""


def _reason(error: CheckpointException) -> str:
    """The first rank's own exception in one line."""
    for rank, (failure, _) in sorted(error.failures.items()):
        return f"rank {rank}: {failure}".splitlines()[0]
    return str(error).splitlines()[0]


def _flat(tensors: Tensors) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for part, named in tensors.items() for name, tensor in named.items()}


def _own_files(partial: Path, group: dist.ProcessGroup | None) -> tuple[StoredFile, ...]:
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    names = sorted(partial.glob(f"__{rank}_*.distcp")) + ([partial / ".metadata"] if rank == 0 else [])
    return tuple(
        StoredFile(name=path.name, num_bytes=path.stat().st_size, sha256=_sha256(path))
        for path in names
        if path.is_file()
    )


def _commit(partial: Path, folder: Path, manifest: CheckpointManifest) -> list[str]:
    try:
        (partial / MANIFEST).write_text(json.dumps(manifest.to_manifest(), indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        return [str(error)]
    return []


def prune(root: Path, attempt: int, keep: int) -> None:
    """Keep the newest ``keep`` checkpoints. ``attempt`` has committed one, so older attempts' count as well."""
    for old in find_checkpoints(root)[keep:]:
        if old.attempt <= attempt:
            shutil.rmtree(old.folder, ignore_errors=True)


def load(folder: Path, tensors: Tensors, *, group: dist.ProcessGroup | None = None) -> CheckpointManifest:
    """Fill ``tensors`` in place from the checkpoint; raises `UserError` if it is corrupt or of another model."""
    manifest = verify(folder)
    wanted = _flat(tensors)
    _compare(folder, wanted)
    try:
        state_dict_loader.load(
            dict(wanted), checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized()
        )
    except CheckpointException as error:
        raise _corrupt(folder, f"cannot be read: {_reason(error)}") from None
    return manifest


def _compare(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    """Names, shapes and types; torch itself would cast a wrong type silently."""
    metadata = FileSystemReader(folder).read_metadata()
    for name, tensor in wanted.items():
        stored = metadata.state_dict_metadata.get(name)
        if stored is None:
            raise _corrupt(folder, f"holds no {name}")
        if not isinstance(stored, TensorStorageMetadata) or stored.size != tensor.size():
            raise _corrupt(folder, f"holds {name} in another shape: it is of another model")
        if stored.properties.dtype != tensor.dtype:
            raise _corrupt(folder, f"holds {name} as {stored.properties.dtype}, this run uses {tensor.dtype}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint by global name, on one process, for export and generation."""
    verify(folder)
    metadata = FileSystemReader(folder).read_metadata()
    weights = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if name.startswith("weights/") and isinstance(stored, TensorStorageMetadata)
    }
    state_dict_loader.load(dict(weights), checkpoint_id=folder, no_dist=True)
    return {name.removeprefix("weights/"): tensor for name, tensor in weights.items()}


def _first(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered
