"""Capacity of this machine for jobs: its cores, its memory, its CUDA devices."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

from penstock.api.executor.admission import Machine

DRIVER = Path("/proc/driver/nvidia/gpus")
OWN_NAMES = ("GPU-", "MIG-")
"""Prefixes of device names that only the driver can resolve."""


def this_machine(environment: Mapping[str, str]) -> Machine:
    """The whole capacity, without PyTorch, which need not be installed."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        devices=devices_in(environment, len(list(DRIVER.glob("*")))),
    )


def devices_in(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The CUDA devices among ``count`` that a process in this environment has, as CUDA_VISIBLE_DEVICES names them.

    As in CUDA itself, an invalid name hides the devices from there on.
    """
    numbers = [str(number) for number in range(count)]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return tuple(numbers)
    names = (name.strip() for name in visible.split(","))
    seen = itertools.takewhile(lambda name: name in numbers or name.startswith(OWN_NAMES), names)
    return tuple(dict.fromkeys(seen))
