"""Delay until the last pod of a job observes its binding, on real nodes, also after other pods waited for minutes.

    ./dev bench binding_delay

It starts a lab (root on Linux) with two nodes and runs the operator on it. Every job has two pods, each of which needs
a device and a node with the job's label. The script adds both to a node when a pod is to start there. The pods run
`benchmarks/binding_pod/penstock`, which only waits for its binding. All runs on one machine, with one clock.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.operator_cluster import Cluster, job
from benchmarks.operator_process import Operator
from benchmarks.support import write_results

from penstock.core.pod import MEASURE_EPOCH, TRAIN_EPOCH
from penstock.kube.names import BINDING_ANNOTATION, UID_LABEL
from penstock.kube.resources import CLAIMS, JOBS, PODS
from penstock.kube.transport import Object
from penstock.kube.watching import Watched, Watcher
from tools.lab import base_image, lab

NODES = ("node1", "node2")
AT_ONCE, WAITING = 50, 50
"""Number of jobs whose pods start at the same time, and of jobs whose second pod starts late. Half of each measure a
profile, half train.
"""

WAIT_SECONDS = 120.0
BETWEEN_SECONDS = (3.0, 4.0)
"""Pause between the pods of two jobs: a node takes a second of a core to start a pod, and as long to end it.

It is random, because kubelets poll their containers every second.
"""

PATIENCE_SECONDS = 60.0
CLAIM = "out"
DEVICE = "bench.penstock.dev/device"
LABELS = "bench.penstock.dev"
STUB = Path(__file__).with_name("binding_pod")


@dataclass
class Place:
    """A pod: its job, and the times at which the cluster got its address and its binding."""

    job_uid: str
    address_at: float | None = None
    told_at: float | None = None


@dataclass
class Places:
    """All pods by uid, from a watch."""

    pods: dict[str, Place] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, pod: Object) -> None:
        """Store a pod that was added or changed."""
        metadata = pod["metadata"]
        with self._lock:
            place = self.pods.setdefault(metadata["uid"], Place(metadata["labels"][UID_LABEL]))
            if place.address_at is None and pod.get("status", {}).get("podIP"):
                place.address_at = time.time()
            if place.told_at is None and BINDING_ANNOTATION in metadata.get("annotations", {}):
                place.told_at = time.time()

    def of(self, job_uid: str) -> dict[str, Place]:
        """The pods of a job that have an address, in the order in which they got it."""
        with self._lock:
            of_job = [(uid, place) for uid, place in self.pods.items() if place.job_uid == job_uid and place.address_at]
        return dict(sorted(of_job, key=lambda entry: entry[1].address_at or 0.0))


class Bench:
    """A cluster in which the benchmark decides when a job's pods get devices."""

    def __init__(self, cluster: Cluster, places: Places) -> None:
        self._cluster, self._places, self.out = cluster, places, Path()
        self._uids: dict[str, str] = {}
        self._let_on: dict[str, set[str]] = {node: set() for node in NODES}

    def claim_storage(self) -> None:
        """Create a claim that all pods share. Its folder is on this machine."""
        wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}}
        self._cluster.create(CLAIMS, {**claim, "spec": {**wanted, "storageClassName": "lab-shared"}})
        bound = self._cluster.wait(lambda: self._cluster.get(CLAIMS, CLAIM)["spec"].get("volumeName"))
        self.out = self._cluster.folder / "volumes" / bound

    def submit(self, name: str, epoch: int, nodes: Sequence[str]) -> None:
        """Create a job of two pods and admit one on each of ``nodes``. Only jobs that train read the profile."""
        for node in nodes:
            self.let_on(node, name)
        self._cluster.create(JOBS, job(name, spec=spec(name, epoch)))
        self._uids[name] = str(self._cluster.get(JOBS, name)["metadata"]["uid"])

    def let_on(self, node: str, name: str) -> None:
        """Label the node for the job and add a device for one pod."""
        self._cluster.label_node(node, f"{LABELS}/{name}")
        self._let_on[node].add(name)
        self._cluster.set_devices(node, DEVICE, len(self._let_on[node]))

    def close(self, node: str, name: str) -> None:
        """Remove the job's label once its pod is there, or the job's other pod would take the next job's device."""
        self._cluster.wait(lambda: self._places.of(self._uids[name]) or None)
        self._cluster.label_node(node, f"{LABELS}/{name}", wanted=False)

    def result(self, name: str, epoch: int) -> dict[str, Any]:
        """Seconds from the address of the job's last pod until that pod, and until all pods, observed the binding."""

        def read_delays() -> dict[str, Any] | None:
            pods = self._places.of(self._uids[name])
            seen = {uid: self._seen(uid, epoch) for uid in pods}
            if len(pods) < len(NODES) or not all(seen.values()):
                return None
            first, last = pods.values()
            line = seen[list(pods)[-1]]
            assert line is not None
            assert first.address_at is not None
            assert last.address_at is not None
            assert last.told_at is not None
            everywhere = max(delays["seen_at"] for delays in seen.values() if delays)
            return {
                "epoch": epoch,
                "first_waited_seconds": last.address_at - first.address_at,
                "told_seconds": last.told_at - last.address_at,
                "last_seconds": line["seen_at"] - last.address_at,
                "since_start_seconds": line["seen_at"] - line["began_at"],
                "all_seconds": everywhere - last.address_at,
            }

        measured: dict[str, Any] = self._cluster.wait(read_delays, PATIENCE_SECONDS)
        return measured

    def _seen(self, pod_uid: str, epoch: int) -> dict[str, float] | None:
        with contextlib.suppress(FileNotFoundError):
            for line in (self.out / f"{pod_uid}.jsonl").read_text().splitlines():
                update: dict[str, float] = json.loads(line)
                if update["epoch"] == epoch:
                    return update
        return None

    def remove(self, name: str) -> None:
        """Delete the job and its pods, and remove their devices."""
        for node, names in self._let_on.items():
            names.discard(name)
            self._cluster.set_devices(node, DEVICE, len(names))
        self._cluster.delete(JOBS, name)


