"""A lab's life: up, down, what is going on in it, and what is done to its nodes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.lab import addons, base_image, build, cache, cgroups, network, node, packages, rooms, state, volumes
from tools.lab import control_plane as plane
from tools.lab.addresses import MOST_NODES, RANGE, Addresses, free_slot
from tools.lab.certificates import make_all, write_kubeconfig
from tools.lab.console import LabError, plain_environ, run, say, wait_until
from tools.lab.state import State

READY_SECONDS = 60.0
MOST_CORES = 1024
NAMES = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
NODE_PROGRAMS = (*node.RUNTIME, *node.KUBELET)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `up` is asked for."""

    name: str = state.DEFAULT_NAME
    num_nodes: int = 2
    kueue: bool = False
    kwok: bool = False

    def __post_init__(self) -> None:
        if not NAMES.fullmatch(self.name):
            raise LabError(f"'{self.name}' is no name for a lab: small letters, digits and dashes, at most 32")
        if not 1 <= self.num_nodes <= MOST_NODES:
            raise LabError(f"a lab has 1 to {MOST_NODES} nodes, not {self.num_nodes}")

    @property
    def parts(self) -> list[build.Part]:
        optional = [(self.kueue, build.KUEUE), (self.kwok, build.KWOK)]
        return [build.KUBERNETES, build.HELM, build.JOBSET, *(part for wanted, part in optional if wanted)]


def fill_cache(parts: list[build.Part]) -> None:
    """Build what is not in the cache, the base image too, and drop what only building needed."""
    packages.require()
    with cache.locked():
        missing = [part for part in parts if not build.is_built(part)]
        for part in parts:
            build.built(part)
        base_image.layer()
        if missing:
            build.forget_go()


def up(wanted: Wanted) -> State:
    """Start a lab and return when its nodes are ready; whatever fails, nothing of it is left."""
    _require_root()
    rooms.require()
    _require_new(wanted.name)
    fill_cache(wanted.parts)
    started = time.monotonic()
    lab = _begin(wanted)
    try:
        lab = _populate(lab)
        _complete(lab, wanted)
    except BaseException:
        down(wanted.name)
        raise
    say(f"{wanted.name} is up after {time.monotonic() - started:.0f} s: export KUBECONFIG={lab.kubeconfig}")
    return lab


def _require_new(name: str) -> None:
    if name in state.names():
        raise LabError(f"the lab {name} is up already: ./dev cluster status, or down")


def _require_root() -> None:
    if os.geteuid() != 0:
        raise LabError("the lab makes network interfaces and mounts, which only root may: sudo ./dev cluster ...")


