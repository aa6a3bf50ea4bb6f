"""Compares the planner's free choices with pinned plans and with plans of fewer resources, on described hardware.

A large problem has 8 to 16,384 devices, a model of 1 to 1,000 billion parameters, 2 thousand to a million tokens and 1
to 4,096 sequences. A small problem has at most 16 devices. A problem depends only on the seed and its number. Each
property is a `Relation`. For small problems, which are many, only the first one and more memory are checked:

- no plan with all fields pinned is faster than the free plan by more than 1 % (`benchmarks.soak.pins`);
- removing a pin never makes a step more than 0.5 % longer. The free plan is compared with plans of one pinned field,
  and plans with all fields but one with those of all fields;
- neither does a quarter more memory, nor more devices where the old number is `minRanks`;
- links that are 10 % faster make a step longer only where the same plan, simulated again, gets slower, too. That is
  possible: a message that arrives earlier may delay another one. Such cases are reported but are not violations.

Every plan is made in a new process, and all plans of all problems in random order.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.soak.pins import pins_around
from benchmarks.soak.planning import Answer, Key, Question, answers

from penstock.core.cluster import ClusterSpec
from penstock.core.job import JobSpec, Metadata, ParallelismSpec, PipelineJob
from penstock.core.layout import num_parameters
from penstock.core.plan import Plan
from penstock.planner.problem import all_meshes, problem_from_cluster
from penstock.planner.variations import faster_links
from tests.support.random_plans import (
    LARGE,
    ONLY_SIMULATED,
    SLOWER_THAN_A_PIN,
    SLOWER_THAN_WITH_LESS,
    Sizes,
    full_pin,
    pin_text,
    random_job,
)

Report = Callable[[str], None]

FREE, ALL_PINNED, FASTER_LINKS, SAME_PLAN = "free", "all pinned", "links 10 % faster", "same plan, links 10 % faster"

FIELDS = ("dp", "tp", "pp", "micro_batch", "slices", "schedule")

REMOVED_FROM = 4
"""Number of random pins from which one field is removed."""

BYTES_PER_PARAMETER = 16
"""Least bytes in mixed precision. Models that exceed the memory of all devices are not drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relation:
    """The plan ``more`` of a problem exists if its plan ``less`` does, and takes at most ``times`` as long.

    If the plan ``unless`` is also longer than ``less``, the violation is only reported.
    """

    less: str
    more: str
    times: float
    unless: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A numbered job and its hardware, with the random numbers for its pins."""

    number: int
    spec: JobSpec
    cluster: ClusterSpec
    chance: random.Random

    @property
    def text(self) -> str:
        """The problem in one line."""
        spec = self.spec
        model = spec.model
        return (
            f"{num_parameters(model) / 1e9:.1f}B, {spec.resources.ranks:,} devices in nodes of "
            f"{self.cluster.devices_per_node}, {spec.training.global_batch:,} x {spec.data.sequence_length:,} tokens, "
            f"{spec.resources.memory_per_rank / 1e9:.0f} GB"
        )

    def question(self, name: str, **changes: Any) -> Question:
        """Request for a plan of this problem, with ``changes``."""
        return dataclasses.replace(Question(key=(self.number, name), spec=self.spec, cluster=self.cluster), **changes)


def draw_problem(seed: int, number: int, sizes: Sizes = LARGE) -> Problem:
    """The problem of this number: the first random one that has a mesh and memory for its model."""
    chance = random.Random(f"{seed} {number}")
    while True:
        spec, cluster = random_job(chance, sizes)
        memory = spec.resources.ranks * spec.resources.memory_per_rank
        has_mesh = next(all_meshes(problem_from_cluster(spec, cluster)), None) is not None
        if has_mesh and BYTES_PER_PARAMETER * num_parameters(spec.model) < memory:
            return Problem(number=number, spec=spec, cluster=cluster, chance=chance)


def compare(seed: int, *, first: int, count: int, pins: int, report: Report, sizes: Sizes = LARGE) -> dict[str, Any]:
    """Compare plans of ``count`` problems from number ``first`` on, each with ``pins`` pins."""
    problems = {number: draw_problem(seed, number, sizes) for number in range(first, first + count)}
    related = _related if sizes is LARGE else _related_of_small
    order = random.Random(seed)
    known = _answered([problem.question(FREE) for problem in problems.values()], order, report)
    questions, relations = list[Question](), list[tuple[int, Relation]]()
    for number, problem in problems.items():
        for relation, needed in related(problem, known[number, FREE].plan, pins):
            relations.append((number, relation))
            questions += needed
    known |= _answered(questions, order, report)
    pin_of = {question.key: question.pin for question in questions}
    violated, tolerated = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, relation in relations:
        if not _holds(relation, number, known):
            record = _record(relation, number, known, pin_of)
            (tolerated if _is_excused(relation, number, known) else violated).append(record)
    broken = [f"problem {key[0]}, {key[1]}: {answer.broken}" for key, answer in sorted(known.items()) if answer.broken]
    return {
        "first": first,
        "problems": [_summary(problem, known) for problem in problems.values()],
        "pins": pins,
        "plans": len(known),
        "processorSeconds": round(sum(answer.processor_seconds for answer in known.values())),
        "violations": [_sentence(record, problems) for record in violated] + broken,
        "alsoSlowerWithTheSamePlan": [_sentence(record, problems) for record in tolerated],
        "violated": violated,
        "jobs": {number: _manifests(problems[number]) for number in sorted({record["problem"] for record in violated})},
    }


def _answered(questions: list[Question], order: random.Random, report: Report) -> dict[Key, Answer]:
    known: dict[Key, Answer] = {}
    by_key = {question.key: question for question in questions}
    for answer in answers(order.sample(list(by_key.values()), len(by_key))):
        known[answer.key] = answer
        if answer.key[1] == FREE or len(known) % 100 == 0:
            step = answer.broken or ("nothing fits" if answer.seconds is None else f"{answer.seconds:.4g} s")
            report(f"{len(known)} of {len(by_key)} plans; problem {answer.key[0]}, {answer.key[1]}: {step}")
    return known


def _related(problem: Problem, free: Plan | None, num_pins: int) -> Iterator[tuple[Relation, list[Question]]]:
    """Relations that must hold for a problem, with the plans that they need."""
    pins = pins_around(problem.chance, problem.spec, problem.cluster, free, num_pins)
    yield from _with_pins(problem, pins)
    for i in problem.chance.sample(range(len(pins)), min(REMOVED_FROM, len(pins))):
        field = problem.chance.choice(FIELDS)
        question = problem.question(
            f"pin {i} without {field}", pin=dataclasses.replace(pins[i], stages=None, **{field: None})
        )
        yield Relation(less=f"pin {i}", more=question.key[1], times=SLOWER_THAN_WITH_LESS), [question]
    if free is None:
        return
    yield from _with_more(problem, free)
    here = full_pin(free)
    full = problem.question(ALL_PINNED, pin=here, budget=ONLY_SIMULATED)
    for field in FIELDS:
        one = problem.question(f"only {field} pinned", pin=ParallelismSpec(**{field: getattr(here, field)}))
        yield Relation(less=one.key[1], more=FREE, times=SLOWER_THAN_WITH_LESS), [one]
        others = problem.question(f"all but {field} pinned", pin=dataclasses.replace(here, **{field: None}))
        yield Relation(less=ALL_PINNED, more=others.key[1], times=SLOWER_THAN_WITH_LESS), [full, others]


def _related_of_small(problem: Problem, free: Plan | None, num_pins: int) -> Iterator[tuple[Relation, list[Question]]]:
    """Relations for one of many small problems."""
    yield from _with_pins(problem, pins_around(problem.chance, problem.spec, problem.cluster, free, num_pins))
    if free is not None:
        yield _with_more_memory(problem)


def _with_pins(problem: Problem, pins: list[ParallelismSpec]) -> Iterator[tuple[Relation, list[Question]]]:
    for i, pin in enumerate(pins):
        question = problem.question(f"pin {i}", pin=pin, budget=ONLY_SIMULATED)
        yield Relation(less=question.key[1], more=FREE, times=SLOWER_THAN_A_PIN), [question]


def _with_more_memory(problem: Problem) -> tuple[Relation, list[Question]]:
    resources = problem.spec.resources
    more = dataclasses.replace(resources, memory_per_rank=resources.memory_per_rank * 5 // 4)
    roomy = problem.question("a quarter more memory", spec=dataclasses.replace(problem.spec, resources=more))
    return Relation(less=FREE, more=roomy.key[1], times=SLOWER_THAN_WITH_LESS), [roomy]


def _with_more(problem: Problem, free: Plan) -> Iterator[tuple[Relation, list[Question]]]:
    resources, cluster = problem.spec.resources, problem.cluster
    yield _with_more_memory(problem)
    for devices in {1, cluster.devices_per_node}:
        wide = dataclasses.replace(resources, ranks=resources.ranks + devices, min_ranks=resources.ranks)
        larger = dataclasses.replace(cluster, num_nodes=cluster.num_nodes + 1)
        question = problem.question(
            f"{devices} more devices", spec=dataclasses.replace(problem.spec, resources=wide), cluster=larger
        )
        yield Relation(less=FREE, more=question.key[1], times=SLOWER_THAN_WITH_LESS), [question]
    faster = faster_links(problem.spec, cluster).hardware
    assert isinstance(faster, ClusterSpec), "links of a description are described"
    question = problem.question(FASTER_LINKS, cluster=faster)
    same = problem.question(SAME_PLAN, cluster=faster, same=free)
    relation = Relation(less=FREE, more=FASTER_LINKS, times=SLOWER_THAN_WITH_LESS, unless=SAME_PLAN)
    yield relation, [question, same]


def _holds(relation: Relation, number: int, known: Mapping[Key, Answer]) -> bool:
    less, more = known[number, relation.less], known[number, relation.more]
    if less.seconds is None or more.broken:
        return True
    return more.seconds is not None and more.seconds <= relation.times * less.seconds


def _is_excused(relation: Relation, number: int, known: Mapping[Key, Answer]) -> bool:
    if not relation.unless:
        return False
    less, same = known[number, relation.less].seconds, known[number, relation.unless].seconds
    return less is not None and same is not None and same > relation.times * less


def _record(
    relation: Relation, number: int, known: Mapping[Key, Answer], pins: Mapping[Key, ParallelismSpec]
) -> dict[str, Any]:
    """Record of both plans of a violated relation."""

    def side(name: str) -> dict[str, Any]:
        answer, pin = known[number, name], pins.get((number, name))
        plan = None if answer.plan is None else pin_text(full_pin(answer.plan))
        return {"name": name, "seconds": answer.seconds, "plan": plan, "pin": pin.to_manifest() if pin else {}}

    return {"problem": number, "more": side(relation.more), "less": side(relation.less)}


def _sentence(record: dict[str, Any], problems: Mapping[int, Problem]) -> str:
    def side(plan: dict[str, Any]) -> str:
        step = "nothing fits" if plan["seconds"] is None else f"{plan['seconds']:.4g} s"
        shown = plan["plan"] or ", ".join(f"{name} {value}" for name, value in plan["pin"].items() if name != "stages")
        return f"{plan['name']}: {step} ({shown})"

    less, more = record["less"], record["more"]
    gap = "" if more["seconds"] is None else f", {more['seconds'] / less['seconds'] - 1:.1%} slower"
    return f"problem {record['problem']} ({problems[record['problem']].text}): {side(more)}, {side(less)}{gap}"


def _summary(problem: Problem, known: Mapping[Key, Answer]) -> dict[str, Any]:
    """Summary of the free plan and the fastest pinned one."""
    free = known[problem.number, FREE]
    pinned = [a.seconds for (number, name), a in known.items() if number == problem.number and name.startswith("pin ")]
    fitting = [seconds for seconds in pinned if seconds is not None]
    return {
        "problem": problem.number,
        "job": problem.text,
        "seconds": free.seconds,
        "plan": None if free.plan is None else pin_text(full_pin(free.plan)),
        "processorSeconds": round(free.processor_seconds, 1),
        "pinsThatFit": len(fitting),
        "fastestPin": min(fitting, default=None),
        "medianPin": statistics.median(fitting) if fitting else None,
    }


def _manifests(problem: Problem) -> dict[str, Any]:
    job = PipelineJob(metadata=Metadata(name=f"problem-{problem.number}"), spec=problem.spec)
    return {"job": job.to_manifest(), "cluster": problem.cluster.to_manifest()}
