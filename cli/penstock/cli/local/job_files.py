"""Reads jobs for this machine, with every reference resolved.

After reading, a job is self-contained: relative paths, which refer to the manifest's folder, are absolute; a schedule
file is part of the manifest; and a vocabulary size that only the tokenizer's file has is filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.manifests import Warn, part, read_resolved, with_absolute_path, with_absolute_schedule
from penstock.core.job import PipelineJob

_PATHS = (("data", "source"), ("data", "tokenizer", "file"), ("checkpoint", "resumeFrom"))


def read_job(path: Path, warn: Warn) -> PipelineJob:
    """Read the job in ``path``; ``warn`` gets notes about dropped parts of an imported schedule.

    Raises:
        UserError: the file cannot be read, or a field is invalid.
    """
    return read_resolved(path, warn, _resolved)


def _resolved(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``spec`` with absolute paths and, if only a tokenizer's file has it, the vocabulary size."""
    resolved = with_absolute_schedule(spec, folder)
    for keys in _PATHS:
        resolved = with_absolute_path(resolved, keys, folder)
    return _with_vocab(resolved)


def _with_vocab(spec: dict[str, Any]) -> dict[str, Any]:
    model, file = part(spec, ["model"]), part(spec, ["data", "tokenizer"]).get("file")
    if not model or "vocab" in model or not isinstance(file, str) or "://" in file:
        return spec
    from penstock.trainer.data.tokenizer import load_tokenizer

    return {**spec, "model": {**model, "vocab": load_tokenizer(Path(file)).vocab}}
