"""Request to a process that loads PyTorch for facts about this machine, and its answer."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.job import Device
from penstock.core.manifest import Manifest
from penstock.core.model import ModelSpec
from penstock.core.profile import MachineKey


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRequest(Manifest):
    """The facts that a job depends on."""

    device: Device
    threads_per_rank: int
    model: ModelSpec
    sequence_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult(Manifest):
    """``key`` and ``model_digest`` have to match a profile's for this machine and this model; ``device_bytes`` is the
    memory of the smallest CUDA device.
    """

    num_cuda_devices: int
    device_bytes: int | None = None
    key: MachineKey | None
    model_digest: str