def spec(name: str, epoch: int) -> dict[str, Any]:
    """A job of two pods. A job that is to be profiled has a unique sequence length, for which there is no profile."""
    own = int(name.rpartition("-")[2]) + 1 if epoch == MEASURE_EPOCH else 0
    return {
        "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 2, "kvHeads": 1, "vocab": 512},
        "data": {"source": "python-stdlib", "sequenceLength": 128 + own},
        "training": {"globalBatch": 2, "steps": 1_000_000},
        "resources": {"ranks": len(NODES), "device": "cuda", "memoryPerRank": "1Gi"},
        "kubernetes": {
            "image": base_image.IMAGE,
            "acceleratorResource": DEVICE,
            "nodeSelector": {f"{LABELS}/{name}": ""},
            "volumes": {"out": {"claim": CLAIM}},
            "env": [{"name": "PATH", "value": f"{STUB}:/usr/bin:/bin"}],
        },
    }


def main() -> int:
    """Run the benchmark and write the tables."""
    with Cluster.started(lab.Spec(name="binding", num_nodes=len(NODES))) as cluster:
        results = measure(cluster)
    write_results("binding_delay", json.dumps(results), table)
    return 0


def measure(cluster: Cluster) -> dict[str, Any]:
    """Both kinds of jobs, one after the other on one cluster."""
    places = Places()
    watch = Watched(resource=PODS, selector=UID_LABEL, replace=lambda listing: None, put=places.put, remove=_ignore)
    watcher = cluster.watcher(watch)
    bench = Bench(cluster, places)
    bench.claim_storage()
    with watching(watcher), Operator.started(cluster):
        prepare(cluster, bench)
        return {"together": together(bench), "late": late(bench)}


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Watch during the block."""
    watcher.start()
    try:
        yield
    finally:
        watcher.stop()


def _ignore(message: Object) -> None:
    """Ignore the message."""


def prepare(cluster: Cluster, bench: Bench) -> None:
    """Profile and plan for the jobs that train. The operator caches both."""
    cluster.lay_out_profile(num_ranks=len(NODES))
    bench.submit("first-0", TRAIN_EPOCH, NODES)
    bench.result("first-0", MEASURE_EPOCH)
    cluster.bring_to_running(PATIENCE_SECONDS)
    bench.result("first-0", TRAIN_EPOCH)


def _epoch(number: int) -> int:
    return (MEASURE_EPOCH, TRAIN_EPOCH)[number % 2]


def together(bench: Bench) -> list[dict[str, Any]]:
    """Jobs whose pods come at the same time, one job after the other."""
    results = []
    for number in range(AT_ONCE):
        name = f"together-{number}"
        bench.submit(name, _epoch(number), NODES)
        results.append(bench.result(name, _epoch(number)))
        bench.remove(name)
        rest()
    return results


def rest() -> None:
    """Wait until the nodes are idle, plus a random time, so that pods start at random phases of the kubelets' polls."""
    time.sleep(random.uniform(*BETWEEN_SECONDS))


def late(bench: Bench) -> list[dict[str, Any]]:
    """Jobs whose second pod comes minutes after the first."""
    names = [f"late-{number}" for number in range(WAITING)]
    for number, name in enumerate(names):
        bench.submit(name, _epoch(number), NODES[:1])
        bench.close(NODES[0], name)
        rest()
    time.sleep(max(WAIT_SECONDS - BETWEEN_SECONDS[0] * WAITING, 0.0))
    results = []
    for number, name in enumerate(names):
        bench.let_on(NODES[1], name)
        results.append(bench.result(name, _epoch(number)))
        bench.remove(name)
        rest()
    return results


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    rows = [
        _row(f"{said}, {what}", [result for result in results[group] if result["epoch"] == epoch])
        for group, said in (("together", "both pods come together"), ("late", "the second pod comes late"))
        for epoch, what in ((MEASURE_EPOCH, "to measure"), (TRAIN_EPOCH, "to train by a plan that is known"))
    ]
    waited = min(result["first_waited_seconds"] for result in results["late"])
    everything = [result["last_seconds"] for group in ("together", "late") for result in results[group]]
    lines = [
        "# From a pod's address to its binding",
        "",
        f"Jobs of two pods on two real nodes; all on one machine: {results['machine']}.",
        "Seconds from when the cluster tells the address of the last pod. *Written*: until the operator has annotated",
        "it. *Read*: until the pod reads it, which is up to its kubelet. *From start*: from the first line of the",
        "program in it, which may run before its kubelet tells the address, or after, until it reads it. A pod that",
        f"comes late comes {waited:.0f} s or more after the first.",
        "",
        "| jobs | number | written, median | p99 | read, median | p99 | most | all, p99 | from start, median | p99 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"All {len(everything)}: p99 {_p99(everything):.2f} s, wanted is 1 s.",
        "",
    ]
    return "\n".join(lines)


def _row(what: str, results: Sequence[Mapping[str, float]]) -> str:
    names = ("told_seconds", "last_seconds", "all_seconds", "since_start_seconds")
    seen, last, everywhere, started = ([result[name] for result in results] for name in names)
    figures = [statistics.median(seen), _p99(seen), statistics.median(last), _p99(last), max(last), _p99(everywhere)]
    figures += [statistics.median(started), _p99(started)]
    return f"| {what} | {len(results)} | {' | '.join(f'{figure:.2f}' for figure in figures)} |"


def _p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(values)[-(len(values) // 100) - 1]
