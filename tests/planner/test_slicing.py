"""Both slicing programmes against oracles, on tables that no hardware would be so cruel to produce."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.slicing import (
    BalancedSlicings,
    IntArray,
    Slicing,
    SlicingProblem,
    rank_one_f_one_b,
    tabulate,
)
from penstock.planner.slicing_flush import best_flush_slicing, least_total_ns
from tests.support import brute_force

Table: TypeAlias = Callable[[np.random.Generator, int], IntArray]

INSTANCES_PER_TABLE = 250


def balanced_slicings(problem: SlicingProblem) -> tuple[Slicing, ...]:
    return tuple(BalancedSlicings(problem).values())


def _few_values(rng: np.random.Generator, size: int) -> IntArray:
    """Ties everywhere."""
    return rng.integers(0, 4, (size, size))


def _near_ties(rng: np.random.Generator, size: int) -> IntArray:
    """Many different slice times, and among their sums many equal ones."""
    length, _ = np.indices((size, size))
    return length**2 + rng.integers(1, 4, (size, size))


def _any_values(rng: np.random.Generator, size: int) -> IntArray:
    return rng.integers(0, 10**9, (size, size))


def _cheaper_when_longer(rng: np.random.Generator, size: int) -> IntArray:
    """Falls with the length and with the prefix, the reverse of what a model does."""
    length, prefix = np.indices((size, size))
    return 1000 * (2 * size - length) - 37 * prefix * length + 37 * size**2 + rng.integers(0, 50, (size, size))


def _spikes(rng: np.random.Generator, size: int) -> IntArray:
    """Costs of a model, with lone slow entries as a bad kernel choice makes them."""
    slower = np.where(rng.random((size, size)) < 0.3, rng.integers(2, 40, (size, size)), 1)
    return _like_a_model(rng, size) * slower.astype(np.int64)


def _like_a_model(rng: np.random.Generator, size: int) -> IntArray:
    length, prefix = np.indices((size, size))
    fixed, slope, attention = rng.integers(0, 500), rng.integers(1, 100), rng.integers(0, 10)
    return np.asarray(fixed + slope * length + attention * length * (2 * prefix + length), dtype=np.int64)


TABLES: dict[str, Table] = {
    "few values": _few_values,
    "near ties": _near_ties,
    "any values": _any_values,
    "cheaper when longer": _cheaper_when_longer,
    "spikes": _spikes,
    "like a model": _like_a_model,
}


def _random_problem(rng: np.random.Generator, table: Table, most_quanta: int = 8) -> SlicingProblem:
    num_quanta, quantum = int(rng.integers(1, most_quanta + 1)), int(rng.integers(1, 5))
    sequence_length = num_quanta * quantum + int(rng.integers(0, quantum))
    limited = rng.random(3) < 0.4
    return SlicingProblem(
        cost_ns=table(rng, num_quanta + 1),
        sequence_length=sequence_length,
        quantum=quantum,
        min_slice_length=int(rng.integers(1, 2 * quantum + 1)) if limited[0] else 1,
        max_slice_length=int(rng.integers(1, sequence_length + 1)) if limited[1] else None,
        max_slices=int(rng.integers(1, num_quanta + 1)) if limited[2] else None,
    )


def _model_problem(
    *, fixed_ns: int, token_ns: int, pair_ns: int, sequence_length: int = 2048, quantum: int = 8
) -> SlicingProblem:
    def cost_of(lengths: IntArray, prefixes: IntArray) -> IntArray:
        pairs: IntArray = lengths * prefixes + lengths * lengths // 2
        return fixed_ns + token_ns * lengths + pair_ns * pairs

    cost_ns = tabulate(cost_of, sequence_length=sequence_length, quantum=quantum)
    return SlicingProblem(cost_ns=cost_ns, sequence_length=sequence_length, quantum=quantum)


def _check_valid(problem: SlicingProblem, slicing: Slicing) -> None:
    assert sum(slicing.lengths) == problem.sequence_length
    assert all(length % problem.quantum == 0 for length in slicing.lengths[:-1])
    assert min(slicing.lengths) >= problem.min_slice_length
    assert max(slicing.lengths) <= (problem.max_slice_length or problem.sequence_length)
    assert slicing.num_slices <= (problem.max_slices or problem.sequence_length)
    quanta = tuple(length // problem.quantum for length in slicing.lengths)
    assert slicing.slice_ns == brute_force.slice_times(problem, quanta)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_flush_equals_brute_force(table: Table) -> None:
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(INSTANCES_PER_TABLE):
        problem = _random_problem(rng, table)
        num_microbatches, num_stages = int(rng.integers(1, 5)), int(rng.integers(1, 12))
        expected = brute_force.flush_by_force(problem, num_microbatches, num_stages)
        slicing = best_flush_slicing(problem, num_microbatches=num_microbatches, num_stages=num_stages)
        if slicing is None:
            assert expected is None
            continue
        found += 1
        objective_ns = slicing.flush_ns(num_microbatches=num_microbatches, num_stages=num_stages)
        assert (objective_ns, slicing.lengths) == expected
        if problem.max_slices is None:
            cheapest = best_flush_slicing(problem, num_microbatches=1, num_stages=1)
            assert cheapest is not None
            assert least_total_ns(problem) == cheapest.total_ns
        _check_valid(problem, slicing)
    assert found > INSTANCES_PER_TABLE // 2


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_balanced_equals_brute_force_for_every_number_of_slices(table: Table) -> None:
    rng = np.random.default_rng(2)
    for _ in range(INSTANCES_PER_TABLE):
        problem = _random_problem(rng, table)
        slicings = balanced_slicings(problem)
        found = {slicing.num_slices: (slicing.largest_ns, slicing.lengths) for slicing in slicings}
        assert found == brute_force.balanced_by_force(problem)
        assert [slicing.num_slices for slicing in slicings] == sorted(found)
        for slicing in slicings:
            _check_valid(problem, slicing)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_numbers_of_slices_may_be_asked_for_in_any_order(table: Table) -> None:
    """The table is only filled up to the largest of them."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        problem = _random_problem(rng, table)
        expected = brute_force.balanced_by_force(problem)
        slicings = BalancedSlicings(problem)
        counts = rng.permutation(problem.num_quanta + 3).tolist()
        balanced = {count: slicings.get(count) for count in counts}
        found = {count: (slicing.largest_ns, slicing.lengths) for count, slicing in balanced.items() if slicing}
        assert found == expected
        assert len(slicings) == len(expected)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_flush_equals_trying_every_ceiling_on_longer_sequences(table: Table) -> None:
    """Long enough that several rounds of pruning are needed, which short instances never see."""
    rng = np.random.default_rng(3)
    for _ in range(8):
        problem = _random_problem(rng, table, most_quanta=40)
        problem = SlicingProblem(
            cost_ns=problem.cost_ns,
            sequence_length=problem.sequence_length,
            quantum=problem.quantum,
            max_slice_length=problem.max_slice_length,
        )
        num_microbatches, num_stages = int(rng.integers(1, 5)), int(rng.integers(1, 60))
        slicing = best_flush_slicing(problem, num_microbatches=num_microbatches, num_stages=num_stages)
        expected = brute_force.flush_by_every_ceiling(problem, num_microbatches, num_stages)
        found = slicing and slicing.flush_ns(num_microbatches=num_microbatches, num_stages=num_stages)
        assert found == expected


