"""Peak memory of a rank, with the same functions for every device: the most bytes held since the last reset."""

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

    On CPU this resets the kernel's high-water mark of resident memory (proc(5), clear_refs). If a sandbox forbids it,
    the mark stays that of the whole process, which is never too low.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(PermissionError, FileNotFoundError):
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK_RSS)


def peak_bytes(device: torch.device) -> int:
    """Largest number of bytes since the last reset. On CPU: resident memory. On CUDA: the allocator's reserved memory
    and all other memory in use on the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + bytes_outside_allocator(device)
    return _status_bytes("VmHWM")


def held_bytes(device: torch.device) -> int:
    """Bytes in use now. On CPU: resident memory. On CUDA: everything in use on the device, which belongs to this rank
    alone, including the context, kernels, NCCL's buffers, and the allocator's cache.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return _status_bytes("VmRSS")


def bytes_outside_allocator(device: torch.device) -> int:
    """Bytes of `held_bytes` on CUDA outside of PyTorch's allocator: context, kernels, NCCL, graphs."""
    return held_bytes(device) - torch.cuda.memory_reserved(device)


def tensor_bytes(device: torch.device) -> int:
    """Bytes in use now that grow with tensors. On CPU: resident memory. On CUDA: live allocations."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status_bytes("VmRSS")


def peak_tensor_bytes(device: torch.device) -> int:
    """Maximum of `tensor_bytes` since the last reset."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM")


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory from which ``device`` copies asynchronously: pinned for CUDA. Nothing else is pinned."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def release_unused(device: torch.device) -> None:
    """Return freed memory that allocators cache, so that the next measurement counts only memory in use."""
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
