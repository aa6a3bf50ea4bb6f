"""Cluster by kind, on Docker, with the commands of the lab as far as kind supports them."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.lab import build, state, volumes
from tools.lab.console import LabError, run, say

DOCKER_SECONDS = 20
VOLUMES = "/volumes"
CHARTS = {"jobset": "oci://registry.k8s.io/jobset/charts/jobset", "kueue": "oci://registry.k8s.io/kueue/charts/kueue"}


def fits() -> bool:
    """Whether kind can be used here: its program is on the PATH and Docker answers."""
    if shutil.which("kind") is None or shutil.which("docker") is None:
        return False
    try:
        asked = subprocess.run(["docker", "info"], capture_output=True, timeout=DOCKER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def kubeconfig(name: str) -> Path:
    """Return the path of the cluster's kubeconfig."""
    return state.labs().with_name("kind") / f"{name}.kubeconfig"


def volumes_folder(name: str) -> Path:
    """Return the folder of this machine that all nodes mount as `VOLUMES`."""
    return kubeconfig(name).with_suffix(".volumes")


def names() -> list[str]:
    """Return the names of all clusters."""
    return run("kind", "get", "clusters").split()


def configuration(num_nodes: int, shared: Path) -> str:
    """Return kind's configuration of a control plane and that many workers, which share a folder of this machine."""
    roles = ["control-plane", *["worker"] * num_nodes]
    mounts = [{"hostPath": str(shared), "containerPath": VOLUMES}]
    nodes = [{"role": role, "extraMounts": mounts} for role in roles]
    return json.dumps({"apiVersion": "kind.x-k8s.io/v1alpha4", "kind": "Cluster", "nodes": nodes})


def up(said: argparse.Namespace) -> None:
    if said.kwok:
        raise LabError("kwok needs the lab, which is used if Docker does not run: stop Docker, or leave --kwok out")
    path, shared = kubeconfig(said.name), volumes_folder(said.name)
    volumes.make_folders(shared)
    command = ["kind", "create", "cluster", "--name", said.name, "--config", "-", "--wait", "120s"]
    run(*command, "--kubeconfig", path, stdin=configuration(said.nodes, shared))
    whole = {"apiVersion": "v1", "kind": "List", "items": volumes.manifests(Path(VOLUMES))}
    apply: list[str | Path] = ["kubectl", "--kubeconfig", path, "apply", "--server-side", "--filename", "-"]
    run(*apply, stdin=json.dumps(whole))
    install(build.JOBSET, path)
    if said.kueue:
        install(build.KUEUE, path)
    say(f"{said.name} is up: export KUBECONFIG={path}")


def install(part: build.Part, path: Path) -> None:
    """Install a part by the chart of its project, in the lab's version."""
    version = part.version.removeprefix("v")
    place = ["--namespace", f"{part.name}-system", "--create-namespace", "--wait", "--kubeconfig", str(path)]
    run("helm", "install", part.name, CHARTS[part.name], "--version", version, *place)


def down(said: argparse.Namespace) -> None:
    """Delete the cluster. Files of pods belong to their users, so a node deletes them."""
    if said.name in names():
        node = f"{said.name}-control-plane"
        run("docker", "exec", node, "sh", "-c", f"rm -rf {VOLUMES}/*/* {VOLUMES}/*/.[!.]*")
    run("kind", "delete", "cluster", "--name", said.name, "--kubeconfig", kubeconfig(said.name))
    kubeconfig(said.name).unlink(missing_ok=True)
    shutil.rmtree(volumes_folder(said.name), ignore_errors=True)


def status(said: argparse.Namespace) -> None:
    print(run("kubectl", "--kubeconfig", kubeconfig(said.name), "get", "nodes"), end="")


def say_kubeconfig(said: argparse.Namespace) -> None:
    print(kubeconfig(said.name))


def load(said: argparse.Namespace) -> None:
    run("kind", "load", "image-archive", said.archive, "--name", said.name)


VERBS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "up": up,
    "down": down,
    "status": status,
    "kubeconfig": say_kubeconfig,
    "load": load,
}


def do(said: argparse.Namespace) -> None:
    """Execute the lab's arguments; raises `LabError` for commands that only the lab supports."""
    if said.verb not in VERBS:
        raise LabError(f"{said.verb} needs the lab, which is used if Docker does not run: stop Docker first")
    VERBS[said.verb](said)
