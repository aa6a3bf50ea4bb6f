"""A tiny job measured for real: every kind of record, in the form that the planner reads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.core.job import ParallelismSpec
from penstock.core.model import UnitKind
from penstock.core.profile import Profile
from penstock.core.profile_matching import batches_to_measure, largest_microbatch
from penstock.core.remaking import SELECTIVE
from penstock.core.run.folder import RunDir
from penstock.core.schedule import Kind
from penstock.core.serialization.files import write_json
from penstock.core.sharding import Collective
from penstock.planner.decide import decide
from penstock.planner.fit import REQUIRED, measured_cost
from penstock.planner.measured import problem_from_profile
from penstock.planner.remake import remake_seconds
from penstock.planner.work import Work
from penstock.trainer.profiling.grid import Point, profile_grid, sparse_grid, transient_grid
from tests.support.training_run import finish, make_run, start, tiny_job, train, write_corpus

LENGTH = 64
MEMORY_ERROR = 0.02
AGAIN = ((UnitKind.ATTENTION, Kind.R), (UnitKind.MLP, Kind.R))
HEAD_PARTS = 3
"""Pinned, as the job's head is too light to be measured in parts by itself."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Measured on two ranks, the head also in parts."""
    folder = tmp_path_factory.mktemp("profile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        job = tiny_job(write_corpus(folder / "corpus"), steps=2)
        measured = make_run(folder / "run", job.with_spec(parallelism=ParallelismSpec(head_parts=HEAD_PARTS)))
    finish(start(measured, "profile", 2))
    return measured


@pytest.fixture(scope="module")
def profile(run: RunDir) -> Profile:
    return run.read_profile()


@pytest.mark.parametrize(("tp", "grid"), [(1, profile_grid), (2, sparse_grid)])
def test_every_pass_is_measured_at_every_point(
    profile: Profile, tp: int, grid: Callable[[int, tuple[int, ...], int], tuple[Point, ...]]
) -> None:
    """Of shards the embedding's I as well, which gathers. R is of blocks."""
    points = grid(LENGTH, batches_to_measure(4), largest_microbatch(4, LENGTH))
    units = [unit for unit in profile.units if (unit.tp, unit.head_parts) == (tp, 1)]
    passes = {*REQUIRED, *AGAIN, *([(UnitKind.EMBEDDING, Kind.I)] if tp > 1 else [])}
    assert {(u.batch, u.length, u.prefix, u.held_out) for u in units} == {
        (p.batch, p.length, p.prefix, p.held_out) for p in points
    }
    for point in points:
        found = {
            (u.unit, u.kind)
            for u in units
            if (u.batch, u.length, u.prefix) == (point.batch, point.length, point.prefix)
        }
        assert found == passes if point.whole else found < passes


def test_both_degrees_of_tensor_parallelism_of_two_ranks_are_measured(profile: Profile) -> None:
    assert profile.tp_degrees == (1, 2)
    assert profile.sequence_parallel
    assert profile.only_tp is None


@pytest.mark.parametrize("tp", [1, 2])
def test_parts_of_the_head_have_all_three_passes_at_every_point(profile: Profile, tp: int) -> None:
    assert profile.degrees == ((1, 1), (1, HEAD_PARTS), (2, 1), (2, HEAD_PARTS))
    points = sparse_grid(LENGTH, batches_to_measure(4), largest_microbatch(4, LENGTH))
    places = [(p.batch, p.length, p.prefix, p.held_out) for p in points if p.whole]
    units = [unit for unit in profile.units if (unit.tp, unit.head_parts) == (tp, HEAD_PARTS)]
    passes = [(u.unit, u.kind, u.batch, u.length, u.prefix, u.held_out) for u in units]
    assert sorted(passes) == sorted((UnitKind.HEAD, kind, *p) for kind in (Kind.F, Kind.I, Kind.W) for p in places)
    cost = measured_cost(profile, tp, HEAD_PARTS)
    assert all(cost.unit_seconds(UnitKind.HEAD, kind, Work.of(2, 24, 0)) > 0 for kind in (Kind.F, Kind.I, Kind.W))
    assert cost.transient_bytes(UnitKind.HEAD, Kind.I, 1, LENGTH, 0) > 0


def test_all_that_is_measured_is_positive(profile: Profile) -> None:
    for unit in profile.units:
        assert unit.alone_seconds > 0
        assert unit.together_seconds > 0
        assert unit.spread >= 0
        assert unit.together_spread is not None
        assert unit.together_spread >= 0
        assert unit.samples >= 2
    assert {record.collective for record in profile.collectives} == set(Collective)
    assert all(record.seconds > 0 for record in profile.collectives)
    assert all(each.seconds > 0 for each in profile.optimizer)
    assert profile.action_overhead_seconds > 0
    assert profile.memory.constant_bytes > 2**26
    assert math.isfinite(profile.load)


def test_running_norms_and_activations_again_takes_a_part_of_forward(run: RunDir, profile: Profile) -> None:
    """Predicted by what was measured: more than nothing, and no more than all of F."""
    model, work = run.read_job().spec.model, Work.of(2, [16, LENGTH], 0)
    for tp in profile.tp_degrees:
        cost = measured_cost(profile, tp)
        for unit, _ in AGAIN:
            seconds = remake_seconds(cost, model, unit, work, SELECTIVE)
            assert (seconds > 0).all()
            assert (seconds <= cost.unit_seconds(unit, Kind.F, work)).all()


def test_links_go_both_ways(profile: Profile) -> None:
    assert {(link.source, link.target) for link in profile.links} == {(0, 1), (1, 0)}
    for link in profile.links:
        assert link.latency_seconds >= 0
        assert 0 < link.bytes_per_second < math.inf
        assert 0 <= link.error < math.inf


def test_memory_is_weighed_where_it_should_be(profile: Profile) -> None:
    points = transient_grid(LENGTH, batches_to_measure(4))
    assert {(t.tp, t.batch, t.length, t.prefix) for t in profile.memory.transients} == {
        (tp, p.batch, p.length, p.prefix) for tp in (1, 2) for p in points
    }


def test_it_survives_its_text_form(profile: Profile) -> None:
    assert Profile.from_manifest(json.loads(json.dumps(profile.to_manifest()))) == profile
    assert profile.num_ranks == 2


def test_progress_reached_the_end(run: RunDir) -> None:
    progress = json.loads(run.profile_progress.read_text())
    assert progress["done"] == progress["total"] > 10


def test_the_planner_can_use_it_and_the_plan_trains(run: RunDir, profile: Profile) -> None:
    cost, spec = measured_cost(profile), replace(run.read_job().spec, parallelism=ParallelismSpec())
    for unit, kind in REQUIRED:
        assert cost.slowdown(unit, kind) >= 1
        assert cost.unit_seconds(unit, kind, Work.of(2, 24, 40)) > 0
    plan = decide(problem_from_profile(spec, profile)).plan
    write_json(run.plan, plan.to_manifest())
    train(run)
    assert len(run.read_metrics()) == 2
    assert plan.prediction is not None
    assert run.read_metrics()[-1].peak_bytes == pytest.approx(max(plan.prediction.peak_bytes), rel=MEMORY_ERROR)
