"""A mistake in the operator's configuration is two lines without a traceback, and exit code 2."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kopf
import pytest

from penstock.operator import __main__ as program

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: here, user: me}}]
clusters: [{name: here, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: me, user: {token: secret}}]
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Mapping[str, Any]]:
    """The arguments of every start of kopf, in an environment that is complete. kopf ends as after a signal."""
    starts: list[Mapping[str, Any]] = []

    async def operator(**arguments: Any) -> None:
        starts.append(arguments)

    (tmp_path / "config").write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("PENSTOCK_METRICS_PORT", "0")
    monkeypatch.setenv("PENSTOCK_LIVENESS_PORT", str(free_port()))
    monkeypatch.setattr(sys, "argv", ["penstock-operator"])
    monkeypatch.setattr(kopf, "operator", operator)
    monkeypatch.setattr(kopf, "configure", lambda **_: None)
    return starts


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def refused(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the error that the program ends with."""
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err.splitlines()


@pytest.mark.parametrize("namespace", ["", "team"])
def test_a_complete_configuration_starts(
    started: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    program.main()
    (arguments,) = started
    assert arguments["clusterwide"] is not bool(namespace)
    assert arguments["namespaces"] == ([namespace] if namespace else [])
    assert "liveness_endpoint" not in arguments
    assert set(arguments["memo"]) == {"controller", "background", "stop_flag"}


@pytest.mark.parametrize("chosen", ["", "json"])
def test_kopf_formats_the_log(started: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    formats: list[kopf.LogFormat] = []
    monkeypatch.setattr(kopf, "configure", lambda log_format: formats.append(log_format))
    monkeypatch.setenv("PENSTOCK_LOG", chosen)
    program.main()
    assert formats == [kopf.LogFormat.JSON if chosen else kopf.LogFormat.FULL]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KUBECONFIG", "/nonexistent/config"),
        ("PENSTOCK_PLANNERS", "many"),
        ("PENSTOCK_METRICS_PORT", "70000"),
        ("PENSTOCK_LIVENESS_PORT", "http"),
        ("PENSTOCK_SERVICE_CA_FILE", "/nonexistent/ca.crt"),
        ("PENSTOCK_POLICY_FILE", "/nonexistent/policy.json"),
    ],
)
def test_a_mistake_is_two_lines(
    started: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    error, remedy = refused(capsys)
    assert error.startswith("error ")
    assert variable in error or value in error
    assert remedy.startswith("  remedy: ")
    assert not started


def test_a_broken_kubeconfig_is_two_lines(
    started: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "broken").write_text("contexts: []\n")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    error, _ = refused(capsys)
    assert error.startswith("error KUBECONFIG: ")
    assert not started


@pytest.mark.parametrize("variable", ["PENSTOCK_METRICS_PORT", "PENSTOCK_LIVENESS_PORT"])
def test_a_taken_port_is_named(
    started: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        port = listening.getsockname()[1]
        monkeypatch.setenv(variable, str(port))
        error, remedy = refused(capsys)
    assert error.startswith(f"error {variable}: port {port}: ")
    assert variable in remedy
    assert not started


def test_an_unknown_command_is_two_lines(
    started: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock-operator", "check-polcy"])
    error, remedy = refused(capsys)
    assert "check-polcy" in error
    assert "check-policy" in remedy
    assert not started
