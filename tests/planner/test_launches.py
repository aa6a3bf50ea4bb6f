"""Actions without a CUDA graph take as long as the slower of device and host, and plans avoid them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.graphs import recording_order
from penstock.core.model import UnitKind
from penstock.core.profile import MemoryRecord, Profile, TransientRecord
from penstock.core.remaking import full_remakes
from penstock.core.schedule import Kind
from penstock.planner.candidate import Candidate
from penstock.planner.decide import Decision, decide
from penstock.planner.evaluate import Simulated
from penstock.planner.fit import measured_cost
from penstock.planner.launches import launched_shares
from penstock.planner.measured import problem_from_profile
from penstock.planner.order import FORWARD
from penstock.planner.outlines import outlines
from penstock.planner.problem import Mesh, Problem
from penstock.planner.stagecost import UnitTable, stage_costs
from penstock.planner.tables import unit_tables
from tests.support.planning import TINY_LLAMA, job, measured, profile

PASSES = tuple(itertools.product(UnitKind, (Kind.F, Kind.I, Kind.W)))
STAGES = ((0, 4), (4, TINY_LLAMA.num_units))
GRAPH_BYTES = 100
"""Of every pass."""


def cuda_profile(launch_seconds: float, most_graph_bytes: int = 0, *, tp: int = 1) -> Profile:
    """Passes take the device a microsecond per token, and the host ``launch_seconds`` each."""
    units = tuple(
        dataclasses.replace(
            measured(unit, kind, length=length, seconds=1e-6 * length, tp=tp), host_seconds=launch_seconds
        )
        for (unit, kind), length in itertools.product(PASSES, (1, 64))
    )
    graphs = tuple(
        TransientRecord(unit=unit, kind=kind, batch=1, length=64, prefix=0, num_bytes=GRAPH_BYTES)
        for unit, kind in PASSES
    )
    memory = MemoryRecord(constant_bytes=1000, graphs=graphs, most_graph_bytes=most_graph_bytes)
    return profile(units, memory=memory)


def cuda_problem(launch_seconds: float, most_graph_bytes: int) -> Problem:
    """The tiny model in sequences of 64 tokens on two devices."""
    return problem_from_profile(job(sequence_length=64, global_batch=4), cuda_profile(launch_seconds, most_graph_bytes))


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    cuts = sorted(draw(st.sets(st.integers(1, 63), max_size=4)))
    slices = tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, 64)))
    remainder = draw(st.sampled_from([0, 1]))
    recompute = draw(st.sampled_from([(), tuple(full_remakes(TINY_LLAMA, stage) for stage in STAGES)]))
    return Candidate(
        mesh=Mesh(dp=1, tp=1, pp=2, microbatch=2, num_microbatches=draw(st.integers(2, 4)), remainder=remainder),
        stages=STAGES,
        slices=slices,
        remainder_slices=slices if remainder else (),
        schedule="1f1b",
        recompute=recompute,
    )


def shares_of(candidate: Candidate, most_graph_bytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[stages, columns]."""
    problem = cuda_problem(1.0, most_graph_bytes)
    shares = launched_shares(unit_tables(problem, candidate), TINY_LLAMA, candidate, (0, 1))
    return np.concatenate(shares, axis=1)


def test_an_action_takes_the_longer_one_of_its_passes_and_of_their_launches() -> None:
    """Of long slices the device's, of short ones the host's."""
    units = UnitTable.of(measured_cost(cuda_profile(20e-6, tp=2), 2), 1, (48, 16))
    whole = ((0, TINY_LLAMA.num_units),)
    costs = stage_costs(units, TINY_LLAMA, whole)
    for column, length in enumerate((48, 16)):
        expected = TINY_LLAMA.num_units * max(length * 1e-6, 20e-6) + 1e-5
        assert costs.alone_ns[:, 0, column].tolist() == [round(1e9 * expected)] * 3
    np.testing.assert_allclose(costs.launch_factor, [[1.0, 20 / 16]])


def test_the_sum_over_an_action_decides_not_each_pass() -> None:
    """Attention is limited by the device, the MLP by the host, and the host runs ahead."""
    records = {
        kind: tuple(
            dataclasses.replace(record, host_seconds=host)
            for record in cuda_profile(1.0, tp=2).units
            if record.unit is kind
        )
        for kind, host in ((UnitKind.ATTENTION, 1e-6), (UnitKind.MLP, 40e-6))
    }
    others = tuple(record for record in cuda_profile(1e-9, tp=2).units if record.unit not in records)
    cost = measured_cost(profile((*others, *itertools.chain.from_iterable(records.values()))), 2)
    units = UnitTable.of(cost, 1, (32, 32))
    layer = stage_costs(units, TINY_LLAMA, ((1, 3),)).alone_ns[0, 0, 0]
    assert layer == round(1e9 * (64e-6 + 1e-5)), "not 32 + 40 microseconds"


