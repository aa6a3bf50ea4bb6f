"""penstock on a test's cluster: service and operator as processes of this machine, which pods of a lab reach."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

import penstock
from penstock.client import Client
from penstock.client.config import Target
from penstock.core.host.ports import free_port
from penstock.kube.names import JOB_LABEL, PEOPLE_AUDIENCE
from penstock.kube.resources import CLAIMS, JOBS, PODS
from tests.support.cluster import Cluster
from tests.support.kubectl import kubectl_of, with_crds
from tests.support.repository import ROOT
from tools.lab.state import State

START_SECONDS = 240.0
END_SECONDS = 60.0
KEEPING_SECONDS = 1.0
PAIR = {"penstock-test": "pair"}
"""A label of the two nodes that jobs train on, so that the second has the hosts of the first."""

PAIR_NODES = ("node1", "node2")
SPARE_NODE = "node3"
READER = "reader"
READY = "/readyz"
OUT, TEXT = "out", "text"
MISSING_IMAGE = "lab.penstock.dev/nothing:1"
"""Jobs may name it, and no registry has it."""
LISTS = {name: ["*"] for name in ("claims", "storageClasses", "tolerations", "nodeSelectors")}
"""What jobs may use where the chart's values say no more."""

CORPUS = "\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(900))


@dataclass
class Program:
    """A Python module that runs in the background and answers 200 at ``health`` once it is ready.

    One that is ``kept`` is started again when it ends by itself, as the pod of a Deployment is.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    health: str
    kept: bool = False
    process: subprocess.Popen[bytes] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    @property
    def log(self) -> Path:
        """All that it said, at every start."""
        return self.folder / f"{self.name}.log"

    def begin(self) -> None:
        """Start it."""
        with self._lock, self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.arguments],
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if self.kept:
            threading.Thread(target=self._keep, args=(self.process,), daemon=True).start()

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        """Begin again, a second after it ended, unless it was asked to end."""
        while process.poll() is None:
            time.sleep(KEEPING_SECONDS)
        time.sleep(KEEPING_SECONDS)
        with self._lock:
            if self.process is process:
                self.begin()

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self.begin()
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self.process is not None
            assert self.process.poll() is None, f"the {self.name} ended:\n{self.log.read_text()}"
            assert time.monotonic() < end, f"the {self.name} is not ready:\n{self.log.read_text()}"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return httpx.get(self.health, trust_env=False, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: signal.Signals) -> None:
        """Send it a signal and wait; one that does not end is killed."""
        with self._lock:
            process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End it as if its machine had failed."""
        self.end(signal.SIGKILL)


@dataclass(kw_only=True)
class JobSpace:
    """The ``namespace`` of the jobs that an installation sees to; it lives itself in ``system``.

    Jobs share the claims `OUT` and `TEXT` there, whose folders on this machine are ``out`` and ``text``.
    """

    cluster: Cluster
    lab: State
    namespace: str
    system: str
    out: Path = field(default_factory=Path)
    text: Path = field(default_factory=Path)

    def claim_storage(self) -> None:
        """Make the claims, and what there is to read."""
        self.out, self.text = (_claimed(self, name) for name in (OUT, TEXT))
        (self.text / "a.py").write_text(CORPUS)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """What kubectl prints, in the namespace of jobs."""
        return self.cluster.kubectl("--namespace", self.namespace, *words, stdin=stdin)

    def jobs(self) -> list[dict[str, Any]]:
        """All there are."""
        return self.cluster.all(JOBS, self.namespace)

    def wait_for_room(self, jobs: Collection[str]) -> None:
        """Until no pod of these jobs, which were deleted, holds anything."""

        def gone() -> bool:
            pods = self.cluster.all(PODS, self.namespace)
            return not [each for each in pods if each["metadata"]["labels"].get(JOB_LABEL) in jobs]

        self.cluster.wait(gone, f"pods of {', '.join(jobs)} stay")


@dataclass(kw_only=True)
class Installed(JobSpace):
    """What is installed as processes of this machine, whose files are in ``folder``."""

    folder: Path
    service: Program
    operator: Program

    @property
    def client(self) -> Client:
        """A client of the service, for somebody who may look at jobs in the namespace and no more; a context."""
        token = self.kubectl("create", "token", READER, "--audience", PEOPLE_AUDIENCE)
        return Client(Target(server=self.service.health.removesuffix(READY), token=token.strip()))


