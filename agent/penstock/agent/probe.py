"""PyTorch's description of this machine, from a separate process: PyTorch takes seconds to load and, on a GPU, memory
that the ranks need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from penstock.agent.launch import visible_devices_environment
from penstock.core.errors import RunError, UserError
from penstock.core.job import Device, JobSpec
from penstock.core.layout import Precision
from penstock.core.probe import ProbeRequest, ProbeResult
from penstock.core.profile import MachineKey
from penstock.core.profile_matching import require_device_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The identity that a profile must have to serve a job here."""

    key: MachineKey
    model_digest: str
    precision: Precision
    num_ranks: int


def identify(spec: JobSpec, devices: tuple[str, ...] = ()) -> Identity:
    """Return the identity of a profile for ``spec`` on these CUDA devices, or on all; raises `UserError` if this
    machine lacks its devices.
    """
    request = ProbeRequest(
        device=spec.resources.device,
        threads_per_rank=spec.resources.threads_per_rank,
        model=spec.model,
        sequence_length=spec.data.sequence_length,
    )
    answer = run_probe(request, devices)
    if answer.key is None:
        raise UserError(
            what="cuda is requested, but this machine has no NVIDIA device",
            where="spec.resources.device",
            remedy="write device: cpu, or check the driver with nvidia-smi and penstock doctor",
        )
    if spec.resources.device is Device.CUDA and answer.num_cuda_devices < spec.resources.ranks:
        raise UserError(
            what=f"{spec.resources.ranks} ranks need a device each, but this machine has {answer.num_cuda_devices}",
            where="spec.resources.ranks",
            remedy=f"write ranks: {answer.num_cuda_devices}, or use a machine with more devices",
        )
    if spec.resources.device is Device.CUDA and answer.device_bytes is not None:
        require_device_memory(spec.resources.memory_per_rank, answer.device_bytes)
    return Identity(
        key=answer.key,
        model_digest=answer.model_digest,
        precision=spec.training.precision,
        num_ranks=spec.resources.ranks,
    )


def run_probe(request: ProbeRequest, devices: tuple[str, ...] = ()) -> ProbeResult:
    """Return PyTorch's answer with these CUDA devices visible, or all; raises `RunError` if it cannot be loaded."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.trainer.probe"],
        input=json.dumps(request.to_manifest()),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **visible_devices_environment(devices)},
        start_new_session=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise RunError(f"PyTorch cannot describe this machine: {lines[-1]}")
    return ProbeResult.from_manifest(json.loads(done.stdout))
