"""The parts of the battery by name, the most valuable first. `benchmarks.gpu.measure` implements them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part. ``needs_cuda`` parts have no meaning on the CPU."""

    name: str
    summary: str
    needs_cuda: bool = False


PARTS = {
    part.name: part
    for part in (
        Part(name="parity", summary="every CUDA path against fp64 and plain computations", needs_cuda=True),
        Part(name="memory", summary="predicted and measured memory of three plans"),
        Part(name="units", summary="the costs of all units, on device and host, and how well they are fitted"),
        Part(name="slices", summary="how much longer a step takes in more slices"),
        Part(name="host", summary="the host's time for launching an action, of a narrow model"),
        Part(name="pair", summary="profile, plan and train with two ranks on one device; the same losses as with one"),
        Part(name="torch", summary="a step next to the same model in plain PyTorch"),
        Part(name="run", summary="`penstock run` without and with full recomputation, and a run that is resumed"),
        Part(name="described", summary="units of llama-8B next to what the kind of device is described to take"),
    )
}