@contextmanager
def installed(cluster: Cluster, folder: Path) -> Iterator[Installed]:
    """Both, with what they need, for as long as the block; skips, loudly, by kind, whose pods see no other machine."""
    lab = cluster.of_lab()
    with_crds(kubectl_of(cluster))
    killed_leave = tempfile.TemporaryDirectory()  # not in `folder`: a socket's path has to be short
    with cluster.namespace("baseline") as namespace, cluster.namespace() as system, killed_leave as temporary:
        found = _prepared(cluster, lab, folder, namespace, system, temporary)
        try:
            found.service.start()
            found.operator.start()
            yield found
        finally:
            found.kubectl("delete", "pj", "--all", "--wait=false")
            found.operator.end(signal.SIGTERM)
            found.service.end(signal.SIGTERM)


@contextmanager
def operated_by(on: Installed, module: str, **environment: str) -> Iterator[Program]:
    """Another operator sees to the jobs during the block: one that this module of the tests starts."""
    other = replace(
        on.operator,
        name=module.rpartition(".")[2],
        arguments=[module],
        environment={
            **on.operator.environment,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *components()]),
            **environment,
        },
        kept=False,
        process=None,
    )
    on.operator.end(signal.SIGTERM)
    try:
        other.start()
        yield other
    finally:
        other.end(signal.SIGTERM)
        on.operator.start()


def _prepared(cluster: Cluster, lab: State, folder: Path, namespace: str, system: str, temporary: str) -> Installed:
    service_port, health_port = free_port(str(lab.addresses.host)), free_port()
    url = f"http://{lab.addresses.host}:{service_port}"
    both = {
        "KUBECONFIG": str(cluster.kubeconfig),
        "PENSTOCK_OWN_NAMESPACE": system,
        "PYTHONPATH": os.pathsep.join(components()),
        "TMPDIR": temporary,
        **{f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "STATE", "DATA")},
    }
    policy = folder / "policy.json"
    allowed = {**LISTS, "images": [cluster.image, MISSING_IMAGE]}
    policy.write_text(json.dumps({"ownNamespace": system, "everywhere": allowed}))
    serve = ["serve", "--cluster", "--namespace", namespace, "--folder", str(folder / "service")]
    serve += ["--policy", str(policy)]
    service = Program(
        name="service",
        arguments=["penstock.cli", *serve, "--host", str(lab.addresses.host), "--port", str(service_port)],
        environment=both,
        folder=folder,
        health=url + READY,
    )
    health = f"http://127.0.0.1:{health_port}/healthz"
    told = {"PENSTOCK_NAMESPACE": namespace, "PENSTOCK_SERVICE_URL": url, "PENSTOCK_METRICS_PORT": "0"}
    told["PENSTOCK_LIVENESS_PORT"] = str(health_port)
    operator = Program(
        name="operator",
        arguments=["penstock.operator"],
        environment={**both, **told, "PENSTOCK_TRAINER_IMAGE": cluster.image, "PENSTOCK_POLICY_FILE": str(policy)},
        folder=folder,
        health=health,
        kept=True,
    )
    found = Installed(
        cluster=cluster,
        lab=lab,
        folder=folder,
        namespace=namespace,
        system=system,
        service=service,
        operator=operator,
    )
    found.claim_storage()
    found.kubectl("create", "serviceaccount", READER)
    found.kubectl("create", "role", READER, "--verb=get,list", "--resource=pipelinejobs.penstock.dev")
    found.kubectl("create", "rolebinding", READER, f"--role={READER}", f"--serviceaccount={namespace}:{READER}")
    for node in PAIR_NODES:
        label_node(cluster, node, True)
    return found


def label_node(cluster: Cluster, node: str, wanted: bool) -> None:
    """Let jobs train on the node, or no longer be put there."""
    words = [f"{key}={value}" if wanted else f"{key}-" for key, value in PAIR.items()]
    cluster.kubectl("label", "node", node, "--overwrite", *words)


def _claimed(found: JobSpace, name: str) -> Path:
    """The folder on this machine behind a new claim of that name, which many nodes may write."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}}
    found.cluster.create(found.namespace, {**claim, "spec": {**spec, "storageClassName": "lab-shared"}})
    return folder_of_claim(found, name)


def folder_of_claim(found: JobSpace, name: str) -> Path:
    """The folder on this machine behind a claim."""

    def volume() -> str:
        claim = found.cluster.get(CLAIMS, name, found.namespace)
        return str(claim["spec"].get("volumeName", "")) if claim["status"]["phase"] == "Bound" else ""

    return found.lab.folder / "volumes" / str(found.cluster.wait(volume, f"nothing is behind the claim {name}"))


def components() -> list[str]:
    """The folders that this process has penstock from."""
    return [str(Path(path).parent) for path in penstock.__path__]
