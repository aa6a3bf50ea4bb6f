"""What a lab runs beside Kubernetes itself: JobSet and Kueue by their own charts, and kwok."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.lab import build
from deploy.lab.certificates import write_kubeconfig
from deploy.lab.console import plain_environ, run
from deploy.lab.control_plane import flags
from deploy.lab.rooms import Room

HOME_NODE = "node1"
"""Where JobSet and Kueue run: tests lose any node but this one."""
WAIT = "120s"
SMALL: Mapping[str, Any] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
FAKE_NODES = "kwok.x-k8s.io/node=fake"
LEASE_SECONDS = 20  # renewed four times as often, and a node is given up after 10 s


def _image(part: build.Part) -> dict[str, str]:
    repository, _, tag = build.image_name(part).partition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}


def jobset_values() -> dict[str, Any]:
    """One manager that need not elect itself."""
    controller = {"leaderElection": {"enable": False}, "resources": SMALL, "nodeSelector": _home()}
    return {"image": _image(build.JOBSET), "controller": controller}


def kueue_values() -> dict[str, Any]:
    """One manager with the configuration that the chart has."""
    manager = {"image": _image(build.KUEUE), "resources": SMALL}
    return {"controllerManager": {"manager": manager, "nodeSelector": _home()}}


def _home() -> dict[str, str]:
    return {"kubernetes.io/hostname": HOME_NODE}


def install(part: build.Part, values: Mapping[str, Any], folder: Path, kubeconfig: Path) -> None:
    """Install a part by its chart and wait until it is ready; raises `LabError` with what Helm says."""
    file = folder / f"{part.name}-values.json"
    file.write_text(json.dumps(values, indent=1))
    helm = build.built(build.HELM) / "helm"
    command = ["install", part.name, str(build.built(part) / "chart"), "--values", str(file), "--wait"]
    place = ["--namespace", f"{part.name}-system", "--create-namespace", "--timeout", WAIT]
    own = {f"HELM_{kind}_HOME": str(folder / "helm" / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    run(helm, *command, *place, "--kubeconfig", kubeconfig, environ=plain_environ() | own)


def start_kwok(room: Room, certificates: Path, server: str) -> None:
    """Start kwok in the control plane's room: it plays the kubelet of every node that is annotated as a fake."""
    config = write_kubeconfig(room.folder / "kwok.kubeconfig", certificates, "admin", server)
    values: dict[str, str | Path | int] = {
        "kubeconfig": config,
        "manage-nodes-with-annotation-selector": FAKE_NODES,
        "node-lease-duration-seconds": LEASE_SECONDS,
        "server-address": "127.0.0.1:10247",
    }
    room.start(build.built(build.KWOK) / "kwok", flags(values))
