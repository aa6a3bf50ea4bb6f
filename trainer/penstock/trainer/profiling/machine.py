"""Identifies the machines of ranks: their names, and which ranks share one."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from penstock.core.host.clocks import boot_id
from penstock.core.pod import NODE_NAME_VARIABLE
from penstock.core.profile import MachineKey

MOST_NAME_CHARACTERS = 200
_PACKAGE = Path(__file__).parents[1]
_OUTSIDE = ("penstock.agent.launch", "penstock.core.graphs", "penstock.core.run.rank_status")
"""Modules outside of the trainer that affect speed: the environment of ranks, which actions are recorded, and the
status that every action writes.
"""

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Place:
    """Machine of a rank. ``name`` is the name of its node or host. Ranks with the same ``boot`` id share cores and
    memory even if names differ, as for several cluster nodes on one machine.
    """

    name: str
    boot: str


def this_place() -> Place:
    """The machine of this process."""
    name = os.environ.get(NODE_NAME_VARIABLE) or socket.gethostname()
    try:
        return Place(name, boot_id())
    except FileNotFoundError:  # only Linux has one
        return Place(name, name)


def hosts_of(places: Sequence[Place]) -> tuple[int, ...]:
    """Number of every rank's machine, in the order of first appearance."""
    numbers = {boot: number for number, boot in enumerate(dict.fromkeys(place.boot for place in places))}
    return tuple(numbers[place.boot] for place in places)


def joined_name(places: Sequence[Place]) -> str:
    """The names of all machines in the order of ranks; if that is too long, the first name and a digest of all."""
    names = list(dict.fromkeys(place.name for place in places))
    text = ",".join(names)
    if len(text) <= MOST_NAME_CHARACTERS:
        return text
    return f"{names[0][:MOST_NAME_CHARACTERS]},+{len(names) - 1},{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def fullest_host(hosts: Sequence[int]) -> int:
    """The host with the most ranks; the first of several such hosts."""
    return max(dict.fromkeys(hosts), key=hosts.count)


def machine_key(device: torch.device, threads: int) -> MachineKey:
    """Key of the hardware and software on which measurements depend."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return MachineKey(
        host=this_place().name,
        device=name,
        num_cores=num_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        threads_per_rank=threads,
        torch_version=torch.__version__,
        backend="nccl" if device.type == "cuda" else "gloo",
        trainer=trainer_digest(),
    )


def trainer_digest(package: Path = _PACKAGE, others: Sequence[str] = _OUTSIDE) -> str:
    """Digest of the trainer's source files, by name and content, since any change may affect speed.

    ``others`` are modules outside of ``package`` that affect the speed of ranks.
    """
    digest = hashlib.sha256()
    files = {path.relative_to(package).as_posix(): path for path in sorted(package.rglob("*.py"))}
    for name in others:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        files[name] = Path(spec.origin)
    for name, path in files.items():
        text = path.read_bytes()
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()[:12]


def num_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may use, by its affinity and by its container's limit (cgroups v2, cpu.max)."""
    present = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
    except OSError:
        return present
    return present if allowed == "max" else min(present, -(-int(allowed) // int(period)))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
