"""Extreme jobs within the limits are planned or refused: no traceback, no overflow, no exhausted memory."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.extremes import Change, maxima
from tests.support.repository import ROOT

NUM_PAIRS = 24
FAST: tuple[Change, ...] = (
    *((f"cluster.device.{name}", 1e30) for name in ("peakFlops", "memoryBandwidth")),
    *((f"cluster.{name}.bytesPerSecond", 1e30) for name in ("intraNode", "interNode")),
    ("cluster.device.memoryBytes", 10**18),
    ("job.spec.resources.memoryPerRank", 10**18),
)
BATCH, LENGTH = ("job.spec.training.globalBatch", 2**30), ("job.spec.data.sequenceLength", 2**24)
ONE = ("job.spec.parallelism.microBatch", 1)
MANY = ("job.spec.parallelism.microBatch", 2**30)


def outcomes(cases: Sequence[Sequence[Change]], most_seconds: float) -> list[dict[str, Any]]:
    command = (sys.executable, "-m", "tests.support.extremes", str(most_seconds))
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_good(cases: Sequence[Sequence[Change]], most_seconds: float = 4) -> list[dict[str, Any]]:
    """Each planned with no negative part, refused with a remedy, or cut off at its time; not all are cut off."""
    results = outcomes(cases, most_seconds)
    assert len(results) == len(cases)
    for changes, result in zip(cases, results, strict=True):
        place = ", ".join(f"{path}={str(value)[:30]}" for path, value in changes)
        assert "traceback" not in result, (place, result)
        if "what" in result:
            assert "\n  remedy: " in result["what"], (place, result)
            for inner in ("int64", "C long", "Unable to allocate", "negative", "array", "NaN"):
                assert inner not in result["what"], (place, result)
        elif "step" in result:
            assert result["step"] > 0 <= result["least"], (place, result)
        else:
            assert result["late"], (place, result)
    assert not all("late" in result for result in results), "none was planned or refused: nothing was tried"
    return results


def test_every_number_at_its_maximum() -> None:
    cases = [[change] for change in maxima()]
    assert len(cases) > 60
    results = require_good(cases)
    for part in ("step", "what"):
        assert any(part in result for result in results), "some are planned, and some refused"


def test_pairs_of_maxima() -> None:
    pairs = list(itertools.combinations(maxima(), 2))
    require_good(random.Random(5).sample(pairs, NUM_PAIRS))


def test_products_of_numbers_that_are_allowed() -> None:
    require_good(
        [
            [*FAST, LENGTH, BATCH, MANY],
            [*FAST, LENGTH, BATCH, MANY, ("job.spec.model.vocab", 2**24), ("job.spec.model.hidden", 2**18)],
            [*FAST, ("job.spec.model.layers", 2**14), ("job.spec.model.ffnHidden", 2**24)],
            [*FAST, ("cluster.device.constantBytes", 10**18)],
            [("cluster.device.peakFlops", 3e4), BATCH],
            *(
                [("cluster.device.actionOverheadSeconds", 900), BATCH, ONE, ("job.spec.parallelism.schedule", name)]
                for name in ("gpipe", "1f1b", "zb-h1", "zb", "zbv")
            ),
            [("cluster.intraNode.latencySeconds", 900), BATCH, ONE],
        ]
    )


@pytest.mark.parametrize(
    "changes",
    [
        [("cluster.numNodes", 65_536)],
        [("cluster.device.actionOverheadSeconds", 0)],
        [
            BATCH,
            ("job.spec.parallelism.schedule", {"generator": "csv", "version": 1, "text": "0F0.0,0B0.0\n"}),
            ("job.spec.parallelism.pp", 2),
        ],
    ],
)
def test_what_needs_no_more_for_being_large_is_planned(changes: list[Change]) -> None:
    """65,536 described nodes took 64 GiB, no overhead was a negative time, and a batch was counted one by one."""
    (result,) = require_good([changes], 120)
    assert "step" in result or result["what"].startswith("spec.parallelism.schedule: the schedule is for"), result
