"""One rank of a trial: compares attention on the rank's device with a plain fp64 one, and sums over all ranks.

``python -m penstock.trainer.worker_trial FOLDER DEVICE``, started like the ranks of training. Rank 0 writes device,
kernel and backend to ``FOLDER/trial.json``.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.errors import RunError
from penstock.trainer.comm import ProcessGroups
from penstock.trainer.units.backends import Operands, build_backend
from penstock.trainer.worker import Worker, run_worker

TOKENS, HEADS, HEAD_DIM = 128, 4, 64
SUMMED_BYTES = 2**20
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest absolute error of an element of attention's output. The elements are about one at most."""


def try_out(worker: Worker, folder: Path) -> None:
    """Run the kernel and the sum. Raises `RunError` if a result is wrong."""
    kernel = _try_kernel(worker.device)
    _try_sum(worker.groups, worker.rank, worker.num_ranks)
    name = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu"
    if worker.rank == 0:
        backend = "nccl" if worker.device.type == "cuda" else "gloo"
        (folder / "trial.json").write_text(json.dumps({"device": name, "kernel": kernel, "backend": backend}))


def _try_kernel(device: torch.device) -> str:
    """Run attention as the trainer does and check its result. Returns the kernel's name, sizes and type."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=generator).to(dtype) for _ in range(3))
    out, lse = torch.empty_like(q, device=device), torch.empty(1, TOKENS, HEADS, device=device)
    backend = build_backend(device, dtype, HEAD_DIM, TOKENS)
    backend.forward(Operands(q.to(device), k.to(device), v.to(device), out, lse))
    error = float((out.cpu().double() - _plain_attention(q, k, v)).abs().max())
    name = f"{type(backend).__name__} attention over {TOKENS} tokens in {str(dtype).removeprefix('torch.')}"
    if not error <= MOST_ERROR[dtype]:
        raise RunError(f"{name} is off by {error:.2g}: the device, its driver or this PyTorch computes wrongly")
    return name


def _plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bnad,bsad->bans", q.double(), k.double()) / math.sqrt(HEAD_DIM)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return torch.einsum("bans,bsad->bnad", scores.masked_fill(hidden, -math.inf).softmax(-1), v.double())


def _try_sum(groups: ProcessGroups, rank: int, num_ranks: int) -> None:
    tensor = torch.full((SUMMED_BYTES // 4,), float(rank + 1), device=groups.device)
    dist.all_reduce(tensor)
    expected = num_ranks * (num_ranks + 1) / 2
    if not bool((tensor == expected).all()):
        raise RunError(f"a sum over {num_ranks} ranks gave {float(tensor[0])} where {expected} is right")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with torch.no_grad():
        sys.exit(run_worker(lambda worker: try_out(worker, root), device=sys.argv[2], status_folder=root))
