"""Where the sums over a tied matrix stand whose rows are on several stages of a rank."""

from __future__ import annotations

from penstock.core.invariants import prove
from penstock.core.layout import tied_stages
from penstock.core.program import Reduction
from penstock.core.schedule import Group
from tests.planner.test_lowering import TWO_STAGES_EACH, at_once
from tests.support.planning import TINY_GPT2, TINY_LLAMA
from tests.support.small_programs import actions, lowered


def test_the_first_stage_and_those_with_parts_of_the_head_hold_a_tied_matrix() -> None:
    units = TINY_GPT2.num_units
    assert tied_stages(TINY_GPT2, ((0, 2), (2, units - 1), (units - 1, units))) == (0, 2)
    assert tied_stages(TINY_GPT2, ((0, units),)) == (0,)
    divided = TINY_GPT2.divided(3)
    assert tied_stages(divided, ((0, 2), (2, units), (units, units + 2))) == (0, 1, 2)
    assert tied_stages(divided, ((0, 2), (2, units - 1), (units - 1, units + 2))) == (0, 2)
    assert tied_stages(divided, ((0, units), (units, units + 2))) == (0, 1)
    assert tied_stages(TINY_LLAMA.divided(3), ((0, 2), (2, TINY_LLAMA.num_units + 2))) == ()


def test_copies_on_one_rank_are_summed_before_replicas_sum_them() -> None:
    """Replicas may divide the sums. Without replicas the rank sums them with the norm."""
    text = "0F0,1F0,1B0,0B0\n"
    program = lowered(text, dp=True, tie=(0, 1))
    assert program.reductions[0] == Reduction(Group.TIE, (0,), (0, 1))
    assert actions(program, 0)[-9:] == [
        *("0START_REDUCE(tie)", "0WAIT_REDUCE(tie)", "0START_REDUCE(dp)", "1START_REDUCE(dp)"),
        *("0WAIT_REDUCE(dp)", "1WAIT_REDUCE(dp)", *at_once(0, "norm"), "0STEP"),
    ]
    prove(program)
    assert [reduction.group for reduction in lowered(text, tie=(0, 1)).reductions] == [Group.NORM]


def test_a_rank_with_several_stages_of_a_tied_head_sums_them_at_once_after_all_compute() -> None:
    """Stages 1 and 3 are on rank 1; on rank 0, which has the first stage, stage 2 is summed without a message."""
    program = lowered(TWO_STAGES_EACH, dp=True, tie=(0, 1, 2, 3))
    assert program.reductions[0] == Reduction(Group.TIE, (0, 1), (0, 1, 2, 3))
    ends = actions(program, 1)
    assert ends[-9:] == [
        *("1START_REDUCE(tie)", "1WAIT_REDUCE(tie)", "1START_REDUCE(dp)", "3START_REDUCE(dp)"),
        *("1WAIT_REDUCE(dp)", "3WAIT_REDUCE(dp)", *at_once(1, "norm"), "1STEP"),
    ]
    first = actions(program, 0)
    assert first[-9:] == [
        *("0START_REDUCE(tie)", "0WAIT_REDUCE(tie)", "0START_REDUCE(dp)", "2START_REDUCE(dp)"),
        *("0WAIT_REDUCE(dp)", "2WAIT_REDUCE(dp)", *at_once(0, "norm"), "0STEP"),
    ]
    prove(program)
