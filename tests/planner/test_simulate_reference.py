"""The compiled simulator equals the plain one on any Program: every time and every byte, to the last integer."""

from __future__ import annotations

import dataclasses
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.schedule import Kind
from penstock.core.timeline import Activity
from penstock.planner.lowering import lower
from penstock.planner.simulate.arrays import simulate_arrays
from penstock.planner.simulate.costs import InstructionCosts
from penstock.planner.simulate.memory import high_water_bytes
from penstock.planner.simulate.simulation import simulate
from tests.support.reference_simulator import ReferenceSimulator
from tests.support.step_costs import costs_of, slot_arrays
from tests.support.strategies import Case, cases

seeds = st.integers(0, 2**32)


@settings(max_examples=250)
@given(cases(), seeds)
def test_times_are_equal(case: Case, seed: int) -> None:
    program = case.lower()
    costs = costs_of(random.Random(seed), program, case.buckets)
    reference = ReferenceSimulator(program, costs)
    found = simulate(program, costs)
    assert found.makespan_ns == reference.makespan
    for name in ("compute", "bubble", "communication", "reduction", "optimizer"):
        accounts = [getattr(worker, name) for worker in reference.workers]
        assert getattr(found.times, f"{name}_ns").tolist() == accounts, name
    spans = {
        (event.rank, event.action): (event.start_ns, event.stop_ns)
        for event in found.timeline.events
        if event.activity is Activity.COMPUTE
    }
    assert spans == {
        (rank, action): span for rank, worker in enumerate(reference.workers) for action, span in worker.spans.items()
    }


@settings(max_examples=250)
@given(cases(), seeds)
def test_bytes_are_equal(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    shape = (case.schedule.num_stages, case.schedule.num_slices + len(case.remainder_slices))
    transients = {
        (kind, stage, part): rng.choice([0, 1, 50, 400])
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
        for stage in range(shape[0])
        for part in range(shape[1])
    }
    program = lower(
        case.schedule,
        case.sizes,
        slices=case.slices,
        remainder=case.remainder,
        receive_ahead=case.receive_ahead,
        late_receives=case.late_receives,
        dp=case.dp,
        tie=case.tie,
        buckets=case.buckets,
        num_units=case.num_units,
        transients=transients,
        keep_pairs=case.keep_pairs,
        prefix_by_slice=case.prefix_by_slice,
    )
    costs = costs_of(rng, program, case.buckets)
    reference = ReferenceSimulator(program, costs)
    peaks = [worker.peak for worker in reference.workers]
    order = case.order
    sizes = slot_arrays(case.sizes, order.num_stages)
    own = (slot_arrays(case.remainder_sizes, order.num_stages), case.remainder_slices)
    found_bytes = high_water_bytes(
        order,
        sizes,
        case.slices,
        case.receive_ahead,
        transients,
        late_receives=case.late_receives,
        remainder=own if case.remainder_slices else None,
        prefix_by_slice=case.prefix_by_slice,
    )
    assert found_bytes.tolist() == peaks
    always = [1000 * rank for rank in range(len(peaks))]
    found = simulate(program, costs, static_bytes=always)
    assert list(found.peak_bytes) == [a + peak for a, peak in zip(always, peaks, strict=True)]


@settings(max_examples=60)
@given(cases(), seeds)
def test_the_account_of_every_rank_adds_up(case: Case, seed: int) -> None:
    program = case.lower()
    costs = costs_of(random.Random(seed), program, case.buckets)
    times = simulate(program, costs).times
    total = times.compute_ns + times.bubble_ns + times.communication_ns + times.reduction_ns + times.optimizer_ns
    assert (total == times.makespan_ns).all()


@settings(max_examples=60)
@given(cases(), seeds)
def test_the_search_and_the_timeline_agree(case: Case, seed: int) -> None:
    program = case.lower()
    costs = costs_of(random.Random(seed), program, case.buckets)
    found = simulate(program, costs)
    fast = simulate_arrays(
        case.order,
        costs,
        receive_ahead=case.receive_ahead,
        late_receives=case.late_receives,
        reductions=program.reductions,
    )
    assert fast.makespan_ns == found.makespan_ns == found.timeline.step_ns
    assert (fast.compute_ns == found.times.compute_ns).all()
    assert fast.trace.size == 0
    for rank in range(len(program.ranks)):
        assert found.timeline.busy_ns(rank) == fast.compute_ns[rank]
    assert found.timeline.bubble == fast.bubble


@settings(max_examples=60)
@given(cases(), seeds)
def test_every_wait_is_shown_and_names_an_instruction(case: Case, seed: int) -> None:
    """Without transport costs a rank computes or waits until it has only reductions left, and its events say which:
    for messages, or for its shards in between.
    """
    program = case.lower()
    costs = costs_of(random.Random(seed), program, case.buckets)
    found = simulate(program, dataclasses.replace(costs, instructions=InstructionCosts()))
    for rank in program.ranks:
        events = [event for event in found.timeline.events if event.rank == rank.rank]
        finish_ns = found.times.finish_ns[rank.rank]
        assert {event.action for event in events} <= {str(instruction.action) for instruction in rank.instructions}
        spans = sorted(
            (event.start_ns, event.stop_ns)
            for event in events
            if event.activity in (Activity.COMPUTE, Activity.WAIT, Activity.REDUCE)
            and event.duration_ns
            and event.start_ns < finish_ns
        )
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans))
        assert sum(stop - start for start, stop in spans) == finish_ns
