"""Problems that `./dev soak mixed` draws, and its report of what does not hold; its long runs make the plans."""

from __future__ import annotations

import dataclasses

import pytest
from benchmarks.soak import mixed
from benchmarks.soak.mixed import MIXED, check, compare_mixed, draw_problem, nodes_of_kinds

from penstock.core.cluster import ClusterSpec
from penstock.core.job import JobSpec, Objective
from penstock.planner.choice import Choice, choose
from tests.support.random_plans import Sizes

SEED, NUM_DRAWN = 1, 100

FEW = Sizes(devices=(2, 3), models=((4, 512, 8),), tokens=(512,), batches=(1,))


def test_problems_follow_from_seed_and_number_and_cover_the_sizes() -> None:
    drawn = [draw_problem(SEED, number) for number in range(NUM_DRAWN)]
    assert drawn[7] == draw_problem(SEED, 7)
    assert drawn[7] != draw_problem(SEED + 1, 7)
    sizes = [problem.cluster.num_devices for problem in drawn]
    assert (min(sizes), max(sizes)) == (2, max(MIXED.devices)) == (2, 64)
    assert {len(problem.cluster.device_kinds) for problem in drawn} == {2, 3}
    assert (
        {problem.spec.resources.spot for problem in drawn} == {problem.is_scaled for problem in drawn} == {True, False}
    )
    assert any(problem.cluster.links for problem in drawn)
    for problem in drawn:
        assert sum(nodes_of_kinds(problem.cluster)) == problem.cluster.num_nodes
        assert problem.spec.resources.ranks == problem.cluster.num_devices


def test_what_does_not_hold_is_reported_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plans for all kinds that take, or cost, ten times what they do."""
    monkeypatch.setattr(mixed, "MIXED", FEW)

    def chosen(spec: JobSpec, cluster: ClusterSpec, *, frontier: bool = False) -> Choice:
        choice = choose(spec, cluster, frontier=frontier)
        if not cluster.other_devices or choice.cost is None:
            return choice
        if spec.objective is Objective.COST:
            cost = dataclasses.replace(choice.cost, per_million_tokens=10 * choice.cost.per_million_tokens)
            return dataclasses.replace(choice, cost=cost)
        run_time = dataclasses.replace(choice.run_time, seconds=10 * choice.run_time.seconds)
        return dataclasses.replace(choice, run_time=run_time)

    expected = compare_mixed(SEED, first=2, count=1, report=lambda line: None)
    assert expected["violations"] == []
    [record] = expected["problems"]
    monkeypatch.setattr(mixed, "choose", chosen)
    result = compare_mixed(SEED, first=2, count=1, report=lambda line: None)
    assert result["jobs"].keys() == {2}
    assert len(result["violations"]) > 1
    assert all(sentence.startswith("problem 2 (") for sentence in result["violations"])
    assert all(f"./dev soak mixed --seed {SEED} --first 2 --count 1" in line for line in result["violations"])
    assert any("the equal split" in sentence and "% slower" in sentence for sentence in result["violations"])
    assert any("for money" in sentence for sentence in result["violations"])
    assert result["problems"][0]["compared"] == record["compared"]


def test_a_refusal_is_a_violation_if_one_kind_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "MIXED", FEW)
    monkeypatch.setattr(
        mixed, "_chosen", lambda spec, cluster, **_: None if cluster.other_devices else choose(spec, cluster)
    )
    _, violated, _ = check(draw_problem(SEED, 2))
    assert len(violated) >= 2
    assert all(sentence.startswith("refused, but ") for sentence in violated)


def test_a_failure_of_the_planner_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Choice:
        raise ValueError("broken")

    monkeypatch.setattr(mixed, "choose", failing)
    result = compare_mixed(SEED, first=0, count=1, report=lambda line: None)
    assert ["ValueError: broken" in sentence for sentence in result["violations"]] == [True]


def test_a_plan_over_a_slow_link_is_not_slower_than_the_equal_split() -> None:
    """Two nodes whose link is 40 times slower than those inside: the plan depends on the order of actions, of which
    those made for the costs of unequal devices were 2 % slower than one made for equal costs.
    """
    figures, violated, tolerated = check(draw_problem(26, 29))
    assert violated == tolerated == []
    assert figures["seconds"] < figures["compared"]["the equal split"]
