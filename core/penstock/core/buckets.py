"""Buckets of a stage's gradients: replicas sum them one by one, the first of them while the rest are still computed.

The last backward of a stage runs from its last unit to its first. A bucket is a range of units, so its gradients are
complete once that backward has passed its first unit. Its sum over replicas then runs next to the backward of the units
before it. Only the last bucket is summed after all compute: with n equal buckets, and sums that take no longer than the
backward, one n-th of the sum is exposed.

Bounds follow from bytes. `MOST_BUCKETS` is small, because every bucket costs one more start of an action and of a
collective: 4 hide three quarters of the sum, 8 would hide another eighth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from penstock.core.layout import Precision, declared_parameters, parameters, tied_stages
from penstock.core.model import ModelSpec
from penstock.core.schedule import Part

MOST_BUCKETS = 4

LEAST_BUCKET_BYTES = 2**18
"""A smaller message takes little longer than the latency of its collective, about 0.2 ms over gloo at 1 GB/s."""


def stage_buckets(
    spec: ModelSpec, stages: Sequence[tuple[int, int]], precision: Precision, tp: int
) -> tuple[tuple[Part, ...], ...]:
    """The buckets of every stage in the order in which backward completes them, for ``tp`` shards; none for a stage
    whose gradients are summed as a whole.

    Of the stages with rows of a tied matrix only the first one has buckets. The others hold the head, which is complete
    first, but waits for the sum over its copies.
    """
    copies = tied_stages(spec, stages)[1:]
    return tuple(
        () if number in copies else _buckets_of_stage(spec, *stage, precision, tp)
        for number, stage in enumerate(stages)
    )


@functools.lru_cache(maxsize=1024)
def _buckets_of_stage(spec: ModelSpec, first: int, stop: int, precision: Precision, tp: int) -> tuple[Part, ...]:
    """The parts of a head on one stage run as one, so they are in one bucket."""
    num_head_units = max(stop - max(spec.first_head_unit, first), 0)
    num_bytes = [count * precision.accumulate_bytes for count in bucket_elements(spec, first, stop, tp)]
    if num_head_units > 1:
        num_bytes[-num_head_units:] = [sum(num_bytes[-num_head_units:])]
    buckets = buckets_of(num_bytes)
    more = max(num_head_units - 1, 0)
    return tuple(Part(part.first, part.stop + (more if part is buckets[0] else 0)) for part in buckets)


def elements_of_buckets(
    spec: ModelSpec, stages: Sequence[tuple[int, int]], precision: Precision, tp: int
) -> tuple[tuple[int, ...], ...]:
    """Elements of the gradients of every bucket of `stage_buckets`, each on the largest of ``tp`` shards."""
    return tuple(
        _elements_of_buckets(spec, *stage, tp, parts) if parts else ()
        for stage, parts in zip(stages, stage_buckets(spec, stages, precision, tp), strict=True)
    )


@functools.lru_cache(maxsize=1024)
def _elements_of_buckets(spec: ModelSpec, first: int, stop: int, tp: int, parts: tuple[Part, ...]) -> tuple[int, ...]:
    elements = bucket_elements(spec, first, stop, tp)
    return tuple(sum(elements[part.first : part.stop]) for part in parts)


def even_groups(num_bytes: Sequence[int], count: int) -> list[int]:
    """The group of each unit, so that ``count`` groups of neighbours have about equal bytes.

    A unit is in group k if the middle of its bytes is in the k-th of ``count`` equal shares of all bytes.
    """
    total = sum(num_bytes)
    befores = accumulate(num_bytes, initial=0)
    return [
        min(count * (2 * before + own) // (2 * total), count - 1)
        for before, own in zip(befores, num_bytes, strict=False)
    ]


def completed_by_units(spec: ModelSpec, first: int, stop: int) -> list[list[str]]:
    """Names of the parameters whose gradients each unit of a stage completes: a matrix that several units share belongs
    to the first of them, whose backward is last.
    """
    names: list[list[str]] = []
    shared: set[str] = set()
    for unit in spec.units[first:stop]:
        names.append([parameter.name for parameter in parameters(spec, unit) if parameter.name not in shared])
        shared.update(names[-1])
    return names


def bucket_elements(spec: ModelSpec, first: int, stop: int, tp: int) -> list[int]:
    """Elements of the gradients that each unit completes, each on the largest of ``tp`` shards."""
    declared = declared_parameters(spec, first, stop)
    return [
        sum(max(math.prod(declared[name].shard_shape(tp, shard)) for shard in range(tp)) for name in names)
        for names in completed_by_units(spec, first, stop)
    ]


def buckets_of(num_bytes: Sequence[int]) -> tuple[Part, ...]:
    """Buckets of units whose gradients take ``num_bytes``, from the last unit to the first; none if one bucket is
    enough.

    A bucket exceeds an equal share by at most one unit, and may be missing where a unit is larger than that.
    """
    count = min(MOST_BUCKETS, sum(num_bytes) // LEAST_BUCKET_BYTES)
    if count < 2:
        return ()
    numbers = even_groups(num_bytes, count)
    bounds = [unit for unit, number in enumerate(numbers) if unit == 0 or number != numbers[unit - 1]]
    parts = [Part(first, stop) for first, stop in pairwise([*bounds, len(numbers)])]
    return tuple(reversed(parts)) if len(parts) > 1 else ()
