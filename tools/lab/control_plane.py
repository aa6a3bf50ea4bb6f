"""Control plane of a lab: etcd, apiserver, controller-manager and scheduler on one machine.

Only the apiserver accepts connections from other machines, and the machine is connected to the lab's bridge only.
"""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tools.lab.addresses import APISERVER_PORT, Addresses
from tools.lab.certificates import write_kubeconfig
from tools.lab.console import LabError, wait_until
from tools.lab.machines import Machine

Value = str | Path | int
NAME = "control-plane"
APISERVER = "kube-apiserver"
ETCD = "http://127.0.0.1:2379"
READY_SECONDS = 60.0
NODE_GRACE_SECONDS = 10
INFREQUENT_GC = {"GOGC": "300"}
"""Go collects garbage whenever the heap has doubled. An apiserver with many jobs spent a quarter of its time on that
(docs/log.md). With 300 the heap quadruples first, which spends memory to save time of the few cores.
"""

ISSUER = "https://kubernetes.default.svc.cluster.local"


def flags(values: Mapping[str, Value]) -> list[str]:
    """Return command-line flags from names and values."""
    return [f"--{name}={value}" for name, value in values.items()]


def etcd_flags(data: Path) -> list[str]:
    """Return etcd's flags. It does not sync to the disk, since no lab survives a crash of the host."""
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
    """Return the apiserver's flags. It calls webhooks at pod addresses, because no kube-proxy runs on this machine."""
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
    """Return flags by which a component connects to the apiserver and authenticates its own clients."""
    values: dict[str, Value] = {"kubeconfig": config, "authentication-kubeconfig": config}
    values |= {"authorization-kubeconfig": config, "bind-address": "127.0.0.1", "leader-elect": "false"}
    return values | {"profiling": "false"}


def controller_manager_flags(certificates: Path, config: Path) -> list[str]:
    """Return the controller-manager's flags. It marks a node NotReady `NODE_GRACE_SECONDS` after the last heartbeat."""
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


def start(machine: Machine, programs: Path, certificates: Path, addresses: Addresses) -> None:
    """Start all components; raises `LabError` with the last log lines if the apiserver does not get ready."""
    server = addresses.apiserver
    machine.start(programs / "etcd", etcd_flags(machine.folder / "etcd"))
    start_apiserver(machine, programs, certificates, addresses)
    configs = {
        name: write_kubeconfig(machine.folder / f"{name}.kubeconfig", certificates, name, server)
        for name in ("kube-controller-manager", "kube-scheduler")
    }
    manager = configs["kube-controller-manager"]
    machine.start(programs / "kube-controller-manager", controller_manager_flags(certificates, manager))
    machine.start(programs / "kube-scheduler", scheduler_flags(configs["kube-scheduler"]))


def start_apiserver(machine: Machine, programs: Path, certificates: Path, addresses: Addresses) -> None:
    """Start the apiserver and wait until it is ready; raises `LabError` with its last log lines if it is not."""
    machine.start(programs / APISERVER, apiserver_flags(certificates, addresses), INFREQUENT_GC)
    _wait_until_ready(machine, certificates, addresses.apiserver)


def _wait_until_ready(machine: Machine, certificates: Path, server: str) -> None:
    try:
        wait_until(lambda: ready(certificates, server), "the apiserver", READY_SECONDS)
    except LabError as error:
        raise LabError(f"{error}\n{machine.log_tail('etcd')}\n{machine.log_tail(APISERVER)}") from error


def ready(certificates: Path, server: str) -> bool:
    """Whether the apiserver reports that it is ready."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    context.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{server}/readyz", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
