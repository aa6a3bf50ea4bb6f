"""Brute force: the shortest step over all placements and cuts into stages, by the planner's own simulator."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

from penstock.core.cluster import OtherDevices
from penstock.core.plan import Plan
from penstock.core.schedule import ScheduleSpec
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.placement import every_arrangement
from penstock.planner.problem import Mesh, Problem, problem_from_cluster
from penstock.planner.stagecost import equal_slices
from tests.support.planning import cluster, job, slow_link, slower_device

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
"""Schedules with one stage per rank, by formula."""

SLICES = (1, 2)

FEW = 8
"""Number of the best ZB-H1 plans of a mesh that are also simulated as ``zb``, whose orders take longer to make."""

TIMES = (1.3, 1.6, 2.0, 3.0)


def random_problem(chance: random.Random, num_devices: int, **pinned: Any) -> Problem:
    """A problem on this many devices of two kinds, on nodes of one device, some with a slow link, without shards."""
    slow = slower_device(chance.choice(TIMES))
    links = (slow_link(0, 1, chance.choice((3.0, 100.0))),) if chance.random() < 0.4 else ()
    others = (OtherDevices(device=slow, num_nodes=chance.randrange(1, num_devices)),)
    described = cluster(num_devices, 1, other_devices=others, links=links)
    spec = job(
        ranks=num_devices,
        global_batch=chance.choice((4, 8, 12)),
        sequence_length=chance.choice((16, 32)),
        tp=1,
        **pinned,
    )
    return problem_from_cluster(spec, described)


def least_step_ns(problem: Problem, plan: Plan) -> tuple[int, str]:
    """The shortest step within memory, and a description of its plan.

    Over all meshes of all devices with one shard and one stage per rank, all distinct placements, all cuts, the
    `SLICES` and those of ``plan``, micro-batches of one sequence and those of ``plan``, and all `SCHEDULES` or the
    pinned one of them. If no schedule is pinned, also ``zb`` for the best `FEW` ZB-H1 plans of each mesh.
    """
    results = [_least_of_mesh(problem, plan, mesh) for mesh in _meshes(problem, plan)]
    return min(results)


def _meshes(problem: Problem, plan: Plan) -> Iterator[Mesh]:
    num_devices = problem.num_devices
    for dp in range(1, num_devices + 1):
        if num_devices % dp or problem.global_batch % dp:
            continue
        share = problem.global_batch // dp
        for microbatch in sorted({1, min(plan.microbatch, share)}):
            yield Mesh.of_share(dp=dp, tp=1, pp=num_devices // dp, microbatch=microbatch, share=share)


def _least_of_mesh(problem: Problem, plan: Plan, mesh: Mesh) -> tuple[int, str]:
    if mesh.remainder:
        return 1 << 60, "micro-batches of several sizes are not compared"
    judged = list[tuple[int, str, Simulated, Candidate]]()
    judge = Simulated(problem, plan.receive_ahead)
    for arrangement in every_arrangement(judge, mesh):
        arranged = judge.placing(lambda _, devices=arrangement: devices)  # type: ignore[misc]
        for candidate in _candidates(problem, plan, mesh):
            evaluation = arranged.evaluate(candidate, in_full=True)
            if max(evaluation.peak_bytes) <= problem.memory_limit_bytes:
                name = f"{candidate.label}, stages {candidate.stages}, slices {candidate.slices}, on {arrangement}"
                judged.append((evaluation.step_ns, name, arranged, candidate))
    judged.sort(key=lambda result: result[:2])
    split = [result for result in judged if result[3].schedule == "zb-h1" != problem.pinned.schedule][:FEW]
    best = [(step_ns, name) for step_ns, name, *_ in judged[:1]]
    for _, name, arranged, candidate in split:
        made = arranged.best_variant(dataclasses.replace(candidate, schedule="zb"))
        evaluation = arranged.evaluate(made, in_full=True)
        if max(evaluation.peak_bytes) <= problem.memory_limit_bytes:
            best.append((evaluation.step_ns, f"zb instead of {name}"))
    return min(best, default=(1 << 60, "nothing fits"))


def _candidates(problem: Problem, plan: Plan, mesh: Mesh) -> Iterator[Candidate]:
    units = problem.model.num_units
    schedules: tuple[str | ScheduleSpec, ...] = ("1f1b",)
    slicings: set[tuple[int, ...]] = {(problem.sequence_length,)}
    if mesh.pp > 1:
        schedules = SCHEDULES if problem.pinned.schedule is None else (problem.pinned.schedule,)
        slicings = {plan.slices, *(equal_slices(problem.sequence_length, count) for count in SLICES)}
    for cuts in itertools.combinations(range(1, units), mesh.pp - 1):
        stages = tuple(itertools.pairwise((0, *cuts, units)))
        for slices, schedule in itertools.product(sorted(slicings), schedules):
            yield Candidate(mesh=mesh, stages=stages, slices=slices, schedule=schedule)
