"""Kueue on a cluster of tests for a while, with one queue that has room for a little more than one small job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deploy import kind
from tests.support.cluster import Cluster
from tests.support.helm import helm_of
from tools.lab import addons, build, lab
from tools.lab.console import LabError

API = "kueue.x-k8s.io/v1beta2"
QUEUE = "team"
LOW, HIGH = "low", "high"
"""Priority classes."""

CPUS = "3100m"
"""A small job's two pods ask for one and a little each, so a second job would find room for one of its pods."""

RETRY_SECONDS = 30.0


@contextmanager
def kueue(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Installed, with a `QUEUE` in the namespace, for as long as the block. No job may be in it when that ends."""
    _install(cluster)
    objects = [*_classes(), _flavor(), _cluster_queue(namespace)]
    cluster.wait(lambda: _taken(cluster, objects), "Kueue takes no queue", RETRY_SECONDS)
    cluster.create(namespace, _named("LocalQueue", QUEUE, spec={"clusterQueue": QUEUE}))
    yield
    cluster.kubectl("--namespace", namespace, "delete", "localqueue", QUEUE)
    cluster.kubectl("delete", "clusterqueue,resourceflavor,workloadpriorityclass", "--all")
    helm_of(cluster).act(cluster.kubeconfig, "uninstall", "kueue", "--namespace", "kueue-system", "--wait")


def _install(cluster: Cluster) -> None:
    if cluster.lab is None:
        kind.install(build.KUEUE, cluster.kubeconfig)
        return
    lab.fill_cache([build.KUEUE])
    lab.load(cluster.lab, build.built(build.KUEUE) / "image.tar")
    addons.install(build.KUEUE, addons.kueue_values(), cluster.lab.folder, cluster.kubeconfig)


def _taken(cluster: Cluster, objects: list[dict[str, Any]]) -> bool:
    """Whether it takes them; its webhook does not answer at once."""
    whole = {"apiVersion": "v1", "kind": "List", "items": objects}
    try:
        cluster.kubectl("apply", "--filename", "-", stdin=json.dumps(whole))
    except LabError:
        return False
    return True


def _named(kind: str, name: str, **rest: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, **rest}


def _classes() -> list[dict[str, Any]]:
    return [_named("WorkloadPriorityClass", name, value=value) for name, value in ((LOW, 1), (HIGH, 2))]


def _flavor() -> dict[str, Any]:
    return _named("ResourceFlavor", "any", spec={})


def _cluster_queue(namespace: str) -> dict[str, Any]:
    quotas = [{"name": "cpu", "nominalQuota": CPUS}, {"name": "memory", "nominalQuota": "1Ti"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "any", "resources": quotas}]}
    chosen = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    preemption = {"withinClusterQueue": "LowerPriority"}
    spec = {"namespaceSelector": chosen, "resourceGroups": [group], "preemption": preemption}
    return _named("ClusterQueue", QUEUE, spec=spec)
