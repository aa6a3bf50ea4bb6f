"""`penstock-agent` itself: exit codes, and what it prints last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.agent.__main__ import main
from penstock.cli.main import main as old_main
from penstock.core.errors import RunError, UserError
from penstock.core.host.stopping import StopRequestedError

EXPORT = ["export", "/nonexistent", "--to", "/nonexistent/too"]


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (UserError(what="is missing", where="spec.model", remedy="write it"), 2, "remedy write it"),
        (RunError("the disk is full"), 1, "failed the disk is full"),
        (ModuleNotFoundError("no torch", name="torch"), 2, "remedy install penstock-trainer: pip install"),
        (KeyError("unforeseen"), 1, "failed KeyError: 'unforeseen'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_why_it_failed_is_on_the_last_line(
    error: Exception, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("penstock.trainer.writing.exported", fail)
    assert main(EXPORT) == code
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith(last)
    assert ("Traceback" in printed) == isinstance(error, KeyError)


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (StopRequestedError(15), 143)])
def test_a_stop_has_its_signal_s_code(stop: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*given: object, **options: object) -> None:
        raise stop

    monkeypatch.setattr("penstock.trainer.writing.exported", stopped)
    assert main(EXPORT) == code


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["supervise", "/run"],
        ["pod", "--attempt", "0", "--out", "/o", "--local", "/l", "--data", "/d"],
        ["pod", "--att", "1", "--out", "/o", "--local", "/l", "--data", "/d"],
        [*EXPORT, "--step", "-1"],
    ],
)
def test_arguments_that_cannot_be_right_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith("error penstock-agent")
    assert remedy.startswith("remedy penstock-agent")
    assert remedy.endswith("--help lists the arguments")


def test_a_supervisor_without_an_order_is_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["supervise", str(tmp_path), "1"]) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error {tmp_path}")
    assert error.endswith("No such file or directory")
    assert remedy.startswith("remedy ")


def test_a_pod_without_its_uid_is_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_POD_UID", raising=False)
    folders = [word for name in ("out", "local", "data") for word in (f"--{name}", str(tmp_path / name))]
    assert main(["pod", "--attempt", "1", *folders]) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error == "error PENSTOCK_POD_UID: is not set"
    assert "downward API" in remedy


def test_old_names_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert old_main(["pod", "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error penstock-agent pod: ")


def test_an_old_supervisor_asks_about_this_machine(tmp_path: Path) -> None:
    model = {"family": "gpt2", "layers": 1, "hidden": 8, "heads": 1, "vocab": 8, "positions": 8}
    question = json.dumps({"device": "cpu", "threadsPerRank": 1, "model": model, "sequenceLength": 8})
    command = [sys.executable, "-m", "penstock.cli.probe"]
    done = subprocess.run(command, input=question, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"numCudaDevices"' in done.stdout
