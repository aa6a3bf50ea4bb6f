"""Container images without a registry: archives in the format of `docker save`, built from files and folders.

Archives are reproducible: the same content gives the same bytes.
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
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    """Return the host's architecture by the name that Go, Debian and images use."""
    return ARCHITECTURES.get(platform.machine(), platform.machine())


def layer_of_files(target: Path, files: Mapping[str, Path]) -> None:
    """Write a layer with executable files; ``files`` maps each path in the image to its source."""
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as layer:
        for name, source in sorted(files.items()):
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode = source.stat().st_size, 0o755
            with source.open("rb") as file:
                layer.addfile(info, file)


def layer_of_folder(target: Path, folder: Path, is_included: Callable[[str], bool]) -> None:
    """Write a layer with the content of a folder, as far as ``is_included`` accepts its path in the image."""

    def filtered(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.mtime = 0
        return info if is_included(f"/{info.name}") else None

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as layer:
        for path in sorted(folder.iterdir()):
            layer.add(path, arcname=path.name, filter=filtered)


def write_image(target: Path, name: str, layer: Path, config: Mapping[str, Any]) -> None:
    """Write the archive of the image ``name`` with a single layer and the container configuration ``config``."""
    image_config = {
        "architecture": architecture(),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{cache.digest(layer)}"]},
    }
    text = json.dumps(image_config, sort_keys=True).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "manifest.json", json.dumps(manifest).encode())
        _add(archive, config_name, text)
        archive.add(layer, arcname="layer.tar", filter=_without_metadata)
    partial.rename(target)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _without_metadata(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
