"""Lab for benchmarks of the operator: creates many jobs and acts as their service."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import config
from kubernetes.client import ApiClient, Configuration

from penstock.core.instants import format_instant
from penstock.kube.names import API_VERSION, JOB_KIND, PROFILE_FILE, UID_LABEL
from penstock.kube.packing import packed
from penstock.kube.resources import CONFIG_MAPS, JOBS, JOBSETS, LEASES, NODES, PODS, Resource
from penstock.kube.transport import APPLY, MERGE, KubeError, Object, Transport
from penstock.kube.watching import Watched, Watcher
from tests.support.planning import profile
from tools.lab import lab, state

T = TypeVar("T")

NAMESPACE, SERVICE_NAMESPACE = "default", "kube-public"
CRDS = Path(__file__).parents[1] / "deploy" / "crds"
THREADS = 16
PATIENCE_SECONDS = 60.0
STEP_SECONDS = 20.0
PROFILE_NAME = "measured"
RESOURCES = {"jobsets": JOBSETS, "pipelinejobs": JOBS, "pods": PODS}
SPEC = {
    "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 2, "kvHeads": 1, "vocab": 512},
    "data": {"source": "python-stdlib", "sequenceLength": 128},
    "training": {"globalBatch": 2, "steps": 1_000_000},
    "resources": {"ranks": 1, "memoryPerRank": "1Gi"},
    "kubernetes": {
        "image": "stub",
        "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
    },
}


@dataclass
class Watching:
    """Times at which names of a kind were first observed, by this machine's clock."""

    first_seen: dict[str, float] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def saw(self, name: str) -> None:
        """Record the time of a name's first observation."""
        with self._changed:
            self.first_seen.setdefault(name, time.monotonic())
            self._changed.notify_all()

    def wait_until(self, enough: Callable[[set[str]], bool], seconds: float) -> None:
        """Wait until ``enough`` accepts the names. Raises TimeoutError after ``seconds``."""
        with self._changed:
            if not self._changed.wait_for(lambda: enough(set(self.first_seen)), seconds):
                raise TimeoutError(f"{len(self.first_seen)} after {seconds:.0f} s")


@dataclass
class Reports:
    """Number of reports that were written on behalf of the service."""

    count: int = 0


