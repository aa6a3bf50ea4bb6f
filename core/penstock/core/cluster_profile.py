"""ClusterProfile: measurements made in advance, so that jobs on the same kind of nodes can use them.

It is optional: without a fresh profile a job measures in its own allocation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from penstock.core import names
from penstock.core.errors import UserError
from penstock.core.instants import INSTANT
from penstock.core.job import Device, Metadata, body_of, write_headed
from penstock.core.kubernetes_spec import Toleration
from penstock.core.layout import Precision
from penstock.core.manifest import Manifest, read_dataclass, require_all
from penstock.core.model import ModelSpec
from penstock.core.names import require_labels, require_name
from penstock.core.status import Condition
from penstock.core.units import BYTES

KIND = "ClusterProfile"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterProfileSpec(Manifest):
    """A measurement on some ranks of some nodes, which is repeated once it is older than ``maxAgeSeconds``."""

    model: ModelSpec
    sequence_length: int
    precision: Precision = Precision.FP32
    device: Device = Device.CPU
    ranks: int = 2
    ranks_per_pod: int = 1
    memory_per_rank: int = field(default=4 * 2**30, metadata=BYTES)
    threads_per_rank: int = 1
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    accelerator_resource: str = "nvidia.com/gpu"
    image: str = ""
    max_age_seconds: int = 604_800

    def __post_init__(self) -> None:
        require_all(
            self,
            self._check_pods,
            lambda: require_labels(self.node_selector, "nodeSelector"),
            lambda: require_name(self.accelerator_resource, "acceleratorResource", names.QUALIFIED),
        )

    def _check_pods(self) -> None:
        if self.ranks_per_pod > 0 and self.ranks % self.ranks_per_pod:
            raise UserError(
                what=f"{self.ranks_per_pod} does not divide ranks {self.ranks}",
                where="ranksPerPod",
                remedy="choose a divisor of ranks",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStatus(Manifest):
    """One measured link between two ranks."""

    source: int
    target: int
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksStatus(Manifest):
    """The measured links in short; each of them is in the profile."""

    num_links: int
    slowest: LinkStatus
    fastest: LinkStatus
    median_bytes_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterProfileStatus(Manifest):
    """Result of the measurement. The profile is in the ConfigMap ``profileRef``, written as namespace/name."""

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    profile_ref: str = ""
    profile_key: str = ""
    measured_at: float | None = field(default=None, metadata=INSTANT)
    links: LinksStatus | None = None


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
