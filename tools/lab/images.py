"""Images without a registry: archives as `docker save` writes them, made from files and folders.

The same content gives the same archive, to the byte.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.lab import cache

DOMAIN = "lab.penstock.dev"
PAUSE = f"{DOMAIN}/pause:1"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    """What Go, Debian and images call the kind of this machine."""
    return MACHINES.get(platform.machine(), platform.machine())


def layer_of_files(target: Path, files: Mapping[str, Path]) -> None:
    """A layer of programs, by their paths in the image."""
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as layer:
        for name, source in sorted(files.items()):
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode = source.stat().st_size, 0o755
            with source.open("rb") as file:
                layer.addfile(info, file)


def layer_of_folder(target: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """A layer of everything below a folder that is ``wanted`` by its path in the image."""

    def kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.mtime = 0
        return info if wanted(f"/{info.name}") else None

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as layer:
        for path in sorted(folder.iterdir()):
            layer.add(path, arcname=path.name, filter=kept)


def write_image(target: Path, name: str, layer: Path, config: Mapping[str, Any]) -> None:
    """An archive of the image ``name`` with that one layer; ``config`` is what its containers start with."""
    whole = {
        "architecture": architecture(),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{cache.digest(layer)}"]},
    }
    text = json.dumps(whole, sort_keys=True).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "manifest.json", json.dumps(manifest).encode())
        _add(archive, config_name, text)
        archive.add(layer, arcname="layer.tar", filter=_undated)
    partial.rename(target)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _undated(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
