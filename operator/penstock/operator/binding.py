"""Order of an attempt's pods, which gives each its node rank for torchrun, and the cache key of a measurement.

Pods are ordered by host, not by name. An attempt on the same hosts as an earlier one then has every rank on the same
host, and may use the earlier measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.core.job import PipelineJob
from penstock.core.pod import PodBinding
from penstock.core.profile import digest
from penstock.core.profile_matching import batches_to_measure, model_digest
from penstock.operator.snapshots import NodeSnapshot, PodSnapshot

MASTER_PORT = 29_500


def in_order(pods: Sequence[PodSnapshot], nodes: Mapping[str, NodeSnapshot]) -> list[PodSnapshot]:
    """Return the pods as nodes 0, 1, ... of the attempt."""
    return sorted(pods, key=lambda pod: (_identity(nodes, pod.node), pod.index))


def bindings(
    job: PipelineJob, attempt: int, epoch: int, pods: Sequence[PodSnapshot], plan_digest: str = ""
) -> list[PodBinding]:
    """Return the bindings of pods in order: of `MEASURE_EPOCH`, or of `TRAIN_EPOCH` with the plan's digest."""
    return [
        PodBinding(
            pod_uid=pod.uid,
            attempt=attempt,
            epoch=epoch,
            node_rank=node_rank,
            num_nodes=len(pods),
            ranks_per_pod=job.spec.kubernetes.ranks_per_pod,
            master=pods[0].address,
            port=MASTER_PORT,
            plan_digest=plan_digest,
        )
        for node_rank, pod in enumerate(pods)
    ]


def profile_key(
    job: PipelineJob, pods: Sequence[PodSnapshot], nodes: Mapping[str, NodeSnapshot], global_batch: int | None = None
) -> str:
    """Return the cache key of a measurement by these pods: their hosts since their last boot, the image and the work.

    The key uses the job's global batch, or ``global_batch`` if given.
    """
    spec = job.spec
    named = {
        "hosts": [_identity(nodes, pod.node) for pod in pods],
        "image": sorted({pod.image_id for pod in pods}),
        "model": model_digest(spec.model, spec.data.sequence_length),
        "precision": spec.training.precision.value,
        "batches": batches_to_measure(global_batch or spec.training.global_batch),
        "resources": replace(spec.resources, min_ranks=None).to_manifest(),
        "ranksPerPod": spec.kubernetes.ranks_per_pod,
        "accelerator": spec.kubernetes.accelerator_resource,
    }
    return digest(named)[:40]


def _identity(nodes: Mapping[str, NodeSnapshot], name: str) -> str:
    node = nodes.get(name)
    return f"{node.uid}/{node.boot_id}" if node else name
