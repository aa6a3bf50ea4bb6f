"""Program that reports the devices of this machine as PyTorch counts and names them.

python -m penstock.trainer.probe < request.json > result.json
"""

from __future__ import annotations

import json
import sys

import torch

from penstock.core.job import Device
from penstock.core.probe import ProbeRequest, ProbeResult
from penstock.core.profile_matching import model_digest
from penstock.trainer.profiling.machine import machine_key


def main() -> None:
    """Read a `ProbeRequest` from stdin and write the `ProbeResult` to stdout."""
    request = ProbeRequest.from_manifest(json.load(sys.stdin))
    num_cuda_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_here = request.device is Device.CPU or num_cuda_devices
    device = torch.device(request.device.value)
    answer = ProbeResult(
        num_cuda_devices=num_cuda_devices,
        device_bytes=min(map(_total_memory, range(num_cuda_devices)), default=None),
        key=machine_key(device, request.threads_per_rank) if is_here else None,
        model_digest=model_digest(request.model, request.sequence_length),
    )
    sys.stdout.write(json.dumps(answer.to_manifest()))


def _total_memory(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


if __name__ == "__main__":
    main()
