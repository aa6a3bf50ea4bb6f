"""`./dev cluster` as far as it needs no root: arguments, messages, the state of labs, volumes, and kind."""

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
from tools.lab.addresses import MAX_NODES
from tools.lab.console import LabError
from tools.lab.processes import Process
from tools.lab.state import State


@pytest.fixture(autouse=True)
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test an empty folder of labs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return state.labs()


def cluster(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.lab", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def write_state(labs: Path, name: str) -> State:
    """Write the state of a lab whose processes do not exist."""
    machines = {"control-plane": Process(pid=2**30, start_ticks=1), "node1": Process(pid=2**30, start_ticks=2)}
    lab_state = State(name=name, slot=3, num_nodes=1, kubernetes="/cache/kubernetes", machines=machines)
    (labs / name).mkdir(parents=True)
    lab_state.write()
    return lab_state


def test_the_state_of_a_lab_is_read_from_its_folder(labs: Path) -> None:
    assert state.names() == []
    one, other = write_state(labs, "one"), write_state(labs, "other")
    assert state.names() == ["one", "other"]
    assert state.read("one") == one != other
    assert one.machine("node1").folder == labs / "one" / "node1"
    assert one.cgroup("node1") != other.cgroup("node1")
    with pytest.raises(LabError, match="the lab one has no node 'node2': use one of node1"):
        one.machine("node2")


def test_the_error_for_an_unknown_lab_has_its_name(labs: Path) -> None:
    done = cluster("status", "--name", "absent")
    assert (done.returncode, done.stderr) == (2, "there is no lab absent: start it by ./dev cluster up --name absent\n")


def test_a_lab_whose_processes_ended_has_to_be_restarted(labs: Path) -> None:
    write_state(labs, "dead")
    done = cluster("return", "node1", "--name", "dead")
    assert (done.returncode, done.stderr) == (2, "node1 is not running: ./dev cluster down, then up\n")


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "../a", "a" * 33])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(LabError, match="is not a valid name of a lab"):
        lab.Spec(name=name)


@pytest.mark.parametrize("num_nodes", [0, MAX_NODES + 1])
def test_a_number_of_nodes_beyond_the_addresses_is_refused(num_nodes: int) -> None:
    with pytest.raises(LabError, match=f"a lab has 1 to {MAX_NODES} nodes, not {num_nodes}"):
        lab.Spec(num_nodes=num_nodes)


def test_only_requested_parts_are_built() -> None:
    assert [part.name for part in lab.Spec().parts] == ["kubernetes", "helm", "jobset"]
    assert lab.Spec(kueue=True, kwok=True).parts == list(build.PARTS)


def test_only_root_starts_and_stops_labs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for call in (lambda: lab.up(lab.Spec()), lambda: lab.down("penstock")):
        with pytest.raises(LabError, match=r"which needs root: sudo \./dev cluster"):
            call()


def test_an_unprivileged_root_gets_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = programs(tmp_path / "programs", unshare="echo unshare failed: Operation not permitted >&2; exit 1")
    monkeypatch.setenv("PATH", f"{failing}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LabError, match=r"root cannot create namespaces here(.|\n)*Operation not permitted"):
        lab.up(lab.Spec())


def test_the_help_lists_every_verb() -> None:
    done = cluster("--help")
    verbs = ("build", "up", "down", "status", "kubeconfig", "shape", "cores", "kill", "return", "link", "load")
    assert done.returncode == 0
    assert all(f"    {verb} " in done.stdout for verb in verbs)


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("none", None)])
def test_the_number_of_cores_is_a_number_or_none(text: str, count: int | None) -> None:
    assert parser().parse_args(["cores", "node1", text]).count == count


@pytest.mark.parametrize("count", ["0", "-1", "1025"])
def test_a_number_of_cores_out_of_range_is_refused(labs: Path, count: str) -> None:
    write_state(labs, "one")
    done = cluster("cores", "node1", "--name", "one", "--", count)
    assert (done.returncode, done.stderr) == (2, f"a node offers 1 to 1024 cores, not {count}\n")


