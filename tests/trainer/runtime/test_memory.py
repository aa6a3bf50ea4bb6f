"""Peak memory of the process, and its reset."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from penstock.trainer.memory import held_bytes, peak_bytes, reset_peak

CPU = torch.device("cpu")
MIB = 2**20
LARGE = 256 * MIB


def _measure(connection: Connection[Any, Any]) -> None:
    """Run in a separate process, since the high-water mark is that of the whole process."""
    before = held_bytes(CPU)
    large = torch.ones(LARGE, dtype=torch.uint8)
    held = peak_bytes(CPU)
    del large
    after = peak_bytes(CPU)
    reset_peak(CPU)
    connection.send((before, held, after, peak_bytes(CPU)))


def test_the_peak_outlasts_its_cause_until_it_is_reset() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_measure, args=(there,))
    process.start()
    before, held, after, reset = here.recv()
    process.join(60)
    assert held >= before + LARGE - 8 * MIB
    assert after >= held - 8 * MIB
    assert reset <= before + LARGE // 4
