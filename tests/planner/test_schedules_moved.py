"""Moves of single actions: the order stays legal, stays within its memory, and its simulated step is never longer."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.model import Family, ModelSpec
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.problem import Mesh, Problem
from penstock.planner.schedules.blocks import word_of
from penstock.planner.schedules.greedy_order import makespan_ns
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.moved import moved_word
from penstock.planner.schedules.seeds import ONE_BY_ONE
from tests.planner.test_schedules_variants import measured_inputs, pipeline, prove_order
from tests.support.planning import cluster, problem, slow_link

MODEL = ModelSpec(family=Family.LLAMA, layers=4, hidden=32, heads=4, kv_heads=4, vocab=64)


@settings(max_examples=20, deadline=None)
@given(measured_inputs(), st.integers(0, 80))
def test_moves_keep_an_order_legal_and_within_its_memory(inputs: ScheduleInputs, num_trials: int) -> None:
    of = pipeline(inputs)
    start = word_of(ONE_BY_ONE, of)
    caps = np.zeros(of.num_ranks, dtype=np.int64)
    length_ns, word = moved_word(of, start, caps, lambda order: makespan_ns(inputs, order), num_trials)
    assert length_ns == makespan_ns(inputs, of.order(word)) <= makespan_ns(inputs, of.order(start))
    assert (of.peaks(word) <= of.peaks(start)).all()
    prove_order(of.order(word), receive_ahead=inputs.receive_ahead)


def over_a_slow_link(slowness: tuple[float, ...]) -> Problem:
    """Two nodes of two devices, and a link between them over which a message takes as long as a pass."""
    described = cluster(2, 2, links=(slow_link(0, 1, 400.0),))
    return dataclasses.replace(problem(described, model=MODEL, ranks=4, global_batch=4), slowness=slowness)


CANDIDATE = Candidate(
    mesh=Mesh(dp=1, tp=1, pp=4, microbatch=1, num_microbatches=4),
    stages=((0, 3), (3, 5), (5, 8), (8, 10)),
    slices=(8, 8),
    schedule="zb",
)


def test_the_step_over_a_slow_link_is_shorter_with_moves() -> None:
    """Orders are made as if the messages of a channel did not wait for each other."""
    judge = Simulated(over_a_slow_link((1.0, 1.0, 1.03, 1.03)))
    moved = judge.with_moved_actions(CANDIDATE)
    assert moved is not None
    best = judge.evaluate(judge.best_variant(CANDIDATE), in_full=True)
    evaluation = judge.evaluate(moved, in_full=True)
    assert evaluation.step_ns < 0.98 * best.step_ns
    assert Simulated(judge.problem).with_moved_actions(CANDIDATE) == moved, "the draws are the same at every call"


def test_equal_devices_and_long_steps_keep_their_orders() -> None:
    assert Simulated(over_a_slow_link(())).with_moved_actions(CANDIDATE) is None
    many = dataclasses.replace(CANDIDATE, mesh=dataclasses.replace(CANDIDATE.mesh, num_microbatches=4_000))
    judge = Simulated(over_a_slow_link((1.0, 1.0, 1.03, 1.03)))
    assert judge.with_moved_actions(many) is None
    assert judge.with_moved_actions(dataclasses.replace(CANDIDATE, schedule="1f1b")) is None
