"""A backend for process groups on CPU: torch's gloo, with one device for all groups of a process.

A gloo device is a thread that waits for sockets. It wakes every 10 ms, even if nothing arrives. torch makes a device
for every group, and a rank has a group per channel (`penstock.trainer.comm`): on two cores, a rank with 20 idle groups
woke 2,000 times a second, which took 4 % of its core, and with one device 100 times, which took 0.6 %. Messages take as
long with one device: 0.3 ms for a float, 1.3 ms for 1 MiB, 70 ms for 64 MiB.

Networks faster than one thread can read, some GB/s, would need several devices.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist


@functools.cache
def backend() -> str:
    """The name of the backend, for `dist.init_process_group` and `dist.new_group`."""
    name = "gloo_on_one_device"
    dist.Backend.register_backend(name, _group, extended_api=True, devices=["cpu"])
    return name


def _group(request: Any, _options: object) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = _devices(), request.timeout
    return dist.ProcessGroupGloo(request.store, request.group_rank, request.group_size, options)


@functools.cache
def _devices() -> list[Any]:
    """One device per interface that ``GLOO_SOCKET_IFNAME`` names, as torch has them; else one for the host's name."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    gloo = dist.ProcessGroupGloo
    return [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
