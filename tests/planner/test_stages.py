"""The stage partition against every partition there is, and its refusals."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.stages import (
    MemoryShortage,
    StagePartition,
    StagesProblem,
    balanced_bounds,
    best_partitions,
    evened_bounds,
)
from tests.support import brute_force

Times: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]

INSTANCES_PER_KIND = 400


def _ints(rng: np.random.Generator, low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(low, high, count).tolist())


def _few_values(rng: np.random.Generator, num_units: int) -> Times:
    """Ties and units that cost nothing."""
    return _ints(rng, 0, 3, num_units)


def _any_values(rng: np.random.Generator, num_units: int) -> Times:
    return _ints(rng, 0, 10**6, num_units)


def _vectors(rng: np.random.Generator, num_units: int) -> Times:
    return tuple(_ints(rng, 0, 50, 3) for _ in range(num_units))


def _like_a_model(rng: np.random.Generator, num_units: int) -> Times:
    """A light embedding, equal attention and mlp units, a heavy head."""
    attention, mlp = int(rng.integers(10, 20)), int(rng.integers(10, 20))
    blocks = tuple(attention if index % 2 else mlp for index in range(num_units))
    return (1, *blocks[1:-1], 37)[:num_units]


KINDS: dict[str, Callable[[np.random.Generator, int], Times]] = {
    "few values": _few_values,
    "any values": _any_values,
    "vectors": _vectors,
    "like a model": _like_a_model,
}


def _random_problem(rng: np.random.Generator, times: Callable[[np.random.Generator, int], Times]) -> StagesProblem:
    """Memory limits differ by stage; with about even odds they bite, and sometimes nothing fits."""
    num_units = int(rng.integers(1, 9))
    num_stages = int(rng.integers(1, num_units + 1))
    uneven = rng.random(2) < 0.5
    resident_bytes, in_flight_bytes = _ints(rng, 0, 100, num_units), _ints(rng, 0, 30, num_units)
    in_flight = tuple(float(num_stages - stage) + rng.integers(0, 4) / 4 for stage in range(num_stages))
    typical = (sum(resident_bytes) + sum(in_flight_bytes) * in_flight[0]) / num_stages
    limit_bytes = tuple(int(typical * factor) for factor in rng.uniform(0.6, 3.0, num_stages))
    return StagesProblem(
        unit_ns=times(rng, num_units),
        resident_bytes=resident_bytes,
        in_flight_bytes=in_flight_bytes,
        in_flight=in_flight,
        limit_bytes=limit_bytes,
        slowdown=tuple((rng.integers(4, 9, num_stages) / 4).tolist()) if uneven[0] else None,
        fixed_ns=_ints(rng, 0, 5, num_stages) if uneven[1] else None,
    )


def _roomy(unit_ns: Times, num_stages: int) -> StagesProblem:
    """A problem in which memory plays no part."""
    nothing = (0,) * len(unit_ns)
    return StagesProblem(
        unit_ns=unit_ns,
        resident_bytes=nothing,
        in_flight_bytes=nothing,
        in_flight=(1.0,) * num_stages,
        limit_bytes=(0,) * num_stages,
    )


def _best(problem: StagesProblem) -> StagePartition:
    found = best_partitions(problem)
    assert isinstance(found, tuple)
    return found[0]


def _squares(partition: StagePartition) -> int:
    return sum(time * time for time in partition.stage_ns)


@pytest.mark.parametrize("times", KINDS.values(), ids=KINDS)
def test_equals_brute_force_down_to_the_last_tie(times: Callable[[np.random.Generator, int], Times]) -> None:
    rng = np.random.default_rng(6)
    feasible = short = 0
    for _ in range(INSTANCES_PER_KIND):
        problem = _random_problem(rng, times)
        count = int(rng.integers(1, 6))
        found = best_partitions(problem, count=count)
        expected = brute_force.partitions_by_force(problem)
        if isinstance(found, MemoryShortage):
            short += 1
            assert not expected
            assert (found.bounds, found.missing_bytes) == brute_force.shortage_by_force(problem)
            continue
        feasible += 1
        assert [(each.bottleneck_ns, _squares(each), each.bounds) for each in found] == expected[:count]
    assert min(feasible, short) > INSTANCES_PER_KIND // 10


def test_reports_the_times_and_bytes_of_each_stage() -> None:
    problem = StagesProblem(
        unit_ns=(10, 20, 30),
        resident_bytes=(100, 200, 300),
        in_flight_bytes=(3, 5, 7),
        in_flight=(2.5, 1.0),
        limit_bytes=(1000, 1000),
        slowdown=(1.5, 1.0),
        fixed_ns=(4, 6),
    )
    assert best_partitions(problem, count=9) == (
        StagePartition(bounds=(0, 2, 3), stage_ns=(49, 36), stage_bytes=(320, 307)),
        StagePartition(bounds=(0, 1, 3), stage_ns=(19, 56), stage_bytes=(108, 512)),
    )


def test_a_slow_device_gets_less() -> None:
    problem = dataclasses.replace(_roomy((10,) * 12, 3), slowdown=(1.0, 4.0, 1.0))
    assert _best(problem).bounds == (0, 5, 6, 12)


def test_the_head_is_heavy_so_the_last_stage_has_fewer_blocks() -> None:
    assert _best(_roomy((2, *(10,) * 16, 40), 4)).bounds == (0, 6, 11, 16, 18)


def test_early_stages_are_the_shorter_ones_among_equals() -> None:
    assert _best(_roomy((10,) * 10, 4)).bounds == (0, 2, 4, 7, 10)


def test_memory_moves_the_cut_and_the_bottleneck_with_it() -> None:
    problem = dataclasses.replace(
        _roomy((10,) * 8, 2), in_flight_bytes=(100,) * 8, in_flight=(2.0, 1.0), limit_bytes=(600, 600)
    )
    partition = _best(problem)
    assert (partition.bounds, partition.bottleneck_ns) == ((0, 3, 8), 50)
    assert partition.stage_bytes == (600, 500)


def test_a_vector_is_judged_by_its_largest_entry() -> None:
    assert _best(_roomy(((9, 1), (1, 9), (9, 1), (1, 9)), 2)).stage_ns == (10, 10)
    assert _best(_roomy(((9, 0), (9, 0), (0, 5), (0, 5)), 2)).bounds == (0, 1, 4)


def test_a_bottleneck_that_only_two_stages_together_have_is_not_missed() -> None:
    problem = dataclasses.replace(
        _roomy((2, 3, 2, 1), 3), fixed_ns=(0, 3, 3), resident_bytes=(1, 1, 1, 1), limit_bytes=(4, 1, 3)
    )
    found = best_partitions(problem, count=3)
    assert isinstance(found, tuple)
    assert [partition.stage_ns for partition in found] == [(5, 5, 4), (2, 6, 6)]


def test_the_shortage_names_the_stage_and_the_bytes() -> None:
    problem = dataclasses.replace(_roomy((1, 1, 1, 1), 2), resident_bytes=(10, 10, 10, 50), limit_bytes=(30, 44))
    shortage = best_partitions(problem)
    assert shortage == MemoryShortage(bounds=(0, 3, 4), missing_bytes=(0, 6))
    assert isinstance(shortage, MemoryShortage)
    assert shortage.stage == 1


def test_limits_below_zero_are_a_shortage_not_an_error() -> None:
    """A caller takes the constant of the process off the limit first, and that may be more than the limit."""
    problem = dataclasses.replace(_roomy((1, 1), 2), limit_bytes=(5, -7))
    assert best_partitions(problem) == MemoryShortage(bounds=(0, 1, 2), missing_bytes=(0, 7))


def test_adding_what_is_missing_makes_it_fit() -> None:
    rng = np.random.default_rng(7)
    mended = 0
    for _ in range(300):
        problem = _random_problem(rng, _any_values)
        shortage = best_partitions(problem)
        if isinstance(shortage, MemoryShortage):
            mended += 1
            added = zip(problem.limit_bytes, shortage.missing_bytes, strict=True)
            enough = dataclasses.replace(problem, limit_bytes=tuple(limit + missing for limit, missing in added))
            assert isinstance(best_partitions(enough), tuple)
            less = max(shortage.missing_bytes) - 1
            most = dataclasses.replace(problem, limit_bytes=tuple(limit + less for limit in problem.limit_bytes))
            assert isinstance(best_partitions(most), MemoryShortage)
    assert mended > 30


def _stages_needed(unit_ns: tuple[int, ...], bottleneck_ns: int) -> int:
    """Filling each stage as far as it goes needs the fewest."""
    needed, filled = 1, 0
    for time in unit_ns:
        needed, filled = (needed, filled + time) if filled + time <= bottleneck_ns else (needed + 1, time)
    return needed


@pytest.mark.parametrize("num_stages", [2, 12, 48, 96])
def test_optimal_at_full_size_by_filling_greedily(num_stages: int) -> None:
    rng = np.random.default_rng(num_stages)
    unit_ns = (700_000, *_ints(rng, 2_000_000, 4_000_000, 192), 9_000_000)
    partition = _best(_roomy(unit_ns, num_stages))
    assert max(unit_ns) <= partition.bottleneck_ns
    assert _stages_needed(unit_ns, partition.bottleneck_ns) <= num_stages
    assert _stages_needed(unit_ns, partition.bottleneck_ns - 1) > num_stages or partition.bottleneck_ns == max(unit_ns)


def test_large_times_keep_their_leading_bits_when_squared() -> None:
    """Seconds per stage: squares of nanoseconds would leave 64 bits."""
    second = 10**9
    partition = _best(_roomy((60 * second,) * 190, 95))
    assert partition.bounds == tuple(range(0, 191, 2))
    assert _best(_roomy((3 * second, 4 * second, 2 * second, 9 * second), 3)).bounds == (0, 1, 3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resident_bytes": (1, 1)}, "resident_bytes has 2 entries, not 3"),
        ({"in_flight": (1.0,)}, "in_flight has 1 entries, not 2"),
        ({"slowdown": (1.0, 1.0, 1.0)}, "slowdown has 3 entries, not 2"),
        ({"unit_ns": (1, -1, 1)}, "unit_ns has a negative entry"),
        ({"limit_bytes": (), "in_flight": ()}, "3 units cannot fill 0 stages"),
        ({"limit_bytes": (9,) * 4, "in_flight": (1.0,) * 4}, "3 units cannot fill 4 stages"),
    ],
)
def test_a_problem_that_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_roomy((1, 1, 1), 2), **changes)  # type: ignore[arg-type]


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="count=0"):
        best_partitions(_roomy((1, 1), 1), count=0)


@st.composite
def problems(draw: st.DrawFn) -> StagesProblem:
    num_units = draw(st.integers(1, 30))
    num_stages = draw(st.integers(1, num_units))

    def numbers(count: int, most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(least, most), min_size=count, max_size=count)))

    return StagesProblem(
        unit_ns=numbers(num_units, 10**9),
        resident_bytes=numbers(num_units, 10**9),
        in_flight_bytes=numbers(num_units, 10**8),
        in_flight=numbers(num_stages, 8),
        limit_bytes=numbers(num_stages, 10**11, least=10**9),
        fixed_ns=numbers(num_stages, 10**6),
    )


@settings(max_examples=80, derandomize=True)
@given(problem=problems(), count=st.integers(1, 4))
def test_what_comes_back_is_a_partition_that_keeps_its_word(problem: StagesProblem, count: int) -> None:
    found = best_partitions(problem, count=count)
    for partition in (found,) if isinstance(found, MemoryShortage) else found:
        assert partition.bounds[0] == 0
        assert partition.bounds[-1] == problem.num_units
        assert len(partition.bounds) == problem.num_stages + 1
        assert list(partition.bounds) == sorted(set(partition.bounds))
    if isinstance(found, MemoryShortage):
        assert max(found.missing_bytes) > 0
        return
    bottlenecks = [partition.bottleneck_ns for partition in found]
    assert bottlenecks == sorted(set(bottlenecks))
    assert 1 <= len(found) <= count
    for partition in found:
        for need, limit in zip(partition.stage_bytes, problem.limit_bytes, strict=True):
            assert need <= limit


@settings(max_examples=60, derandomize=True)
@given(problem=problems(), extra_bytes=st.integers(0, 10**9))
def test_more_memory_never_hurts(problem: StagesProblem, extra_bytes: int) -> None:
    roomier = dataclasses.replace(problem, limit_bytes=tuple(limit + extra_bytes for limit in problem.limit_bytes))
    before, after = best_partitions(problem), best_partitions(roomier)
    if isinstance(before, MemoryShortage):
        if isinstance(after, MemoryShortage):
            assert max(after.missing_bytes) == max(before.missing_bytes) - extra_bytes
        return
    assert isinstance(after, tuple)
    assert after[0].bottleneck_ns <= before[0].bottleneck_ns


@given(
    st.lists(st.integers(0, 50), min_size=8, max_size=20),
    st.sampled_from([(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 3, 3, 2, 1, 0), (0, 1, 2, 2, 1, 0)]),
)
def test_ranks_with_several_stages_are_never_busier_when_evened(unit_ns: list[int], owners: tuple[int, ...]) -> None:
    before = balanced_bounds(unit_ns, len(owners))
    after = evened_bounds(unit_ns, before, owners)
    assert (after[0], after[-1]) == (0, len(unit_ns))
    assert all(a < b for a, b in itertools.pairwise(after))
    assert busiest(unit_ns, after, owners) <= busiest(unit_ns, before, owners)


def test_the_rank_of_a_long_head_gets_less_of_the_rest() -> None:
    """In a V of four ranks the first one has the head, which takes as long as ten units of 50."""
    unit_ns, owners = [10] * 49 + [100], (0, 1, 2, 3, 3, 2, 1, 0)
    before = balanced_bounds(unit_ns, len(owners))
    assert busiest(unit_ns, before, owners) >= 170
    assert busiest(unit_ns, evened_bounds(unit_ns, before, owners), owners) == 150


def busiest(unit_ns: list[int], bounds: tuple[int, ...], owners: tuple[int, ...]) -> int:
    loads = dict.fromkeys(owners, 0)
    for owner, (first, stop) in zip(owners, itertools.pairwise(bounds), strict=True):
        loads[owner] += sum(unit_ns[first:stop])
    return max(loads.values())


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=14), st.data())
def test_stages_balanced_by_time_are_the_best_without_limits(unit_ns: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(unit_ns)))
    assert balanced_bounds(unit_ns, num_stages) == _best(_roomy(tuple(unit_ns), num_stages)).bounds
