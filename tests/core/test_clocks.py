"""Clocks: ages that no correction of the wall clock reaches, and a time of day without jumps."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clocks import Ages, Reading
from penstock.core.host.clocks import SLEW, SlewedClock, boot_id, read_clocks

NOW = Reading(wall=1e9, boot_id="boot", boottime=500.0)


# Ages


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 1e4)), min_size=1))
def test_an_age_counts_from_the_last_change(changes: list[tuple[int, float]]) -> None:
    ages, now, changed_at = Ages(), 500.0, 500.0
    before: int | None = None
    for value, passed in changes:
        now += passed
        changed_at = now if value != before else changed_at
        before = value
        assert ages.seconds(("job", "step"), value, now) == now - changed_at


def test_ages_of_other_jobs_are_forgotten() -> None:
    ages = Ages()
    for job in ("kept", "gone"):
        ages.seconds((job, "step"), 1, 0.0)
    ages.forget_all_but({"kept"})
    assert [ages.seconds((job, "step"), 1, 7.0) for job in ("kept", "gone")] == [7.0, 0.0]


@pytest.mark.parametrize(
    ("stored", "age"),
    [
        (Reading(wall=0.0, boot_id="boot", boottime=490.0), 10.0),
        (Reading(wall=2e9, boot_id="boot", boottime=490.0), 10.0),
        (Reading(wall=NOW.wall - 3.0, boot_id="before", boottime=490.0), 3.0),
        (Reading(wall=NOW.wall - 3.0), 3.0),
        (Reading(wall=NOW.wall + 3.0), 0.0),
    ],
    ids=["same boot", "same boot, wall set back", "another boot", "wall only", "in the future"],
)
def test_an_age_is_by_the_clock_of_the_boot_while_that_lasts(stored: Reading, age: float) -> None:
    assert stored.age(NOW) == age


def test_the_machine_s_clocks_are_read() -> None:
    before, reading, after = time.time(), read_clocks(), time.time()
    assert before <= reading.wall <= after
    assert reading.boot_id == boot_id()
    assert reading.boottime == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=5.0)


# A slewed clock


class Machine:
    """A wall clock that is set now and then, on a machine that runs on."""

    def __init__(self) -> None:
        self.boottime, self.ahead = 500.0, 1e9
        self.clock = SlewedClock(lambda: self.boottime + self.ahead, lambda: self.boottime)

    def after(self, seconds: float) -> float:
        self.boottime += seconds
        return self.clock()


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, -1.0, 3600.0, -3600.0, 1e8]), st.floats(0.0, 1e4)), max_size=20))
def test_a_slewed_clock_is_never_off_by_more_than_its_slew(changes: list[tuple[float, float]]) -> None:
    machine = Machine()
    for jump, passed in changes:
        machine.ahead += jump
        before = machine.clock()
        elapsed = machine.after(passed) - before
        assert elapsed == pytest.approx(passed, abs=SLEW * passed + 1e-5)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("polls", [1, 1000])
def test_a_slewed_clock_comes_to_the_wall_clock_however_often_it_is_read(jump: float, polls: int) -> None:
    machine = Machine()
    machine.ahead += jump
    assert machine.clock() - machine.boottime == 1e9
    seconds = abs(jump) / SLEW
    halfway = [machine.after(seconds / 2 / polls) for _ in range(polls)][-1]
    assert halfway - machine.boottime == pytest.approx(1e9 + jump / 2, abs=1e-2)
    for _ in range(polls):
        machine.after(1.01 * seconds / 2 / polls)
    assert machine.clock() == pytest.approx(machine.boottime + machine.ahead, abs=1e-6)


def test_a_slewed_clock_is_the_time_of_day_when_nothing_is_set() -> None:
    machine = Machine()
    assert [machine.after(seconds) for seconds in (0.0, 1.0, 60.0)] == [1e9 + 500.0, 1e9 + 501.0, 1e9 + 561.0]
