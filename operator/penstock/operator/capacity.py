"""Free capacity: how many more pods of a job fit on the nodes next to the pods that are there.

It repeats only the arithmetic of the scheduler's NodeResourcesFit, NodeAffinity (by nodeSelector) and TaintToleration:
the scheduler decides in the end, and a job that grew in vain shrinks again. Reference:
https://kubernetes.io/docs/reference/scheduling/config
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from penstock.core.job import PipelineJob
from penstock.core.kubernetes_spec import Operator, Toleration
from penstock.kube.quantities import amount
from penstock.kube.transport import Object
from penstock.operator.podspec import REPORTER_REQUESTS, resources

Amounts = Mapping[str, Decimal]
"""Amounts by resource, in cores, bytes, devices or pods."""

EXCLUDING_EFFECTS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Number of further pods of a job that fit, and the time ``since`` when it has been this number."""

    num_pods: int
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Free resources of a node, for pods that its ``taints`` (key, value, effect) and labels admit."""

    node: str
    amounts: Amounts
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str, str], ...] = ()


def offers(nodes: Iterable[Object], pods: Iterable[Object]) -> list[Offer]:
    """Free resources of ready nodes next to ``pods`` of any owner. Pods that have ended hold nothing."""
    held: dict[str, dict[str, Decimal]] = {}
    for pod in pods:
        node = pod["spec"].get("nodeName", "")
        if node and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            _add(held.setdefault(node, {}), {**_requested(pod), "pods": Decimal(1)})
    return [_offer(node, held.get(node["metadata"]["name"], {})) for node in nodes if _is_schedulable(node)]


def num_pods(job: PipelineJob, available: Iterable[Offer]) -> int:
    """The number of pods of the job that fit."""
    needs = {"pods": Decimal(1)}
    for requested in (resources(job), REPORTER_REQUESTS):
        _add(needs, {name: amount(text) for name, text in requested.items()})
    return sum(_num_fitting(offer, needs) for offer in available if _admits(offer, job))


def _num_fitting(offer: Offer, needs: Amounts) -> int:
    return max(0, min(int(offer.amounts.get(name, Decimal(0)) // need) for name, need in needs.items() if need))


def _admits(offer: Offer, job: PipelineJob) -> bool:
    selector = job.spec.kubernetes.node_selector
    if any(offer.labels.get(name) != value for name, value in selector.items()):
        return False
    tolerations = job.spec.kubernetes.tolerations
    excluding = (taint for taint in offer.taints if taint[2] in EXCLUDING_EFFECTS)
    return all(any(_tolerates(toleration, taint) for toleration in tolerations) for taint in excluding)


def _tolerates(toleration: Toleration, taint: tuple[str, str, str]) -> bool:
    key, value, effect = taint
    if toleration.effect is not None and toleration.effect.value != effect:
        return False
    if not toleration.key:
        return True
    return toleration.key == key and (toleration.operator is Operator.EXISTS or toleration.value == value)


def _is_schedulable(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions") or ()
    is_ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return is_ready and not node.get("spec", {}).get("unschedulable")


def _offer(node: Object, held: Amounts) -> Offer:
    allocatable = node.get("status", {}).get("allocatable", {})
    return Offer(
        node=node["metadata"]["name"],
        amounts={name: amount(text) - held.get(name, Decimal(0)) for name, text in allocatable.items()},
        labels=node["metadata"].get("labels", {}),
        taints=tuple((item["key"], item.get("value", ""), item["effect"]) for item in node["spec"].get("taints", ())),
    )


def _requested(pod: Object) -> dict[str, Decimal]:
    """The pod's requests: the larger of the sum over containers and sidecars, and its largest init container."""
    spec = pod["spec"]
    lasting = [sidecar for sidecar in spec.get("initContainers", ()) if sidecar.get("restartPolicy") == "Always"]
    total: dict[str, Decimal] = {}
    for container in (*spec["containers"], *lasting):
        _add(total, _container_requests(container))
    for container in spec.get("initContainers", ()):
        for name, quantity in _container_requests(container).items():
            total[name] = max(total.get(name, Decimal(0)), quantity)
    return total


def _container_requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    requests = container.get("resources", {}).get("requests", {})
    return {name: amount(text) for name, text in requests.items()}


def _add(total: dict[str, Decimal], more: Amounts) -> None:
    for name, quantity in more.items():
        total[name] = total.get(name, Decimal(0)) + quantity
