"""Each part is built once, from pinned versions."""

from __future__ import annotations

import dataclasses
import fcntl
import http.server
import os
import re
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.lab import addons, build, cache, packages, toolchain
from tools.lab.console import LabError
from tools.lab.images import architecture

for_every_part = pytest.mark.parametrize("part", build.PARTS, ids=lambda part: part.name)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache.folder().mkdir(parents=True)
    return cache.folder()


@given(st.lists(st.text(), min_size=1), st.lists(st.text(), min_size=1))
def test_keys_differ_with_the_parts(one: list[str], other: list[str]) -> None:
    """Keys also differ if the parts have the same concatenation."""
    assert (cache.key_of(*one) == cache.key_of(*other)) == (one == other)


def test_a_part_is_built_once(folder: Path) -> None:
    builds = []

    def build_part(target: Path) -> None:
        builds.append(target)
        (target / "program").write_text("1")

    first = cache.get_or_build("part", "key", build_part)
    assert cache.get_or_build("part", "key", build_part) == first == folder / "part-key"
    assert cache.get_or_build("part", "other", build_part) != first
    assert len(builds) == 2


def test_a_failed_build_leaves_no_files(folder: Path) -> None:
    def build_part(target: Path) -> None:
        (target / "partial").write_text("")
        raise LabError("no")

    with pytest.raises(LabError, match="no"):
        cache.get_or_build("part", "key", build_part)
    assert list(folder.iterdir()) == []


def test_the_lock_is_exclusive_and_removes_partial_builds(folder: Path) -> None:
    (folder / "partial-1").mkdir()
    with cache.locked():
        assert not (folder / "partial-1").exists()
        with (folder / "lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Modules


@for_every_part
def test_a_module_pins_its_version_and_checksum(part: build.Part) -> None:
    sums = (part.folder / "go.sum").read_text()
    assert f"{part.module} {part.version} h1:" in sums
    assert f"module penstock.dev/lab/{part.name}\n" in (part.folder / "go.mod").read_text()


@for_every_part
def test_a_module_has_the_packages_of_its_programs(part: build.Part) -> None:
    text = (part.folder / "go.mod").read_text()
    for package in part.programs.values():
        assert (part.folder / package).is_dir() if package.startswith(".") else f"tool {package}\n" in text


def test_all_modules_are_one_workspace() -> None:
    """Otherwise shared dependencies would be compiled once per module, and Kueue would take as long as Kubernetes."""
    used = re.findall(r"^\t\./(\S+)$", (build.MODULES / "go.work").read_text(), re.MULTILINE)
    assert used == sorted(part.name for part in build.PARTS)
    assert build.go_environ()["GOWORK"] == str(build.MODULES / "go.work")


def test_all_libraries_of_kubernetes_have_its_version() -> None:
    replaced = re.findall(r"=> k8s.io/\S+ (\S+)", (build.KUBERNETES.folder / "go.mod").read_text())
    assert len(replaced) == 33
    assert {version.replace("v0.", "v1.", 1) for version in replaced} == {build.KUBERNETES.version}


def test_the_version_of_a_module_that_is_not_required_is_an_error() -> None:
    with pytest.raises(LabError, match=r"does not require example\.org/x"):
        build.pinned("require example.org/xy v1.0.0\n", "example.org/x")


def test_a_part_is_rebuilt_when_its_module_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.KWOK.key
    shutil.copytree(build.MODULES, tmp_path / "go")
    monkeypatch.setattr(build, "MODULES", tmp_path / "go")
    assert build.KWOK.key == before
    with (tmp_path / "go" / "kwok" / "go.sum").open("a") as file:
        file.write("another\n")
    assert build.KWOK.key != before
    assert dataclasses.replace(build.HELM, image="a:1").key != build.HELM.key
    assert dataclasses.replace(build.HELM, minutes=9).key == build.HELM.key


def test_programs_are_linked_with_their_version() -> None:
    flags = build.version_flags("v1.36.3")
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags
    assert "-X k8s.io/client-go/pkg/version.gitMinor=36" in flags


def test_charts_use_the_image_that_is_built() -> None:
    jobset, kueue = addons.jobset_values()["image"], addons.kueue_values()["controllerManager"]["manager"]["image"]
    for part, values in ((build.JOBSET, jobset), (build.KUEUE, kueue)):
        assert f"{values['repository']}:{values['tag']}" == build.image_name(part)
        assert values["pullPolicy"] == "IfNotPresent"


# Requirements of the host


@pytest.mark.parametrize(("text", "version"), [("go1.26.8\n", (1, 26)), ("go1.9", (1, 9)), ("devel", (0, 0))])
def test_versions_of_go_are_parsed(text: str, version: tuple[int, int]) -> None:
    assert toolchain.version(text) == version


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Start a module proxy and return its URL and the folder that it serves."""
    served = tmp_path / "served"
    served.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(served))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", served
        server.shutdown()
        thread.join()


def write_release(folder: Path) -> Path:
    """Write an archive of Go as the proxy serves it, with scripts as programs."""
    name = f"v0.0.1-go{toolchain.VERSION}.linux-{architecture()}"
    path = folder / "golang.org" / "toolchain" / "@v" / f"{name}.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file in ("bin/go", "pkg/tool/linux/compile", "src/a.go"):
            archive.writestr(f"golang.org/toolchain@{name}/{file}", "#!/bin/sh\necho go1.26.8\n")
    return path


@pytest.fixture
def without_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(toolchain, "PATHS", ())


@pytest.mark.usefixtures("without_go")
def test_go_is_downloaded_if_it_is_not_installed(proxy: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_release(proxy[1])
    monkeypatch.setenv("GOPROXY", f"{proxy[0]}/,direct")
    monkeypatch.setitem(toolchain.SUMS, architecture(), cache.digest(archive))
    program = toolchain.go()
    assert program.stat().st_mode & 0o111
    assert (program.parents[1] / "pkg" / "tool" / "linux" / "compile").stat().st_mode & 0o111
    archive.unlink()
    assert toolchain.go() == program


@pytest.mark.usefixtures("without_go")
def test_a_download_of_go_with_a_wrong_checksum_is_refused(
    proxy: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    write_release(proxy[1])
    monkeypatch.setenv("GOPROXY", proxy[0])
    with pytest.raises(LabError, match=r"the downloaded Go \S+ has the SHA-256"):
        toolchain.go()
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("without_go")
def test_the_user_is_asked_to_install_go_if_it_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPROXY", "http://127.0.0.1:1")
    with pytest.raises(LabError, match=r"or install Go from https://go\.dev/dl"):
        toolchain.go()
    monkeypatch.setattr(toolchain, "SUMS", {})
    with pytest.raises(LabError, match=r"Go 1\.26 or newer is missing: install it"):
        toolchain.go()


def test_modules_come_from_the_default_proxy_unless_goproxy_has_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "off", "direct"):
        monkeypatch.setenv("GOPROXY", value)
        assert toolchain.proxy() == "https://proxy.golang.org"


def test_missing_packages_are_one_command_for_users_other_than_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "NEEDED", {"sh": "dash", "no-such-program": "b", "/no/such/file": "a"})
    assert packages.missing() == ["a", "b"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"sudo apt-get install --yes --no-install-recommends a b$"):
        packages.require()
