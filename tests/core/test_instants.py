"""Instants of manifests against Python's own calendar."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.instants import format_instant, parse_instant


@given(st.integers(0, 4_000_000_000_000))
def test_round_trip_to_the_millisecond(milliseconds: int) -> None:
    text = format_instant(milliseconds / 1000)
    assert text is not None
    assert dt.datetime.fromisoformat(text).timestamp() == pytest.approx(milliseconds / 1000, abs=1e-6)
    assert parse_instant(text, "at") == pytest.approx(milliseconds / 1000, abs=1e-6)


def test_timestamps_of_kubernetes_are_parsed() -> None:
    assert parse_instant("1970-01-01T00:01:00Z", "at") == 60.0
    assert parse_instant("1970-01-01T01:01:00.5+01:00", "at") == 60.5


def test_none_stays_none() -> None:
    assert format_instant(None) is None
    assert parse_instant(None, "at") is None


@pytest.mark.parametrize(
    "value", ["yesterday", 12, "2026-13-01T00:00:00Z", "2026-01-01T00:00:00", "0001-01-01T00:00:00+14:00"]
)
def test_an_invalid_instant_is_refused_with_its_field(value: object) -> None:
    with pytest.raises(UserError) as caught:
        parse_instant(value, "status.startedAt")
    assert caught.value.where == "status.startedAt"