def job(name: str, **parts: Mapping[str, Any]) -> dict[str, Any]:
    """Manifest of a PipelineJob with these ``parts``."""
    return {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": {"name": name}, **parts}


class Cluster:
    """A cluster and the clients that use it."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig, self.folder = kubeconfig, folder
        client = Configuration()
        client.connection_pool_maxsize = 2 * THREADS
        config.load_kube_config(str(kubeconfig), client_configuration=client)  # type: ignore[no-untyped-call]
        self._kube = Transport(ApiClient(client))

    @classmethod
    @contextlib.contextmanager
    def started(cls, spec: lab.Spec) -> Iterator[Cluster]:
        """Start a lab and end it after the block."""
        lab.down(spec.name)
        made = lab.up(spec)
        try:
            kubectl = [str(made.programs / "kubectl"), "--kubeconfig", str(made.kubeconfig)]
            subprocess.run([*kubectl, "apply", "--filename", CRDS], check=True)
            yield cls(made.kubeconfig, state.folder_of(spec.name))
        finally:
            lab.down(spec.name)

    def wait(self, happened: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T:
        """Poll ``happened`` until it returns something other than None. Raises TimeoutError after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not (value := happened()):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"nothing after {seconds:.0f} s")
            time.sleep(0.05)
        return value

    def create(self, resource: Resource, manifest: dict[str, Any]) -> None:
        """Create an object."""
        self._kube.call("POST", resource.path(NAMESPACE), body=manifest)

    def get(self, resource: Resource, name: str) -> Object:
        """The object as it is now."""
        return self._kube.get(resource, NAMESPACE, name)

    def delete(self, resource: Resource, name: str) -> None:
        """Delete an object."""
        self._kube.call("DELETE", resource.path(NAMESPACE, name))

    def watcher(self, watched: Watched) -> Watcher:
        """A watch of a kind in the namespace."""
        return Watcher(self._kube, watched, NAMESPACE, time.time)

    # Nodes

    def set_devices(self, node: str, name: str, count: int) -> None:
        """Let a node have so many devices of that name. See
        https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node
        """
        body = {"status": {"capacity": {name: str(count)}, "allocatable": {name: str(count)}}}
        self._kube.call("PATCH", NODES.path("", node, "status"), body=body, content_type=MERGE)

    def label_node(self, node: str, name: str, wanted: bool = True) -> None:
        """Add an empty label to a node, or remove it."""
        body = {"metadata": {"labels": {name: "" if wanted else None}}}
        self._kube.call("PATCH", NODES.path("", node), body=body, content_type=MERGE)

    def add_fake_nodes(self, count: int) -> None:
        """Add nodes that kwok simulates."""
        for number in range(count):
            self.create(NODES, _fake_node(f"kwok-{number}"))
        time.sleep(2.0)

    # Jobs

    def create_jobs(self, names: Sequence[str]) -> dict[str, float]:
        """Create jobs concurrently. Returns the time at which each existed."""

        def create(name: str) -> float:
            self.create(JOBS, job(name, spec=SPEC))
            return time.monotonic()

        with ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(names, threads.map(create, names), strict=True))

    def remove_jobs(self) -> None:
        """Delete all jobs and wait until none of their objects is left."""
        self._kube.call("DELETE", JOBS.path(NAMESPACE))
        while any(self._kube.list(resource, NAMESPACE, UID_LABEL).objects for resource in (JOBSETS, PODS, CONFIG_MAPS)):
            time.sleep(0.5)

    def jobs(self) -> list[Object]:
        """All jobs."""
        return list(self._kube.list(JOBS, NAMESPACE).objects)

    def names(self, plural: str) -> list[str]:
        """Names of all objects of a kind."""
        return [item["metadata"]["name"] for item in self._kube.list(RESOURCES[plural], NAMESPACE).objects]

    def delete_pods(self, count: int) -> list[str]:
        """Delete pods of ``count`` jobs. Returns the jobs' names."""
        pods = self._kube.list(PODS, NAMESPACE, UID_LABEL).objects[:count]
        for pod in pods:
            self._kube.call("DELETE", PODS.path(NAMESPACE, pod["metadata"]["name"]), query={"gracePeriodSeconds": "0"})
        return [pod["metadata"]["labels"]["penstock.dev/job"] for pod in pods]

    @contextlib.contextmanager
    def watching(self, plural: str) -> Iterator[Watching]:
        """Watch a kind during the block."""
        resource, watched, ended = RESOURCES[plural], Watching(), threading.Event()
        listing = self._kube.list(resource, NAMESPACE)
        for item in listing.objects:
            watched.saw(item["metadata"]["name"])

        def follow() -> None:
            version = listing.version
            while not ended.is_set():
                with contextlib.suppress(KubeError):
                    for change in self._kube.watch(resource, version, NAMESPACE):
                        version = change.version
                        if change.object is not None and not change.removed:
                            watched.saw(change.object["metadata"]["name"])
                        if ended.is_set():
                            return

        threading.Thread(target=follow, daemon=True).start()
        yield watched
        ended.set()

    # The service's part

    def lay_out_profile(self, num_ranks: int) -> None:
        """Create a new profile, which every job with ``num_ranks`` ranks may use."""
        measured = dataclasses.replace(profile(num_ranks=num_ranks), measured_at=time.time())
        data = {PROFILE_FILE: packed(measured.to_manifest())}
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": PROFILE_NAME}, "binaryData": data}
        self.create(CONFIG_MAPS, manifest)

    def bring_to_running(self, seconds: float) -> None:
        """Report a profile for each job that requests one, until all run. Also reports steps of running jobs."""
        deadline = time.monotonic() + seconds
        told_at: dict[str, float] = {}
        for step in itertools.count(1):
            self._renew_lease()
            phases = {
                job_object["metadata"]["name"]: job_object.get("status", {}).get("phase") for job_object in self.jobs()
            }
            if set(phases.values()) == {"Running"}:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not all jobs ran after {seconds:.0f} s")
            self._report_all([name for name, phase in phases.items() if phase == "Profiling"], profileRef=PROFILE_NAME)
            late = time.monotonic() - STEP_SECONDS
            silent = [name for name, phase in phases.items() if phase == "Running" and told_at.get(name, 0.0) < late]
            self._report_all(silent, profileRef=PROFILE_NAME, epoch=1, step=step)
            told_at.update(dict.fromkeys(silent, time.monotonic()))
            time.sleep(1.0)

    @contextlib.contextmanager
    def progressing(self, period_seconds: float) -> Iterator[Reports]:
        """Report a step of every job once per period, during the block."""
        names, reports, ended = self.names("pipelinejobs"), Reports(), threading.Event()

        def report() -> None:
            for step in itertools.count(1):
                began = time.monotonic()
                self._renew_lease()
                self._report_all(names, profileRef=PROFILE_NAME, step=step, epoch=1, loss="2.5", stepSeconds=0.5)
                reports.count += len(names)
                if ended.wait(max(period_seconds - (time.monotonic() - began), 0.0)):
                    return

        thread = threading.Thread(target=report)
        thread.start()
        yield reports
        ended.set()
        thread.join()

    def _report_all(self, names: Sequence[str], **progress: Any) -> None:
        progress_report = {"attempt": 1, "reportedAt": format_instant(time.time()), **progress}

        def report(name: str) -> None:
            body = job(name, status={"progress": progress_report})
            query = {"fieldManager": "penstock-service", "force": "true"}
            self._kube.call("PATCH", JOBS.path(NAMESPACE, name, "status"), body=body, query=query, content_type=APPLY)

        with ThreadPoolExecutor(THREADS // 4) as threads:
            list(threads.map(report, names))

    def _renew_lease(self) -> None:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "penstock-service"},
            "spec": {"renewTime": str(format_instant(time.time())).replace("Z", "000Z")},
        }
        query = {"fieldManager": "penstock-service", "force": "true"}
        path = LEASES.path(SERVICE_NAMESPACE, "penstock-service")
        self._kube.call("PATCH", path, body=body, query=query, content_type=APPLY)


def _fake_node(name: str) -> dict[str, Any]:
    amounts = {"cpu": "1000", "memory": "4Ti", "pods": "1000"}
    metadata = {
        "name": name,
        "annotations": {"kwok.x-k8s.io/node": "fake"},
        "labels": {"type": "kwok", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
    }
    taint = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
    status = {"allocatable": amounts, "capacity": amounts}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [taint]}, "status": status}
