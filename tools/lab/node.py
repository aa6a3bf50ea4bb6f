"""A node: containerd, kubelet and kube-proxy in a room of their own, and the configuration of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from tools.lab.addresses import Addresses
from tools.lab.certificates import write_kubeconfig
from tools.lab.console import LabError, wait_until
from tools.lab.images import PAUSE
from tools.lab.network import listens
from tools.lab.rooms import Room

SOCKET = "/run/containerd/containerd.sock"
PLUGINS = "/usr/lib/cni"
BRIDGE = "cni0"
RUNTIME = ("containerd",)
KUBELET = ("kubelet",)
PROXY = ("kube-proxy",)
KUBELET_PORT = 10250
ASIDE = "/mnt"
"""No volume of a pod covers what is there, as one for /tmp does with a repository below /tmp."""

SYSFS = "/sys/devices/system"
START_SECONDS = 30.0
LOOK_SECONDS = 0.5
EVICT_NEVER = dict.fromkeys(("memory.available", "nodefs.available", "imagefs.available"), "0%")


def name(node: int) -> str:
    return f"node{node}"


def containerd_config(folder: Path) -> str:
    """Its TOML. Root may lack CAP_SYS_RESOURCE, hence `restrict_oom_score_adj`."""
    runtime = 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc'
    return f"""version = 2
root = "{folder / "containerd"}"
state = "/run/containerd"

[grpc]
address = "{SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
path = "{folder / "opt"}"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{PLUGINS}"
conf_dir = "{folder / "cni"}"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[{runtime}]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{folder / "container.json"}"

[{runtime}.options]
SystemdCgroup = false
"""


def container_spec(default: dict[str, Any], shared: Sequence[Path]) -> dict[str, Any]:
    """What every container is made from: containerd's own specification, and some of the host's folders to read.

    Images of the lab need not hold this project then, nor PyTorch: both are where they are on this machine, and once
    more below `ASIDE`.
    """
    mounts = [
        {
            "destination": f"{place}{path}",
            "source": str(path),
            "type": "bind",
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
        for place in ("", ASIDE)
        for path in shared
    ]
    return default | {"mounts": [*default["mounts"], *mounts]}


def network_config(pods: IPv4Network) -> str:
    """CNI: a bridge within the node, addresses counted up from the node's part."""
    ipam = {"type": "host-local", "ranges": [[{"subnet": str(pods)}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": ipam}
    return json.dumps({"cniVersion": "1.0.0", "name": "lab", "plugins": [bridge]}, indent=1)


def kubelet_config(folder: Path, authority: Path, group: str) -> str:
    """Its JSON. Silence is noticed soon, and nothing is evicted because this machine's disk is full.

    Nothing answers at the address for names, which programs learn at once; without one every pod gets a warning.
    """
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(authority)}},
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group}",
        "clusterDNS": ["127.0.0.1"],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "enforceNodeAllocatable": [],
        "evictionHard": EVICT_NEVER,
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "nodeLeaseDurationSeconds": 8,
        "nodeStatusUpdateFrequency": "2s",
        "podLogsDir": "/var/log/pods",
        "resolvConf": str(folder / "resolv.conf"),
        "serializeImagePulls": False,
        "volumePluginDir": str(folder / "volume-plugins"),
    }
    return json.dumps(config, indent=1)


def proxy_config(config: Path, node: str) -> str:
    """Its JSON. What comes from outside of the pods is answered through the node that it came to."""
    return json.dumps(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(config)},
            "conntrack": {"maxPerCore": 0},
            "detectLocal": {"bridgeInterface": BRIDGE},
            "detectLocalMode": "BridgeInterface",
            "hostnameOverride": node,
            "metricsBindAddress": "127.0.0.1:10249",
            "mode": "nftables",
            "oomScoreAdj": 0,
        },
        indent=1,
    )


