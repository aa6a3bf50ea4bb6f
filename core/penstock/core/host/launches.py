"""Launches of one user on this machine: the resources that each holds, and whether another launch fits.

`penstock run`, `penstock profile`, trials and the supervisor of each of a service's attempts add themselves before they
start ranks, and stay until these have ended. Two rules decide which launches may start:

- A CUDA device has one launch. A launch that does not name its devices gets the first that are free.
- Cores and memory are counted as a service does for its jobs (`penstock.core.capacity`). Launches run side by side
  while they fit together. A single launch always fits: it may request more than the machine has, which is slow
  but disturbs no other launch.

A launch is a file that its process keeps locked (flock(2)). The kernel releases the lock however the process ends, so
nothing has to be cleaned up for others to start. An example of the folder:

    lock                    held for the moment in which a launch is added
    4711-0c9b1f7e.json      {"pid": 4711, "what": "run directory /home/me/runs/tiny/1", "cores": 2, ...}
    4805-77a0e2d1.json      unlocked: its process was killed, and the next launch removes it
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.core.capacity import Demand, Machine
from penstock.core.errors import UserError
from penstock.core.host.locks import STATE
from penstock.core.host.machine_capacity import addresses_of
from penstock.core.manifest import Manifest
from penstock.core.units import format_bytes, format_count

MOST_NAMED = 3
"""Holders in a message."""


class InUseError(UserError):
    """Other launches hold resources that a launch needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding(Manifest):
    """What a launch holds, by the process ``pid``; ``what`` describes it to people.

    ``cpus`` are those that the process may run on. ``devices`` are PCI addresses; empty with ``cuda_devices`` where the
    driver lists none, which may be any. ``uid`` is of a service's job.
    """

    pid: int
    what: str
    cores: int = 0
    cuda_devices: int = 0
    memory_bytes: int = 0
    cpus: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    uid: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.what}) holds {' and '.join(self._parts()) or 'nothing'}"

    def _parts(self) -> list[str]:
        parts = []
        if self.cores:
            parts.append(format_count(self.cores, "core"))
        if self.cuda_devices:
            parts.append(format_count(self.cuda_devices, "CUDA device"))
        if self.memory_bytes:
            parts.append(f"{format_bytes(self.memory_bytes)} of memory")
        return parts


