"""Slots of what stages make again: they live from R on, and what is kept stays next to them."""

from __future__ import annotations

from penstock.core.schedule import Kind
from tests.support.small_programs import lowered, one_line_of_both, slot_lives


def test_recompute_takes_over_the_activations_and_leaves_the_keys() -> None:
    lives = slot_lives(lowered("0F0.0,0F0.1,0B0.1,0R0.0,0B0.0\n"), 0)
    assert lives["ra@0:0.0"] == lives["rl@0:0.0"] == ("0R0.0", "0B0.0")
    assert lives["kv@0:0"] == ("0F0.0", "0B0.0")


def test_a_slice_without_an_r_is_recomputed_inside_its_backward() -> None:
    """In memory that is no slot, except what W reads after I."""
    lives = slot_lives(lowered("0F0.0,0F0.1,0B0.1,0R0.0,0B0.0\n"), 0)
    assert not {"ra@0:0.1", "rl@0:0.1"} & lives.keys()
    lives = slot_lives(lowered("0F0.0,0F0.1,0I0.1,0R0.0,0I0.0,0W0.1,0W0.0\n"), 0)
    assert "ra@0:0.1" not in lives
    assert lives["rl@0:0.1"] == ("0I0.1", "0W0.1")
    assert lives["rl@0:0.0"] == ("0R0.0", "0W0.0")


def test_what_is_not_made_again_stays_and_is_read_by_the_recomputation() -> None:
    program = lowered("0F0,0B0\n1F0,1R0[0],1R0[1],1B0\n", sizes=one_line_of_both)
    lives = slot_lives(program, 1)
    assert lives["a@1:0.0"] == lives["l@1:0.0"] == ("1F0.0", "1B0.0")
    assert lives["ra@1:0.0"] == lives["rl@1:0.0"] == ("1R0.0[0]", "1B0.0")
    slots = program.ranks[1].slots
    first, second = (i for i in program.ranks[1].instructions if i.action.kind is Kind.R)
    assert [str(slots[index]) for index in first.reads] == ["x@1:0.0", "a@1:0.0", "l@1:0.0", "kv@1:0"]
    assert [str(slots[index]) for index in second.reads] == ["ra@1:0.0", "a@1:0.0", "l@1:0.0", "kv@1:0"]


def test_a_recomputation_in_parts_fills_the_same_slots() -> None:
    """They live from the first part on; the parts after it read the last output of the part before there."""
    text = "0F0,1F0,1B0,0R0[0:2],0R0[2],0B0\n"
    lives = slot_lives(lowered(text), 0)
    assert lives["ra@0:0.0"] == lives["rl@0:0.0"] == ("0R0.0[0:2]", "0B0.0")
    program = lowered("0F0,0B0\n1F0,1R0[0],1R0[1:3],1B0\n", num_units=(0, 3))
    slots = program.ranks[1].slots
    first, second = (i for i in program.ranks[1].instructions if i.action.kind is Kind.R)
    assert [str(slots[index]) for index in first.reads] == ["x@1:0.0", "kv@1:0"]
    assert [str(slots[index]) for index in second.reads] == ["ra@1:0.0", "kv@1:0"]
    assert first.writes == second.writes
