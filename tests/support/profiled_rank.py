"""A rank that measures and leaves its peak: ``python -m tests.support.profiled_rank FOLDER``.

FOLDER holds ``job.json``. Every rank leaves the most bytes that it held at any moment in ``peak-<rank>``, and the first
one what was measured in ``profile.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from penstock.core.job import PipelineJob
from penstock.trainer import memory
from penstock.trainer.profiling import units
from penstock.trainer.profiling.profile import measure
from penstock.trainer.worker import Worker, run_worker


def profile(worker: Worker, folder: Path) -> None:
    """Measure the job's model."""
    peaks: list[int] = []

    def reset_peak(device: torch.device) -> None:
        peaks.append(memory.peak_bytes(device))
        memory.reset_peak(device)

    setattr(units, "reset_peak", reset_peak)  # noqa: B010, the kernel keeps the mark since the last reset alone
    spec = PipelineJob.from_manifest(json.loads((folder / "job.json").read_text())).spec
    measured = measure(spec, worker, 0.0)
    peaks.append(memory.peak_bytes(worker.device))
    (folder / f"peak-{worker.rank}").write_text(str(max(peaks)))
    if measured is not None:
        (folder / "profile.json").write_text(json.dumps(measured.to_manifest()))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with torch.no_grad():
        sys.exit(run_worker(lambda worker: profile(worker, root), device="cpu", status_folder=root))