class Launches:
    """The launches in ``folder`` on ``machine``, for a process that may run on ``cpus``."""

    def __init__(
        self,
        folder: Path,
        machine: Machine,
        cpus: Iterable[int] | None = None,
        addresses: Callable[[Iterable[str]], tuple[str, ...]] = addresses_of,
    ) -> None:
        self._folder, self._machine, self._addresses = folder, machine, addresses
        self._cpus = frozenset(os.sched_getaffinity(0) if cpus is None else cpus)

    @contextmanager
    def held(
        self, what: str, demand: Demand, *, uid: str = "", devices: tuple[str, ...] | None = None
    ) -> Iterator[tuple[str, ...]]:
        """Hold ``demand`` for ``what`` during the block; yield the CUDA devices of the launch, by name.

        They are ``devices``, or else the first that are free; none where the driver lists none. Launches of the same
        ``uid`` are of one job and not counted.

        Raises:
            InUseError: it does not fit next to others.
            UserError: the folder cannot be written.
        """
        with self._adding():
            others = self.others([uid] if uid else [])
            self._require_capacity(demand, others)
            given = self._free(demand, others) if devices is None else self._unheld(devices, demand, others)
            holding = Holding(
                pid=os.getpid(),
                what=what,
                cores=demand.cores,
                cuda_devices=demand.cuda_devices,
                memory_bytes=demand.memory_bytes,
                cpus=tuple(sorted(self._cpus)),
                devices=self._addresses(given),
                uid=uid,
            )
            path = self._folder / f"{holding.pid}-{uuid.uuid4().hex[:8]}.json"
            file = path.open("w")
            file.write(json.dumps(holding.to_manifest()))
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield given
        finally:
            path.unlink(missing_ok=True)
            file.close()

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Let one launch at a time be added, after the files of launches that were killed are removed."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / "lock").open("w")
        except OSError as error:
            remedy = f"fix its permissions, or set {STATE} to another folder"
            what = f"cannot be written: {error.strerror}"
            raise UserError(what=what, where=str(self._folder), remedy=remedy) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in self._folder.glob("*.json"):
                if _read(path) is None:
                    path.unlink(missing_ok=True)
            yield

    def holdings(self) -> list[Holding]:
        """The running launches."""
        holdings = (_read(path) for path in sorted(self._folder.glob("*.json")))
        return [holding for holding in holdings if holding is not None]

    def others(self, uids: Iterable[str]) -> list[Holding]:
        """The running launches, without those of jobs with these uids."""
        own = frozenset(uids)
        return [holding for holding in self.holdings() if holding.uid not in own]

    def demand_of(self, holding: Holding) -> Demand:
        """The launch's part of this process's resources: no cores, if it runs on others."""
        cores = 0 if self._cpus.isdisjoint(holding.cpus) else holding.cores
        return Demand(cores=cores, cuda_devices=holding.cuda_devices, memory_bytes=holding.memory_bytes)

    def devices_of(self, holdings: Sequence[Holding]) -> tuple[str, ...]:
        """The machine's devices that these launches hold, by its names."""
        free = self._unheld_names(holdings)
        return tuple(name for name in self._machine.devices if name not in free)

    def _require_capacity(self, demand: Demand, others: Sequence[Holding]) -> None:
        """Raise `InUseError` if cores or memory do not suffice for all."""
        if not others:
            return
        capacity, used = self._machine.capacity, Demand()
        for holding in others:
            used = used.plus(self.demand_of(holding))
        short = []
        if used.cores and used.cores + demand.cores > capacity.cores:
            free = max(capacity.cores - used.cores, 0)
            short.append(f"{format_count(demand.cores, 'core')} of which {free} of {capacity.cores} are free")
        if used.memory_bytes and used.memory_bytes + demand.memory_bytes > capacity.memory_bytes:
            free_text = format_bytes(max(capacity.memory_bytes - used.memory_bytes, 0))
            total = format_bytes(capacity.memory_bytes)
            short.append(f"{format_bytes(demand.memory_bytes)} of memory of which {free_text} of {total} are free")
        if short:
            raise _in_use(" and ".join(short), others)

    def _unheld_names(self, others: Sequence[Holding]) -> tuple[str, ...]:
        """Names of the machine's devices that no other launch holds."""
        if any(holding.cuda_devices and not holding.devices for holding in others):
            return ()
        held = {address for holding in others for address in holding.devices}
        names = self._machine.devices
        return tuple(name for name, address in zip(names, self._addresses(names), strict=True) if address not in held)

    def _free(self, demand: Demand, others: Sequence[Holding]) -> tuple[str, ...]:
        """The first devices that are free; none where the driver lists none."""
        count, users = demand.cuda_devices, [holding for holding in others if holding.cuda_devices]
        free = self._unheld_names(others)
        if users and count > len(free):
            raise _in_use(_devices_short(count, len(free), len(self._machine.devices)), users)
        return free[:count]

    def _unheld(self, devices: tuple[str, ...], demand: Demand, others: Sequence[Holding]) -> tuple[str, ...]:
        """``devices``, if no other launch holds one of them."""
        addresses = set(self._addresses(devices))
        users = [
            holding
            for holding in others
            if holding.cuda_devices and (not holding.devices or addresses.intersection(holding.devices))
        ]
        if users and demand.cuda_devices:
            names = ", ".join(devices)
            raise _in_use(f"the CUDA devices {names}, of which not all are free", users)
        return devices


def _devices_short(count: int, free: int, total: int) -> str:
    return f"{format_count(count, 'CUDA device')} of which {free} of {total} are free"


def _in_use(short: str, holders: Sequence[Holding]) -> InUseError:
    named = [str(holding) for holding in holders[:MOST_NAMED]]
    if len(holders) > MOST_NAMED:
        named.append(f"{len(holders) - MOST_NAMED} more hold the rest")
    return InUseError(
        what=f"this launch needs {short}: {', '.join(named)}",
        where="this machine",
        remedy="wait for that, end it, or lower spec.resources; jobs of a service (penstock serve) wait for each other",
    )


def _read(path: Path) -> Holding | None:
    """The launch if it runs: then its process has the lock of the file."""
    with suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return Holding.from_manifest(json.load(file))
            except (ValueError, UserError):
                return Holding(pid=0, what=f"of another version, {path}")
    return None
