"""Costs of buckets: how much of a stage's last backward and first forward each is, and how long its sums and its gather
take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.core.buckets import bucket_elements, stage_buckets
from penstock.core.replicas import largest_shard
from penstock.core.schedule import Group, Part
from penstock.planner.candidate import Candidate
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.problem import Problem
from penstock.planner.simulate.costs import MILLION, Bucket
from penstock.planner.stagecost import Stages, UnitTable, first_like, unit_counts
from penstock.planner.tables import shards_seconds


def buckets_of(
    problem: Problem, candidate: Candidate, units: UnitTable, stage_ranks: Sequence[int], devices: Sequence[int]
) -> tuple[tuple[Bucket, ...], ...]:
    """Return `Costs.buckets`, which is empty without buckets.

    ``units`` has the costs of units for the slices of a micro-batch; ``devices`` the first one of every rank.
    """
    mesh, model = candidate.mesh, problem.model
    if not problem.has_buckets(mesh):
        return ()
    known: dict[tuple[tuple[int, int], tuple[Part, ...]], list[_Share]] = {}
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
                    done_ppm=share.done_ppm,
                    reduce_ns=_reduce_ns(problem, candidate, share, peers),
                    gather_ns=_gather_ns(problem, candidate, share, peers),
                )
                for part, share in zip(parts, known.get(key, ()), strict=True)
            )
        )
    return tuple(costs)


class _Share(NamedTuple):
    """`Bucket.done_ppm` of a bucket, its elements including gaps, and the time of its sums over shards."""

    done_ppm: tuple[int, int, int]
    num_elements: int
    shards_ns: int


def _shares(
    problem: Problem, candidate: Candidate, units: UnitTable, stage: tuple[int, int], parts: Sequence[Part]
) -> list[_Share]:
    """The share of every bucket of a stage."""
    first, _ = stage
    mesh, model = candidate.mesh, problem.model
    ranges: Stages = tuple((first + part.first, first + part.stop) for part in parts)
    done_ppm = _done_ppm(units, unit_counts(model, ranges))
    elements = bucket_elements(model, *stage, mesh.tp)
    sums = [sum(elements[part.first : part.stop]) for part in parts]
    flats = [candidate.optimizer_shards * largest_shard(count, candidate.optimizer_shards) for count in sums]
    shards_ns = np.zeros(len(parts), dtype=np.int64)
    if mesh.tp > 1:
        shards_ns = whole_nanoseconds(shards_seconds(problem, ranges, mesh))
    return list(map(_Share, done_ppm, flats, shards_ns.tolist()))


def _done_ppm(units: UnitTable, counts: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
    """`Bucket.done_ppm` of every bucket, by the costs of slice 0, which the first F and the last backward are of.

    ``counts`` [buckets, unit kinds] are units of each kind.
    """
    forward, gradient, weight = (counts @ units.seconds[:, :, 0].T).T
    return list(zip(*(_running_ppm(row.tolist()) for row in (gradient + weight, weight, forward)), strict=True))


def _running_ppm(parts: Sequence[float]) -> list[int]:
    """The share of the total that each part and those before it have, in millionths; all of it at the end."""
    total = sum(parts)
    shares = [round(MILLION * share / total) if total else 0 for share in accumulate(parts)]
    return [*shares[:-1], MILLION]


def _reduce_ns(problem: Problem, candidate: Candidate, share: _Share, peers: Sequence[int]) -> dict[Group, int]:
    cost = problem.cost_of(candidate.mesh.tp)
    num_bytes = share.num_elements * problem.software.gradient_type.num_bytes(problem.precision)
    seconds = cost.gradient_sum_seconds(num_bytes, peers, scattered=candidate.optimizer_shards > 1)
    return {Group.TP: share.shards_ns, Group.DP: int(whole_nanoseconds(seconds))}


def _gather_ns(problem: Problem, candidate: Candidate, share: _Share, peers: Sequence[int]) -> int:
    if candidate.optimizer_shards == 1:
        return 0
    num_bytes = share.num_elements * problem.precision.compute_bytes
    return int(whole_nanoseconds(problem.cost_of(candidate.mesh.tp).all_gather_seconds(num_bytes, peers)))
