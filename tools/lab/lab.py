"""Start, stop and inspect a lab, and change or fail its nodes."""

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

from tools.lab import addons, base_image, build, cache, cgroups, machines, network, node, packages, state, volumes
from tools.lab import control_plane as plane
from tools.lab.addresses import MAX_NODES, RANGE, Addresses, free_slot
from tools.lab.certificates import make_all, write_kubeconfig
from tools.lab.console import LabError, plain_environ, run, say, wait_until
from tools.lab.machines import Machine
from tools.lab.state import State

READY_SECONDS = 60.0
MAX_CORES = 1024
NAMES = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
NODE_PROGRAMS = (*node.RUNTIME, *node.KUBELET)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Requested lab: its name, its number of nodes, and its optional parts."""

    name: str = state.DEFAULT_NAME
    num_nodes: int = 2
    kueue: bool = False
    kwok: bool = False

    def __post_init__(self) -> None:
        if not NAMES.fullmatch(self.name):
            raise LabError(
                f"'{self.name}' is not a valid name of a lab: use 1 to 32 lower-case letters, digits and dashes, with "
                f"no dash at either end"
            )
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise LabError(f"a lab has 1 to {MAX_NODES} nodes, not {self.num_nodes}")

    @property
    def parts(self) -> list[build.Part]:
        """The parts to build for this lab."""
        optional = [(self.kueue, build.KUEUE), (self.kwok, build.KWOK)]
        return [build.KUBERNETES, build.HELM, build.JOBSET, *(part for is_requested, part in optional if is_requested)]


def fill_cache(parts: list[build.Part]) -> None:
    """Build the parts and the base image that the cache lacks, then remove Go's caches, which only a build needs."""
    packages.require()
    with cache.locked():
        missing = [part for part in parts if not build.is_built(part)]
        for part in parts:
            build.built(part)
        base_image.layer()
        if missing:
            build.remove_go_caches()


def up(spec: Spec) -> State:
    """Start a lab and return when its nodes are ready. After an error nothing of it remains."""
    _require_root()
    machines.require_namespaces()
    _require_unused_name(spec.name)
    fill_cache(spec.parts)
    started = time.monotonic()
    lab = _reserve(spec)
    try:
        lab = _start_machines(lab)
        _start_kubernetes(lab, spec)
        _install_addons(lab, spec)
    except BaseException:
        down(spec.name)
        raise
    say(f"{spec.name} is up after {time.monotonic() - started:.0f} s: export KUBECONFIG={lab.kubeconfig}")
    return lab


def _require_unused_name(name: str) -> None:
    if name in state.names():
        raise LabError(f"the lab {name} is already up: use it (./dev cluster status), or stop it (./dev cluster down)")


def _require_root() -> None:
    if os.geteuid() != 0:
        raise LabError("the lab creates network interfaces and mounts, which needs root: sudo ./dev cluster ...")


