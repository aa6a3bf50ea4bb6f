"""What is built is built once, from what is pinned."""

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

each_part = pytest.mark.parametrize("part", build.PARTS, ids=lambda part: part.name)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache.folder().mkdir(parents=True)
    return cache.folder()


@given(st.lists(st.text(), min_size=1), st.lists(st.text(), min_size=1))
def test_keys_differ_with_the_parts(one: list[str], other: list[str]) -> None:
    """Also where the parts are the same text, cut at another place."""
    assert (cache.key_of(*one) == cache.key_of(*other)) == (one == other)


def test_a_part_is_made_once(folder: Path) -> None:
    made = []

    def make(target: Path) -> None:
        made.append(target)
        (target / "program").write_text("1")

    one = cache.kept("part", "key", make)
    assert cache.kept("part", "key", make) == one == folder / "part-key"
    assert cache.kept("part", "other", make) != one
    assert len(made) == 2


def test_a_part_that_fails_leaves_nothing(folder: Path) -> None:
    def make(target: Path) -> None:
        (target / "half").write_text("")
        raise LabError("no")

    with pytest.raises(LabError, match="no"):
        cache.kept("part", "key", make)
    assert list(folder.iterdir()) == []


def test_who_builds_is_alone_and_finds_nothing_half_built(folder: Path) -> None:
    (folder / "partial-1").mkdir()
    with cache.locked():
        assert not (folder / "partial-1").exists()
        with (folder / "lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Modules


@each_part
def test_a_module_pins_itself_and_what_it_needs(part: build.Part) -> None:
    sums = (part.folder / "go.sum").read_text()
    assert f"{part.module} {part.version} h1:" in sums
    assert f"module penstock.dev/lab/{part.name}\n" in (part.folder / "go.mod").read_text()


@each_part
def test_a_module_builds_what_is_asked_of_it(part: build.Part) -> None:
    text = (part.folder / "go.mod").read_text()
    for package in part.programs.values():
        assert (part.folder / package).is_dir() if package.startswith(".") else f"tool {package}\n" in text


def test_all_modules_are_one_workspace() -> None:
    """Or what they share is compiled for each of them, and Kueue takes as long as Kubernetes."""
    used = re.findall(r"^\t\./(\S+)$", (build.MODULES / "go.work").read_text(), re.MULTILINE)
    assert used == sorted(part.name for part in build.PARTS)
    assert build.go_environ()["GOWORK"] == str(build.MODULES / "go.work")


def test_parts_of_kubernetes_have_one_version() -> None:
    replaced = re.findall(r"=> k8s.io/\S+ (\S+)", (build.KUBERNETES.folder / "go.mod").read_text())
    assert len(replaced) == 33
    assert {version.replace("v0.", "v1.", 1) for version in replaced} == {build.KUBERNETES.version}


def test_a_module_that_is_not_required_has_no_version() -> None:
    with pytest.raises(LabError, match=r"requires no example\.org/x"):
        build.pinned("require example.org/xy v1.0.0\n", "example.org/x")


def test_a_part_is_built_anew_when_its_module_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.KWOK.key
    shutil.copytree(build.MODULES, tmp_path / "go")
    monkeypatch.setattr(build, "MODULES", tmp_path / "go")
    assert build.KWOK.key == before
    with (tmp_path / "go" / "kwok" / "go.sum").open("a") as file:
        file.write("another\n")
    assert build.KWOK.key != before
    assert dataclasses.replace(build.HELM, image="a:1").key != build.HELM.key
    assert dataclasses.replace(build.HELM, minutes=9).key == build.HELM.key


def test_programs_are_told_their_version() -> None:
    flags = build.version_flags("v1.36.3")
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags
    assert "-X k8s.io/client-go/pkg/version.gitMinor=36" in flags


def test_charts_are_told_the_image_that_is_built() -> None:
    jobset, kueue = addons.jobset_values()["image"], addons.kueue_values()["controllerManager"]["manager"]["image"]
    for part, values in ((build.JOBSET, jobset), (build.KUEUE, kueue)):
        assert f"{values['repository']}:{values['tag']}" == build.image_name(part)
        assert values["pullPolicy"] == "IfNotPresent"


# What a machine has to offer


@pytest.mark.parametrize(("text", "found"), [("go1.26.8\n", (1, 26)), ("go1.9", (1, 9)), ("devel", (0, 0))])
def test_go_s_versions_are_numbers(text: str, found: tuple[int, int]) -> None:
    assert toolchain.version(text) == found


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A proxy for modules, its address and folder."""
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


def released(folder: Path) -> Path:
    """An archive of Go as the proxy has them, its one program a script."""
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
    monkeypatch.setattr(toolchain, "PLACES", ())


@pytest.mark.usefixtures("without_go")
def test_go_is_fetched_where_it_is_missing(proxy: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    archive = released(proxy[1])
    monkeypatch.setenv("GOPROXY", f"{proxy[0]}/,direct")
    monkeypatch.setitem(toolchain.SUMS, architecture(), cache.digest(archive))
    found = toolchain.go()
    assert found.stat().st_mode & 0o111
    assert (found.parents[1] / "pkg" / "tool" / "linux" / "compile").stat().st_mode & 0o111
    archive.unlink()
    assert toolchain.go() == found


@pytest.mark.usefixtures("without_go")
def test_go_that_is_not_what_was_released_is_refused(
    proxy: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    released(proxy[1])
    monkeypatch.setenv("GOPROXY", proxy[0])
    with pytest.raises(LabError, match="is not what was released"):
        toolchain.go()
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("without_go")
def test_go_that_cannot_be_fetched_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPROXY", "http://127.0.0.1:1")
    with pytest.raises(LabError, match=r"or install Go from https://go\.dev/dl"):
        toolchain.go()
    monkeypatch.setattr(toolchain, "SUMS", {})
    with pytest.raises(LabError, match=r"Go 1\.26 or newer is missing: install it"):
        toolchain.go()


def test_modules_come_from_go_s_proxy_unless_another_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("", "off", "direct"):
        monkeypatch.setenv("GOPROXY", said)
        assert toolchain.proxy() == "https://proxy.golang.org"


def test_missing_packages_are_one_line_for_who_may_not_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "NEEDED", {"sh": "dash", "no-such-program": "b", "/no/such/file": "a"})
    assert packages.missing() == ["a", "b"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"sudo apt-get install --yes --no-install-recommends a b$"):
        packages.require()
