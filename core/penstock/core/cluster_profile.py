"""ClusterProfile: measurements made in advance, so that jobs on the same kind of nodes can use them.

It is optional: without a fresh profile a job measures in its own allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from penstock.core import job_rules
from penstock.core.instants import INSTANT
from penstock.core.job import Device, Metadata, body_of, write_headed
from penstock.core.kubernetes_spec import AcceleratorResource, NodeSelector, Tolerations
from penstock.core.layout import Precision
from penstock.core.limits import (
    EXACT,
    MOST_RANKS,
    MOST_WIDTH,
    POSITIVE_BYTES,
    characters,
    one_to,
    up_to,
)
from penstock.core.manifest import Checked, Manifest, read_dataclass
from penstock.core.model import ModelSpec
from penstock.core.names import require_labels
from penstock.core.status import Condition
from penstock.core.units import BYTES

KIND = "ClusterProfile"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterProfileSpec(Checked):
    """A measurement on some ranks of some nodes, which is repeated once it is older than ``maxAgeSeconds``."""

    model: Annotated[ModelSpec, "the model whose layers are measured"]
    sequence_length: Annotated[int, one_to(MOST_WIDTH), "tokens of one sequence"]
    precision: Annotated[Precision, "`fp32` or `bf16`; `fp64` is for proofs"] = Precision.FP32
    device: Annotated[Device, "`cpu` or `cuda`"] = Device.CPU
    ranks: Annotated[int, one_to(MOST_RANKS), "processes that are measured together; on cuda one device each"] = 2
    ranks_per_pod: Annotated[int, one_to(MOST_RANKS), "ranks that share a pod; must divide `ranks`"] = 1
    memory_per_rank: Annotated[
        int,
        POSITIVE_BYTES,
        "memory that a rank requests",
    ] = field(default=4 * 2**30, metadata=BYTES)
    threads_per_rank: Annotated[int, one_to(65_536), "CPU threads of one rank"] = 1
    node_selector: NodeSelector = field(default_factory=dict)
    tolerations: Tolerations = ()
    accelerator_resource: AcceleratorResource = "nvidia.com/gpu"
    image: Annotated[str, characters(), "container image; empty: the one that the operator was installed with"] = ""
    max_age_seconds: Annotated[int, up_to(EXACT), "older measurements are repeated; 0: never"] = 604_800

    rules = job_rules.CLUSTER_PROFILE

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Check keys."""
        return (lambda spec: require_labels(spec.node_selector, "nodeSelector"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStatus(Manifest):
    """One measured link between two ranks."""

    source: Annotated[int, "rank that sends"]
    target: Annotated[int, "rank that receives"]
    latency_seconds: Annotated[float, "seconds to the first byte"]
    bytes_per_second: Annotated[float, "in this direction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksStatus(Manifest):
    """The measured links in short; each of them is in the profile."""

    num_links: Annotated[int, "directed links that were measured"]
    slowest: Annotated[LinkStatus, "the one with the fewest bytes per second"]
    fastest: Annotated[LinkStatus, "the one with the most bytes per second"]
    median_bytes_per_second: Annotated[float, "of all links"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterProfileStatus(Manifest):
    """Result of the measurement. The profile is in the ConfigMap ``profileRef``, written as namespace/name."""

    observed_generation: Annotated[int, "the generation of the spec that was measured"] = 0
    conditions: Annotated[tuple[Condition, ...], "observations, one of each type"] = ()
    profile_ref: Annotated[str, "the ConfigMap that holds the profile, as namespace/name"] = ""
    profile_key: Annotated[
        str,
        "digest of all for which it is valid: hosts since their last start, image, model, resources",
    ] = ""
    measured_at: Annotated[float | None, "when it was measured"] = field(default=None, metadata=INSTANT)
    links: Annotated[LinksStatus | None, "summary of the measured links"] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterProfile(Manifest):
    """The manifest: `metadata` and `spec` under the API version and kind."""

    metadata: Metadata
    spec: ClusterProfileSpec

    @classmethod
    def from_manifest(cls, value: Any, path: str = "") -> Self:
        """The profile described by ``value``; raises `UserError` with the field's path."""
        return read_dataclass(cls, body_of(KIND, value, path), path)

    def to_manifest(self) -> dict[str, Any]:
        """The manifest; defaults are left out."""
        return write_headed(KIND, self)
