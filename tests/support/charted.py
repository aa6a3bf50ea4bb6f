"""The chart with all its programs on a test's cluster, restricted, and on which nodes they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deploy import own_images
from deploy.installation import Installation
from deploy.site import site_of_lab
from penstock.kube.resources import PODS
from tests.support.cluster import Cluster
from tests.support.installed import PAIR_NODES, JobSpace, label_node
from tests.support.kubectl import kubectl_of, with_crds

OWNED = ("meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-", "helm.sh/resource-policy-")
CRDS = ("pipelinejobs.penstock.dev", "clusterprofiles.penstock.dev")


@contextmanager
def chart_space(cluster: Cluster) -> Iterator[JobSpace]:
    """Namespaces of the jobs and of the chart's programs; both accept restricted pods only."""
    with_crds(kubectl_of(cluster))
    with cluster.namespace("restricted") as namespace, cluster.namespace("restricted") as system:
        space = JobSpace(cluster=cluster, lab=cluster.of_lab(), namespace=namespace, system=system)
        space.claim_storage()
        for node in PAIR_NODES:
            label_node(cluster, node, True)
        yield space


@contextmanager
def charted(space: JobSpace, values: Mapping[str, Any]) -> Iterator[Installation]:
    """Install the chart with these values; at the end its CRDs stay without an owner."""
    site = site_of_lab(space.lab)
    images = own_images.given(site, space.lab.name)
    installation = Installation(site=site, images=images, release="tried", namespace=space.system)
    installation.install(values)
    yield installation
    space.kubectl("delete", "pj", "--all", "--wait=false")
    installation.uninstall()
    for name in CRDS:
        space.kubectl("annotate", "crd", name, *OWNED)
        space.kubectl("label", "crd", name, "app.kubernetes.io/managed-by-")


def values(space: JobSpace) -> dict[str, Any]:
    """The namespace of jobs, and the image that they name there."""
    return {"namespace": space.namespace, "jobPolicy.images": [space.cluster.image]}


def prefer(node: str) -> dict[str, Any]:
    """Values with which operator and service run on that node while it is there."""
    requirement = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    preference = {"weight": 100, "preference": {"matchExpressions": [requirement]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}
    return {f"{program}.affinity": affinity for program in ("operator", "service")}


def programs(space: JobSpace) -> dict[str, str]:
    """The uid of each program's pod that is not about to end."""
    return {name: pod["metadata"]["uid"] for name, pod in _live_pods(space)}


def nodes_of_programs(space: JobSpace) -> dict[str, str]:
    """The node of each program's pod that is not about to end."""
    return {name: pod["spec"].get("nodeName", "") for name, pod in _live_pods(space)}


def _live_pods(space: JobSpace) -> Iterator[tuple[str, dict[str, Any]]]:
    for pod in space.cluster.all(PODS, space.system):
        if "deletionTimestamp" not in pod["metadata"]:
            yield pod["metadata"]["labels"]["app.kubernetes.io/component"], pod
