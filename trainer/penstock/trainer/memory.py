"""Peak memory of a rank, by one name on every device: the most bytes held since the last reset."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch
from torch import Tensor

_PROCESS = Path("/proc/self")
_RESET_PEAK_RSS = "5"


def reset_peak(device: torch.device) -> None:
    """Start a new measurement.

    On CPU the kernel's high-water mark of resident memory is set to what is resident now (proc(5), clear_refs); a
    sandbox that forbids it leaves the mark of the whole process, which is never too low.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(PermissionError, FileNotFoundError):
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK_RSS)


def peak_bytes(device: torch.device) -> int:
    """Bytes at the worst moment since the last reset: resident memory on CPU; on CUDA what the allocator had reserved,
    and all else that is taken of the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + held_bytes(device) - torch.cuda.memory_reserved(device)
    return _status_bytes("VmHWM")


def held_bytes(device: torch.device) -> int:
    """Bytes of this rank now: resident memory on CPU; on CUDA all that is taken of its device, which no other rank has:
    the context, kernels, NCCL's buffers, and what the allocator keeps.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return _status_bytes("VmRSS")


def tensor_bytes(device: torch.device) -> int:
    """Bytes now, as far as they grow with tensors: resident memory on CPU, live allocations on CUDA."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status_bytes("VmRSS")


def peak_tensor_bytes(device: torch.device) -> int:
    """`tensor_bytes` at the worst moment since the last reset."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM")


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host from which ``device`` copies while the host goes on: pinned for CUDA. Nothing else pins."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def release_unused(device: torch.device) -> None:
    """Give back what allocators keep of freed memory, so that the next measurement counts only what is in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(name: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
