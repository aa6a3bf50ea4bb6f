"""Certificates that openssl made, asked about by openssl; and the flags that name them."""

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
    made = tmp_path_factory.mktemp("lab") / "certificates"
    make_all(made, ADDRESSES, 2)
    return made


def shown(path: Path, *what: str) -> str:
    return run("openssl", "x509", "-in", path, "-noout", *what)


@pytest.mark.parametrize("name", ["apiserver", "node1", "node2", *CLIENTS])
def test_the_authority_signed_it(folder: Path, name: str) -> None:
    run("openssl", "verify", "-CAfile", folder / "ca.crt", folder / f"{name}.crt")
    with pytest.raises(LabError, match="verification failed"):
        run("openssl", "verify", "-CAfile", folder / "front-proxy-ca.crt", folder / f"{name}.crt")


def test_the_front_proxy_has_an_authority_of_its_own(folder: Path) -> None:
    run("openssl", "verify", "-CAfile", folder / "front-proxy-ca.crt", folder / "front-proxy.crt")


def test_nobody_but_the_authorities_signs(folder: Path) -> None:
    assert "CA:TRUE" in shown(folder / "ca.crt", "-ext", "basicConstraints")
    leaves = [path for path in folder.glob("*.crt") if not path.stem.endswith("ca")]
    assert len(leaves) == 2 + 2 + len(CLIENTS)
    assert all("CA:FALSE" in shown(path, "-ext", "basicConstraints") for path in leaves)


def test_the_apiserver_is_found_by_every_name(folder: Path) -> None:
    names = shown(folder / "apiserver.crt", "-ext", "subjectAltName,extendedKeyUsage")
    assert "DNS:kubernetes.default.svc.cluster.local" in names
    for ip in (ADDRESSES.control_plane, ADDRESSES.services[1], "127.0.0.1"):
        assert f"IP Address:{ip}" in names
    assert "TLS Web Server Authentication" in names


def test_a_kubelet_is_a_node_to_the_authorizer(folder: Path) -> None:
    assert shown(folder / "node2.crt", "-subject").strip() == "subject=O = system:nodes, CN = system:node:node2"
    assert "TLS Web Client Authentication" in shown(folder / "node2.crt", "-ext", "extendedKeyUsage")


def test_keys_are_the_owner_s(folder: Path) -> None:
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.key"))


def test_a_kubeconfig_holds_all_it_needs(folder: Path, tmp_path: Path) -> None:
    path = write_kubeconfig(tmp_path / "config", folder, "admin", ADDRESSES.apiserver)
    assert path.stat().st_mode & 0o077 == 0
    found = json.loads(path.read_text())
    assert path.read_text() == kubeconfig(folder, "admin", ADDRESSES.apiserver)
    assert found["clusters"][0]["cluster"]["server"] == ADDRESSES.apiserver
    user = found["users"][0]["user"]
    assert base64.b64decode(user["client-key-data"]) == (folder / "admin.key").read_bytes()


def test_tokens_are_signed_by_one_key_and_checked_by_the_other(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a token")
    signature = tmp_path / "signature"
    run("openssl", "dgst", "-sign", folder / "service-account.key", "-out", signature, tmp_path / "text")
    checked = ("openssl", "dgst", "-verify", folder / "service-account.pub", "-signature", signature)
    assert subprocess.run([*checked, tmp_path / "text"], capture_output=True, check=False).returncode == 0


def test_every_file_that_the_apiserver_is_told_of_exists(folder: Path) -> None:
    told = [flag.partition("=")[2] for flag in control_plane.apiserver_flags(folder, ADDRESSES)]
    files = [Path(value) for value in told if value.startswith(str(folder))]
    assert len(files) > 8
    assert [path for path in files if not path.exists()] == []


def test_nothing_but_the_apiserver_listens_beyond_its_room(folder: Path) -> None:
    config = Path("/config")
    manager = control_plane.controller_manager_flags(folder, config)
    assert "--bind-address=127.0.0.1" in manager
    assert "--bind-address=127.0.0.1" in control_plane.scheduler_flags(config)
    listening = [flag for flag in control_plane.etcd_flags(Path("/etcd")) if "listen" in flag]
    assert len(listening) == 2
    assert all("//127.0.0.1:" in flag for flag in listening)
    assert f"--node-monitor-grace-period={control_plane.NODE_GRACE_SECONDS}s" in manager


def test_an_apiserver_that_is_not_there_is_not_ready(folder: Path) -> None:
    assert control_plane.ready(folder, "https://127.0.0.1:1") is False