@contextmanager
def _lock() -> Iterator[None]:
    """Labs begin and end one after the other: they choose slots, and share folders that rooms cover."""
    state.labs().mkdir(parents=True, exist_ok=True)
    with (state.labs() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _note() -> Path:
    """Where the folders are noted that were made for the rooms of all labs."""
    return state.labs() / "mountpoints"


def _begin(wanted: Wanted) -> State:
    """The lab's folder, slot and mount points; from here on `down` knows it."""
    with _lock():
        _require_new(wanted.name)
        others = [str(state.read(name).addresses.network) for name in state.names()]
        slot = free_slot(wanted.name, [*network.routed(), *others])
        if slot is None:
            raise LabError(f"there is no room for a lab in {RANGE}: ./dev cluster down --name {state.names()}")
        folder = state.folder_of(wanted.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kubernetes = str(build.built(build.KUBERNETES))
        lab = State(name=wanted.name, slot=slot, num_nodes=wanted.num_nodes, kubernetes=kubernetes, rooms={})
        lab.write()
        rooms.make_mountpoints(_note())
    return lab


def _populate(lab: State) -> State:
    """Lay the bridge, and open every room with its cable."""
    addresses = lab.addresses
    network.lay_bridge(addresses)
    make_all(lab.certificates, addresses, lab.num_nodes)
    write_kubeconfig(lab.kubeconfig, lab.certificates, "admin", addresses.apiserver)
    machines = {plane.NAME: addresses.control_plane}
    machines |= {node.name(number): addresses.node(number) for number in range(1, lab.num_nodes + 1)}
    for machine, address in machines.items():
        folder = lab.folder / machine
        folder.mkdir()
        room = rooms.open_room(machine, folder, lab.programs / rooms.FIRST)
        lab = replace(lab, rooms={**lab.rooms, machine: room.first})
        lab.write()
        network.plug_in(room, address, addresses)
    return lab


def _complete(lab: State, wanted: Wanted) -> None:
    addresses, control = lab.addresses, lab.room(plane.NAME)
    network.route_host(addresses, lab.num_nodes)
    network.route_room(control, network.pod_routes(addresses, lab.num_nodes))
    images = [build.built(part) / "image.tar" for part in wanted.parts if part.image]
    images.append(base_image.write(lab.folder / "python.tar"))
    with ThreadPoolExecutor() as pool:
        nodes = range(1, lab.num_nodes + 1)
        prepared = [pool.submit(_prepare_node, lab, number, images) for number in nodes]
        plane.start(control, lab.programs, lab.certificates, addresses)
        say("the control plane is ready")
        for each in prepared:
            each.result()
        list(pool.map(lambda number: _join(lab, number), nodes))
    _wait_for_nodes(lab)
    say(f"{lab.num_nodes} nodes are ready")
    volumes.make_folders(lab.folder / "volumes")
    apply(lab, volumes.manifests(lab.folder / "volumes"))
    _add(lab, wanted)


def _prepare_node(lab: State, number: int, images: list[Path]) -> None:
    """A node's configuration, runtime and images, for which no control plane is needed."""
    room = lab.room(node.name(number))
    cgroups.make(lab.group(room.name))
    network.route_room(room, network.pod_routes(lab.addresses, lab.num_nodes, besides=number))
    node.configure(room, lab.certificates, lab.addresses, number, lab.group(room.name))
    _start_runtime(room)
    for image in images:
        node.import_image(room, image)


def _start_runtime(room: rooms.Room) -> None:
    node.start_runtime(room, packages.program("containerd"), base_image.shared())


def _join(lab: State, number: int) -> None:
    room = lab.room(node.name(number))
    _start_kubelet(lab, room)
    node.start_proxy(room, lab.programs)


def _start_kubelet(lab: State, room: rooms.Room) -> None:
    node.start_kubelet(room, lab.programs, str(lab.addresses.node(int(room.name.removeprefix("node")))))


def _wait_for_nodes(lab: State) -> None:
    wanted = {node.name(number) for number in range(1, lab.num_nodes + 1)}
    try:
        wait_until(lambda: wanted <= ready_nodes(lab), "ready nodes", READY_SECONDS, 0.3)
    except LabError as error:
        logs = [lab.room(silent).log_tail("kubelet") for silent in sorted(wanted - ready_nodes(lab))]
        raise LabError("\n".join([str(error), *logs])) from error


def _add(lab: State, wanted: Wanted) -> None:
    addons.install(build.JOBSET, addons.jobset_values(), lab.folder, lab.kubeconfig)
    say("JobSet is installed")
    if wanted.kueue:
        addons.install(build.KUEUE, addons.kueue_values(), lab.folder, lab.kubeconfig)
        say("Kueue is installed")
    if wanted.kwok:
        addons.start_kwok(lab.room(plane.NAME), lab.certificates, lab.addresses.apiserver)
        say("kwok runs")


def kubectl(lab: State, *words: str, stdin: str | None = None) -> str:
    """What kubectl prints; raises `LabError` with what it complains about."""
    return run(lab.programs / "kubectl", "--kubeconfig", lab.kubeconfig, *words, stdin=stdin, environ=plain_environ())


def apply(lab: State, manifests: list[dict[str, Any]]) -> None:
    """Apply objects."""
    whole = {"apiVersion": "v1", "kind": "List", "items": manifests}
    kubectl(lab, "apply", "--server-side", "--filename", "-", stdin=json.dumps(whole))


def ready_nodes(lab: State) -> set[str]:
    """The nodes that the cluster holds for ready, kwok's among them."""
    found = json.loads(kubectl(lab, "get", "nodes", "--output", "json"))["items"]
    return {each["metadata"]["name"] for each in found if _is_ready(each)}


def _is_ready(found: dict[str, Any]) -> bool:
    conditions = found["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def down(name: str) -> None:
    """End a lab without a trace; one that does not exist is none."""
    _require_root()
    if name not in state.names():
        shutil.rmtree(state.folder_of(name), ignore_errors=True)
        return
    lab = state.read(name)
    for machine in lab.rooms:
        lab.room(machine).close()
    network.take_up_bridge(lab.addresses)
    for machine in lab.rooms:
        cgroups.remove(lab.group(machine))
    with _lock():
        shutil.rmtree(lab.folder)
        if not state.names():
            rooms.remove_mountpoints(_note())


def kill(lab: State, machine: str) -> None:
    """Lose a node: its kubelet and its containerd end at once, its containers go on."""
    _node(lab, machine).kill(NODE_PROGRAMS)


def crash(lab: State, machine: str) -> None:
    """Lose a node as by its power: all that runs there ends at once, pods included. `bring_back` starts it again."""
    _node(lab, machine).empty()


def bring_back(lab: State, machine: str) -> None:
    """Start what `kill` or `crash` ended, and return when it runs; what runs already stays."""
    room = _node(lab, machine)
    if not room.programs(node.RUNTIME):
        _start_runtime(room)
    if not room.programs(node.KUBELET):
        _start_kubelet(lab, room)
    if not room.programs(node.PROXY):
        node.start_proxy(room, lab.programs)
    programs = (node.RUNTIME, node.KUBELET, node.PROXY)
    wait_until(lambda: all(map(room.programs, programs)), f"the programs of {machine}", READY_SECONDS)


def restart_apiserver(lab: State) -> None:
    """End it by SIGKILL and start it again; what it knows is etcd's.

    Its port is given back a moment after the process has gone from the table, on a busy machine.
    """
    room = lab.room(plane.NAME)
    room.kill((plane.APISERVER,))
    server = lab.addresses.apiserver
    wait_until(lambda: not network.listens(server), f"the end of who listens at {server}", READY_SECONDS)
    plane.start_apiserver(room, lab.programs, lab.certificates, lab.addresses)


def shape(lab: State, machine: str, rate: str) -> None:
    """Let a node's card be as fast as ``rate`` says, `none` for no limit."""
    limit = None if rate == "none" else network.bits_per_second(rate)
    network.shape(_node(lab, machine), lab.addresses, limit)


def declare_cores(lab: State, machine: str, count: int | None) -> None:
    """Let a node offer so many cores to pods, whatever this machine has, or None: what it has; its pods go on.

    Pods that ask for more than the machine has share it, as the pods of all nodes do in any case.
    """
    if count is not None and not 1 <= count <= MOST_CORES:
        raise LabError(f"a node offers 1 to {MOST_CORES} cores, not {count}")
    room = _node(lab, machine)
    node.declare_cores(room, count)
    room.kill(node.KUBELET)
    _start_kubelet(lab, room)


def set_link(lab: State, machine: str, wanted: str) -> None:
    """Pull a node's cable, or plug it in."""
    network.set_link(_node(lab, machine), lab.addresses, wanted)


def load(lab: State, archive: Path) -> None:
    """Give every node the images of an archive."""
    if not archive.is_file():
        raise LabError(f"{archive} is no file: write one with `docker save`")
    for number in range(1, lab.num_nodes + 1):
        node.import_image(lab.room(node.name(number)), archive.resolve())


def _node(lab: State, machine: str) -> rooms.Room:
    if machine == plane.NAME:
        raise LabError("the control plane is no node")
    return lab.room(machine)


def status(lab: State) -> str:
    """The lab in a few lines: where it is, and each of its machines."""
    addresses: Addresses = lab.addresses
    lines = [f"{lab.name}: {addresses.apiserver}, {addresses.network}", f"export KUBECONFIG={lab.kubeconfig}"]
    ready = ready_nodes(lab) if plane.ready(lab.certificates, addresses.apiserver) else set()
    lines += [f"kubectl is {lab.programs / 'kubectl'}"]
    for machine in lab.rooms:
        if machine == plane.NAME:
            continue
        lines.append(f"{machine}: {'ready' if machine in ready else 'not ready'}")
    return "\n".join(lines)
