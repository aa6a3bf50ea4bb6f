"""What `./dev soak plans` draws, pins, and makes of the answers; it makes the plans themselves for hours."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from benchmarks.soak import plans
from benchmarks.soak.pins import pins_around, published
from benchmarks.soak.planning import Answer, Question, answers
from benchmarks.soak.plans import compare, draw_problem

from penstock.core.layout import num_parameters
from penstock.planner.pins import check_pins
from penstock.planner.problem import meshes_over, problem_from_cluster
from tests.support.random_plans import SMALL, full_pin, pin_text, planned, random_job, step_seconds

SEED, NUM_DRAWN = 1, 200


def test_problems_follow_from_seed_and_number_and_cover_the_sizes() -> None:
    drawn = [draw_problem(SEED, number) for number in range(NUM_DRAWN)]
    assert drawn[7].spec == draw_problem(SEED, 7).spec != draw_problem(SEED + 1, 7).spec
    for sizes, least, most in (
        ([each.spec.resources.ranks for each in drawn], 8, 16_384),
        ([each.spec.training.global_batch for each in drawn], 1, 4_096),
        ([each.spec.data.sequence_length for each in drawn], 2_048, 2**20),
    ):
        assert (min(sizes), max(sizes)) == (least, most)
    parameters = [num_parameters(each.spec.model) for each in drawn]
    assert min(parameters) < 1.5e9
    assert max(parameters) > 0.8e12


@pytest.mark.parametrize("number", range(20))
def test_pins_are_different_fix_everything_and_can_be(number: int) -> None:
    problem = draw_problem(SEED, number)
    pins = pins_around(problem.chance, problem.spec, problem.cluster, None, 40)
    assert len(set(pins)) == len(pins) == 40
    for pin in pins:
        pinned = problem_from_cluster(dataclasses.replace(problem.spec, parallelism=pin), problem.cluster)
        check_pins(pinned, receive_ahead=4)
        assert len(list(meshes_over(pinned, problem.spec.resources.ranks))) == 1, pin_text(pin)


def test_papers_have_configurations_for_as_many_devices() -> None:
    spec = draw_problem(SEED, 0).spec
    spec = dataclasses.replace(
        spec,
        model=dataclasses.replace(spec.model, layers=96, hidden=12288, heads=96, kv_heads=96),
        training=dataclasses.replace(spec.training, global_batch=1536),
        resources=dataclasses.replace(spec.resources, ranks=384),
    )
    found = {(pin.dp, pin.tp, pin.pp, pin.micro_batch, pin.slices, pin.schedule) for pin in published(spec)}
    assert (4, 8, 12, 1, 1, "1f1b") in found  # GPT-3 on 384 A100s
    assert (1, 4, 96, 1, 19, "gpipe") in found  # TeraPipe's setting 9 with the authors' slices


def test_a_plan_of_a_fresh_process_is_the_same_and_refusals_and_failures_are_answers() -> None:
    spec, cluster = random_job(random.Random("fresh"))
    free = planned(spec, cluster)
    assert free is not None
    none = dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, memory_per_rank=2**20))
    questions = [
        Question(key=(0, "free"), spec=spec, cluster=cluster),
        Question(key=(0, "pinned"), spec=spec, cluster=cluster, pin=full_pin(free)),
        Question(key=(0, "same"), spec=spec, cluster=cluster, same=free),
        Question(key=(0, "refused"), spec=none, cluster=cluster),
        Question(key=(0, "failing"), spec=spec, cluster=None),  # type: ignore[arg-type]  # fails
    ]
    told = {answer.key[1]: answer for answer in answers(questions)}
    assert told["free"].plan == free
    assert told["pinned"].seconds == pytest.approx(step_seconds(free), rel=0.05)
    assert told["same"].seconds == pytest.approx(step_seconds(free), rel=1e-9)
    assert (told["refused"].seconds, told["refused"].broken) == (None, "")
    assert told["failing"].broken


def test_what_does_not_hold_is_told_with_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every pinned plan takes 1 s: a free one that takes 2 s, and one that gets slower by faster links, which is
    tolerated, as the same plan does, too.
    """
    spec, cluster = random_job(random.Random("fresh"))
    plan = planned(spec, cluster)
    seconds = {plans.FREE: 2.0, plans.FASTER_LINKS: 2.2, plans.SAME_PLAN: 2.1}

    def answered(questions: Sequence[Question]) -> list[Answer]:
        return [Answer(key=each.key, seconds=seconds.get(each.key[1], 1.0), plan=plan) for each in questions]

    monkeypatch.setattr(plans, "answers", answered)
    found = compare(SEED, first=3, count=1, pins=5, report=lambda line: None)
    beaten = [each for each in found["violations"] if "100.0% slower" in each]
    assert len(beaten) == len(found["violations"]) == 5 + len(plans.FIELDS)
    assert len(found["alsoSlowerWithTheSamePlan"]) == 1
    assert found["jobs"].keys() == {3}
    assert all(each["problem"] == 3 for each in found["violated"])


def test_small_problems_are_held_against_pins_and_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cluster = random_job(random.Random("fresh"))
    plan, asked = planned(spec, cluster), list[Question]()

    def answered(questions: Sequence[Question]) -> list[Answer]:
        asked.extend(questions)
        return [Answer(key=each.key, seconds=1.0 + (each.key[1] == plans.FREE), plan=plan) for each in questions]

    monkeypatch.setattr(plans, "answers", answered)
    result = compare(SEED, first=0, count=3, pins=4, report=lambda line: None, sizes=SMALL)
    assert all(question.spec.resources.ranks <= 16 for question in asked)
    assert len(asked) == 3 * (1 + 4 + 1)
    assert len(result["violations"]) == 3 * 4
