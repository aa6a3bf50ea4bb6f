"""Archives of images: their content, and that they are reproducible."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tools.lab import base_image, build
from tools.lab.console import LabError
from tools.lab.images import layer_of_files, layer_of_folder, write_image


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_bytes(b"does something")
    path.chmod(0o600)
    return path


def content(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as opened:
        files = ((member.name, opened.extractfile(member)) for member in opened.getmembers())
        return {name: file.read() for name, file in files if file is not None}


def build_image(folder: Path, program: Path, name: str = "a.example/b:1") -> Path:
    layer_of_files(folder / "layer.tar", {"/bin/program": program})
    target = folder / "image.tar"
    write_image(target, name, folder / "layer.tar", {"Entrypoint": ["/bin/program"]})
    return target


def parsed(archive: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Return manifest, configuration and layer of an archive."""
    files = content(archive)
    (manifest,) = json.loads(files["manifest.json"])
    (layer,) = manifest["Layers"]
    return manifest, json.loads(files[manifest["Config"]]), files[layer]


def test_an_archive_has_the_name_and_content_of_the_image(tmp_path: Path, program: Path) -> None:
    manifest, config, layer = parsed(build_image(tmp_path, program))
    assert manifest["RepoTags"] == ["a.example/b:1"]
    assert config["config"]["Entrypoint"] == ["/bin/program"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as opened:
        (member,) = opened.getmembers()
    assert (member.name, member.mode, member.uid, member.mtime) == ("bin/program", 0o755, 0, 0)


def test_the_configuration_is_named_by_its_digest(tmp_path: Path, program: Path) -> None:
    files = content(build_image(tmp_path, program))
    (name,) = [name for name in files if name.endswith(".json") and name != "manifest.json"]
    assert name == f"{hashlib.sha256(files[name]).hexdigest()}.json"


def test_the_same_content_gives_the_same_archive(tmp_path: Path, program: Path) -> None:
    first = build_image(tmp_path, program).read_bytes()
    program.touch()
    assert build_image(tmp_path, program).read_bytes() == first
    assert build_image(tmp_path, program, "a.example/b:2").read_bytes() != first


def test_a_failed_write_leaves_no_archive(tmp_path: Path, program: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_image(tmp_path / "image.tar", "a:1", tmp_path / "absent.tar", {})
    assert not (tmp_path / "image.tar").exists()


def test_a_layer_of_a_folder_leaves_out_excluded_paths(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("usr/bin/python3", "usr/share/doc/python/README", "proc/cpuinfo", "usr/lib/a.pyc", "tmp/scratch"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "tmp").chmod(0o1777)
    layer_of_folder(tmp_path / "layer.tar", root, base_image.is_kept)
    with tarfile.open(tmp_path / "layer.tar") as opened:
        members = {member.name: member for member in opened.getmembers()}
    assert sorted(name for name, member in members.items() if member.isfile()) == ["usr/bin/python3"]
    assert {"proc", "tmp", "usr/share/doc"} <= set(members)
    assert members["tmp"].mode == 0o1777


def test_the_base_image_has_the_running_version_of_python() -> None:
    assert base_image.IMAGE.endswith(f":{base_image.PYTHON}")
    release, mirror = base_image.suite(base_image.PYTHON)
    assert release
    assert mirror.startswith("http")
    with pytest.raises(LabError, match=r"no base image for Python 2\.7: use one of 3\.11"):
        base_image.suite("2.7")


def test_containers_mount_the_environment_and_the_repository() -> None:
    folders = base_image.mounted_folders()
    assert build.MODULES.parents[2] in folders
    assert any(Path(sys.prefix).is_relative_to(folder) for folder in folders) or sys.prefix.startswith("/usr")
    assert all(folder.is_dir() for folder in folders)