@pytest.mark.parametrize("eps_ns", [1, 100, 3000, 10**6])
def test_eps_costs_no_more_than_it_may(eps_ns: int) -> None:
    rng = np.random.default_rng(4)
    for table in TABLES.values():
        for _ in range(30):
            problem = _random_problem(rng, table, most_quanta=24)
            exact = best_flush_slicing(problem, num_microbatches=2, num_stages=9)
            rough = best_flush_slicing(problem, num_microbatches=2, num_stages=9, eps_ns=eps_ns)
            if exact is None or rough is None:
                assert exact is rough
                continue
            gap_ns = rough.flush_ns(num_microbatches=2, num_stages=9) - exact.flush_ns(num_microbatches=2, num_stages=9)
            assert 0 <= gap_ns <= (9 - 1) * eps_ns


def test_bounded_number_of_slices_equals_brute_force_where_the_cheapest_way_has_too_many() -> None:
    """Long slices are dear here, so every unbounded optimum has more slices than allowed."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        num_quanta = int(rng.integers(3, 9))
        length, _ = np.indices((num_quanta + 1, num_quanta + 1))
        cost_ns = length**2 * 100 + rng.integers(0, 90, (num_quanta + 1, num_quanta + 1))
        problem = SlicingProblem(
            cost_ns=cost_ns,
            sequence_length=num_quanta,
            quantum=1,
            max_slices=int(rng.integers(1, num_quanta)),
            max_slice_length=int(rng.integers(1, num_quanta + 1)),
        )
        expected = brute_force.flush_by_force(problem, 2, 3)
        slicing = best_flush_slicing(problem, num_microbatches=2, num_stages=3)
        found = slicing and (slicing.flush_ns(num_microbatches=2, num_stages=3), slicing.lengths)
        assert found == expected


def test_ranking_is_by_the_1f1b_objective_then_fewest_slices() -> None:
    slicings = [
        Slicing(lengths=(4,), slice_ns=(30,)),
        Slicing(lengths=(2, 2), slice_ns=(20, 20)),
        Slicing(lengths=(2, 1, 1), slice_ns=(15, 15, 15)),
    ]
    ranked = rank_one_f_one_b(reversed(slicings), num_microbatches=1, num_stages=2)
    assert [slicing.num_slices for slicing in ranked] == [1, 2, 3]
    assert [slicing.one_f_one_b_ns(num_microbatches=1, num_stages=2) for slicing in ranked] == [60, 60, 60]
    ranked = rank_one_f_one_b(slicings, num_microbatches=1, num_stages=9)
    assert [slicing.num_slices for slicing in ranked] == [3, 2, 1]


def test_long_first_and_short_last_when_the_prefix_costs() -> None:
    """The shape TeraPipe prints, such as 704, 688, 656 for 13B and 384 down to 296 for 44B, at L = 2048."""
    problem = _model_problem(fixed_ns=2_000_000, token_ns=10_000, pair_ns=4)
    flush = best_flush_slicing(problem, num_microbatches=1, num_stages=8)
    assert flush is not None
    assert flush.num_slices > 2
    for slicing in (flush, *balanced_slicings(problem)[1:10]):
        assert list(slicing.lengths) == sorted(slicing.lengths, reverse=True)
        assert slicing.lengths[0] > slicing.lengths[-1]


def test_equal_slices_when_the_prefix_costs_nothing() -> None:
    problem = _model_problem(fixed_ns=640_000, token_ns=10_000, pair_ns=0)
    by_count = {slicing.num_slices: slicing for slicing in balanced_slicings(problem)}
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        assert by_count[count].lengths == (2048 // count,) * count
    flush = best_flush_slicing(problem, num_microbatches=1, num_stages=9)
    assert flush is not None
    # (S + K - 1) (f + c L / S), with f fixed and c per token, is smallest at S = sqrt((K - 1) c L / f) = 16
    assert flush.lengths == (128,) * 16


def test_the_fixed_cost_of_an_action_decides_the_number_of_slices() -> None:
    counts = []
    for fixed_ns in (0, 10_000, 100_000, 1_000_000, 10_000_000_000):
        slicing = best_flush_slicing(
            _model_problem(fixed_ns=fixed_ns, token_ns=10_000, pair_ns=1), num_microbatches=1, num_stages=48
        )
        assert slicing is not None
        counts.append(slicing.num_slices)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    assert counts[0] > counts[2] > 1


def test_one_stage_is_not_sliced_and_equals_have_the_fewest_slices() -> None:
    cost_ns = np.repeat(np.arange(65)[:, None], 65, axis=1)
    problem = SlicingProblem(cost_ns=cost_ns, sequence_length=64, quantum=1)
    slicing = best_flush_slicing(problem, num_microbatches=3, num_stages=1)
    assert slicing == Slicing(lengths=(64,), slice_ns=(64,))


def test_remaining_tokens_belong_to_the_last_slice_and_add_to_its_cost() -> None:
    problem = _model_problem(fixed_ns=0, token_ns=100, pair_ns=0, sequence_length=1021, quantum=8)
    for slicing in balanced_slicings(problem)[:20]:
        assert sum(slicing.lengths) == 1021
        assert slicing.lengths[-1] % 8 == 1021 % 8
        assert slicing.slice_ns == tuple(100 * length for length in slicing.lengths)


def test_limits_that_no_slicing_meets_give_none() -> None:
    cost_ns = np.ones((5, 5), dtype=np.int64)
    for limits in ({"min_slice_length": 5}, {"max_slice_length": 1, "max_slices": 3}, {"max_slice_length": 0}):
        problem = SlicingProblem(cost_ns=cost_ns, sequence_length=4, quantum=1, **limits)
        assert balanced_slicings(problem) == ()
        assert best_flush_slicing(problem, num_microbatches=1, num_stages=2) is None


def test_a_slice_that_exceeds_the_limit_by_the_remaining_tokens_is_not_used() -> None:
    problem = SlicingProblem(cost_ns=np.ones((4, 4), dtype=np.int64), sequence_length=11, quantum=3, max_slice_length=6)
    assert [slicing.lengths for slicing in balanced_slicings(problem)] == [(6, 5), (3, 3, 5)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantum": 0}, "quantum 0"),
        ({"quantum": 9}, "quantum 9"),
        ({"cost_ns": np.ones((4, 5), dtype=np.int64)}, "4 quanta"),
        ({"cost_ns": np.ones((5, 5))}, "float64"),
        ({"max_slices": 0}, "max_slices 0"),
    ],
)
def test_a_problem_that_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"cost_ns": np.ones((5, 5), dtype=np.int64), "sequence_length": 8, "quantum": 2}
    with pytest.raises(ValueError, match=message):
        SlicingProblem(**{**good, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [-1, 1 << 58])
def test_costs_that_cannot_be_summed_are_refused(cost: int) -> None:
    problem = SlicingProblem(cost_ns=np.full((5, 5), cost, dtype=np.int64), sequence_length=4, quantum=1)
    with pytest.raises(ValueError, match="slice costs span"):
        balanced_slicings(problem)


def test_counts_and_products_out_of_range_are_refused() -> None:
    problem = SlicingProblem(cost_ns=np.full((5, 5), 1 << 50, dtype=np.int64), sequence_length=4, quantum=1)
    with pytest.raises(ValueError, match="num_stages=0"):
        best_flush_slicing(problem, num_microbatches=1, num_stages=0)
    with pytest.raises(ValueError, match="beyond 64 bits"):
        best_flush_slicing(problem, num_microbatches=10_000, num_stages=1)


@st.composite
def problems(draw: st.DrawFn) -> SlicingProblem:
    num_quanta = draw(st.integers(1, 20))
    size = num_quanta + 1
    values = draw(st.lists(st.integers(0, 10**6), min_size=size**2, max_size=size**2))
    quantum = draw(st.integers(1, 8))
    return SlicingProblem(
        cost_ns=np.array(values).reshape(size, size),
        sequence_length=num_quanta * quantum + draw(st.integers(0, quantum - 1)),
        quantum=quantum,
        max_slices=draw(st.one_of(st.none(), st.integers(1, num_quanta))),
    )


def _with_max_slices(problem: SlicingProblem, max_slices: int | None, scale: int = 1) -> SlicingProblem:
    return SlicingProblem(
        cost_ns=problem.cost_ns * scale,
        sequence_length=problem.sequence_length,
        quantum=problem.quantum,
        max_slices=max_slices,
    )


@settings(max_examples=60, derandomize=True)
@given(problem=problems(), num_microbatches=st.integers(1, 8), num_stages=st.integers(1, 96))
def test_the_two_objectives_bound_each_other(problem: SlicingProblem, num_microbatches: int, num_stages: int) -> None:
    flush = best_flush_slicing(problem, num_microbatches=num_microbatches, num_stages=num_stages)
    assert flush is not None
    _check_valid(problem, flush)
    objective_ns = flush.flush_ns(num_microbatches=num_microbatches, num_stages=num_stages)
    for slicing in balanced_slicings(problem):
        _check_valid(problem, slicing)
        assert objective_ns <= slicing.flush_ns(num_microbatches=num_microbatches, num_stages=num_stages)
        if slicing.num_slices == flush.num_slices:
            assert slicing.largest_ns <= flush.largest_ns


@settings(max_examples=60, derandomize=True)
@given(problem=problems(), num_stages=st.integers(1, 96))
def test_a_tighter_limit_never_helps_and_scale_changes_nothing(problem: SlicingProblem, num_stages: int) -> None:
    def objective_ns(each: SlicingProblem) -> int:
        slicing = best_flush_slicing(each, num_microbatches=2, num_stages=num_stages)
        assert slicing is not None
        return slicing.flush_ns(num_microbatches=2, num_stages=num_stages)

    free = _with_max_slices(problem, None)
    assert objective_ns(free) <= objective_ns(problem) <= objective_ns(_with_max_slices(problem, 1))
    bounded = {slicing.num_slices: slicing for slicing in balanced_slicings(problem)}
    assert all(bounded.get(each.num_slices, each) == each for each in balanced_slicings(free))
    scaled = best_flush_slicing(
        _with_max_slices(problem, problem.max_slices, scale=7), num_microbatches=2, num_stages=num_stages
    )
    same = best_flush_slicing(problem, num_microbatches=2, num_stages=num_stages)
    assert scaled is not None
    assert same is not None
    assert scaled.lengths == same.lengths