def configure(room: Room, certificates: Path, addresses: Addresses, node: int, group: str) -> None:
    """Write every file that the node's programs read, but the specification of containers."""
    folder = room.folder
    (folder / "cni").mkdir()
    write_kubeconfig(folder / "kubelet.kubeconfig", certificates, name(node), addresses.apiserver)
    proxy = write_kubeconfig(folder / "kube-proxy.kubeconfig", certificates, "kube-proxy", addresses.apiserver)
    texts = {
        "containerd.toml": containerd_config(folder),
        "cni/lab.conflist": network_config(addresses.pods(node)),
        "kubelet.json": kubelet_config(folder, certificates / "ca.crt", group),
        "kube-proxy.json": proxy_config(proxy, name(node)),
        "resolv.conf": "",
    }
    for file, text in texts.items():
        (folder / file).write_text(text)


def start_runtime(room: Room, containerd: Path, shared: Sequence[Path]) -> None:
    """Start containerd and wait until it answers; raises `LabError` with its last words if it does not."""
    spec = room.folder / "container.json"
    if not spec.exists():
        default = json.loads(room.run("ctr", "oci", "spec"))
        spec.write_text(json.dumps(container_spec(default, shared)))
    room.start(containerd, ["--config", str(room.folder / "containerd.toml"), "--log-level", "warn"])
    _wait_for(room, "containerd", lambda: _answers(room))


def _answers(room: Room) -> bool:
    try:
        room.run("ctr", "--address", SOCKET, "--connect-timeout", "1s", "version")
    except LabError:
        return False
    return True


def start_kubelet(room: Room, programs: Path, address: str) -> None:
    """Start the kubelet, which announces the node by itself, and wait until it listens.

    It ends if containerd answers and is not done with the containers that it found, and is started again.
    """
    arguments = ["--config", str(room.folder / "kubelet.json"), "--kubeconfig", str(room.folder / "kubelet.kubeconfig")]
    arguments += ["--node-ip", address, "--hostname-override", room.name]

    def stays() -> bool:
        if not room.programs(KUBELET):
            room.start(programs / "kubelet", arguments)
        return listens(f"https://{address}:{KUBELET_PORT}")

    _wait_for(room, "kubelet", stays, LOOK_SECONDS)


def _wait_for(room: Room, program: str, happened: Callable[[], bool], pause_seconds: float = 0.1) -> None:
    """Return once it has happened; raises `LabError` with the program's last words if it does not."""
    try:
        wait_until(happened, f"{program} of {room.name}", START_SECONDS, pause_seconds)
    except LabError as error:
        raise LabError(f"{error}\n{room.log_tail(program)}") from error


def declare_cores(room: Room, count: int | None) -> None:
    """Let a kubelet that starts from now on count so many cores, whatever this machine has; None: what it has.

    It counts folders of sysfs, by NUMA node or, where there is none, by processor. Only the room's own programs find
    these folders there: containers mount a sysfs of their own, and the kernel divides time among what there is.
    """
    for name, files in (("node", {}), ("cpu", cores(count or 0))):
        folder, place = room.folder / "sysfs" / name, Path(SYSFS, name)
        if not place.exists():  # a kernel without NUMA has no nodes
            continue
        folder.mkdir(parents=True, exist_ok=True)
        is_mounted = _is_same(room, folder, place)
        if count is None:
            if is_mounted:
                room.run("umount", "--lazy", place)
            continue
        for path in folder.iterdir():
            shutil.rmtree(path)
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        if not is_mounted:
            room.run("mount", "--bind", folder, place)


def _is_same(room: Room, folder: Path, place: Path) -> bool:
    """Whether a room finds the folder at that place, which it does as long as it is mounted there."""
    found = room.run("stat", "--format", "%d:%i", folder, place).split()
    return found[0] == found[1]


def cores(count: int) -> dict[str, str]:
    """The files by which a kubelet counts cores: all are of one processor."""
    return {
        f"cpu{number}/topology/{file}": f"{value}\n"
        for number in range(count)
        for file, value in (("core_id", number), ("physical_package_id", 0))
    }


def start_proxy(room: Room, programs: Path) -> None:
    """Start kube-proxy, which leads services to pods."""
    room.start(programs / "kube-proxy", ["--config", str(room.folder / "kube-proxy.json")])


def import_image(room: Room, archive: Path) -> None:
    """Give the node an image from an archive as `docker save` writes it."""
    room.run("ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", "import", "--all-platforms", archive)
