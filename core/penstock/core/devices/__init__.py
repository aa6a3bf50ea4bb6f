"""Data of known kinds of device: numbers of one device, and of the nodes it usually comes in.

Each file of this folder is one kind. Every number has a source and its date; numbers without a measurement are marked
as such. The kernels' numbers are fitted to benchmarks of single kernels, never to training steps.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.errors import UserError
from penstock.core.layout import Precision
from penstock.core.manifest import Manifest, nearest

__all__ = ["DeviceKind", "Source", "cluster_of", "device_kind", "device_kinds", "reported_peak_flops"]

_SUFFIX = ".toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source(Manifest):
    """Source of the numbers of some fields, with its date."""

    fields: tuple[str, ...]
    source: str
    date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind(Manifest):
    """One kind of device, and the nodes it usually comes in. Its driver calls it ``reported_name``."""

    title: str
    device: DeviceSpec
    devices_per_node: int
    nics_per_node: int
    intra_node: LinkSpec
    inter_node: LinkSpec
    sources: tuple[Source, ...]
    intra_node_peer: LinkSpec | None = None
    reported_name: str | None = None


@functools.cache
def device_kinds() -> tuple[str, ...]:
    """The names of all kinds, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


@functools.cache
def device_kind(name: str) -> DeviceKind:
    """The kind called ``name``; raises `UserError` if there is none."""
    if name not in device_kinds():
        longer = [kind for kind in device_kinds() if name and kind.startswith(name)]
        close = f"choose {' or '.join(longer)}" if longer else nearest(name, device_kinds())
        raise UserError(
            what=f"{name!r} is not a known kind of device",
            where="device",
            remedy=close or f"choose one of {', '.join(device_kinds())}",
        )
    text = resources.files(__name__).joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    return DeviceKind.from_manifest(tomllib.loads(text), name)


def cluster_of(kind: DeviceKind, num_nodes: int, name: str = "") -> ClusterSpec:
    """A cluster of ``num_nodes`` nodes of the usual form for the kind."""
    return ClusterSpec(
        name=name or f"{kind.device.name}-{num_nodes}x{kind.devices_per_node}",
        device=kind.device,
        num_nodes=num_nodes,
        devices_per_node=kind.devices_per_node,
        nics_per_node=kind.nics_per_node,
        intra_node=kind.intra_node,
        intra_node_peer=kind.intra_node_peer,
        inter_node=kind.inter_node,
    )


def reported_peak_flops(name: str, precision: Precision) -> float | None:
    """The peak of the device whose driver reports ``name``; None for unknown kinds and unless training is 16-bit."""
    if precision is not Precision.BF16:
        return None
    kinds = (device_kind(kind) for kind in device_kinds())
    return next((kind.device.peak_flops for kind in kinds if kind.reported_name == name), None)
