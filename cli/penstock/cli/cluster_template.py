"""Template of a cluster description for `penstock cluster init`: every number with its meaning and its source."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

from penstock.cli import output
from penstock.cli.output import Lines
from penstock.cli.template import write_new
from penstock.core.cluster import DeviceSpec, KernelSpec, LinkSpec
from penstock.core.devices import DeviceKind, cluster_of, device_kind, device_kinds
from penstock.core.manifest import camel
from penstock.core.units import format_bytes, quantity

DEVICE_FIELDS = {
    "peak_flops": "of matrix products in bf16 without sparsity, FLOP per second",
    "memory_bytes": "a job's smaller memoryPerRank counts",
    "memory_bandwidth": "bytes per second",
    "constant_bytes": "context, libraries and communicators",
    "action_overhead_seconds": "fixed cost of one action",
    "price_per_hour": "of one device; plans then say what they cost",
}
KERNEL_FIELDS = {
    "product_share": "of the peak, by a product that is large in every dimension",
    "product_edge": "a product takes as long as one with that many more rows and columns",
    "product_depth": "and with so much more depth",
    "product_memory_share": "of the bandwidth, by the matrices of a product",
    "attention_share": "of the peak, by fused attention forward",
    "attention_backward_share": "the same backward",
    "attention_edge": "more keys per query",
    "attention_depth": "a wider head",
    "attention_rows": "more rows of queries",
    "stream_share": "of the bandwidth, by elementwise kernels",
    "row_share": "of the bandwidth, by norms and softmax",
    "kernel_seconds": "least time of a kernel",
}
SOFTWARE = """\
# What the trainer does; these are the defaults, which describe penstock's own.
# software:
#   attention: flash            # or unfused: scores are kept
#   dropout: false
#   fusion: epilogue            # or grouped (Megatron-LM), or none (PyTorch's modules)
#   fusedGradients: true        # W's product adds to the gradient itself
#   gradientType: fp32          # or bf16
#   transfers: overlapped       # with computing; or exchanged (Megatron-LM's 1F1B), or blocking
#   optimizerBarrier: true
#   allocatorSlack: 0.0         # share of activations lost to the allocator
#   launchSeconds: 5.0e-6       # of one kernel, on the host
#   headInForward: true         # the head's F does its whole backward
#   overlappedCollectives: false  # a backward's, with its products (Megatron-LM)
#   recomputesOnDemand: false   # inside the backward that needs it
"""


def description(kind: DeviceKind, num_nodes: int, name: str = "") -> str:
    """Return a description of ``num_nodes`` nodes; raises `UserError` for more devices than are allowed."""
    cluster = cluster_of(kind, num_nodes, name)
    lines = [
        f"# {num_nodes} nodes of {kind.devices_per_node} {kind.title}, for `penstock plan JOB --cluster FILE`.",
        "# Replace numbers by those of your own hardware where you know them. Sources:",
        *(_source(source.fields, source.source, source.date) for source in kind.sources),
        f"name: {cluster.name}",
        f"numNodes: {num_nodes}",
        f"devicesPerNode: {kind.devices_per_node}",
        f"nicsPerNode: {kind.nics_per_node}              # network cards, which the devices of a node share evenly",
        f"intraNode: {_link(kind.intra_node)}   # what a collective reaches inside a node",
    ]
    if kind.intra_node_peer is not None:
        lines.append(f"intraNodePeer: {_link(kind.intra_node_peer)}   # between two devices of a node")
    lines += [
        f"interNode: {_link(kind.inter_node)}   # one network card",
        f"error: {_number(cluster.error)}                  # share by which predicted times may be off",
        "device:",
        f"  name: {kind.device.name}",
        *_fields(kind.device, DEVICE_FIELDS, "  "),
    ]
    if kind.device.kernels is not None:
        lines += ["  kernels:", *_fields(kind.device.kernels, KERNEL_FIELDS, "    ")]
    return "\n".join(lines) + "\n" + SOFTWARE


def _source(fields: tuple[str, ...], source: str, date: str) -> str:
    return f"# - {', '.join(fields)}: {source} ({date})"


def _fields(owner: DeviceSpec | KernelSpec, meanings: dict[str, str], indent: str) -> list[str]:
    written = {field: f"{indent}{camel(field)}: {_value(field, getattr(owner, field))}" for field in meanings}
    width = max(map(len, written.values()))
    return [f"{line:<{width}}  # {meanings[field]}" for field, line in written.items()]


def _value(field: str, value: float) -> str:
    return quantity(int(value)) if field.endswith("_bytes") else _number(value)


def _link(link: LinkSpec) -> str:
    return f"{{latencySeconds: {_number(link.latency_seconds)}, bytesPerSecond: {_number(link.bytes_per_second)}}}"


def _number(value: float) -> str:
    """Format ``value`` exactly, with an exponent where it is large: ``989.0e12``."""
    text = Decimal(repr(value)).normalize().to_eng_string().lower().replace("e+", "e")
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa if '.' in mantissa or not exponent else mantissa + '.0'}{exponent}{power}"


def write_description(path: Path, device: str, num_nodes: int, name: str, *, overwrite: bool) -> None:
    """Write a description; raises `UserError` for an unknown device, or if the file exists."""
    write_new(path, description(device_kind(device), num_nodes, name), overwrite=overwrite)


def kinds_lines() -> Lines:
    """Return the kinds of device as a table."""
    table = output.table("device", "", "peak TFLOP/s", "memory", "GB/s", "a node", padding=(0, 2))
    for name in device_kinds():
        kind = device_kind(name)
        node = f"{kind.devices_per_node} devices, {kind.nics_per_node} cards"
        peak, bandwidth = kind.device.peak_flops / 1e12, kind.device.memory_bandwidth / 1e9
        memory = format_bytes(kind.device.memory_bytes)
        table.add_row(name, kind.title, f"{peak:.0f}", memory, f"{bandwidth:.0f}", node)
    return [table]


def kinds_data() -> dict[str, Any]:
    """Return the kinds of device as data, with sources."""
    return {name: device_kind(name).to_manifest() for name in device_kinds()}
