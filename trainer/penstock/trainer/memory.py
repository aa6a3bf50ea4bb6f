"""Peak memory of a rank, by one name on every device: the most bytes held since the last reset."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

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
    """Bytes at the worst moment since the last reset: resident memory on CPU, torch's allocations on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def resident_bytes() -> int:
    """Bytes of this process in memory now."""
    return _status_bytes("VmRSS")


def held_bytes(device: torch.device) -> int:
    """What the rank's process holds now: on CUDA all that is taken of its device, also outside of torch's allocator."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resident_bytes()


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
