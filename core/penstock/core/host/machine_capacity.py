"""Capacity of this machine for launches: its cores, its memory, its CUDA devices."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.core.capacity import Machine

DRIVER = Path("/proc/driver/nvidia/gpus")
OWN_NAMES = ("GPU-", "MIG-")
"""Prefixes of device names that only the driver can resolve."""


def this_machine(environment: Mapping[str, str]) -> Machine:
    """Return the whole capacity of this machine. Works without PyTorch, which may not be installed."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        devices=devices_in(environment, len(list(DRIVER.glob("*")))),
    )


def devices_in(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Return the CUDA devices, of ``count``, that are visible in the environment, by their CUDA_VISIBLE_DEVICES names.

    As in CUDA itself, an invalid name hides the devices from there on.
    """
    numbers = [str(number) for number in range(count)]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return tuple(numbers)
    names = (name.strip() for name in visible.split(","))
    seen = itertools.takewhile(lambda name: name in numbers or name.startswith(OWN_NAMES), names)
    return tuple(dict.fromkeys(seen))


def addresses_of(names: Iterable[str], driver: Path = DRIVER) -> tuple[str, ...]:
    """Convert device names to PCI addresses: a device then has one name, whether it was given by number or by UUID.

    Numbers follow the order of addresses, as CUDA numbers devices of the same model. A name that the driver does not
    list, such as that of a MIG instance, is returned as it is.
    """
    uuids = {folder.name: _uuid(folder) for folder in sorted(driver.glob("*"))}
    return tuple(_address_of(name, uuids) for name in names)


def _address_of(name: str, uuids: Mapping[str, str]) -> str:
    if name.isdecimal():
        return next(itertools.islice(uuids, int(name), None), name)
    return next((address for address, uuid in uuids.items() if uuid.startswith(name)), name)


def _uuid(folder: Path) -> str:
    """Return the UUID from the driver's description of a device; empty if there is none."""
    try:
        lines = (folder / "information").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == "GPU UUID"), "")
