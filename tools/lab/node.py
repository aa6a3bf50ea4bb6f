"""Node of a lab: containerd, kubelet and kube-proxy on one machine, and their configuration."""

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
from tools.lab.machines import Machine
from tools.lab.network import listens

SOCKET = "/run/containerd/containerd.sock"
PLUGINS = "/usr/lib/cni"
BRIDGE = "cni0"
RUNTIME = ("containerd",)
KUBELET = ("kubelet",)
PROXY = ("kube-proxy",)
KUBELET_PORT = 10250
COPY_ROOT = "/mnt"
"""Containers have the shared folders below this path, too. A volume of a pod can hide a folder at its own path: one at
/tmp hides a repository below /tmp.
"""

SYSFS = "/sys/devices/system"
START_SECONDS = 30.0
RETRY_SECONDS = 0.5
NO_EVICTION = dict.fromkeys(("memory.available", "nodefs.available", "imagefs.available"), "0%")


def name(node: int) -> str:
    return f"node{node}"


def containerd_config(folder: Path) -> str:
    """Return containerd's configuration. Root may lack CAP_SYS_RESOURCE, hence `restrict_oom_score_adj`."""
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
    """Return the specification of every container: containerd's default, with folders of the host mounted read-only.

    So images of the lab contain neither this project nor PyTorch. Both are at the same paths as on the host, and again
    below `COPY_ROOT`.
    """
    mounts = [
        {
            "destination": f"{root}{path}",
            "source": str(path),
            "type": "bind",
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
        for root in ("", COPY_ROOT)
        for path in shared
    ]
    return default | {"mounts": [*default["mounts"], *mounts]}


def network_config(pods: IPv4Network) -> str:
    """Return the CNI configuration: a bridge in the node, and pod addresses in order from the node's subnet."""
    ipam = {"type": "host-local", "ranges": [[{"subnet": str(pods)}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": ipam}
    return json.dumps({"cniVersion": "1.0.0", "name": "lab", "plugins": [bridge]}, indent=1)


def kubelet_config(folder: Path, authority: Path, cgroup: str) -> str:
    """Return the kubelet's configuration: frequent heartbeats, and no eviction when the host's disk is full.

    Nothing listens at the address of the cluster's DNS, so that lookups fail immediately; without an address every pod
    gets a warning event.
    """
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(authority)}},
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "clusterDNS": ["127.0.0.1"],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "enforceNodeAllocatable": [],
        "evictionHard": NO_EVICTION,
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


def proxy_config(kubeconfig: Path, node: str) -> str:
    """Return kube-proxy's configuration. Replies to traffic from outside of pods return through the receiving node."""
    return json.dumps(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
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


def configure(machine: Machine, certificates: Path, addresses: Addresses, node: int, cgroup: str) -> None:
    """Write the configuration of the node's programs, all but the container specification."""
    folder = machine.folder
    (folder / "cni").mkdir()
    write_kubeconfig(folder / "kubelet.kubeconfig", certificates, name(node), addresses.apiserver)
    proxy = write_kubeconfig(folder / "kube-proxy.kubeconfig", certificates, "kube-proxy", addresses.apiserver)
    texts = {
        "containerd.toml": containerd_config(folder),
        "cni/lab.conflist": network_config(addresses.pods(node)),
        "kubelet.json": kubelet_config(folder, certificates / "ca.crt", cgroup),
        "kube-proxy.json": proxy_config(proxy, name(node)),
        "resolv.conf": "",
    }
    for file, text in texts.items():
        (folder / file).write_text(text)


def start_runtime(machine: Machine, containerd: Path, shared: Sequence[Path]) -> None:
    """Start containerd and wait until it answers; raises `LabError` with its last log lines if it does not."""
    spec = machine.folder / "container.json"
    if not spec.exists():
        default = json.loads(machine.run("ctr", "oci", "spec"))
        spec.write_text(json.dumps(container_spec(default, shared)))
    machine.start(containerd, ["--config", str(machine.folder / "containerd.toml"), "--log-level", "warn"])
    _wait_for(machine, "containerd", lambda: _runtime_answers(machine))


def _runtime_answers(machine: Machine) -> bool:
    try:
        machine.run("ctr", "--address", SOCKET, "--connect-timeout", "1s", "version")
    except LabError:
        return False
    return True


def start_kubelet(machine: Machine, programs: Path, address: str) -> None:
    """Start the kubelet, which registers the node itself, and wait until it listens.

    The kubelet exits if containerd already answers but is still restoring its containers; then it is restarted.
    """
    folder = machine.folder
    arguments = ["--config", str(folder / "kubelet.json"), "--kubeconfig", str(folder / "kubelet.kubeconfig")]
    arguments += ["--node-ip", address, "--hostname-override", machine.name]

    def start_unless_running() -> bool:
        if not machine.programs(KUBELET):
            machine.start(programs / "kubelet", arguments)
        return listens(f"https://{address}:{KUBELET_PORT}")

    _wait_for(machine, "kubelet", start_unless_running, RETRY_SECONDS)


def _wait_for(machine: Machine, program: str, condition: Callable[[], bool], pause_seconds: float = 0.1) -> None:
    """Wait until ``condition`` holds; raises `LabError` with the program's last log lines if it does not in time."""
    try:
        wait_until(condition, f"{program} of {machine.name}", START_SECONDS, pause_seconds)
    except LabError as error:
        raise LabError(f"{error}\n{machine.log_tail(program)}") from error


def declare_cores(machine: Machine, count: int | None) -> None:
    """Set the number of cores that a kubelet counts at its next start, or with None reset it to that of the host.

    A kubelet counts folders of sysfs, by NUMA node or, without NUMA, by processor. Other folders are mounted over them,
    for the machine's own programs only: each container mounts a sysfs of its own, and the kernel still schedules on the
    cores of the host.
    """
    for name, files in (("node", {}), ("cpu", topology_files(count or 0))):
        folder, mount_point = machine.folder / "sysfs" / name, Path(SYSFS, name)
        if not mount_point.exists():  # a kernel without NUMA has no folder "node"
            continue
        folder.mkdir(parents=True, exist_ok=True)
        is_mounted = _is_mounted(machine, folder, mount_point)
        if count is None:
            if is_mounted:
                machine.run("umount", "--lazy", mount_point)
            continue
        for path in folder.iterdir():
            shutil.rmtree(path)
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        if not is_mounted:
            machine.run("mount", "--bind", folder, mount_point)


def _is_mounted(machine: Machine, folder: Path, mount_point: Path) -> bool:
    """Whether the folder is mounted there in the machine: then both paths have the same device and inode."""
    source, target = machine.run("stat", "--format", "%d:%i", folder, mount_point).split()
    return source == target


def topology_files(count: int) -> dict[str, str]:
    """Return the files of sysfs by which a kubelet counts cores, with their content: ``count`` cores of one socket."""
    return {
        f"cpu{number}/topology/{file}": f"{value}\n"
        for number in range(count)
        for file, value in (("core_id", number), ("physical_package_id", 0))
    }


def start_proxy(machine: Machine, programs: Path) -> None:
    """Start kube-proxy, which forwards services to pods."""
    machine.start(programs / "kube-proxy", ["--config", str(machine.folder / "kube-proxy.json")])


def import_image(machine: Machine, archive: Path) -> None:
    """Import an image into the node from an archive in the format of `docker save`."""
    machine.run("ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", "import", "--all-platforms", archive)
