"""The proof of reductions in buckets: each after its part of every backward, all of a stage once, messages last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest

from penstock.core.errors import ProgramError
from penstock.core.invariants import prove
from penstock.core.program import Extent, Program
from penstock.core.schedule import Part, parse_action
from tests.support.small_programs import (
    TWO_MICROBATCHES,
    lowered,
    moved,
    one_line_each,
    one_line_remade,
    replaced,
    without,
)

BUCKETS = ((Part(2, 4), Part(1, 2), Part(0, 1)), (Part(3, 5), Part(0, 3)))
SPLIT = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


def full() -> Program:
    return lowered(TWO_MICROBATCHES, dp=True, buckets=BUCKETS)


def divided() -> Program:
    """Replicas divide the state of each bucket."""
    return lowered(TWO_MICROBATCHES, dp=True, zero=1, buckets=BUCKETS)


def split() -> Program:
    return lowered(SPLIT, dp=True, buckets=BUCKETS)


def refused(broken: Program, **facts: list[int]) -> str:
    with pytest.raises(ProgramError) as caught:
        prove(broken, **facts)  # type: ignore[arg-type]
    return str(caught.value)


def renamed(program: Program, rank: int, text: str, other: str) -> Program:
    return replaced(program, rank, text, lambda found: replace(found, action=parse_action(other)))


def both(program: Program, rank: int, part: str, other: str) -> Program:
    """With another part in a reduction's start and wait."""
    for kind in ("START", "WAIT"):
        program = renamed(program, rank, f"{rank}{kind}_REDUCE(dp){part}", f"{rank}{kind}_REDUCE(dp){other}")
    return program


@pytest.mark.parametrize("make", [full, split, divided])
def test_buckets_are_proved_in_the_memory_of_whole_stages(make: Callable[[], Program]) -> None:
    whole = lowered(SPLIT if make is split else TWO_MICROBATCHES, dp=True)
    proof, of_whole = prove(make(), num_trained=[4, 5]), prove(whole)
    assert proof.live_bytes == of_whole.live_bytes
    assert proof.arena_bytes == of_whole.arena_bytes
    assert proof.num_transfers == of_whole.num_transfers


