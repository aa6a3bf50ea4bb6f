"""Shared by benchmarks of published steps and layers: rows, software stacks, A100 nodes and jobs."""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.cluster import AttentionKernel, ClusterSpec, Fusion, SoftwareSpec, Transfers
from penstock.core.devices import cluster_of, device_kind
from penstock.core.job import DataSpec, Device, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import ModelSpec

MEGATRON = SoftwareSpec(
    recomputes_on_demand=True,
    attention=AttentionKernel.UNFUSED,
    dropout=True,
    fusion=Fusion.GROUPED,
    launch_seconds=8e-6,
    transfers=Transfers.EXCHANGED,
    head_in_forward=False,
)
"""Megatron-LM before FlashAttention, on which the zero-bubble authors built (their section 5.1 and branch
`legacy-main`): fused bias and activation, bias, dropout and residual, and scaled masked softmax; dropout 0.1; gradients
added in fp32 by the products; point-to-point exchanges that both sides wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published step and its simulation."""

    paper: str
    name: str
    published: float
    predicted: float
    published_gib: float | None = None
    predicted_gib: float | None = None

    @property
    def error(self) -> float:
        """Signed relative error of the simulation."""
        return self.predicted / self.published - 1

    @property
    def memory_error(self) -> float | None:
        """Signed relative error of the fullest rank's memory; None if it is not published."""
        if self.published_gib is None or self.predicted_gib is None:
            return None
        return self.predicted_gib / self.published_gib - 1


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def a100_cluster(num_nodes: int, software: SoftwareSpec) -> ClusterSpec:
    """HGX A100 nodes with four cards of 200 Gb/s RoCE. The paper states only "8 GPUs a node, RoCE between nodes"."""
    return dataclasses.replace(cluster_of(device_kind("a100-80"), num_nodes), nics_per_node=4, software=software)


def job(model: ModelSpec, length: int, batch: int, ranks: int, memory: int, **pinned: Any) -> JobSpec:
    """A job with these pins and with whole hidden states, as in most of the papers."""
    return JobSpec(
        model=model,
        data=DataSpec(source="", sequence_length=length),
        training=TrainingSpec(global_batch=batch, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CPU, ranks=ranks, memory_per_rank=memory),
        parallelism=ParallelismSpec(sequence_parallel=False, **pinned),
    )


def even_stages(layers: int, num_stages: int) -> tuple[float, ...]:
    """Layers per stage, as even as possible, with the larger stages first."""
    return tuple(float(layers // num_stages + (stage < layers % num_stages)) for stage in range(num_stages))


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Mean and largest absolute error, and the bias."""
    errors = [row.error for row in rows]
    return {
        "mean": statistics.fmean(map(abs, errors)),
        "worst": max(map(abs, errors)),
        "bias": statistics.fmean(errors),
    }
