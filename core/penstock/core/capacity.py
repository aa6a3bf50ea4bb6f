"""Resources that a job holds on a machine from its launch to its end, and the capacity of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.job import Device, JobSpec
from penstock.core.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Resources of a job from its launch to its end: exclusive cores or devices, and memory."""

    cores: int = 0
    cuda_devices: int = 0
    memory_bytes: int = 0

    def plus(self, other: Demand) -> Demand:
        """The sum of both."""
        return Demand(
            cores=self.cores + other.cores,
            cuda_devices=self.cuda_devices + other.cuda_devices,
            memory_bytes=self.memory_bytes + other.memory_bytes,
        )

    def fits(self, capacity: Demand) -> bool:
        """Whether a machine of that capacity can meet this demand."""
        return (
            self.cores <= capacity.cores
            and self.cuda_devices <= capacity.cuda_devices
            and self.memory_bytes <= capacity.memory_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Capacity for jobs. ``devices`` are the CUDA ones, by the names that CUDA_VISIBLE_DEVICES takes."""

    cores: int
    memory_bytes: int
    devices: tuple[str, ...] = ()

    @property
    def capacity(self) -> Demand:
        """The capacity in the form of a demand, to be compared with demands."""
        return Demand(cores=self.cores, cuda_devices=len(self.devices), memory_bytes=self.memory_bytes)


def lacking(demand: Demand, capacity: Demand) -> str:
    """Text of the resources of which a machine of that capacity has too little; empty if it meets the demand."""
    short = []
    if demand.cores > capacity.cores:
        short.append(f"{demand.cores} cores of {capacity.cores}")
    if demand.cuda_devices > capacity.cuda_devices:
        short.append(f"{demand.cuda_devices} CUDA devices of {capacity.cuda_devices}")
    if demand.memory_bytes > capacity.memory_bytes:
        short.append(f"{format_bytes(demand.memory_bytes)} of memory of {format_bytes(capacity.memory_bytes)}")
    return " and ".join(short)


def demand_of(spec: JobSpec) -> Demand:
    """The resources of all ranks of a job. On a CPU a rank holds a core for each of its threads, and host memory. On
    CUDA it holds a device and one core to drive it. Its memory is the device's; manifests do not state how much host
    memory it uses.
    """
    resources = spec.resources
    if resources.device is Device.CUDA:
        return Demand(cores=resources.ranks, cuda_devices=resources.ranks)
    return Demand(
        cores=resources.ranks * resources.threads_per_rank,
        memory_bytes=resources.host_memory_bytes(resources.ranks) or 0,
    )
