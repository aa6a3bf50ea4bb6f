"""What the doctor finds, and that every complaint has a remedy."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import resource
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from penstock.agent import probe
from penstock.agent.trial import Trial, try_ranks
from penstock.cli.local import doctor
from penstock.cli.local.doctor import Finding, examine
from penstock.cli.main import main
from penstock.core.errors import RunError
from penstock.core.job import Device
from penstock.core.probe import ProbeRequest, ProbeResult
from tests.support.sample_run import sample_machine, sample_model


@pytest.fixture(autouse=True)
def known_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's answer, without asking it, and trials that go well."""
    monkeypatch.setattr(doctor, "run_probe", _answer)
    monkeypatch.setattr(doctor, "try_ranks", _try)


def _try(device: Device, num_ranks: int) -> Trial:
    return Trial(done=f"{num_ranks} ranks on {device.value} did it", seconds=1.25)


def _answer(question: ProbeRequest) -> ProbeResult:
    return ProbeResult(num_cuda_devices=2, key=sample_machine(), model_digest="")


def finding(name: str, folder: Path) -> Finding:
    return next(each for each in examine(folder) if each.name == name)


def test_a_healthy_machine_has_nothing_to_mend(tmp_path: Path) -> None:
    findings = examine(tmp_path)
    assert [each.name for each in findings if not each.fine] == []
    names = {each.name for each in findings}
    assert names >= {"python", "system", "cores", "memory", "disk", "open files", "network", "processor", "cuda"}


def test_every_package_of_the_trainer_and_the_command_is_named(tmp_path: Path) -> None:
    names = {each.name for each in examine(tmp_path)}
    assert names >= {"numpy", "torch", "tokenizers", "safetensors", "rich", "typer", "plotly"}
    assert not names & {"kopf", "fastapi"}


def test_devices_are_counted(tmp_path: Path) -> None:
    assert finding("cuda", tmp_path).found == "2 devices"
    assert finding("processor", tmp_path).found == sample_machine().device


@pytest.mark.parametrize(
    ("wanted", "tried"),
    [(None, ["trial on cpu", "trial on cuda"]), (Device.CPU, ["trial on cpu"]), (Device.CUDA, ["trial on cuda"])],
)
def test_ranks_are_tried_on_the_device_asked_for(tmp_path: Path, wanted: Device | None, tried: list[str]) -> None:
    findings = examine(tmp_path, wanted)
    assert [each.name for each in findings if each.name.startswith("trial")] == tried
    assert findings[-1].found == f"2 ranks on {tried[-1].removeprefix('trial on ')} did it, in 1.2 s"


def test_a_device_that_is_asked_for_and_not_here_is_a_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "run_probe", lambda question: dataclasses.replace(_answer(question), num_cuda_devices=0)
    )
    assert finding("cuda", tmp_path).fine
    wanted = {each.name: each for each in examine(tmp_path, Device.CUDA)}
    assert "driver" in wanted["cuda"].remedy
    assert not any(name.startswith("trial") for name in wanted)


def test_a_trial_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is counted may still not compute."""

    def fail(device: Device, num_ranks: int) -> NoReturn:
        raise RunError("RuntimeError: CUDA error: no kernel image is available")

    monkeypatch.setattr(doctor, "try_ranks", fail)
    found = finding("trial on cuda", tmp_path)
    assert "no kernel image" in found.found
    assert "nvidia-smi" in found.remedy


def test_ranks_really_start_compute_and_sum() -> None:
    trial = try_ranks(Device.CPU, 2)
    assert trial.done == "2 ranks on cpu ran CpuFlash attention over 128 tokens in float32 and a sum by gloo"


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: here a trial on CUDA goes well")
def test_ranks_without_their_device_say_so() -> None:
    with pytest.raises(RunError, match="rank 0 has no device of its own"):
        try_ranks(Device.CUDA, 1)


def test_ranks_that_do_not_end_are_ended() -> None:
    with pytest.raises(RunError, match="did not end within 0 s"):
        try_ranks(Device.CPU, 1, patience_seconds=0.0)


def test_a_missing_package_is_installed_by_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(name: str) -> str:
        if name == "tokenizers":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", look)
    found = finding("tokenizers", tmp_path)
    assert found.found == "missing"
    assert found.remedy.startswith("pip install 'tokenizers")


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5))
    assert "free some space" in finding("disk", tmp_path).remedy


def test_few_open_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert "ulimit" in finding("open files", tmp_path).remedy


def test_a_missing_loopback_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, address: Any) -> NoReturn:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", fail)
    assert "lo up" in finding("network", tmp_path).remedy


def test_a_broken_pytorch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(question: ProbeRequest) -> NoReturn:
        raise RunError("PyTorch cannot describe this machine: no libgomp")

    monkeypatch.setattr(doctor, "run_probe", fail)
    found = finding("pytorch", tmp_path)
    assert "libgomp" in found.found
    assert not found.fine


def test_devices_are_asked_where_the_trainer_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may be there without it; that it is missing is a finding of its own."""
    monkeypatch.setattr(
        doctor, "find_spec", lambda name: None if name == "penstock.trainer" else importlib.util.find_spec(name)
    )
    assert "pytorch" not in [found.name for found in doctor.examine(tmp_path, None)]


def test_the_exit_code_says_whether_something_has_to_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "ready to train" in capsys.readouterr().out
    monkeypatch.setattr(
        doctor, "examine", lambda folder, device: [Finding(name="disk", found="full", remedy="free some")]
    )
    assert main(["doctor"]) == 2
    assert "remedy: free some" in capsys.readouterr().out
    assert main(["doctor", "--output", "json"]) == 2
    assert json.loads(capsys.readouterr().out) == [{"name": "disk", "found": "full", "remedy": "free some"}]


def test_pytorch_that_does_not_load_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    question = ProbeRequest(device=Device.CPU, threads_per_rank=1, model=sample_model(), sequence_length=1)
    with pytest.raises(RunError, match="it printed nothing"):
        probe.run_probe(question)
