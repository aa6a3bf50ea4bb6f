"""Trial of ranks that start like those of training: on the given device they run a kernel and an all-reduce."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.agent.launch import LaunchSpec, launch
from penstock.core.errors import RunError
from penstock.core.job import Device

MODULE = "penstock.trainer.worker_trial"
MOST_RANKS = 2
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Description of the ranks' work, and its duration including their start."""

    done: str
    seconds: float


def try_ranks(device: Device, num_ranks: int, patience_seconds: float = PATIENCE_SECONDS) -> Trial:
    """Start ``num_ranks`` ranks on ``device`` and wait for them; raises `RunError` with a rank's own message."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as folder:
        root = Path(folder)
        ranks = launch(
            LaunchSpec(
                module=MODULE,
                arguments=(folder, device.value),
                device=device,
                preloaded=MODULE,
                num_ranks=num_ranks,
                threads_per_rank=1,
                log_folder=root / "logs",
                status_folder=root,
            )
        )
        outcome = ranks.wait(patience_seconds)
        if outcome is None:
            ranks.kill()
            ranks.wait()
            raise RunError(f"{num_ranks} ranks on {device.value} did not end within {patience_seconds:.0f} s")
        if outcome.failure is not None:
            raise RunError(outcome.failure.message)
        result = json.loads((root / "trial.json").read_text())
    ranks_text = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    done = f"{ranks_text} on {result['device']} ran {result['kernel']} and a sum by {result['backend']}"
    return Trial(done=done, seconds=time.monotonic() - begin)
