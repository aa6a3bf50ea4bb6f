"""A real Kubernetes for tests, one for a whole session of pytest: the lab as root on Linux, kind where Docker runs."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from kubernetes import config

from deploy import kind
from penstock.kube.resources import NODES, PODS, Resource
from penstock.kube.transport import Transport
from tests.support.not_run import BEGINNING, missing
from tools.lab import base_image, build, lab, processes, state
from tools.lab.console import LabError, plain_environ, run

NAME = "cluster"
NUM_NODES = 3
PATIENCE_SECONDS = 300.0
COLD_SECONDS = 1800
"""For tests that use it, as a time limit: the first of all may have to build Kubernetes."""

SERVICES = Resource(api_version="v1", plural="services")

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster. ``image`` has a Python of the minor version of this one; ``lab`` is none by kind."""

    kubeconfig: Path
    program: str
    image: str
    lab: state.State | None

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """What kubectl prints; raises `LabError` with what it complains about."""
        return run(self.program, "--kubeconfig", self.kubeconfig, *words, stdin=stdin, environ=plain_environ())

    @cached_property
    def api(self) -> Transport:
        """Its API: who waits for something asks several times a second, and kubectl takes longer to start than that."""
        client = config.new_client_from_config(str(self.kubeconfig))  # type: ignore[no-untyped-call]
        return Transport(client)

    def get(self, resource: Resource, name: str, namespace: str = "") -> dict[str, Any]:
        """An object as it is now."""
        return dict(self.api.get(resource, namespace, name))

    def all(self, resource: Resource, namespace: str = "", selector: str = "") -> list[dict[str, Any]]:
        """All objects of a namespace, or of the cluster, with these labels."""
        return [dict(each) for each in self.api.list(resource, namespace, selector).objects]

    def create(self, namespace: str, *manifests: dict[str, Any]) -> None:
        """Create objects in a namespace."""
        whole = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("--namespace", namespace, "create", "--filename", "-", stdin=json.dumps(whole))

    @contextmanager
    def namespace(self, level: str = "privileged") -> Iterator[str]:
        """A new namespace, with that level of Pod Security, for as long as the block."""
        name = f"t{os.getpid()}-{next(_numbers)}"
        self.kubectl("create", "namespace", name)
        self.kubectl("label", "namespace", name, f"pod-security.kubernetes.io/enforce={level}")
        yield name
        self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def ready(self) -> set[str]:
        """The nodes that are ready."""
        ready = {"type": "Ready", "status": "True"}
        return {
            node["metadata"]["name"]
            for node in self.all(NODES)
            if any(ready.items() <= condition.items() for condition in node["status"]["conditions"])
        }

    def pod(self, name: str, code: str, *, node: str = "", **spec: Any) -> dict[str, Any]:
        """A pod that runs Python code once; it fits every level of Pod Security."""
        inner = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
        mounts = [{"name": each["name"], "mountPath": f"/{each['name']}"} for each in spec.get("volumes", ())]
        container = {
            "name": "main",
            "image": self.image,
            "command": ["python", "-uc", code],
            "securityContext": inner,
            "volumeMounts": mounts,
        }
        outer = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
        whole = {"containers": [container], "restartPolicy": "Never", "securityContext": outer, **spec}
        where = {"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}
        whole["terminationGracePeriodSeconds"] = 1
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {**whole, **where}}

    def wait_for_pod(self, namespace: str, name: str, *phases: str) -> dict[str, Any]:
        """The pod, once it is in one of these phases."""

        def answer() -> Any:
            pod = self.get(PODS, name, namespace)
            return pod if pod["status"].get("phase") in phases else None

        pod: dict[str, Any] = self.wait(answer, f"{name} is not {' or '.join(phases)}")
        return pod

    def printed(self, namespace: str, name: str) -> str:
        """What a pod printed until it succeeded."""
        pod = self.wait_for_pod(namespace, name, "Succeeded", "Failed")
        text = self.kubectl("--namespace", namespace, "logs", name)
        assert pod["status"]["phase"] == "Succeeded", text
        return text

    def wait(self, happened: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
        """What is not nothing, as soon as there is something; fails naming ``what`` when it takes too long."""
        end = time.monotonic() + seconds
        while not (found := happened()):
            assert time.monotonic() < end, what
            time.sleep(0.2)
        return found

    def of_lab(self) -> state.State:
        """The lab; skips, loudly, by kind, which has no cables to pull."""
        if self.lab is None:
            pytest.skip(BEGINNING + "this needs the lab, and kind is used where Docker runs")
        return self.lab


@contextmanager
def shared() -> Iterator[Cluster]:
    """The session's cluster, which its last user ends; skips, loudly, where none can be had."""
    name = f"test-{_session()}"
    with _locked():
        end_orphans()
        users = _users(name)
        try:
            cluster = _opened(name) if users else _started(name)
        except LabError as error:
            missing(NAME, f"there is no cluster: {error}")
        _write_users(name, [*users, os.getpid()])
    yield cluster
    with _locked():
        users = [user for user in _users(name) if user != os.getpid()]
        if not users:
            _end(name)  # first, or nobody would end it after a process that is killed here
        _write_users(name, users)


def _session() -> int:
    """The process of the whole session, which with xdist is the parent of those that run tests."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


@contextmanager
def _locked() -> Iterator[None]:
    state.labs().mkdir(parents=True, exist_ok=True)
    with (state.labs() / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _users(name: str) -> list[int]:
    """The processes that use that cluster."""
    try:
        users = json.loads((state.labs() / f"{name}.users").read_text())
    except FileNotFoundError:
        return []
    return [user for user in users if processes.process(user) is not None]


def _write_users(name: str, users: list[int]) -> None:
    path = state.labs() / f"{name}.users"
    path.write_text(json.dumps(users))
    if not users:
        path.unlink()


def end_orphans() -> None:
    """End the clusters of sessions that were killed."""
    for path in state.labs().glob("test-*.users"):
        if not _users(path.stem):
            _end(path.stem)
            path.unlink()


def _started(name: str) -> Cluster:
    if platform.system() != "Linux":
        raise LabError("a lab needs Linux, and kind needs Docker")
    if kind.fits():
        kind.up(argparse.Namespace(name=name, nodes=NUM_NODES, kueue=False, kwok=False))
    else:
        spec = lab.Spec(name=name, num_nodes=NUM_NODES)
        lab.fill_cache([*spec.parts, build.KUEUE])  # which a test installs, and whose libraries are these parts' too
        lab.up(spec)
    return _opened(name)


def _opened(name: str) -> Cluster:
    if kind.fits():
        image = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
        return Cluster(kubeconfig=kind.kubeconfig(name), program="kubectl", image=image, lab=None)
    return of(state.read(name))


def of(found: state.State) -> Cluster:
    """A lab as tests use it."""
    kubectl = str(found.programs / "kubectl")
    return Cluster(kubeconfig=found.kubeconfig, program=kubectl, image=base_image.IMAGE, lab=found)


def _end(name: str) -> None:
    with contextlib.suppress(LabError) if kind.fits() else contextlib.nullcontext():
        kind.down(argparse.Namespace(name=name)) if kind.fits() else lab.down(name)