def test_the_path_of_the_kubeconfig_is_printed(labs: Path) -> None:
    lab_state = write_state(labs, "one")
    assert cluster("kubeconfig", "--name", "one").stdout.strip() == str(lab_state.kubeconfig)


# Volumes


def test_every_volume_has_a_folder_and_a_class(tmp_path: Path) -> None:
    volumes.make_folders(tmp_path)
    manifests = volumes.manifests(tmp_path)
    classes = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "StorageClass"}
    names = [manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "PersistentVolume"]
    specs = [manifest["spec"] for manifest in manifests if manifest["kind"] == "PersistentVolume"]
    assert classes == {"lab-shared", "lab-local"}
    assert len(set(names)) == len(names) == 2 * volumes.VOLUMES_PER_CLASS
    assert {spec["storageClassName"] for spec in specs} == classes
    assert all(Path(spec["hostPath"]["path"]).stat().st_mode & 0o777 == 0o777 for spec in specs)
    shared = [spec for spec in specs if spec["storageClassName"] == "lab-shared"]
    assert {tuple(spec["accessModes"]) for spec in shared} == {("ReadWriteMany",)}


# Kind


def programs(folder: Path, **scripts: str) -> str:
    """Write shell scripts into a folder and return its path, for use in PATH."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def test_kind_is_used_if_it_is_installed_and_docker_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"both": {"kind": "exit 0", "docker": "exit 0"}, "kind": {"kind": "exit 0"}, "docker": {"docker": "exit 0"}}
    cases["stopped"] = {"kind": "exit 0", "docker": "exit 1"}
    usable = []
    for name, scripts in cases.items():
        monkeypatch.setenv("PATH", programs(tmp_path / name, **scripts))
        usable += [name] if kind.fits() else []
    assert usable == ["both"]


def test_kind_creates_the_nodes_and_helm_installs_jobset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs are scripts that log their arguments; the cluster workflow runs the real kind."""
    log = tmp_path / "log"
    script = f'{{ echo "$0 $*"; cat; echo; }} >> {log}'
    path = programs(tmp_path / "programs", kind=script, helm=script, kubectl=script)
    monkeypatch.setenv("PATH", f"{path}{os.pathsep}{os.environ['PATH']}")
    kind.do(parser().parse_args(["up", "--nodes", "3", "--name", "ours"]))
    create, config, apply, objects, install = [line for line in log.read_text().splitlines() if line]
    assert "create cluster --name ours --config -" in create
    nodes = json.loads(config)["nodes"]
    assert [node["role"] for node in nodes] == ["control-plane", *["worker"] * 3]
    shared = {"hostPath": str(kind.volumes_folder("ours")), "containerPath": "/volumes"}
    assert all(node["extraMounts"] == [shared] for node in nodes)
    assert "apply --server-side" in apply
    volume_specs = [item["spec"] for item in json.loads(objects)["items"] if item["kind"] == "PersistentVolume"]
    paths = [Path(spec["hostPath"]["path"]) for spec in volume_specs]
    assert all((kind.volumes_folder("ours") / path.relative_to("/volumes")).is_dir() for path in paths)
    assert f"install jobset {kind.CHARTS['jobset']} --version 0.12.0" in install
    assert install.endswith(f"--kubeconfig {kind.kubeconfig('ours')}")


LAB_ONLY = ["shape node1 1gbit", "cores node1 4", "kill node1", "link node1 up", "build"]


@pytest.mark.parametrize("words", [words.split() for words in LAB_ONLY])
def test_commands_that_need_the_lab_are_refused_with_kind(words: list[str]) -> None:
    with pytest.raises(LabError, match=f"{words[0]} needs the lab"):
        kind.do(parser().parse_args(words))
