"""Makes plans in separate processes, so that none depends on earlier ones.

A fork server, which has loaded the planner but not planned anything, forks a process for each plan.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import JobSpec, ParallelismSpec
from penstock.core.plan import Plan
from penstock.core.units import to_seconds
from penstock.planner.budget import Budget
from penstock.planner.decide import decide
from penstock.planner.evaluate import Simulated
from penstock.planner.problem import Problem, problem_from_cluster
from penstock.planner.replay import candidate_of, placement_of
from tests.support.random_plans import NO_PIN, step_seconds

MOST_SECONDS = 600.0
"""Time limit of one plan, on a machine that may be busy."""

ADDRESS_SPACE_BYTES = 6 * 2**30

Key = tuple[int, str]
"""Number of a problem, and name of one of its plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Request for a plan. With ``same``, that plan is simulated again instead."""

    key: Key
    spec: JobSpec
    cluster: ClusterSpec
    pin: ParallelismSpec = NO_PIN
    budget: Budget | None = None
    same: Plan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Seconds of the step, None if the planner refused; the plan; the error, if any; processor seconds."""

    key: Key
    seconds: float | None = None
    plan: Plan | None = None
    broken: str = ""
    processor_seconds: float = 0.0


def answers(questions: Sequence[Question]) -> Iterator[Answer]:
    """Answers of all questions in order of completion, with one process per processor."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.soak.planning"])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for done in as_completed(
            [threads.submit(_answer_in_fresh_process, context, question) for question in questions]
        ):
            yield done.result()


def _answer_in_fresh_process(context: ForkServerContext, question: Question) -> Answer:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(question, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(MOST_SECONDS):
            return Answer(key=question.key, broken=f"no plan within {MOST_SECONDS:.0f} s")
        answer: Answer = ours.recv()
        return answer
    except EOFError:
        process.join()
        return Answer(key=question.key, broken=f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        ours.close()


def _answer(question: Question, there: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    seconds, plan, broken = None, None, ""
    try:
        if question.same is None:
            plan = decide(_problem(question), question.budget).plan
            seconds = step_seconds(plan)
        else:
            seconds = simulated_again(question.same, question)
    except UserError:
        pass  # no plan fits, or the pins are impossible
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
    used = resource.getrusage(resource.RUSAGE_SELF)
    there.send(
        Answer(
            key=question.key,
            seconds=seconds,
            plan=plan if question.budget is None else None,
            broken=broken,
            processor_seconds=used.ru_utime + used.ru_stime,
        )
    )


def _problem(question: Question) -> Problem:
    spec = dataclasses.replace(question.spec, parallelism=question.pin)
    return problem_from_cluster(spec, question.cluster)


def simulated_again(plan: Plan, question: Question) -> float:
    """Seconds of a step of ``plan``, with its order and placement, for the question's job and hardware."""
    judge = Simulated(_problem(question), plan.receive_ahead, placement_of(plan))
    return to_seconds(judge.evaluate(candidate_of(plan), in_full=True).step_ns)
