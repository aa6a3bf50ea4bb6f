"""Round numbers are round, cover their span, and are never too many; times keep one unit."""

from __future__ import annotations

import datetime as dt
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.view.axis import large, round_step, round_ticks, signed, time_unit, utc

SPANS = st.floats(1e-9, 1e12, allow_nan=False)


@given(SPANS, st.integers(1, 40))
def test_a_step_is_one_two_or_five_times_a_power_of_ten(span: float, most: int) -> None:
    step = round_step(span, most)
    mantissa = step / 10.0 ** math.floor(math.log10(step) + 1e-9)
    assert round(mantissa, 6) in (1, 2, 5, 10)


@given(SPANS, st.integers(1, 40))
def test_ticks_are_few_rise_from_zero_and_end_inside(span: float, most: int) -> None:
    ticks = round_ticks(span, most)
    assert ticks[0] == 0.0
    assert len(ticks) <= most + 1
    assert list(ticks) == sorted(set(ticks))
    assert ticks[-1] <= span * (1 + 1e-9)
    assert span - ticks[-1] <= round_step(span, most) * (1 + 1e-9)


@given(SPANS, st.integers(2, 40))
def test_no_finer_round_step_would_do(span: float, most: int) -> None:
    step = round_step(span, most)
    finer = next(
        factor
        for factor in (5, 2, 2.5)
        if round(step / factor / 10 ** math.floor(math.log10(step / factor) + 1e-9), 6) in (1, 2, 5)
    )
    assert span / (step / finer) > most * (1 - 1e-9)


def test_an_empty_range_has_the_tick_zero() -> None:
    assert round_ticks(0, 10) == (0.0,)
    assert round_step(-1, 10) == 1.0


@pytest.mark.parametrize(
    ("nanoseconds", "text", "tick"),
    [
        (0, "0 ns", "0"),
        (812, "812 ns", "812"),
        (1_250, "1.25 µs", "1.25"),
        (128_400_000, "128 ms", "128.4"),
        (9_870_000, "9.87 ms", "9.87"),
        (2_270_000_000, "2.27 s", "2.27"),
        (71_000_000_000, "71.0 s", "71"),
    ],
)
def test_times_have_three_digits_in_their_unit(nanoseconds: int, text: str, tick: str) -> None:
    unit = time_unit(nanoseconds)
    assert unit.text(nanoseconds) == text
    assert unit.tick(nanoseconds) == tick
    assert unit.text(nanoseconds, unit=False) == text.split()[0]


def test_one_unit_serves_smaller_times_of_the_same_picture() -> None:
    unit = time_unit(2_000_000_000)
    assert unit.text(1_500_000) == "0.002 s"
    assert unit.text(0) == "0 s"


def test_signed_shares_have_a_true_minus() -> None:
    assert [signed(share) for share in (0.0314, -0.004, 0.0)] == ["+3.1%", "−0.4%", "+0.0%"]


@given(st.floats(-6e10, 2.5e11))
def test_dates_equal_the_library_s(seconds: float) -> None:
    expected = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=math.floor(seconds))
    assert utc(seconds) == f"{expected.year:04}-{expected:%m-%d %H:%M} UTC"


def test_large_counts_are_in_words() -> None:
    assert [large(n) for n in (98_304, 7_980_000, 175_181_291_520)] == ["98,304", "8.0 million", "175.2 billion"]
