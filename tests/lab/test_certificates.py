"""Certificates of a lab, checked by openssl, and the flags of the control plane that name them."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest

from tools.lab import control_plane
from tools.lab.addresses import Addresses
from tools.lab.certificates import CLIENTS, kubeconfig, make_all, write_kubeconfig
from tools.lab.console import LabError, run

ADDRESSES = Addresses(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    certificates = tmp_path_factory.mktemp("lab") / "certificates"
    make_all(certificates, ADDRESSES, 2)
    return certificates


def x509(path: Path, *options: str) -> str:
    return run("openssl", "x509", "-in", path, "-noout", *options)


@pytest.mark.parametrize("name", ["apiserver", "node1", "node2", *CLIENTS])
def test_certificates_are_signed_by_the_authority(folder: Path, name: str) -> None:
    run("openssl", "verify", "-CAfile", folder / "ca.crt", folder / f"{name}.crt")
    with pytest.raises(LabError, match="verification failed"):
        run("openssl", "verify", "-CAfile", folder / "front-proxy-ca.crt", folder / f"{name}.crt")


def test_the_front_proxy_has_a_separate_authority(folder: Path) -> None:
    run("openssl", "verify", "-CAfile", folder / "front-proxy-ca.crt", folder / "front-proxy.crt")


def test_only_authorities_may_sign(folder: Path) -> None:
    assert "CA:TRUE" in x509(folder / "ca.crt", "-ext", "basicConstraints")
    leaves = [path for path in folder.glob("*.crt") if not path.stem.endswith("ca")]
    assert len(leaves) == 2 + 2 + len(CLIENTS)
    assert all("CA:FALSE" in x509(path, "-ext", "basicConstraints") for path in leaves)


def test_the_apiserver_has_every_name_of_its_service(folder: Path) -> None:
    names = x509(folder / "apiserver.crt", "-ext", "subjectAltName,extendedKeyUsage")
    assert "DNS:kubernetes.default.svc.cluster.local" in names
    for ip in (ADDRESSES.control_plane, ADDRESSES.services[1], "127.0.0.1"):
        assert f"IP Address:{ip}" in names
    assert "TLS Web Server Authentication" in names


def test_a_kubelet_has_the_subject_that_the_node_authorizer_requires(folder: Path) -> None:
    assert x509(folder / "node2.crt", "-subject").strip() == "subject=O = system:nodes, CN = system:node:node2"
    assert "TLS Web Client Authentication" in x509(folder / "node2.crt", "-ext", "extendedKeyUsage")


def test_only_the_owner_can_read_keys(folder: Path) -> None:
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.key"))


def test_a_kubeconfig_contains_server_and_key(folder: Path, tmp_path: Path) -> None:
    path = write_kubeconfig(tmp_path / "config", folder, "admin", ADDRESSES.apiserver)
    assert path.stat().st_mode & 0o077 == 0
    config = json.loads(path.read_text())
    assert path.read_text() == kubeconfig(folder, "admin", ADDRESSES.apiserver)
    assert config["clusters"][0]["cluster"]["server"] == ADDRESSES.apiserver
    user = config["users"][0]["user"]
    assert base64.b64decode(user["client-key-data"]) == (folder / "admin.key").read_bytes()


def test_token_signatures_verify_with_the_public_key(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a token")
    signature = tmp_path / "signature"
    run("openssl", "dgst", "-sign", folder / "service-account.key", "-out", signature, tmp_path / "text")
    checked = ("openssl", "dgst", "-verify", folder / "service-account.pub", "-signature", signature)
    assert subprocess.run([*checked, tmp_path / "text"], capture_output=True, check=False).returncode == 0


def test_every_file_in_the_flags_of_the_apiserver_exists(folder: Path) -> None:
    values = [flag.partition("=")[2] for flag in control_plane.apiserver_flags(folder, ADDRESSES)]
    files = [Path(value) for value in values if value.startswith(str(folder))]
    assert len(files) > 8
    assert [path for path in files if not path.exists()] == []


def test_only_the_apiserver_listens_beyond_its_machine(folder: Path) -> None:
    config = Path("/config")
    manager = control_plane.controller_manager_flags(folder, config)
    assert "--bind-address=127.0.0.1" in manager
    assert "--bind-address=127.0.0.1" in control_plane.scheduler_flags(config)
    listen_flags = [flag for flag in control_plane.etcd_flags(Path("/etcd")) if "listen" in flag]
    assert len(listen_flags) == 2
    assert all("//127.0.0.1:" in flag for flag in listen_flags)
    assert f"--node-monitor-grace-period={control_plane.NODE_GRACE_SECONDS}s" in manager


def test_an_unreachable_apiserver_is_not_ready(folder: Path) -> None:
    assert control_plane.ready(folder, "https://127.0.0.1:1") is False
