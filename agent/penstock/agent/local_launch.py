"""Holds the part of this machine that a job's ranks need, against other launches of this user."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path

from penstock.core.capacity import demand_of
from penstock.core.host.launches import Launches
from penstock.core.host.locks import launches_folder
from penstock.core.host.machine_capacity import this_machine
from penstock.core.job import JobSpec


def local_launches() -> Launches:
    """The launches of this user on this machine."""
    return Launches(launches_folder(os.environ, Path.home(), socket.gethostname()), this_machine(os.environ))


def holding(
    spec: JobSpec, what: str, *, uid: str = "", devices: tuple[str, ...] | None = None
) -> AbstractContextManager[tuple[str, ...]]:
    """Hold the resources of the job's ranks during the block, which gets their CUDA devices; empty: all that there may
    be. Raises as `penstock.core.host.launches.Launches.held`.
    """
    return local_launches().held(what, demand_of(spec), uid=uid, devices=devices)
