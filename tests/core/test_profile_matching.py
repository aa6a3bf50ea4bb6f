"""Which measurements serve which job."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.core.layout import Precision
from penstock.core.model import UnitKind
from penstock.core.moments import MomentType
from penstock.core.profile import CollectiveRecord, MachineKey, OptimizerRecord, Profile
from penstock.core.profile_matching import (
    OLDEST_SECONDS,
    head_degrees_to_measure,
    model_digest,
    stale,
    subject,
    tp_degrees_to_measure,
    unfit,
)
from penstock.core.replicas import ReductionType
from penstock.core.schedule import Kind
from tests.support.planning import TINY_GPT2, TINY_LLAMA, job, machine, profile_for

SPEC = job(sequence_length=16, global_batch=2, ranks=2)
MODEL = model_digest(SPEC.model, SPEC.data.sequence_length)
FITTING = profile_for(SPEC)


A_SUM = CollectiveRecord(num_ranks=2, num_bytes=8, seconds=1.0, spread=0.0)


def test_a_profile_serves_the_types_in_which_sums_were_measured() -> None:
    narrow = dataclasses.replace(SPEC.training, gradient_reduction_type=ReductionType.BF16)
    narrow_spec = dataclasses.replace(SPEC, training=narrow)
    older = dataclasses.replace(FITTING, collectives=(A_SUM,))
    assert unfit(older, SPEC, MODEL) is None
    assert unfit(older, narrow_spec, MODEL) == "lacks sums of gradients in bf16"
    both = (A_SUM, dataclasses.replace(A_SUM, reduction_type=ReductionType.BF16))
    assert unfit(dataclasses.replace(FITTING, collectives=both), narrow_spec, MODEL) is None


def test_a_profile_of_the_job_s_model_serves() -> None:
    assert unfit(FITTING, SPEC, MODEL) is None


def test_a_profile_serves_with_or_without_operations_that_are_not_products() -> None:
    recomputations = tuple(dataclasses.replace(each, kind=Kind.R) for each in FITTING.units if each.kind is Kind.F)
    assert not any(each.kind is Kind.R for each in FITTING.units)
    assert unfit(dataclasses.replace(FITTING, units=FITTING.units + recomputations), SPEC, MODEL) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_digest": "0" * 64}, "is of another model"),
        ({"precision": Precision.BF16}, "was measured in bf16, the job trains in fp32"),
        ({"num_ranks": 4}, "was measured with 4 ranks, the job has 2"),
        ({"units": tuple(each for each in FITTING.units if each.batch == 1)}, "lacks micro-batch sizes"),
        (
            {"optimizer": (OptimizerRecord(num_parameters=1, seconds=1.0, spread=0.0, moment_type=MomentType.BF16),)},
            "lacks times of the optimizer with moments in fp32",
        ),
        (
            {"collectives": (dataclasses.replace(A_SUM, reduction_type=ReductionType.BF16),)},
            "lacks sums of gradients in fp32",
        ),
        (
            {"links": (dataclasses.replace(FITTING.links[0], bytes_per_second=1e15),)},
            "has links of a speed that no network has",
        ),
    ],
)
def test_a_profile_of_another_subject_does_not_serve_and_the_reason_is_stated(
    changes: dict[str, Any], reason: str
) -> None:
    assert reason in (unfit(dataclasses.replace(FITTING, **changes), SPEC, MODEL) or "")


OF_SHARDS = tuple(dataclasses.replace(each, tp=2) for each in FITTING.units)


def with_shards(**changes: Any) -> Profile:
    """As it fits, and at tp 2 as well."""
    return dataclasses.replace(FITTING, **{"units": (*FITTING.units, *OF_SHARDS), **changes})


@pytest.mark.parametrize("measured", [FITTING, with_shards()])
@pytest.mark.parametrize("pinned", [{}, {"tp": 1}])
def test_a_profile_of_shards_serves_jobs_that_do_not_pin_them(measured: Profile, pinned: Any) -> None:
    assert unfit(measured, job(**pinned), MODEL) is None


@pytest.mark.parametrize(
    ("measured", "pinned", "reason"),
    [
        (FITTING, {"tp": 2}, "lacks units at tp 2"),
        (with_shards(), {"tp": 2}, None),
        (with_shards(), {"tp": 2, "sequence_parallel": False}, "was measured with sequence parallelism"),
        (with_shards(), {"sequence_parallel": False}, "was measured with sequence parallelism"),
        (with_shards(), {"tp": 1, "sequence_parallel": False}, None),
        (with_shards(sequence_parallel=False), {}, "was measured without sequence parallelism"),
        (with_shards(sequence_parallel=False), {"sequence_parallel": False}, None),
        (dataclasses.replace(FITTING, sequence_parallel=False), {}, None),
        (dataclasses.replace(FITTING, only_tp=1), {}, "was measured at tp 1 alone"),
        (dataclasses.replace(FITTING, only_tp=1), {"tp": 1}, None),
        (with_shards(units=OF_SHARDS, only_tp=2), {"tp": 2}, None),
        (with_shards(units=OF_SHARDS, only_tp=2), {}, "was measured at tp 2 alone"),
    ],
)
def test_shards_serve_where_they_were_measured_alike(measured: Profile, pinned: Any, reason: str | None) -> None:
    assert unfit(measured, job(**pinned), MODEL) == reason


@pytest.mark.parametrize(
    ("hosts", "pinned", "degrees"),
    [
        ((0,), None, (1,)),
        ((0, 0), None, (1, 2)),
        ((0,) * 8, None, (1, 2, 4)),  # four heads
        ((0, 0, 1, 1), None, (1, 2)),
        ((0, 1, 0, 1), None, (1,)),
        ((0, 0, 0, 1, 1, 1), None, (1,)),
        ((0, 0, 0), None, (1,)),
        ((0, 0, 1, 1), 4, (4,)),
        ((0, 0), 1, (1,)),
        ((0, 0, 0), 2, (2,)),
        ((0, 0), 3, (1,)),
    ],
)
def test_degrees_divide_the_model_and_keep_to_hosts_unless_pinned(
    hosts: tuple[int, ...], pinned: int | None, degrees: tuple[int, ...]
) -> None:
    spec = job(ranks=12, global_batch=12, tp=pinned)
    assert tp_degrees_to_measure(spec, hosts) == degrees


def with_vocab(vocab: int, **pinned: Any) -> Any:
    """A job whose head has so many rows; 64 rows are 3 % of the work."""
    return job(model=dataclasses.replace(TINY_LLAMA, vocab=vocab), **pinned)


@pytest.mark.parametrize(
    ("vocab", "tp", "num_ranks", "degrees"),
    [
        (64, 1, 2, ()),
        (64, 1, 8, ()),
        (64, 1, 36, (2, 4, 8, 16, 32, 36)),
        (4096, 1, 2, (2,)),
        (4096, 1, 6, (2, 4, 6)),
        (4096, 2, 6, (2, 3)),
        (4096, 6, 6, ()),
        (4096, 1, 1, ()),
    ],
)
def test_a_head_is_measured_in_parts_where_it_is_more_than_a_rank_s_share(
    vocab: int, tp: int, num_ranks: int, degrees: tuple[int, ...]
) -> None:
    assert head_degrees_to_measure(with_vocab(vocab), tp, num_ranks) == degrees


def test_a_pinned_number_of_parts_is_measured_too_where_the_vocabulary_has_as_many_rows() -> None:
    assert head_degrees_to_measure(with_vocab(4096, head_parts=3), 1, 2) == (2, 3)
    assert head_degrees_to_measure(with_vocab(64, head_parts=3), 1, 2) == (3,)
    assert head_degrees_to_measure(with_vocab(64, head_parts=1), 1, 2) == ()
    assert head_degrees_to_measure(with_vocab(64, head_parts=64), 1, 2) == (64,)
    assert head_degrees_to_measure(with_vocab(64, head_parts=64), 2, 2) == ()


def test_a_pinned_number_of_parts_has_to_be_measured() -> None:
    pinned = job(sequence_length=16, global_batch=2, ranks=2, head_parts=2)
    assert unfit(FITTING, pinned, MODEL) == "lacks a head in 2 parts at tp 1"
    of_parts = (dataclasses.replace(each, head_parts=2) for each in FITTING.units if each.unit is UnitKind.HEAD)
    divided = dataclasses.replace(FITTING, units=(*FITTING.units, *of_parts))
    assert unfit(divided, pinned, MODEL) is None
    assert unfit(divided, SPEC, MODEL) is None


@pytest.mark.parametrize(
    ("pinned", "reason"),
    [
        ({"tp": 2, "head_parts": 4}, "lacks a head in 4 parts at tp 2"),
        ({"tp": 2, "head_parts": 2}, None),
        ({"tp": 1, "head_parts": 4}, None),
        ({"head_parts": 4}, None),
        ({"head_parts": 3}, "lacks a head in 3 parts at tp 1"),
    ],
)
def test_a_pinned_number_of_parts_has_to_be_measured_where_the_planner_asks_for_it(
    pinned: dict[str, Any], reason: str | None
) -> None:
    """At the pinned degree of tensor parallelism; at 3 and tp 2 alone it does not serve either (`check_pins`)."""
    spec = job(ranks=4, **pinned)
    degrees = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 3))
    units = tuple(
        dataclasses.replace(each, tp=tp, head_parts=parts)
        for tp, parts in degrees
        for each in FITTING.units
        if parts == 1 or each.unit is UnitKind.HEAD
    )
    measured = dataclasses.replace(FITTING, units=units, num_ranks=4)
    assert measured.degrees == degrees
    assert unfit(measured, spec, MODEL) == reason


def test_the_number_of_blocks_does_not_matter() -> None:
    deeper = dataclasses.replace(TINY_LLAMA, layers=99)
    assert model_digest(TINY_LLAMA, 16) == model_digest(deeper, 16)
    assert len({model_digest(TINY_LLAMA, 16), model_digest(TINY_LLAMA, 32), model_digest(TINY_GPT2, 16)}) == 3


@pytest.mark.parametrize(("age", "old"), [(0, False), (OLDEST_SECONDS, False), (OLDEST_SECONDS + 1, True)])
def test_a_profile_ages(age: float, old: bool) -> None:
    reason = stale(FITTING, FITTING.measured_at + age)
    assert (reason is not None) == old
    assert reason in (None, "is 7 days old")


def test_each_part_names_another_subject() -> None:
    here = machine()
    parts: list[tuple[MachineKey, str, Precision, int]] = [
        (here, "m", Precision.FP32, 2),
        (dataclasses.replace(here, threads_per_rank=2), "m", Precision.FP32, 2),
        (here, "n", Precision.FP32, 2),
        (here, "m", Precision.BF16, 2),
        (here, "m", Precision.FP32, 4),
    ]
    assert len({subject(*each) for each in parts}) == len(parts)
    assert subject(*parts[0]) == subject(*parts[0])
