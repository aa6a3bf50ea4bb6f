"""A model whose head's vocabulary is shared by several units."""

from __future__ import annotations

import pytest

from penstock.core.errors import UserError
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.plan import Plan
from penstock.core.schedule import ScheduleSpec

SPEC = ModelSpec(family=Family.LLAMA, layers=2, hidden=8, heads=2, vocab=10)


def test_a_divided_model_has_a_unit_for_every_part() -> None:
    divided = SPEC.divided(3)
    assert divided.num_units == len(divided.units) == SPEC.num_units + 2
    assert [(unit.kind, unit.part) for unit in divided.units[-3:]] == [(UnitKind.HEAD, part) for part in range(3)]
    assert [unit.index for unit in divided.units] == list(range(divided.num_units))
    assert divided.whole == SPEC
    assert divided.divided(1) == SPEC
    assert divided.divided(2).head_parts == 2
    assert divided.with_vocab(12).whole == SPEC.with_vocab(12)


def test_one_part_is_the_model_itself() -> None:
    assert SPEC.divided(1) is SPEC
    assert SPEC.head_parts == 1


def test_more_parts_than_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="vocabulary of 10 cannot be divided into 11 parts"):
        SPEC.divided(11)


def test_a_plan_writes_the_parts_next_to_the_model_and_reads_them_back() -> None:
    plan = Plan(
        model=SPEC,
        precision=Precision.FP32,
        pp=2,
        microbatch=1,
        num_microbatches=2,
        slices=(8,),
        stages=((0, 3), (3, 5), (5, 6), (6, 7)),
        head_parts=2,
        schedule=ScheduleSpec(generator="interleaved"),
    )
    assert plan.model == SPEC.divided(2)
    written = plan.to_manifest()
    assert written["headParts"] == 2
    assert written["model"] == SPEC.to_manifest()
    assert Plan.from_manifest(written) == plan
