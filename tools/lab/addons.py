"""Add-ons of a lab: JobSet and Kueue, installed by their own charts, and kwok."""

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
from tools.lab.machines import Machine

HOME_NODE = "node1"
"""Node of JobSet and Kueue, which no test may kill."""
READY_SECONDS = 120.0
SMALL_REQUESTS: Mapping[str, Any] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
FAKE_NODES = "kwok.x-k8s.io/node=fake"
STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-delete.yaml",
)
"""The stages of kwok that apply to fake nodes and their pods. Pods run until the stage of `kwok-complete.yaml`."""
LEASE_SECONDS = 20  # kwok renews a lease every 5 s; the controller-manager marks a node NotReady after 10 s


def _image(part: build.Part) -> dict[str, str]:
    repository, _, tag = build.image_name(part).partition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}


def jobset_values() -> dict[str, Any]:
    """Return chart values for a single manager without leader election."""
    controller = {"leaderElection": {"enable": False}, "resources": SMALL_REQUESTS, "nodeSelector": _home_selector()}
    return {"image": _image(build.JOBSET), "controller": controller}


def kueue_values() -> dict[str, Any]:
    """Return chart values for a single manager with the chart's default configuration."""
    probe = {"initialDelaySeconds": 1, "periodSeconds": 2}
    manager = {"image": _image(build.KUEUE), "resources": SMALL_REQUESTS}
    return {"controllerManager": {"manager": manager, "readinessProbe": probe, "nodeSelector": _home_selector()}}


def _home_selector() -> dict[str, str]:
    return {"kubernetes.io/hostname": HOME_NODE}


def install(part: build.Part, values: Mapping[str, Any], folder: Path, kubeconfig: Path) -> None:
    """Install a part by its chart and wait until it is ready; raises `LabError` with the error of Helm or kubectl."""
    file = folder / f"{part.name}-values.json"
    file.write_text(json.dumps(values, indent=1))
    helm = build.built(build.HELM) / "helm"
    command = ["install", part.name, str(build.built(part) / "chart"), "--values", str(file)]
    namespace = f"{part.name}-system"
    target = ["--namespace", namespace, "--create-namespace"]
    helm_folders = {f"HELM_{kind}_HOME": str(folder / "helm" / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    run(helm, *command, *target, "--kubeconfig", kubeconfig, environ=plain_environ() | helm_folders)
    _wait_until_available(namespace, kubeconfig)


def _wait_until_available(namespace: str, kubeconfig: Path) -> None:
    """Wait for the managers, each of which creates its certificate as a secret and waits until its volume has it.

    A kubelet updates volumes once a minute, and immediately when a pod changes, so each check annotates the pods.
    """
    kubectl: list[str | Path] = [
        build.built(build.KUBERNETES) / "kubectl",
        "--kubeconfig",
        kubeconfig,
        "--namespace",
        namespace,
    ]
    conditions = 'jsonpath={.items[*].status.conditions[?(@.type=="Available")].status}'

    def available() -> bool:
        run(*kubectl, "annotate", "pods", "--all", "--overwrite", f"{DOMAIN}/nudged={time.monotonic_ns()}")
        return run(*kubectl, "get", "deployments", "--output", conditions).split() == ["True"]

    wait_until(available, f"the pods of {namespace}", READY_SECONDS, 1.0)


def start_kwok(machine: Machine, certificates: Path, server: str) -> None:
    """Start kwok on the control plane's machine. It acts as the kubelet of every node that is annotated as a fake."""
    config = write_kubeconfig(machine.folder / "kwok.kubeconfig", certificates, "admin", server)
    part = build.built(build.KWOK)
    stages = [*(part / "stages" / name for name in STAGES), Path(__file__).with_name("kwok-complete.yaml")]
    values: dict[str, str | Path | int] = {
        "kubeconfig": config,
        "manage-nodes-with-annotation-selector": FAKE_NODES,
        "node-lease-duration-seconds": LEASE_SECONDS,
        "server-address": "127.0.0.1:10247",
    }
    machine.start(part / "kwok", [*flags(values), *(f"--config={stage}" for stage in stages)])
