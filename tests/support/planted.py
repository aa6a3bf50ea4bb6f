"""Checkpoints as somebody else may hand them over: with code in them, and digests that fit."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.profile import digest
from penstock.trainer.checkpoint import MANIFEST
from tests.support.old_checkpoint import FOLDER, STEP


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


def old_copy(root: Path) -> Path:
    """The checkpoint of 16853cd as attempt 1 below ``root``."""
    folder = root / "a1" / f"step-{STEP}"
    shutil.copytree(FOLDER / "a1" / folder.name, folder)
    return folder


def plant(folder: Path, marker: Path) -> None:
    """Code in place of the metadata of an old checkpoint."""
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(marker)))
    seal(folder)


def seal(folder: Path) -> None:
    """Make the manifest say of every file what it is now."""
    content = json.loads((folder / MANIFEST).read_text())
    names = [file["name"] for file in content["files"]]
    rewrite(folder, {"files": [described(folder, name) for name in names]})


def described(folder: Path, name: str) -> dict[str, object]:
    """A file as a manifest lists it."""
    content = (folder / name).read_bytes()
    return {"name": name, "numBytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def rewrite(folder: Path, changes: Mapping[str, object]) -> None:
    """Change the manifest, and let its digest fit."""
    content = {**json.loads((folder / MANIFEST).read_text()), **changes}
    content.pop("sha256")
    (folder / MANIFEST).write_text(json.dumps({**content, "sha256": digest(content)}))
