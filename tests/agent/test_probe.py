"""What a profile must be of, as PyTorch says it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock.agent import probe
from penstock.agent.probe import Identity, identify
from penstock.core.errors import UserError
from penstock.core.job import Device
from penstock.core.layout import Precision
from penstock.core.probe import ProbeRequest, ProbeResult
from penstock.core.profile_matching import model_digest
from tests.support.local_run import local_job
from tests.support.sample_run import sample_machine, sample_model


def answering(num_cuda_devices: int, *, here: bool = True) -> Callable[[ProbeRequest, tuple[str, ...]], ProbeResult]:
    """PyTorch on a machine with that many devices."""
    key = sample_machine() if here else None
    return lambda request, devices: ProbeResult(num_cuda_devices=num_cuda_devices, key=key, model_digest="m")


def test_an_identity_has_everything_costs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run_probe", answering(0))
    job = local_job(training__precision="bf16", resources__ranks=4)
    expected = Identity(key=sample_machine(), model_digest="m", precision=Precision.BF16, num_ranks=4)
    assert identify(job.spec) == expected


@pytest.mark.parametrize(
    ("devices", "here", "place"), [(0, False, "spec.resources.device"), (1, True, "spec.resources.ranks")]
)
def test_missing_devices_are_named(monkeypatch: pytest.MonkeyPatch, devices: int, here: bool, place: str) -> None:
    monkeypatch.setattr(probe, "run_probe", answering(devices, here=here))
    with pytest.raises(UserError) as found:
        identify(local_job(resources__device="cuda").spec)
    assert found.value.where == place
    assert found.value.remedy


@pytest.mark.parametrize(("wanted", "fits"), [("4Gi", True), ("5Gi", False)])
def test_a_rank_may_take_what_a_device_has(monkeypatch: pytest.MonkeyPatch, wanted: str, fits: bool) -> None:
    answer = ProbeResult(num_cuda_devices=2, device_bytes=4 * 2**30, key=sample_machine(), model_digest="m")
    monkeypatch.setattr(probe, "run_probe", lambda request, devices: answer)
    for device in ("cuda", "cpu"):
        spec = local_job(resources__device=device, resources__memoryPerRank=wanted).spec
        if fits or device == "cpu":
            assert identify(spec).num_ranks == 2
            continue
        with pytest.raises(UserError, match="5 GiB is more than the 4 GiB of a device") as found:
            identify(spec)
        assert found.value.where == "spec.resources.memoryPerRank"


def test_enough_devices_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run_probe", answering(2))
    assert identify(local_job(resources__device="cuda").spec).num_ranks == 2


def test_only_the_devices_of_the_job_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run_probe(request: ProbeRequest, devices: tuple[str, ...]) -> ProbeResult:
        asked.append(devices)
        return answering(len(devices))(request, devices)

    monkeypatch.setattr(probe, "run_probe", run_probe)
    identify(local_job(resources__device="cuda").spec, ("3", "1"))
    assert asked == [("3", "1")]


def test_pytorch_answers_for_itself() -> None:
    """The number of layers does not matter: costs are of units, however many there are."""
    request = ProbeRequest(device=Device.CPU, threads_per_rank=2, model=sample_model(80), sequence_length=64)
    assert ProbeRequest.from_manifest(json.loads(json.dumps(request.to_manifest()))) == request
    answer = probe.run_probe(request)
    assert answer.key is not None
    assert (answer.key.threads_per_rank, answer.key.backend) == (2, "gloo")
    assert answer.model_digest == model_digest(sample_model(8), 64)
