"""The command, as far as it needs no root: arguments, messages, what it keeps about a lab, and kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import kind
from tests.support.repository import ROOT
from tools.lab import build, lab, state, volumes
from tools.lab.__main__ import parser
from tools.lab.addresses import MOST_NODES
from tools.lab.console import LabError
from tools.lab.processes import Process
from tools.lab.state import State


@pytest.fixture(autouse=True)
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No labs but the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return state.labs()


def cluster(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.lab", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def kept(labs: Path, name: str) -> State:
    rooms = {"control-plane": Process(pid=2**30, start_ticks=1), "node1": Process(pid=2**30, start_ticks=2)}
    found = State(name=name, slot=3, num_nodes=1, kubernetes="/cache/kubernetes", rooms=rooms)
    (labs / name).mkdir(parents=True)
    found.write()
    return found


def test_a_lab_is_known_by_its_folder(labs: Path) -> None:
    assert state.names() == []
    one, other = kept(labs, "one"), kept(labs, "other")
    assert state.names() == ["one", "other"]
    assert state.read("one") == one != other
    assert one.room("node1").folder == labs / "one" / "node1"
    assert one.group("node1") != other.group("node1")
    with pytest.raises(LabError, match="the lab one has no node 'node2': one of node1"):
        one.room("node2")


def test_a_lab_that_is_not_there_is_named(labs: Path) -> None:
    done = cluster("status", "--name", "absent")
    assert (done.returncode, done.stderr) == (2, "there is no lab absent: ./dev cluster up\n")


def test_what_is_dead_is_told_to_be_taken_down(labs: Path) -> None:
    kept(labs, "dead")
    done = cluster("return", "node1", "--name", "dead")
    assert (done.returncode, done.stderr) == (2, "node1 is not running: ./dev cluster down, then up\n")


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "../a", "a" * 33])
def test_names_that_make_no_folder_are_refused(name: str) -> None:
    with pytest.raises(LabError, match="is no name for a lab"):
        lab.Wanted(name=name)


@pytest.mark.parametrize("num_nodes", [0, MOST_NODES + 1])
def test_as_many_nodes_as_there_are_addresses(num_nodes: int) -> None:
    with pytest.raises(LabError, match=f"a lab has 1 to {MOST_NODES} nodes, not {num_nodes}"):
        lab.Wanted(num_nodes=num_nodes)


def test_only_what_is_asked_for_is_built() -> None:
    assert [part.name for part in lab.Wanted().parts] == ["kubernetes", "helm", "jobset"]
    assert lab.Wanted(kueue=True, kwok=True).parts == list(build.PARTS)


def test_only_root_makes_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for begun in (lambda: lab.up(lab.Wanted()), lambda: lab.down("penstock")):
        with pytest.raises(LabError, match=r"which only root may: sudo \./dev cluster"):
            begun()


def test_a_root_that_may_make_no_namespaces_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = programs(tmp_path / "programs", unshare="echo unshare failed: Operation not permitted >&2; exit 1")
    monkeypatch.setenv("PATH", f"{refusing}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LabError, match=r"root may not make namespaces here(.|\n)*Operation not permitted"):
        lab.up(lab.Wanted())


def test_the_help_names_every_verb() -> None:
    done = cluster("--help")
    verbs = ("build", "up", "down", "status", "kubeconfig", "shape", "cores", "kill", "return", "link", "load")
    assert done.returncode == 0
    assert all(f"    {verb} " in done.stdout for verb in verbs)


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("none", None)])
def test_cores_are_declared_or_those_of_the_machine(text: str, count: int | None) -> None:
    assert parser().parse_args(["cores", "node1", text]).count == count


@pytest.mark.parametrize("count", ["0", "-1", "1025"])
def test_a_node_cannot_offer_any_number_of_cores(labs: Path, count: str) -> None:
    kept(labs, "one")
    done = cluster("cores", "node1", "--name", "one", "--", count)
    assert (done.returncode, done.stderr) == (2, f"a node offers 1 to 1024 cores, not {count}\n")


def test_a_kubeconfig_is_found(labs: Path) -> None:
    found = kept(labs, "one")
    assert cluster("kubeconfig", "--name", "one").stdout.strip() == str(found.kubeconfig)


# Volumes


def test_every_volume_has_a_folder_and_a_class(tmp_path: Path) -> None:
    volumes.make_folders(tmp_path)
    manifests = volumes.manifests(tmp_path)
    classes = {each["metadata"]["name"] for each in manifests if each["kind"] == "StorageClass"}
    found = [each for each in manifests if each["kind"] == "PersistentVolume"]
    assert classes == {"lab-shared", "lab-local"}
    assert len({each["metadata"]["name"] for each in found}) == len(found) == 2 * volumes.VOLUMES_PER_CLASS
    assert {each["spec"]["storageClassName"] for each in found} == classes
    assert all(Path(each["spec"]["hostPath"]["path"]).stat().st_mode & 0o777 == 0o777 for each in found)
    shared = [each for each in found if each["spec"]["storageClassName"] == "lab-shared"]
    assert {tuple(each["spec"]["accessModes"]) for each in shared} == {("ReadWriteMany",)}


# Kind


def programs(folder: Path, **scripts: str) -> str:
    """A folder of programs, as a PATH."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def test_kind_is_used_where_it_is_and_docker_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"both": {"kind": "exit 0", "docker": "exit 0"}, "kind": {"kind": "exit 0"}, "docker": {"docker": "exit 0"}}
    cases["stopped"] = {"kind": "exit 0", "docker": "exit 1"}
    fit = []
    for name, scripts in cases.items():
        monkeypatch.setenv("PATH", programs(tmp_path / name, **scripts))
        fit += [name] if kind.fits() else []
    assert fit == ["both"]


def test_kind_is_asked_for_the_nodes_and_given_jobset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With programs that note what they are asked for: what kind does with it is seen where Docker runs."""
    log = tmp_path / "log"
    note = f'{{ echo "$0 $*"; cat; echo; }} >> {log}'
    path = programs(tmp_path / "programs", kind=note, helm=note, kubectl=note)
    monkeypatch.setenv("PATH", f"{path}{os.pathsep}{os.environ['PATH']}")
    kind.do(parser().parse_args(["up", "--nodes", "3", "--name", "ours"]))
    made, config, applied, objects, installed = [line for line in log.read_text().splitlines() if line]
    assert "create cluster --name ours --config -" in made
    nodes = json.loads(config)["nodes"]
    assert [node["role"] for node in nodes] == ["control-plane", *["worker"] * 3]
    shared = {"hostPath": str(kind.volumes_folder("ours")), "containerPath": "/volumes"}
    assert all(node["extraMounts"] == [shared] for node in nodes)
    assert "apply --server-side" in applied
    behind = [
        each["spec"]["hostPath"]["path"] for each in json.loads(objects)["items"] if each["kind"] == "PersistentVolume"
    ]
    assert all((kind.volumes_folder("ours") / Path(path).relative_to("/volumes")).is_dir() for path in behind)
    assert f"install jobset {kind.CHARTS['jobset']} --version 0.12.0" in installed
    assert installed.endswith(f"--kubeconfig {kind.kubeconfig('ours')}")


ONLY_OF_THE_LAB = ["shape node1 1gbit", "cores node1 4", "kill node1", "link node1 up", "build"]


@pytest.mark.parametrize("words", [words.split() for words in ONLY_OF_THE_LAB])
def test_what_only_the_lab_can_is_refused_by_kind(words: list[str]) -> None:
    with pytest.raises(LabError, match=f"{words[0]} needs the lab"):
        kind.do(parser().parse_args(words))
