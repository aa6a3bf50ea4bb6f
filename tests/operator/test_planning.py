"""Equal questions share one answer, and few are asked at once."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Step
from penstock.operator import planning
from penstock.operator.planning import Planning
from penstock.planner.worker.protocol import Answer, PlanningRequest
from tests.support.fake_planner import FakePlanner
from tests.support.manifests import example
from tests.support.sample_run import sample_plan, sample_profile, sample_schedule, sample_timeline


def question(steps: int = 200) -> PlanningRequest:
    return PlanningRequest(
        spec=PipelineJob.from_manifest(example(training__steps=steps)).spec, profile=sample_profile()
    )


def answered(told: Planning, key: str) -> Step:
    for _ in range(50):
        step, _ = told.status(key)
        if step not in (Step.WORKING,):
            return step
    raise AssertionError("it is never answered")


def test_equal_questions_are_asked_once() -> None:
    planner = FakePlanner()
    told = Planning(planner)
    keys = {told.request(question()) for _ in range(5)}
    (key,) = keys
    assert answered(told, key) is Step.DONE
    told.request(question())
    assert planner.asked == [key]


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(1, 3))
def test_so_many_at_once_and_all_in_the_end(steps: list[int], num_planners: int) -> None:
    planner = FakePlanner()
    told = Planning(planner, num_planners)
    keys = [told.request(question(number)) for number in steps]
    for _ in range(100):
        working = told.num_working
        assert working == len(planner.polls) <= num_planners
        told.take_answered()
    assert [told.status(key)[0] for key in keys] == [Step.DONE] * len(keys)
    assert len(planner.asked) == len(set(steps))


class PatientPlanner(FakePlanner):
    """Answers nothing until it may."""

    may_answer = False

    def poll(self, key: str) -> Answer | None:
        return super().poll(key) if self.may_answer else None


def test_one_namespace_does_not_keep_another_waiting() -> None:
    planner = PatientPlanner()
    told = Planning(planner)
    many = [told.request(question(steps), "many") for steps in range(1, 9)]
    one = told.request(question(100), "one")
    shared = told.request(question(8), "one")
    planner.may_answer = True
    for _ in range(100):
        told.take_answered()
    assert planner.asked == [many[0], many[1], one, many[2], shared, *many[3:7]]


def test_who_is_told_of_an_answer_is_told_once() -> None:
    told = Planning(FakePlanner())
    key = told.request(question())
    found = [name for _ in range(5) for name in told.take_answered()]
    assert found == [key]


def test_an_answer_that_somebody_else_met_with_is_told_too() -> None:
    told = Planning(FakePlanner())
    key = told.request(question())
    answered(told, key)
    assert told.take_answered() == [key]


def test_why_there_is_none() -> None:
    told = Planning(FakePlanner(Answer(what="nothing fits", remedy="raise memoryPerRank")))
    key = told.request(question())
    assert answered(told, key) is Step.FAILED
    _, answer = told.status(key)
    assert answer is not None
    assert "raise memoryPerRank" in answer.error


def test_a_failure_of_the_process_is_no_answer_to_later_requests() -> None:
    planner = FakePlanner(Answer(what="planning took over 600 s", is_transient=True))
    told = Planning(planner)
    failed = [told.request(question()) for _ in range(2)]
    assert answered(told, failed[0]) is Step.FAILED
    later = [told.request(question()) for _ in range(2)]
    assert answered(told, later[0]) is Step.FAILED
    planner.answer = Answer(plan=sample_plan())
    last = told.request(question())
    assert answered(told, last) is Step.DONE
    assert told.request(question()) == last
    assert planner.asked == [failed[0], later[0], last]
    assert [told.status(key)[0] for key in (*failed, *later)] == [Step.FAILED] * 4


def test_nobody_asked() -> None:
    assert Planning(FakePlanner()).status("key") == (Step.MISSING, None)


def test_what_nobody_here_draws_is_not_kept() -> None:
    told = Planning(FakePlanner(Answer(plan=sample_plan(), timeline=sample_timeline(sample_schedule(2, 2, 2)))))
    key = told.request(question())
    answered(told, key)
    _, answer = told.status(key)
    assert answer == Answer(plan=sample_plan())


def test_the_oldest_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_REMEMBERED", 2)
    told = Planning(FakePlanner())
    keys = []
    for steps in (1, 2, 3):
        keys.append(told.request(question(steps)))
        answered(told, keys[-1])
    assert [told.status(key)[0] for key in keys] == [Step.MISSING, Step.DONE, Step.DONE]


def test_closing_ends_what_is_worked_on() -> None:
    planner = FakePlanner()
    told = Planning(planner)
    told.request(question(1))
    told.request(question(2))
    told.close()
    assert (planner.polls, told.num_working, told.num_waiting) == ({}, 0, 0)


def test_how_long_each_took() -> None:
    took: list[float] = []
    told = Planning(FakePlanner(), observe_seconds=took.append)
    answered(told, told.request(question()))
    assert len(took) == 1
    assert took[0] >= 0


def test_threads() -> None:
    planner = FakePlanner()
    told = Planning(planner, 2)

    def work() -> None:
        for steps in range(1, 20):
            answered(told, told.request(question(steps)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(planner.asked) == sorted(set(planner.asked))
    assert len(planner.asked) == 19


def test_a_question_does_not_name_the_job() -> None:
    told = Planning(FakePlanner())
    one = question()
    assert told.request(one) == told.request(replace(one))
