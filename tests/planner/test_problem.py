"""Meshes: every division of the devices that obeys what is pinned, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.job import Objective
from penstock.core.layout import Precision
from penstock.core.model import UnitKind
from penstock.core.schedule import Kind
from penstock.planner.budget import Budget
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import MOST_QUANTA, Mesh, all_meshes, fewer_devices, meshes
from penstock.planner.sizes import microbatch_sizes
from tests.support.planning import TINY_LLAMA, cluster, job, measured, problem, profile, units_at

Numbers = tuple[int, int, int, int, int]


def numbers(mesh: Mesh) -> Numbers:
    return (mesh.dp, mesh.tp, mesh.pp, mesh.microbatch, mesh.num_microbatches)


def by_force(numbers_of_devices: set[int], batch: int, degrees: set[int]) -> set[Numbers]:
    found = set()
    for dp, tp, pp in itertools.product(range(1, max(numbers_of_devices) + 1), repeat=3):
        if dp * tp * pp not in numbers_of_devices or tp not in degrees or pp > TINY_LLAMA.num_units:
            continue
        for size in microbatch_sizes(batch // dp) if batch % dp == 0 else ():
            found.add((dp, tp, pp, size, -(-batch // (dp * size))))
    return found


@given(st.integers(1, 16), st.integers(1, 12), st.sampled_from([1, 2, 4, 6]), st.sampled_from(Objective))
def test_meshes_are_all_divisions(ranks: int, batch: int, per_node: int, objective: Objective) -> None:
    described = cluster(num_nodes=16, devices_per_node=per_node)
    asked = problem(described, ranks=ranks, global_batch=batch, objective=objective)
    found, everywhere = list(meshes(asked)), list(all_meshes(asked))
    sizes = {ranks} if objective is Objective.TIME else {n for n in range(1, ranks + 1) if ranks % n == 0}
    inside = {1: {1}, 2: {1, 2}, 4: {1, 2, 4}, 6: {1, 2}}[per_node]
    assert len(found) == len(set(found))
    assert set(map(numbers, found)) == by_force(sizes, batch, inside)
    assert set(map(numbers, everywhere)) == by_force(sizes, batch, {1, 2} if per_node == 6 else {1, 2, 4})
    assert len(everywhere) == len(set(everywhere))


@given(st.integers(2, 12), st.integers(1, 12), st.sampled_from(Objective), st.data())
def test_fewer_devices_are_used_down_to_the_fewest_ranks(
    ranks: int, batch: int, objective: Objective, data: st.DataObject
) -> None:
    fewest = data.draw(st.integers(1, ranks))
    asked = problem(cluster(num_nodes=8), ranks=ranks, min_ranks=fewest, global_batch=batch, objective=objective)
    found = list(all_meshes(asked))
    assert len(found) == len(set(found))
    assert set(map(numbers, found)) == by_force(set(range(fewest, ranks + 1)), batch, {1, 2, 4})
    is_money = objective is Objective.COST
    main = {n for n in range(fewest, ranks + 1) if (is_money and ranks % n == 0) or n == ranks}
    assert set(map(numbers, meshes(asked))) == by_force(main, batch, {1, 2})


def test_of_many_devices_whole_hosts_stay_unused() -> None:
    asked = problem(cluster(num_nodes=64, devices_per_node=8), ranks=148, min_ranks=100, global_batch=4)
    assert fewer_devices(asked) == [144, 136, *range(128, 99, -1)]
    assert fewer_devices(problem(ranks=4, global_batch=4)) == []
    large = problem(cluster(num_nodes=4096, devices_per_node=8), ranks=32768, min_ranks=1, global_batch=4)
    assert fewer_devices(large) == [*range(32760, 31736, -8), *range(128, 0, -1)]


@given(st.data())
def test_meshes_obey_every_pin(data: st.DataObject) -> None:
    described = cluster(num_nodes=4, devices_per_node=4)
    everything = list(meshes(problem(described, ranks=8, global_batch=8)))
    chosen = data.draw(st.sampled_from(everything))
    names = data.draw(st.sets(st.sampled_from(["dp", "tp", "pp", "micro_batch"])))
    values = {"dp": chosen.dp, "tp": chosen.tp, "pp": chosen.pp, "micro_batch": chosen.microbatch}
    pinned = {name: values[name] for name in names}
    found = list(meshes(problem(described, ranks=8, global_batch=8, **pinned)))
    assert found == [m for m in everything if all(_value(m, name) == value for name, value in pinned.items())]


def _value(mesh: Mesh, name: str) -> int:
    value: int = getattr(mesh, "microbatch" if name == "micro_batch" else name)
    return value


def test_pinned_stages_say_how_long_the_pipeline_is() -> None:
    assert {mesh.pp for mesh in meshes(problem(ranks=4, global_batch=4, stages=(1.5, 2.5)))} == {2}


def test_a_mesh_says_what_it_is() -> None:
    mesh = Mesh(dp=2, tp=1, pp=4, microbatch=3, num_microbatches=5)
    assert mesh.num_devices == 8
    assert mesh.label == "dp 2 x tp 1 x pp 4, 5 micro-batches of 3"


@given(st.integers(1, 10_000))
def test_boundaries_lie_on_a_bounded_grid(length: int) -> None:
    quantum = problem(sequence_length=length).quantum
    assert length // quantum <= MOST_QUANTA
    assert quantum == 1 or length / (quantum - 1) > MOST_QUANTA


def test_a_job_larger_than_its_cluster_is_refused() -> None:
    with pytest.raises(UserError, match="asks for 8 ranks, the cluster has 4"):
        problem(ranks=8, global_batch=8)


def test_the_memory_limit_is_the_smaller_of_job_and_device() -> None:
    assert problem(memory=1000).memory_limit_bytes == 1000
    assert problem(memory=2**40).memory_limit_bytes == 2**30


def test_a_profile_of_another_precision_is_refused() -> None:
    with pytest.raises(UserError, match="measured in bf16, the job trains in fp32"):
        problem_from_profile(job(), profile(precision=Precision.BF16))


def test_devices_of_a_profile_are_where_they_were_measured() -> None:
    """Further ranks count as ranks of the last host."""
    asked = problem_from_profile(job(ranks=5, global_batch=10), profile(num_ranks=3, hosts=(0, 1, 1)))
    assert asked.host_of(range(5)).tolist() == [0, 1, 1, 1, 1]
    assert problem_from_profile(job(), profile()).host_of([0, 1]).tolist() == [0, 0]


def test_ranks_of_two_hosts_do_not_slow_each_other() -> None:
    """The measured side of a prediction over nodes."""

    def step_seconds(hosts: tuple[int, ...]) -> float:
        passes = itertools.product(UnitKind, (Kind.F, Kind.I, Kind.W))
        units = tuple(measured(unit, kind, slowdown=2.0) for unit, kind in passes)
        found = decide(problem_from_profile(job(pp=1, dp=2), profile(units, hosts=hosts))).plan.prediction
        assert found is not None
        return found.compute_seconds

    assert step_seconds((0, 0)) == step_seconds(()) == pytest.approx(2 * step_seconds((0, 1)), rel=0.05)


def test_a_measured_problem_has_the_degrees_of_tensor_parallelism_that_were_measured() -> None:
    measured = problem_from_profile(job(ranks=2, global_batch=2), profile())
    assert {mesh.tp for mesh in meshes(measured)} == {1}
    assert measured.profile_digest == profile().digest
    both = profile((*units_at(1), *units_at(2, share=0.6)))
    assert {mesh.tp for mesh in meshes(problem_from_profile(job(ranks=2), both))} == {1, 2}
    assert {mesh.tp for mesh in meshes(problem_from_profile(job(ranks=2, tp=2), profile(units_at(2))))} == {2}


def test_shards_that_divided_hidden_states_otherwise_do_not_count() -> None:
    both = profile((*units_at(1), *units_at(2)))
    assert problem_from_profile(job(ranks=2, sequence_parallel=False), both).tp_degrees == (1,)
    whole = dataclasses.replace(both, sequence_parallel=False)
    assert problem_from_profile(job(ranks=2, sequence_parallel=False), whole).tp_degrees == (1, 2)
    assert problem_from_profile(job(ranks=2), whole).tp_degrees == (1,)


@pytest.mark.parametrize(("share", "tp"), [(0.5, 2), (2.0, 1)])
def test_measured_shards_are_taken_where_they_are_faster(share: float, tp: int) -> None:
    """One sequence that nothing else can divide: half the seconds win, twice as many do not."""
    both = profile((*units_at(1), *units_at(2, share=share)))
    plan = decide(problem_from_profile(job(ranks=2, global_batch=1, pp=1, min_ranks=1), both)).plan
    assert plan.tp == tp


def test_a_degree_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UserError, match="tp 2 was not measured"):
        decide(problem_from_profile(job(ranks=2, tp=2), profile()))


def test_a_description_states_how_far_its_times_may_be_off() -> None:
    prediction = decide(problem(cluster(error=0.2)), Budget(candidates=10)).plan.prediction
    assert prediction is not None
    assert prediction.low_seconds == pytest.approx(0.8 * prediction.step_seconds)
    assert prediction.high_seconds == pytest.approx(1.2 * prediction.step_seconds)


def test_devices_go_by_their_nodes_cards_in_order() -> None:
    four = cluster(num_nodes=2, devices_per_node=4, nics_per_node=2)
    assert problem(four, ranks=8, global_batch=8).card_of(range(8)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    plain = problem(cluster(num_nodes=2, devices_per_node=4), ranks=8, global_batch=8)
    assert plain.card_of(range(8)).tolist() == plain.host_of(range(8)).tolist()
