"""Costs of buckets of gradients: how much of a stage's last backward each waits for, and how long its sums take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from penstock.core.buckets import bucket_elements, stage_buckets
from penstock.core.replicas import largest_shard
from penstock.core.schedule import Group, Part
from penstock.planner.candidate import Candidate
from penstock.planner.memory import gradient_bytes
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.problem import Problem
from penstock.planner.simulate.costs import MILLION, Bucket
from penstock.planner.stagecost import PASSES, Stages, UnitTable, first_like, unit_counts
from penstock.planner.tables import shards_seconds


def buckets_of(
    problem: Problem, candidate: Candidate, units: UnitTable, stage_ranks: Sequence[int], devices: Sequence[int]
) -> tuple[tuple[Bucket, ...], ...]:
    """`Costs.buckets`; none if a plan has none.

    ``units`` has the costs of units for the slices of a micro-batch; ``devices`` the first one of every rank.
    """
    mesh, model = candidate.mesh, problem.model
    if not problem.has_buckets(mesh):
        return ()
    known: dict[tuple[tuple[int, int], tuple[Part, ...]], list[tuple[tuple[int, int], int, int]]] = {}
    costs = []
    parts_of_stages = stage_buckets(model, candidate.stages, problem.precision, mesh.tp)
    for stage, rank, parts in zip(candidate.stages, stage_ranks, parts_of_stages, strict=True):
        key = (first_like(model, stage), parts)
        if parts and key not in known:
            known[key] = _shares(problem, candidate, units, stage, parts)
        peers = devices[rank :: mesh.pp]
        costs.append(
            tuple(
                Bucket(
                    part=part,
                    done_ppm=done_ppm,
                    reduce_ns=_reduce_ns(problem, candidate, num_bytes, shards_ns, peers),
                )
                for part, (done_ppm, num_bytes, shards_ns) in zip(parts, known.get(key, ()), strict=True)
            )
        )
    return tuple(costs)


def _shares(
    problem: Problem, candidate: Candidate, units: UnitTable, stage: tuple[int, int], parts: Sequence[Part]
) -> list[tuple[tuple[int, int], int, int]]:
    """Of every bucket of a stage the parts of B and W done at its end, its bytes, and its time in sums over shards."""
    first, _ = stage
    mesh, model = candidate.mesh, problem.model
    ranges: Stages = tuple((first + part.first, first + part.stop) for part in parts)
    done_ppm = _done_ppm(units, unit_counts(model, ranges))
    elements = bucket_elements(model, *stage, mesh.tp)
    sums = [sum(elements[part.first : part.stop]) for part in parts]
    flats = [candidate.optimizer_shards * largest_shard(count, candidate.optimizer_shards) for count in sums]
    per_gradient = gradient_bytes(problem.precision, problem.software.gradient_type)
    shards_ns = np.zeros(len(parts), dtype=np.int64)
    if mesh.tp > 1:
        shards_ns = whole_nanoseconds(shards_seconds(problem, ranges, mesh))
    return list(zip(done_ppm, [count * per_gradient for count in flats], shards_ns.tolist(), strict=True))


def _done_ppm(units: UnitTable, counts: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """The last backward is that of slice 0. ``counts`` [buckets, unit kinds] are units of each kind."""
    seconds = counts @ units.seconds[:, :, 0].T
    weight = seconds[:, len(PASSES) - 1]
    both = weight + seconds[:, len(PASSES) - 2]
    return list(zip(_running_ppm(both.tolist()), _running_ppm(weight.tolist()), strict=True))


def _running_ppm(parts: Sequence[float]) -> list[int]:
    """The share of the total that each part and those before it have, in millionths; all of it at the end."""
    total = sum(parts)
    shares = [round(MILLION * share / total) if total else 0 for share in accumulate(parts)]
    return [*shares[:-1], MILLION]


def _reduce_ns(
    problem: Problem, candidate: Candidate, num_bytes: int, shards_ns: int, peers: Sequence[int]
) -> dict[Group, int]:
    cost = problem.cost_of(candidate.mesh.tp)
    reduce_seconds = cost.reduce_scatter_seconds if candidate.optimizer_shards > 1 else cost.all_reduce_seconds
    return {Group.TP: shards_ns, Group.DP: int(whole_nanoseconds(reduce_seconds(num_bytes, peers)))}
