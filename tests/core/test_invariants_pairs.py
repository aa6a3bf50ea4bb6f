"""The proof of overlapped pairs: both actions find what was there before either began, and anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.core.errors import ProgramError
from penstock.core.invariants import prove
from penstock.core.program import Instruction, Program
from penstock.core.schedule import Action, Kind, parse_action
from tests.support.small_programs import lowered, moved, one_line_remade, replaced, without

SCHEDULE = """\
0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2
1F0,(1B0;1F1)OVERLAP_F_B,(1B1;1F2)OVERLAP_F_B,1B2
"""
PAIR = "(1B0.0;1F1.0)OVERLAP_F_B"


def program() -> Program:
    return lowered(SCHEDULE, keep_pairs=True)


def refused(broken: Program) -> str:
    with pytest.raises(ProgramError) as caught:
        prove(broken)
    return str(caught.value)


def test_pairs_are_proved_and_take_one_step_of_the_grid() -> None:
    proof = prove(program())
    assert proof.num_transfers == 6
    assert proof.num_steps == 7  # rank 0: three forwards' worth, two rounds behind rank 1, and two backwards
    apart = prove(lowered(SCHEDULE))
    assert proof.num_instructions < apart.num_instructions
    assert all(both >= one for both, one in zip(proof.live_bytes, apart.live_bytes, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "(1B1.0;1F1.0)OVERLAP_F_B",  # the backward needs the forward
        "(1F1.0;1F2.0)OVERLAP_F_B",
        "(1B0.0;1B1.0)OVERLAP_F_B",
        "(1B0.0;1W1.0)OVERLAP_F_B",
        "(1B0.0)OVERLAP_F_B",
        "(1B0.0;1F1.0;1F2.0)OVERLAP_F_B",
    ],
)
def test_only_a_forward_and_a_backward_of_different_microbatches_are_a_pair(text: str) -> None:
    broken = replaced(program(), 1, PAIR, lambda pair: replace(pair, action=parse_action(text)))
    assert f"{text}: is no forward and backward of different micro-batches" in refused(broken)


@pytest.mark.parametrize("kind", [Kind.F, Kind.R, Kind.B])
def test_an_action_of_one_kind_has_no_children(kind: Kind) -> None:
    """They would be proved to run, and something else would."""
    broken = replaced(program(), 1, PAIR, lambda pair: replace(pair, action=replace(pair.action, kind=kind)))
    assert "is no forward and backward of different micro-batches" in refused(broken)


def test_neither_child_runs_before_its_message() -> None:
    broken = moved(program(), 1, "1WAIT_RECV_F1.0", before="1SEND_B0.0")
    assert "1B0.0;1F1.0)OVERLAP_F_B: reads x@1:1.0, which is under transfer" in refused(broken)


def test_no_message_is_sent_before_both_are_done() -> None:
    broken = moved(program(), 1, "1SEND_B0.0", before=PAIR)
    assert "1SEND_B0.0: reads g_out@1:0.0, which was never acquired" in refused(broken)


def test_a_child_does_no_work_twice() -> None:
    again = parse_action("(1B0.0;1F2.0)OVERLAP_F_B")
    broken = replaced(program(), 1, "(1B1.0;1F2.0)OVERLAP_F_B", lambda pair: replace(pair, action=again))
    assert "(1B0.0;1F2.0)OVERLAP_F_B: does work that was done before" in refused(broken)


def test_a_child_has_its_turn() -> None:
    later = parse_action("(1B2.0;1F1.0)OVERLAP_F_B")
    broken = replaced(program(), 1, PAIR, lambda pair: replace(pair, action=later))
    assert "(1B2.0;1F1.0)OVERLAP_F_B: runs before the F of its slice" in refused(broken)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pair: replace(pair, reads=pair.reads[::-1]), "has to read"),
        (lambda pair: replace(pair, reads=pair.reads[1:]), "has to read"),
        (lambda pair: replace(pair, writes=pair.writes[:-1]), "has to write"),
    ],
)
def test_the_slots_are_those_of_both(change: Callable[[Instruction], Instruction], reason: str) -> None:
    assert f"{PAIR}: {reason} " in refused(replaced(program(), 1, PAIR, change))


def test_what_the_first_child_reads_is_not_freed_for_the_second() -> None:
    """Slots of both live at once, so they may not share a place."""
    slots = list(program().ranks[1].slots)
    (pair,) = [i for i in program().ranks[1].instructions if str(i.action) == PAIR]
    of = {slots[index].microbatch: index for index in pair.reads if slots[index].kind == "x"}
    slots[of[1]] = replace(slots[of[1]], extents=slots[of[0]].extents)
    rank = replace(program().ranks[1], slots=tuple(slots))
    assert "overlaps" in refused(replace(program(), ranks=(program().ranks[0], rank)))


def test_children_may_be_split_backwards_and_of_other_stages() -> None:
    split = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,(1I0;1F1)OVERLAP_F_B,1W0,1I1,1W1\n"
    assert prove(lowered(split, keep_pairs=True)).num_transfers == 4
    wave = "0F0,0F1,3F0,(3B0;0F2)OVERLAP_F_B,3F1,3B1,3F2,3B2,0B0,0B1,0B2\n"
    wave += "1F0,2F0,1F1,2F1,1F2,2F2,2B0,2B1,2B2,1B0,1B1,1B2\n"
    prove(lowered(wave, keep_pairs=True))


def test_a_backward_in_a_pair_cannot_recompute_inside() -> None:
    """Its forward needs the memory of buffers that it gives up."""
    again = SCHEDULE.replace("(0F2;0B0)", "0R0,(0F2;0B0)").replace("(1B0", "1R0,(1B0").replace("(1B1", "1R1,(1B1")
    with_r = lowered(again, keep_pairs=True, sizes=one_line_remade)
    prove(with_r, sizes=one_line_remade)
    without_r = lowered(again.replace("1R1,", ""), keep_pairs=True, sizes=one_line_remade)
    with pytest.raises(ProgramError, match=r"has the memory of its forward, which 1B1\.0 needs"):
        prove(without_r, sizes=one_line_remade)


def test_a_pair_that_is_left_out_is_missed() -> None:
    reason = refused(without(program(), 1, "(1B1.0;1F2.0)OVERLAP_F_B"))
    assert "1FREE1.0: frees dkv@1:1, which was never acquired" in reason


def test_the_action_says_what_is_a_pair() -> None:
    assert parse_action(PAIR).is_pair
    assert not Action(Kind.F, 0, 0, 0).is_pair
    assert not parse_action("(1B0.0;1R1.0)OVERLAP_F_B").is_pair
