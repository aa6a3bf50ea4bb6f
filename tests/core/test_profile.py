"""Manifests of profiles stay readable when fields are added."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock.core.errors import UserError
from penstock.core.profile import Profile, UnitRecord
from tests.support.planning import profile, units_at

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
    """An older profile keeps its digest."""
    record = UnitRecord.from_manifest(BEFORE)
    assert record.together_spread is None
    assert record.to_manifest() == BEFORE


def test_both_spreads_round_trip() -> None:
    record = dataclasses.replace(UnitRecord.from_manifest(BEFORE), together_spread=0.2)
    assert UnitRecord.from_manifest(record.to_manifest()) == record
    assert (record.spread, record.together_spread) == (0.1, 0.2)


def test_a_profile_of_one_device_per_rank_has_no_shards() -> None:
    """A profile that was measured before this field existed keeps its digest."""
    measured = profile()
    assert not {"sequenceParallel", "onlyTp"} & measured.to_manifest().keys()
    assert measured.tp_degrees == (1,)
    shards = dataclasses.replace(measured, units=(*measured.units, *units_at(2)), sequence_parallel=False, only_tp=2)
    assert shards.tp_degrees == (1, 2)
    assert Profile.from_manifest(shards.to_manifest()) == shards


def test_a_profile_of_one_machine_names_no_hosts() -> None:
    """A profile that was measured before this field existed keeps its digest."""
    assert "hosts" not in profile().to_manifest()


def test_hosts_round_trip_and_are_as_many_as_ranks() -> None:
    measured = profile(num_ranks=3, hosts=(0, 1, 1))
    assert Profile.from_manifest(measured.to_manifest()) == measured
    with pytest.raises(UserError, match="hosts: names the machines of 2 ranks of 3"):
        profile(num_ranks=3, hosts=(0, 1))


def test_every_rank_has_a_slowness_or_none() -> None:
    assert "slowness" not in profile().to_manifest()
    measured = profile(num_ranks=3, slowness=(1.0, 2.0, 1.0))
    assert Profile.from_manifest(measured.to_manifest()) == measured
    for wrong in ((1.0, 2.0), (1.0, 0.0, 1.0), (1.0, math.nan, 1.0), (1.0, math.inf, 1.0)):
        with pytest.raises(UserError, match="slowness: does not have one positive number for each of 3 ranks"):
            profile(num_ranks=3, slowness=wrong)


def test_a_quiet_machine_gives_no_warning() -> None:
    assert profile(load=1.4).warnings == ()


def test_a_busy_machine_and_links_that_were_not_fitted_give_warnings() -> None:
    one, other = profile().links
    busy, links = profile(load=3.91, links=(one, dataclasses.replace(other, bounded=True, error=0.8))).warnings
    assert "busy" in busy
    assert "load average 3.9 on 2 cores" in busy
    assert "1 of 2 links" in links
    assert "80%" in links
    assert all("penstock profile JOB" in warning for warning in (busy, links))


@pytest.mark.parametrize(
    ("latency", "speed", "is_physical"),
    [(1e-5, 1e9, True), (0.0, 1e12, True), (1e-5, 1e15, False), (-1e-6, 1e9, False), (1e-5, 0.0, False)],
)
def test_a_link_is_physical_if_its_values_are_possible(latency: float, speed: float, is_physical: bool) -> None:
    link = dataclasses.replace(profile().links[0], latency_seconds=latency, bytes_per_second=speed)
    assert link.is_physical is is_physical
