"""Lowering of overlapped pairs: one instruction with the slots, messages and transients of both actions."""

from __future__ import annotations

import pytest

from penstock.core.errors import UserError
from penstock.core.invariants import prove
from penstock.core.schedule import Kind
from tests.support.small_programs import actions, lowered


def test_a_pair_is_one_instruction_between_both_receives_and_both_sends() -> None:
    schedule = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,1B2\n"
    program = lowered(schedule, keep_pairs=True)
    assert [text for text in actions(program, 1) if "POST" not in text and "WAIT_SEND" not in text][:8] == [
        *("1WAIT_RECV_F0.0", "1F0.0", "1WAIT_RECV_F1.0", "(1F1.0;1B0.0)OVERLAP_F_B", "1SEND_B0.0"),
        *("1WAIT_RECV_F2.0", "(1F2.0;1B1.0)OVERLAP_F_B", "1SEND_B1.0"),
    ]
    assert [text for text in actions(program, 0) if "POST" not in text and "WAIT_SEND" not in text][4:8] == [
        *("0WAIT_RECV_B0.0", "(0F2.0;0B0.0)OVERLAP_F_B", "0SEND_F2.0", "0WAIT_RECV_B1.0"),
    ]
    prove(program)


def test_a_pair_acquires_the_slots_and_adds_the_transients_of_both() -> None:
    schedule = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    transients = {(Kind.F, 0, 0): 30, (Kind.B, 0, 0): 12}
    (pair,) = [
        instruction
        for instruction in lowered(schedule, keep_pairs=True, transients=transients).ranks[0].instructions
        if instruction.action.children
    ]
    assert pair.transient_bytes == 42
    alone = lowered(schedule, transients=transients).ranks[0]
    forward, backward = (next(i for i in alone.instructions if str(i.action) == text) for text in ("0F1.0", "0B0.0"))
    assert sorted(pair.acquires) == sorted((*forward.acquires, *backward.acquires))
    assert (pair.reads, pair.writes) == (forward.reads + backward.reads, forward.writes + backward.writes)


def test_other_overlaps_run_serially_where_pairs_are_one_instruction() -> None:
    serial = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    same = "0F0,0F1,(0B0;0B1)OVERLAP_F_B\n(1F0;1B0)OVERLAP_F_B,1F1,1B1\n"
    assert lowered(same, keep_pairs=True) == lowered(serial)


def test_children_that_cannot_run_at_once_are_a_deadlock() -> None:
    with pytest.raises(UserError, match=r"rank 0 has \(0F1\.0;0B0\.0\)OVERLAP_F_B before 1I0\.0 is done"):
        lowered("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n", keep_pairs=True)
