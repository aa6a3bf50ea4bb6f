"""Additions of a lab to Kubernetes: JobSet and Kueue by their own charts, and kwok."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.lab import build
from tools.lab.certificates import write_kubeconfig
from tools.lab.console import plain_environ, run, wait_until
from tools.lab.control_plane import flags
from tools.lab.images import DOMAIN
from tools.lab.rooms import Room

HOME_NODE = "node1"
"""Where JobSet and Kueue run: tests lose any node but this one."""
READY_SECONDS = 120.0
SMALL: Mapping[str, Any] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
FAKE_NODES = "kwok.x-k8s.io/node=fake"
STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-delete.yaml",
)
"""What a fake node and its pods go through, of what kwok has; pods run until `kwok-complete.yaml` ends them."""
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
    probe = {"initialDelaySeconds": 1, "periodSeconds": 2}
    manager = {"image": _image(build.KUEUE), "resources": SMALL}
    return {"controllerManager": {"manager": manager, "readinessProbe": probe, "nodeSelector": _home()}}


def _home() -> dict[str, str]:
    return {"kubernetes.io/hostname": HOME_NODE}


def install(part: build.Part, values: Mapping[str, Any], folder: Path, kubeconfig: Path) -> None:
    """Install a part by its chart and wait until it is ready; raises `LabError` with what Helm or the cluster says."""
    file = folder / f"{part.name}-values.json"
    file.write_text(json.dumps(values, indent=1))
    helm = build.built(build.HELM) / "helm"
    command = ["install", part.name, str(build.built(part) / "chart"), "--values", str(file)]
    namespace = f"{part.name}-system"
    place = ["--namespace", namespace, "--create-namespace"]
    own = {f"HELM_{kind}_HOME": str(folder / "helm" / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    run(helm, *command, *place, "--kubeconfig", kubeconfig, environ=plain_environ() | own)
    _wait(namespace, kubeconfig)


def _wait(namespace: str, kubeconfig: Path) -> None:
    """Wait for the managers. Each makes itself a certificate and waits until it sees it in a volume.

    A kubelet looks after volumes once a minute, and at once when a pod changes: so the pods are changed.
    """
    kubectl: list[str | Path] = [
        build.built(build.KUBERNETES) / "kubectl",
        "--kubeconfig",
        kubeconfig,
        "--namespace",
        namespace,
    ]
    told = 'jsonpath={.items[*].status.conditions[?(@.type=="Available")].status}'

    def available() -> bool:
        run(*kubectl, "annotate", "pods", "--all", "--overwrite", f"{DOMAIN}/nudged={time.monotonic_ns()}")
        return run(*kubectl, "get", "deployments", "--output", told).split() == ["True"]

    wait_until(available, f"the pods of {namespace}", READY_SECONDS, 1.0)


def start_kwok(room: Room, certificates: Path, server: str) -> None:
    """Start kwok in the control plane's room: it plays the kubelet of every node that is annotated as a fake."""
    config = write_kubeconfig(room.folder / "kwok.kubeconfig", certificates, "admin", server)
    part = build.built(build.KWOK)
    stages = [*(part / "stages" / name for name in STAGES), Path(__file__).with_name("kwok-complete.yaml")]
    values: dict[str, str | Path | int] = {
        "kubeconfig": config,
        "manage-nodes-with-annotation-selector": FAKE_NODES,
        "node-lease-duration-seconds": LEASE_SECONDS,
        "server-address": "127.0.0.1:10247",
    }
    room.start(part / "kwok", [*flags(values), *(f"--config={stage}" for stage in stages)])