@given(st.floats(1e-7, 1e-3), st.floats(1e-7, 1e-3))
def test_a_whole_backward_takes_the_longer_one_of_all_its_passes_and_of_all_their_launches(
    of_input: float, of_weight: float
) -> None:
    hosts = {Kind.F: 1e-9, Kind.I: of_input, Kind.W: of_weight}
    units = tuple(
        dataclasses.replace(record, host_seconds=hosts[record.kind]) for record in cuda_profile(1.0, tp=2).units
    )
    costs = stage_costs(UnitTable.of(measured_cost(profile(units), 2), 1, (64,)), TINY_LLAMA, ((1, 3),))
    backward_ns = int(costs.alone_ns[1:, 0, 0].sum() - costs.saved_ns[0, 0])
    assert backward_ns == pytest.approx(1e9 * (2 * max(128e-6, of_input + of_weight) + 2e-5), abs=3)


@given(candidates(), st.integers(0, 40_000))
def test_the_planner_counts_the_graphs_that_the_trainer_records(candidate: Candidate, most_bytes: int) -> None:
    """One by one, as `penstock.trainer.graphs.Graphs.record_all` does; equals differ by the one on the boundary."""
    mesh = candidate.mesh
    counted = 1 - shares_of(candidate, most_bytes)
    for rank, stage in enumerate(candidate.stages):
        kinds = [Kind.F, Kind.I, Kind.W, *([Kind.R] if candidate.recompute else [])]
        of_column = [*([(mesh.microbatch, n) for n in candidate.slices] * mesh.num_alike)]
        of_column += [(mesh.remainder, n) for n in candidate.remainder_slices]
        actions = [(kind, batch * length) for kind in kinds for batch, length in of_column]
        graph_bytes = GRAPH_BYTES * (stage[1] - stage[0])
        used, recorded = 0, 0
        for _ in recording_order(actions, lambda action: action[1]):
            used += graph_bytes
            recorded += used <= most_bytes
        times = np.array([mesh.num_alike] * len(candidate.slices) + [1] * len(candidate.remainder_slices))
        assert -1e-9 <= len(kinds) * float(counted[rank] @ times) - recorded < 1 + 1e-9


@given(candidates(), st.integers(0, 40_000), st.integers(0, 20_000), st.sampled_from([1e-6, 30e-6, 1e-3]))
def test_more_memory_for_graphs_never_makes_an_action_longer(
    candidate: Candidate, most_bytes: int, more_bytes: int, launch_seconds: float
) -> None:
    recorded, more, few, none = (
        Simulated(cuda_problem(launch_seconds, size)).costs(candidate, (0, 1)).compute_ns
        for size in (10**9, most_bytes + more_bytes, most_bytes, 0)
    )
    assert (recorded <= more).all()
    assert (more <= few).all()
    assert (few <= none).all(), "an action without a graph never takes less than with one"
    unlaunched = Simulated(cuda_problem(0.0, 0)).costs(candidate, (0, 1)).compute_ns
    assert (recorded == unlaunched).all(), "graphs hide all launches"


@given(candidates())
def test_without_graphs_a_short_slice_takes_all_of_its_launches(candidate: Candidate) -> None:
    """F of the first stage: an embedding, two attention units and an MLP."""
    costs = Simulated(cuda_problem(1e-3, 0)).costs(candidate, (0, 1))
    assert (costs.compute_ns[FORWARD, 0] == round(1e9 * (4e-3 + 1e-5))).all()


def test_a_plan_has_fewer_slices_where_launches_dominate() -> None:
    """A sequence of 1,024 tokens on two ranks; graphs of two slices per rank fit, or all."""

    def planned(launch_seconds: float, most_graph_bytes: int, **pinned: Any) -> Decision:
        spec = job(sequence_length=1024, global_batch=1, pp=2, dp=1, **pinned)
        return decide(problem_from_profile(spec, cuda_profile(launch_seconds, most_graph_bytes)))

    fast, slow, recorded = planned(1e-9, 3000), planned(1e-3, 3000), planned(1e-3, 10**9)
    assert len(slow.plan.slices) < len(fast.plan.slices)
    assert recorded.plan.slices == fast.plan.slices, "graphs hide the launches"
    unaware = planned(1e-3, 3000, slices=fast.plan.slices)
    assert slow.chosen.step_ns < unaware.chosen.step_ns / 2


def test_an_older_profile_has_a_graph_for_every_action_also_in_estimates() -> None:
    def estimates(launch_seconds: float) -> list[int]:
        made = cuda_profile(launch_seconds)
        older = dataclasses.replace(made, memory=dataclasses.replace(made.memory, graphs=()))
        problem = problem_from_profile(job(sequence_length=64, global_batch=4), older)
        return [outline.estimate_ns for outline in outlines(problem)]

    assert estimates(1.0) == estimates(1e-9)
