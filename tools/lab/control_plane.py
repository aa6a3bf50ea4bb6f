"""The control plane: etcd, apiserver, controller-manager and scheduler in a room of their own.

Only the apiserver listens beyond the room, and the room's one cable leads to the lab's bridge.
"""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tools.lab.addresses import APISERVER_PORT, Addresses
from tools.lab.certificates import write_kubeconfig
from tools.lab.console import LabError, wait_until
from tools.lab.rooms import Room

Value = str | Path | int
NAME = "control-plane"
APISERVER = "kube-apiserver"
ETCD = "http://127.0.0.1:2379"
READY_SECONDS = 60.0
NODE_GRACE_SECONDS = 10
SELDOM_COLLECTING = {"GOGC": "300"}
"""Go looks for garbage whenever its heap has doubled, which took an apiserver that was busy with many jobs a quarter of
its time (docs/log.md). On a machine with few cores memory is what there is more of.
"""

ISSUER = "https://kubernetes.default.svc.cluster.local"


def flags(values: Mapping[str, Value]) -> list[str]:
    """Command line flags from names and values."""
    return [f"--{name}={value}" for name, value in values.items()]


def etcd_flags(data: Path) -> list[str]:
    """Nothing is synced to the disk: a lab outlives no crash of its machine."""
    peers = "http://127.0.0.1:2380"
    values: dict[str, Value] = {
        "data-dir": data,
        "listen-client-urls": ETCD,
        "advertise-client-urls": ETCD,
        "log-level": "warn",
    }
    values |= {"listen-peer-urls": peers, "initial-advertise-peer-urls": peers, "initial-cluster": f"default={peers}"}
    return [*flags(values), "--unsafe-no-fsync"]


def apiserver_flags(certificates: Path, addresses: Addresses) -> list[str]:
    """Webhooks are called at their pods' addresses (`enable-aggregator-routing`): no proxy runs in this room."""
    authority = certificates / "ca.crt"
    values: dict[str, Value] = {
        "advertise-address": str(addresses.control_plane),
        "bind-address": "0.0.0.0",
        "secure-port": APISERVER_PORT,
        "tls-cert-file": certificates / "apiserver.crt",
        "tls-private-key-file": certificates / "apiserver.key",
        "service-cluster-ip-range": str(addresses.services),
        "etcd-servers": ETCD,
        "client-ca-file": authority,
    }
    values |= {"authorization-mode": "Node,RBAC", "enable-admission-plugins": "NodeRestriction"}
    values |= {
        "service-account-issuer": ISSUER,
        "service-account-key-file": certificates / "service-account.pub",
        "service-account-signing-key-file": certificates / "service-account.key",
    }
    values |= {
        "kubelet-client-certificate": certificates / "admin.crt",
        "kubelet-client-key": certificates / "admin.key",
        "kubelet-preferred-address-types": "InternalIP",
    }
    values |= {
        "proxy-client-cert-file": certificates / "front-proxy.crt",
        "proxy-client-key-file": certificates / "front-proxy.key",
        "requestheader-client-ca-file": certificates / "front-proxy-ca.crt",
        "requestheader-allowed-names": "front-proxy",
        "requestheader-username-headers": "X-Remote-User",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
    }
    switches = ["--enable-aggregator-routing=true", "--allow-privileged=true", "--profiling=false"]
    return [*flags(values), *switches]


def _client_flags(config: Path) -> dict[str, Value]:
    """How a component of the control plane reaches the apiserver, and whom it answers."""
    reach: dict[str, Value] = {"kubeconfig": config, "authentication-kubeconfig": config}
    reach |= {"authorization-kubeconfig": config, "bind-address": "127.0.0.1", "leader-elect": "false"}
    return reach | {"profiling": "false"}


def controller_manager_flags(certificates: Path, config: Path) -> list[str]:
    """A node is given up soon after its kubelet fell silent."""
    values: dict[str, Value] = {
        "node-monitor-grace-period": f"{NODE_GRACE_SECONDS}s",
        "node-monitor-period": "1s",
        "root-ca-file": certificates / "ca.crt",
        "service-account-private-key-file": certificates / "service-account.key",
        "cluster-signing-cert-file": certificates / "ca.crt",
        "cluster-signing-key-file": certificates / "ca.key",
        "use-service-account-credentials": "true",
    }
    return flags(_client_flags(config) | values)


def scheduler_flags(config: Path) -> list[str]:
    return flags(_client_flags(config))


def start(room: Room, programs: Path, certificates: Path, addresses: Addresses) -> None:
    """Start all of it; raises `LabError` with a component's last words when it does not come up."""
    server = addresses.apiserver
    room.start(programs / "etcd", etcd_flags(room.folder / "etcd"))
    start_apiserver(room, programs, certificates, addresses)
    configs = {
        name: write_kubeconfig(room.folder / f"{name}.kubeconfig", certificates, name, server)
        for name in ("kube-controller-manager", "kube-scheduler")
    }
    manager = configs["kube-controller-manager"]
    room.start(programs / "kube-controller-manager", controller_manager_flags(certificates, manager))
    room.start(programs / "kube-scheduler", scheduler_flags(configs["kube-scheduler"]))


def start_apiserver(room: Room, programs: Path, certificates: Path, addresses: Addresses) -> None:
    """Start it alone and wait until it answers; raises `LabError` with its last words when it does not."""
    room.start(programs / APISERVER, apiserver_flags(certificates, addresses), SELDOM_COLLECTING)
    _wait(room, certificates, addresses.apiserver)


def _wait(room: Room, certificates: Path, server: str) -> None:
    try:
        wait_until(lambda: ready(certificates, server), "the apiserver", READY_SECONDS)
    except LabError as error:
        raise LabError(f"{error}\n{room.log_tail('etcd')}\n{room.log_tail(APISERVER)}") from error


def ready(certificates: Path, server: str) -> bool:
    """Whether the apiserver answers that it is ready."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    context.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{server}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