BROKEN: dict[str, tuple[Callable[[], Program], str]] = {
    "a bucket before its part": (
        lambda: moved(full(), 0, "0START_REDUCE(dp)[1]", before="0B1.0[1]"),
        r"0START_REDUCE(dp)[1]: finds 1 of 2 weight gradients of stage 0, units [1]",
    ),
    "a bucket of a divided state before its part": (
        lambda: moved(divided(), 0, "0START_REDUCE(dp)[0]", before="0B1.0[0]"),
        r"0START_REDUCE(dp)[0]: finds 1 of 2 weight gradients of stage 0, units [0]",
    ),
    "a step on a divided state before a bucket's sum": (
        lambda: moved(divided(), 0, "0STEP", before="0WAIT_REDUCE(dp)[0]"),
        "0STEP: runs before 0WAIT_REDUCE(dp)[0]",
    ),
    "a gather of a whole stage next to those of buckets": (
        lambda: renamed(divided(), 0, "0START_GATHER(dp)[0]", "0START_GATHER(dp)"),
        "0START_GATHER(dp): is no gather of its rank",
    ),
    "a forward before its bucket is gathered": (
        lambda: moved(divided(), 0, "0F0.0[1]", before="0WAIT_GATHER(dp)[1]"),
        "0F0.0[1]: runs before 0WAIT_GATHER(dp)[1]",
    ),
    "a forward before an earlier bucket is gathered": (
        lambda: moved(divided(), 0, "0WAIT_GATHER(dp)[0]", before="0F0.0[1]"),
        "0F0.0[0]: runs before 0WAIT_GATHER(dp)[0]",
    ),
    "parts of a forward in another order": (
        lambda: moved(
            moved(divided(), 0, "0WAIT_GATHER(dp)[2:4]", before="0F0.0[1]"), 0, "0F0.0[2:4]", before="0F0.0[1]"
        ),
        "0F0.0[2:4]: begins at unit 2 of 4 where unit 1 is next",
    ),
    "a whole forward after a part": (
        lambda: renamed(divided(), 0, "0F0.0[2:4]", "0F0.0"),
        "0F0.0: does work that was done before",
    ),
    "a missing part of a forward": (
        lambda: without(divided(), 0, "0F0.0[2:4]"),
        "0SEND_F0.0: sends y@0:0.0, which holds nothing",
    ),
    "a message before the last part of a forward": (
        lambda: moved(divided(), 0, "0SEND_F0.0", before="0F0.0[2:4]"),
        "0SEND_F0.0: sends y@0:0.0, which holds nothing",
    ),
    "a bucket before its part of W": (
        lambda: moved(split(), 1, "1START_REDUCE(dp)[0:3]", before="1W1.0[0:3]"),
        r"1START_REDUCE(dp)[0:3]: finds 1 of 2 weight gradients of stage 1, units [0:3]",
    ),
    "a bucket before another micro-batch": (
        lambda: without(split(), 0, "0W0.0"),
        r"0START_REDUCE(dp)[2:4]: finds 1 of 2 weight gradients of stage 0, units [2:4]",
    ),
    "parts in another order": (
        lambda: moved(full(), 0, "0B1.0[0]", before="0B1.0[1]"),
        "0B1.0[0]: ends at unit 1 where the units before 2 are next",
    ),
    "a part twice": (
        lambda: renamed(full(), 0, "0B1.0[1]", "0B1.0[2:4]"),
        "0B1.0[2:4]: ends at unit 4 where the units before 2 are next",
    ),
    "a whole backward after a part": (
        lambda: renamed(full(), 0, "0B1.0[1]", "0B1.0"),
        "0B1.0: does work that was done before",
    ),
    "a missing part": (
        lambda: without(full(), 0, "0B1.0[0]"),
        "0START_REDUCE(dp)[0]: finds 1 of 2 weight gradients of stage 0, units [0]",
    ),
    "a message before the last part": (
        lambda: moved(full(), 1, "1SEND_B1.0", before="1B1.0[0:3]"),
        "1SEND_B1.0: sends g_out@1:1.0, which holds nothing",
    ),
    "a part of a forward instead of all of it": (
        lambda: renamed(full(), 0, "0F1.0", "0F1.0[0]"),
        "0SEND_F1.0: sends y@0:1.0, which holds nothing",
    ),
    "an input gradient in parts": (
        lambda: renamed(split(), 0, "0I1.0", "0I1.0[0]"),
        "0I1.0[0]: is for a part of its stage, which only F, R, B and W may be",
    ),
    "a norm in parts": (
        lambda: renamed(full(), 0, "0START_REDUCE(norm)", "0START_REDUCE(norm)[0]"),
        "0START_REDUCE(norm)[0]: is no reduction of its rank",
    ),
    "a bucket that is not waited for": (
        lambda: without(full(), 0, "0WAIT_REDUCE(dp)[1]"),
        "0START_REDUCE(norm): runs before 0WAIT_REDUCE(dp)[1]",
    ),
    "a whole reduction next to buckets": (
        lambda: both(full(), 0, "[1]", ""),
        "the reductions of [2:4], [0] are not all of stage 0, once",
    ),
    "buckets that overlap": (
        lambda: both(full(), 0, "[1]", "[0:2]"),
        "the reductions of [2:4], [0:2], [0] are not all of stage 0, once",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_program_is_refused(name: str) -> None:
    make, reason = BROKEN[name]
    assert reason in refused(make())


def test_a_unit_that_no_bucket_has_is_missed() -> None:
    """Which only the model knows."""
    prove(full())
    assert "are not all of stage 0, once" in refused(full(), num_trained=[5, 5])


def test_an_input_gradient_between_parts_of_a_full_backward_is_refused() -> None:
    """Then a W would count the first part once more."""
    broken = renamed(renamed(full(), 0, "0B1.0[1]", "0I1.0"), 0, "0B1.0[0]", "0W1.0")
    assert "0I1.0: does work that was done before" in refused(broken)


def test_only_the_bucket_of_the_tied_rows_waits_for_the_tie() -> None:
    program = lowered(TWO_MICROBATCHES, dp=True, tie=(0, 1), buckets=BUCKETS)
    prove(program)
    early = moved(program, 0, "0START_REDUCE(dp)[0]", before="0WAIT_REDUCE(tie)")
    assert "0START_REDUCE(dp)[0]: runs before 0WAIT_REDUCE(tie)" in refused(early)


def test_parts_that_recompute_inside_share_memory_that_nothing_else_may_use_meanwhile() -> None:
    """Also no other backward, although it would find all its data."""
    text = "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n"
    for sizes in (one_line_each, one_line_remade):
        program = lowered(text, dp=True, buckets=((), (Part(1, 2), Part(0, 1))), sizes=sizes)
        prove(program, sizes=sizes, num_trained=[2, 2])
        apart = moved(_spread(program), 0, "1B1.0[1]", before="0B0.0")
        if sizes is one_line_each:
            prove(apart, sizes=sizes, num_trained=[2, 2])
            continue
        with pytest.raises(ProgramError, match=r"0B0\.0: runs between parts of 1B1\.0, which share memory"):
            prove(apart, sizes=sizes, num_trained=[2, 2])


def test_parts_of_a_forward_that_gives_up_buffers_share_memory_that_nothing_else_may_use_meanwhile() -> None:
    text = "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n"
    for sizes in (one_line_each, one_line_remade):
        buckets = ((), (Part(1, 2), Part(0, 1)))
        program = lowered(text, dp=True, zero=1, buckets=buckets, sizes=sizes)
        prove(program, sizes=sizes, num_trained=[2, 2])
        apart = moved(_spread(program), 0, "0F1.0", before="1F0.0[1]")
        if sizes is one_line_each:
            prove(apart, sizes=sizes, num_trained=[2, 2])
            continue
        with pytest.raises(ProgramError, match=r"0F1\.0: runs between parts of 1F0\.0, which share memory"):
            prove(apart, sizes=sizes, num_trained=[2, 2])


def _spread(program: Program) -> Program:
    """The Program of one rank with no two slots in the same memory."""
    (rank,) = program.ranks
    stops = [*accumulate(slot.num_bytes for slot in rank.slots)]
    slots = tuple(
        replace(slot, extents=(Extent(stop - slot.num_bytes, slot.num_bytes),))
        for slot, stop in zip(rank.slots, stops, strict=True)
    )
    return replace(program, ranks=(replace(rank, slots=slots, arena_bytes=stops[-1]),))
