"""Process of one rank, from its start by torchrun to its exit.

    sys.exit(run_worker(main, device="cpu", status_folder=folder))

A signal only sets a flag. The runtime reduces the flags of all ranks once a step, so that all stop after the same step.
Any failure ends the process immediately: its peers wait for messages that will not come, and only the closed connection
ends their wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from penstock.core.errors import PenstockError, UserError
from penstock.core.run.rank_status import StatusFile, status_path
from penstock.core.units import format_bytes
from penstock.trainer import gloo
from penstock.trainer.comm import ProcessGroups
from penstock.trainer.parent_death import die_with_parent, launcher

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_ALLOCATION = re.compile(rf"to allocate (\d+(?:\.\d*)?) ({'|'.join(_UNITS)})")


class StopFlag:
    """Whether this rank was requested to stop."""

    def __init__(self) -> None:
        self._raised = False

    def __call__(self) -> bool:
        return self._raised

    def raise_on(self, *numbers: signal.Signals) -> None:
        """Handle these signals by raising the flag."""
        for number in numbers:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._raised = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """Argument of a rank's main function. The default process group exists."""

    rank: int
    num_ranks: int
    device: torch.device
    groups: ProcessGroups
    status: StatusFile
    stop_requested: Callable[[], bool]


def run_worker(main: Callable[[Worker], None], *, device: str, status_folder: Path) -> int:
    """Join the other ranks, run ``main`` and leave. Returns the exit code 0, or ends the process with another one.

    ``device`` is ``cpu`` or ``cuda``.
    """
    die_with_parent(launcher(), signal.SIGKILL)
    stop = StopFlag()
    stop.raise_on(signal.SIGTERM, signal.SIGINT)
    rank = int(os.environ["RANK"])
    Path("/proc/self/comm").write_text(f"rank {rank}")  # the process name in top and in the kernel's log
    status = StatusFile(status_path(status_folder, rank), os.getpid())
    try:
        main(_join(device, status, stop))
        dist.barrier()
    except BaseException as error:
        _report_and_exit(status, error)
    status.finish(time.monotonic_ns())
    dist.destroy_process_group()
    return 0


def _join(device: str, status: StatusFile, stop: StopFlag) -> Worker:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    place = torch.device("cpu")
    if device == "cuda":
        place = own_device(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
        torch.cuda.set_device(place)
        set_precision()
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=place)
    else:
        dist.init_process_group(gloo.backend())
    return Worker(
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        device=place,
        groups=ProcessGroups(place),
        status=status,
        stop_requested=stop,
    )


def set_precision() -> None:
    """Set the precision of CUDA kernels explicitly, independent of the defaults of the installed PyTorch.

    Products of fp32 are computed in fp32: no TF32. Products of bf16 are summed in fp32, even where cuBLAS splits a sum.
    Kernels that add in no fixed order are allowed: on CUDA, attention's backward and the embedding's gradient have no
    deterministic kernels.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(mode=False)


def own_device(local_rank: int, num_devices: int) -> torch.device:
    """The CUDA device of this rank alone. Raises `UserError` if there are fewer devices than ranks."""
    if local_rank >= num_devices:
        raise UserError(
            what=f"rank {local_rank} has no device of its own: {num_devices} are visible here",
            where="spec.resources.ranks",
            remedy="use fewer ranks, or let CUDA_VISIBLE_DEVICES name more devices",
        )
    return torch.device("cuda", local_rank)


def impossible_allocation(error: BaseException, capacity_bytes: int) -> UserError | None:
    """The user error behind an allocation that exceeds ``capacity_bytes``; None for any other error.

    PyTorch and numpy report the requested size only in the message: "tried to allocate 80 bytes", "Tried to allocate
    2.50 GiB", "Unable to allocate 227. PiB". For a size that no integer holds, PyTorch reports an overflow.
    """
    text = str(error)
    match = _ALLOCATION.search(text)
    if match is not None:
        requested_bytes = float(match[1]) * 1024 ** _UNITS.index(match[2])
        if requested_bytes <= capacity_bytes:
            return None
        requested, capacity = format_bytes(int(requested_bytes)), format_bytes(capacity_bytes)
        what = f"an allocation of {requested} cannot succeed on {capacity} of memory"
    elif "Storage size calculation overflowed" in text:
        what = "an allocation is larger than any memory"
    else:
        return None
    remedy = "make the model, the sequence or the batch smaller, or use more ranks; a retry would fail alike"
    return UserError(what=what, where="spec.model", remedy=remedy)


def _capacity_bytes(error: BaseException) -> int:
    """Total memory of the device or host on which the allocation failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _report_and_exit(status: StatusFile, error: BaseException) -> None:
    """Report the error and exit, without any clean-up that could wait for a peer."""
    with contextlib.suppress(Exception):  # CUDA may report an earlier failure at any call
        error = impossible_allocation(error, _capacity_bytes(error)) or error
    expected = isinstance(error, PenstockError)
    print(str(error) if expected else traceback.format_exc(), file=sys.stderr, flush=True)  # noqa: T201
    message = str(error) if expected else f"{type(error).__name__}: {error}"
    status.fail(message, time.monotonic_ns(), refused=isinstance(error, UserError))
    os._exit(2 if isinstance(error, UserError) else 1)