@contextmanager
def _lock() -> Iterator[None]:
    """Serialize the start and end of labs, which choose free slots and share the mount points of machines."""
    state.labs().mkdir(parents=True, exist_ok=True)
    with (state.labs() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _mountpoints_record() -> Path:
    """Return the path of the file that lists the folders created for the machines of all labs."""
    return state.labs() / "mountpoints"


def _reserve(spec: Spec) -> State:
    """Create the lab's folder, slot and mount points. From here on `down` can remove the lab."""
    with _lock():
        _require_unused_name(spec.name)
        others = [str(state.read(name).addresses.network) for name in state.names()]
        slot = free_slot(spec.name, [*network.route_destinations(), *others])
        if slot is None:
            raise LabError(
                f"no subnet of {RANGE} is free for another lab: stop one by ./dev cluster down --name NAME "
                f"(running: {', '.join(state.names()) or 'none, routes of this host use them all'})"
            )
        folder = state.folder_of(spec.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        kubernetes = str(build.built(build.KUBERNETES))
        lab = State(name=spec.name, slot=slot, num_nodes=spec.num_nodes, kubernetes=kubernetes, machines={})
        lab.write()
        machines.make_mountpoints(_mountpoints_record())
    return lab


def _start_machines(lab: State) -> State:
    """Create the bridge, then start every machine and connect it to the bridge."""
    addresses = lab.addresses
    network.create_bridge(addresses)
    make_all(lab.certificates, addresses, lab.num_nodes)
    write_kubeconfig(lab.kubeconfig, lab.certificates, "admin", addresses.apiserver)
    addresses_by_name = {plane.NAME: addresses.control_plane}
    addresses_by_name |= {node.name(number): addresses.node(number) for number in range(1, lab.num_nodes + 1)}
    for name, address in addresses_by_name.items():
        folder = lab.folder / name
        folder.mkdir()
        machine = machines.start_machine(name, folder, lab.programs / machines.INIT_PROGRAM)
        lab = replace(lab, machines={**lab.machines, name: machine.init})
        lab.write()
        network.connect(machine, address, addresses)
    return lab


def _start_kubernetes(lab: State, spec: Spec) -> None:
    """Start the control plane while the nodes are prepared, then the nodes; return when they are ready."""
    addresses, control_plane = lab.addresses, lab.machine(plane.NAME)
    network.add_host_routes(addresses, lab.num_nodes)
    network.add_machine_routes(control_plane, network.pod_routes(addresses, lab.num_nodes))
    images = [build.built(part) / "image.tar" for part in spec.parts if part.image]
    images.append(base_image.write(lab.folder / "python.tar"))
    with ThreadPoolExecutor() as pool:
        nodes = range(1, lab.num_nodes + 1)
        preparations = [pool.submit(_prepare_node, lab, number, images) for number in nodes]
        plane.start(control_plane, lab.programs, lab.certificates, addresses)
        say("the control plane is ready")
        for preparation in preparations:
            preparation.result()
        list(pool.map(lambda number: _start_node(lab, number), nodes))
    _wait_for_nodes(lab)
    say(f"{lab.num_nodes} nodes are ready")
    volumes.make_folders(lab.folder / "volumes")
    apply(lab, volumes.manifests(lab.folder / "volumes"))


def _prepare_node(lab: State, number: int, images: list[Path]) -> None:
    """Do what a node needs and what does not need the control plane: configuration, containerd and images."""
    machine = lab.machine(node.name(number))
    cgroups.make(lab.cgroup(machine.name))
    network.add_machine_routes(machine, network.pod_routes(lab.addresses, lab.num_nodes, exclude=number))
    node.configure(machine, lab.certificates, lab.addresses, number, lab.cgroup(machine.name))
    _start_runtime(machine)
    for image in images:
        node.import_image(machine, image)


def _start_runtime(machine: Machine) -> None:
    node.start_runtime(machine, packages.program("containerd"), base_image.mounted_folders())


def _start_node(lab: State, number: int) -> None:
    machine = lab.machine(node.name(number))
    _start_kubelet(lab, machine)
    node.start_proxy(machine, lab.programs)


def _start_kubelet(lab: State, machine: Machine) -> None:
    node.start_kubelet(machine, lab.programs, str(lab.addresses.node(int(machine.name.removeprefix("node")))))


def _wait_for_nodes(lab: State) -> None:
    names = {node.name(number) for number in range(1, lab.num_nodes + 1)}
    try:
        wait_until(lambda: names <= ready_nodes(lab), "ready nodes", READY_SECONDS, 0.3)
    except LabError as error:
        logs = [lab.machine(unready).log_tail("kubelet") for unready in sorted(names - ready_nodes(lab))]
        raise LabError("\n".join([str(error), *logs])) from error


def _install_addons(lab: State, spec: Spec) -> None:
    addons.install(build.JOBSET, addons.jobset_values(), lab.folder, lab.kubeconfig)
    say("JobSet is installed")
    if spec.kueue:
        addons.install(build.KUEUE, addons.kueue_values(), lab.folder, lab.kubeconfig)
        say("Kueue is installed")
    if spec.kwok:
        addons.start_kwok(lab.machine(plane.NAME), lab.certificates, lab.addresses.apiserver)
        say("kwok is running")


def kubectl(lab: State, *words: str, stdin: str | None = None) -> str:
    """Run kubectl and return its stdout; raises `LabError` with its error message."""
    return run(lab.programs / "kubectl", "--kubeconfig", lab.kubeconfig, *words, stdin=stdin, environ=plain_environ())


def apply(lab: State, manifests: list[dict[str, Any]]) -> None:
    """Apply manifests by server-side apply."""
    objects = {"apiVersion": "v1", "kind": "List", "items": manifests}
    kubectl(lab, "apply", "--server-side", "--filename", "-", stdin=json.dumps(objects))


def ready_nodes(lab: State) -> set[str]:
    """Return the names of the nodes whose condition Ready is true, including kwok's."""
    nodes = json.loads(kubectl(lab, "get", "nodes", "--output", "json"))["items"]
    return {node_object["metadata"]["name"] for node_object in nodes if _is_ready(node_object)}


def _is_ready(node_object: dict[str, Any]) -> bool:
    conditions = node_object["status"].get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def down(name: str) -> None:
    """Stop a lab and remove everything of it; does nothing if there is no lab of that name."""
    _require_root()
    if name not in state.names():
        shutil.rmtree(state.folder_of(name), ignore_errors=True)
        return
    lab = state.read(name)
    for name in lab.machines:
        lab.machine(name).stop()
    network.remove_bridge(lab.addresses)
    for name in lab.machines:
        cgroups.remove(lab.cgroup(name))
    with _lock():
        shutil.rmtree(lab.folder)
        if not state.names():
            machines.remove_mountpoints(_mountpoints_record())


def kill(lab: State, name: str) -> None:
    """Kill the kubelet and containerd of a node; its containers keep running, as on a node that is cut off."""
    _node(lab, name).kill(NODE_PROGRAMS)


def crash(lab: State, name: str) -> None:
    """Kill all processes of a node, its pods included, as a power failure does. `bring_back` restarts the node."""
    _node(lab, name).kill_all()


def bring_back(lab: State, name: str) -> None:
    """Restart the programs that `kill` or `crash` ended, and return when all programs of the node run."""
    machine = _node(lab, name)
    if not machine.programs(node.RUNTIME):
        _start_runtime(machine)
    if not machine.programs(node.KUBELET):
        _start_kubelet(lab, machine)
    if not machine.programs(node.PROXY):
        node.start_proxy(machine, lab.programs)
    programs = (node.RUNTIME, node.KUBELET, node.PROXY)
    wait_until(lambda: all(map(machine.programs, programs)), f"the programs of {name}", READY_SECONDS)


def restart_apiserver(lab: State) -> None:
    """Kill the apiserver and start it again. Its state is in etcd, which keeps running.

    On a busy host the kernel frees the port a moment after the process has ended.
    """
    machine = lab.machine(plane.NAME)
    machine.kill((plane.APISERVER,))
    server = lab.addresses.apiserver
    wait_until(lambda: not network.listens(server), f"a free port at {server}", READY_SECONDS)
    plane.start_apiserver(machine, lab.programs, lab.certificates, lab.addresses)


def shape(lab: State, name: str, rate: str) -> None:
    """Limit a node's link to ``rate``, such as `100mbit`; `none` removes the limit."""
    limit = None if rate == "none" else network.bits_per_second(rate)
    network.shape(_node(lab, name), lab.addresses, limit)


def declare_cores(lab: State, name: str, count: int | None) -> None:
    """Set the number of cores that a node offers to pods, or reset it to that of the host; running pods keep running.

    A node may offer more cores than the host has: the pods of all nodes share the host's cores.
    """
    if count is not None and not 1 <= count <= MAX_CORES:
        raise LabError(f"a node offers 1 to {MAX_CORES} cores, not {count}")
    machine = _node(lab, name)
    node.declare_cores(machine, count)
    machine.kill(node.KUBELET)
    _start_kubelet(lab, machine)


def set_link(lab: State, name: str, link_state: str) -> None:
    """Set a node's link `up` or `down`."""
    network.set_link(_node(lab, name), lab.addresses, link_state)


def load(lab: State, archive: Path) -> None:
    """Import the images of an archive into every node."""
    if not archive.is_file():
        raise LabError(f"there is no file {archive}: write one with `docker save`")
    for number in range(1, lab.num_nodes + 1):
        node.import_image(lab.machine(node.name(number)), archive.resolve())


def _node(lab: State, name: str) -> Machine:
    """Return the machine of a node; raises `LabError` for the control plane and for names that no node has."""
    if name == plane.NAME:
        raise LabError(f"the {plane.NAME} is not a node: use {node.name(1)} or another node")
    return lab.machine(name)


def status(lab: State) -> str:
    """Describe the lab in a few lines: its addresses, its kubeconfig and the state of each node."""
    addresses: Addresses = lab.addresses
    lines = [f"{lab.name}: {addresses.apiserver}, {addresses.network}", f"export KUBECONFIG={lab.kubeconfig}"]
    ready = ready_nodes(lab) if plane.ready(lab.certificates, addresses.apiserver) else set()
    lines += [f"kubectl is {lab.programs / 'kubectl'}"]
    nodes = [name for name in lab.machines if name != plane.NAME]
    lines += [f"{name}: {'ready' if name in ready else 'not ready'}" for name in nodes]
    return "\n".join(lines)
