"""The clock against a dictionary: the next time, who comes then, and what never comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.clock import never, new_clock, next_cell, next_time, set_time, time_of

changes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10**15)), max_size=60)


@given(st.integers(1, 41), changes, st.data())
def test_it_is_a_minimum_over_cells(num_cells: int, steps: list[tuple[int, int]], data: st.DataObject) -> None:
    first = np.array(data.draw(st.lists(st.booleans(), min_size=num_cells, max_size=num_cells)))
    clock = new_clock(num_cells, first)
    times = {cell: 0 if first[cell] else never(clock) for cell in range(num_cells)}
    for cell, time in steps:
        assert next_time(clock) == min(times.values())
        if min(times.values()) < never(clock):
            assert next_cell(clock) == min(times, key=lambda each: (times[each], each))
        if cell < num_cells:
            set_time(clock, cell, time)
            times[cell] = time
        assert all(time_of(clock, each) == times[each] for each in times)


@pytest.mark.parametrize("num_cells", [1, 2, 3, 64, 65, 4096])
def test_never_is_after_every_time_that_fits(num_cells: int) -> None:
    clock = new_clock(num_cells, np.zeros(num_cells, dtype=bool))
    assert next_time(clock) == never(clock)
    thirteen_days = 13 * 24 * 3600 * 10**9
    assert thirteen_days < never(clock)
    set_time(clock, num_cells - 1, thirteen_days)
    assert (next_time(clock), next_cell(clock)) == (thirteen_days, num_cells - 1)
    set_time(clock, num_cells - 1, never(clock))
    assert next_time(clock) == never(clock)


def test_of_equal_times_the_lowest_cell_comes_first() -> None:
    clock = new_clock(8, np.ones(8, dtype=bool))
    came = []
    while next_time(clock) < never(clock):
        came.append(next_cell(clock))
        set_time(clock, came[-1], never(clock))
    assert came == list(range(8))
