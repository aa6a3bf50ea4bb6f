"""A mistake in how the service is started is two lines without a traceback, and exit code 2."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.cli.main import main


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The error and the remedy that the service ends with."""
    assert main(["serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    error, remedy = printed.err.splitlines()
    assert error.startswith("error ")
    assert remedy.startswith("remedy ")
    return error, remedy


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--data", "corpus"], "--data"),
        (["--data", "corpus=/nonexistent/folder"], "--data"),
        (["--tls-certificate", "/nonexistent/tls.crt"], "--tls-key"),
        (["--tls-certificate", "/nonexistent/tls.crt", "--tls-key", "/nonexistent/tls.key"], "--tls-certificate"),
        (["--webhook", "https://example.com/hook"], "--webhook"),
        (["--webhook", "ftp://example.com", "--webhook-secret", "/nonexistent/secret"], "--webhook-secret"),
        (["--namespace", "team"], "--namespace"),
        (["--policy", "/nonexistent/policy.json"], "--policy"),
        (["--database", "postgresql://me:secret@host/name"], "--database"),
        (["--database", "mysql://host/name"], "database"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_an_option_is_two_lines(
    arguments: list[str], where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error, _ = refused([*arguments, "--folder", str(tmp_path), "--port", str(free_port())], capsys)
    assert where in error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_taken_port_is_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        error, remedy = refused(["--folder", str(tmp_path), "--port", str(port)], capsys)
    assert f"port {port}" in error
    assert "--port" in f"{error} {remedy}"


def test_a_cluster_without_a_configuration_is_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent/config")
    error, remedy = refused(["--cluster", "--folder", str(tmp_path), "--port", str(free_port())], capsys)
    assert error.startswith("error KUBECONFIG: no Kubernetes configuration found")
    assert "kubectl" in remedy


def test_a_folder_that_cannot_be_made_is_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    refused(["--folder", str(tmp_path / "file" / "data"), "--port", str(free_port())], capsys)
