"""Keys and certificates of a lab, made by openssl: two certificate authorities, and one certificate per component."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.lab.addresses import Addresses
from tools.lab.console import run

DAYS = 365
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
CLIENTS: Mapping[str, str] = {
    "admin": "/O=system:masters/CN=lab-admin",
    "kube-controller-manager": "/CN=system:kube-controller-manager",
    "kube-scheduler": "/CN=system:kube-scheduler",
    "kube-proxy": "/CN=system:kube-proxy",
}
"""Clients of the apiserver other than kubelets: the names of their files, and the subjects that RBAC grants rights."""


def make_all(folder: Path, addresses: Addresses, num_nodes: int) -> None:
    """Make all keys and certificates below ``folder``: `X.crt` and `X.key` of each, and the key pair of tokens."""
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = name\n[name]\n")
    for authority in ("ca", "front-proxy-ca"):
        _authority(folder, authority)
    _signed(folder, "apiserver", "/CN=kube-apiserver", serves=served_names(addresses))
    for name, subject in (*CLIENTS.items(), *(kubelet(number) for number in range(1, num_nodes + 1))):
        _signed(folder, name, subject)
    _signed(folder, "front-proxy", "/CN=front-proxy", authority="front-proxy-ca")
    _token_keys(folder)


def kubelet(node: int) -> tuple[str, str]:
    """Return file name and subject of a node's kubelet; the Node authorizer requires this form of the subject."""
    return f"node{node}", f"/O=system:nodes/CN=system:node:node{node}"


def served_names(addresses: Addresses) -> str:
    """Return the subject alternative names of the apiserver, for clients outside the cluster and in pods."""
    service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
    ips = (str(addresses.control_plane), str(addresses.services[1]), "127.0.0.1")
    return ",".join([*(f"DNS:{name}" for name in (*service, "localhost")), *(f"IP:{ip}" for ip in ips)])


def _request(folder: Path, name: str, subject: str) -> list[str | Path]:
    outputs: list[str | Path] = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"]
    command = ("openssl", "req", "-x509", *NEW_KEY, "-config", folder / "openssl.cnf", "-days", str(DAYS))
    return [*command, "-subj", subject, *outputs]


def _authority(folder: Path, name: str) -> None:
    extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,digitalSignature")
    run(*_request(folder, name, f"/CN=lab-{name}"), *_extension_options(extensions))


def _signed(folder: Path, name: str, subject: str, *, authority: str = "ca", serves: str = "") -> None:
    """Make a certificate for a client, or for a server if ``serves`` has the names of one."""
    usage = "serverAuth" if serves else "clientAuth"
    extensions = ["basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature"]
    extensions += [f"extendedKeyUsage={usage}", *([f"subjectAltName={serves}"] if serves else [])]
    signer = ("-CA", folder / f"{authority}.crt", "-CAkey", folder / f"{authority}.key")
    run(*_request(folder, name, subject), *signer, *_extension_options(extensions))


def _extension_options(extensions: tuple[str, ...] | list[str]) -> list[str]:
    return [word for extension in extensions for word in ("-addext", extension)]


def _token_keys(folder: Path) -> None:
    private, public = folder / "service-account.key", folder / "service-account.pub"
    run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", private)
    run("openssl", "pkey", "-in", private, "-pubout", "-out", public)


def kubeconfig(certificates: Path, name: str, server: str) -> str:
    """Return the kubeconfig of the client ``name``, with embedded keys. It is JSON, which is valid YAML."""

    def embedded(file: str) -> str:
        return base64.b64encode((certificates / file).read_bytes()).decode()

    user = {"client-certificate-data": embedded(f"{name}.crt"), "client-key-data": embedded(f"{name}.key")}
    cluster = {"server": server, "certificate-authority-data": embedded("ca.crt")}
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
        "current-context": "lab",
    }
    return json.dumps(config, indent=1)


def write_kubeconfig(path: Path, certificates: Path, name: str, server: str) -> Path:
    """Write the kubeconfig to a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(kubeconfig(certificates, name, server))
    return path
