"""`./dev gpu`: what it says without a GPU, that parts are bounded, and that all run on the fake CUDA runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as battery
from benchmarks.gpu.measure import MEASURES, ratios
from benchmarks.gpu.parts import PARTS

from tests.support.fakecuda.build import environment
from tests.support.serving import wait_until

NEEDS_VALUES = "pair"
"""Its ranks announce the sizes of messages by messages, and a fake device keeps no values."""


def _battery(
    folder: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--folder", str(folder), *arguments],
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def _result(folder: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"gpu-{part}.json").read_text())
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: says what happens without a GPU")
def test_without_a_gpu_it_prints_that_and_runs_nothing(tmp_path: Path) -> None:
    done = _battery(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("./dev gpu cannot run here: PyTorch finds no NVIDIA GPU and driver.\n")
    assert list(tmp_path.iterdir()) == []


def test_the_parts_are_listed_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert battery.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PARTS) == list(MEASURES)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert battery.main(["parity", "speed"]) == 2
    assert capsys.readouterr().err == "no part speed: `./dev gpu --list` shows those there are.\n"


def test_a_part_that_takes_too_long_is_cut_off_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery, "LIMIT_SECONDS", 2)
    status, output = battery._bounded(["sh", "-c", "sleep 60 & echo $!; wait"])
    assert status == battery.CUT_OFF
    command_line = Path(f"/proc/{int(output)}/cmdline")  # empty of a process that ended and is not reaped yet
    wait_until(lambda: not command_line.exists() or not command_line.read_text(), 10.0)


def test_ratios_are_over_points_of_enough_tokens() -> None:
    points = [((1, 8, 0), 9.0), ((2, 8, 0), 1.0), ((1, 16, 4), 2.0), ((1, 32, 0), 6.0)]
    rows = [{"unit": "mlp F", "point": point, "measured": seconds, "described": 2.0} for point, seconds in points]
    assert ratios(rows, 16) == {"mlp F": (1.0, 0.5, 3.0)}


@pytest.mark.timeout(600)
@pytest.mark.long
def test_parts_run_on_a_fake_device_and_leave_their_results(tmp_path: Path) -> None:
    """It computes nothing: losses are zero, and parity cannot pass, which ends the battery with 1."""
    parts = [name for name in PARTS if name != NEEDS_VALUES]
    done = _battery(tmp_path, "--small", *parts, variables=environment(devices=1, device_bytes=2**30))
    assert done.returncode == 1, done.stderr
    results = {name: _result(tmp_path, name) for name in parts}
    assert {result["device"] for result in results.values()} == {"Fake H100"}
    assert {name: result["status"] for name, result in results.items()} == {
        **dict.fromkeys(parts, "passed"),
        "parity": "failed",
    }
    assert "failure" in results["parity"]["found"]["tests"].values()
    assert set(results["torch"]["found"]["losses"].values()) == {0.0}
    assert results["slices"]["found"]["steps"]["4"]["num_actions"] == 2 * 2 * 4
    peaks = results["memory"]["found"]["peak_bytes"]
    assert all(each["predicted"] > 0 for each in peaks.values())  # what was measured comes by a collective: zero
    assert results["units"]["found"]["profile"]["key"]["backend"] == "nccl"


@pytest.mark.timeout(600)
def test_numbers_are_right_where_they_can_be_computed(tmp_path: Path) -> None:
    """On CPU: two ranks whose messages go through the host lose as one does, and so does plain PyTorch."""
    done = _battery(tmp_path, "--small", "--device", "cpu", "pair", "torch", "parity")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "gpu-parity.json").exists(), "there is nothing of it on CPU"
    pair, torch_ = (_result(tmp_path, name)["found"] for name in ("pair", "torch"))
    assert pair["losses"]["2"] == pytest.approx(pair["losses"]["1"], rel=1e-5)
    assert pair["measured_seconds"] > 0 < pair["predicted_seconds"]
    assert torch_["loss_error"] < 1e-5
