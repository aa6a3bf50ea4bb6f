"""Measurements have a text form that outlives what is added to it."""

from __future__ import annotations

import dataclasses

from penstock.core.profile import UnitRecord

BEFORE = {
    "unit": "mlp",
    "kind": "F",
    "batch": 1,
    "length": 64,
    "prefix": 0,
    "aloneSeconds": 0.5,
    "togetherSeconds": 0.75,
    "spread": 0.1,
    "samples": 6,
}
"""A record as it was written before the spread of runs together was kept."""


def test_an_older_record_is_read_and_written_as_it_was() -> None:
    """So an older profile keeps its digest, too."""
    record = UnitRecord.from_manifest(BEFORE)
    assert record.together_spread is None
    assert record.to_manifest() == BEFORE


def test_both_spreads_survive() -> None:
    record = dataclasses.replace(UnitRecord.from_manifest(BEFORE), together_spread=0.2)
    assert UnitRecord.from_manifest(record.to_manifest()) == record
    assert (record.spread, record.together_spread) == (0.1, 0.2)
