"""Communication kernels on a device: their exact number, against every order of events, and what too few places do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import HealthCheck, assume, given, settings

from penstock.core.errors import ProgramError
from penstock.core.invariants import prove
from penstock.core.program import Program
from penstock.core.residency import NUM_PLACES, resident_kernels
from penstock.core.schedule import Kind
from penstock.planner.compile import program_of
from tests.support.small_plans import small_plan
from tests.support.small_programs import lowered, moved
from tests.support.strategies import Case, cases
from tests.support.stream_threads import is_stuck_somewhere, most_kernels, sharded

ONE_MESSAGE = "0F0,0B0\n1F0,1B0\n"
SMALL = (
    ONE_MESSAGE,
    "0F0,0I0,0W0\n1F0,1I0,1W0\n",
    "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "0F0,2F0,2B0,0B0\n1F0,1B0\n",
)
MOST_STATES = 60_000
LAUNCHES = frozenset({Kind.SEND_F, Kind.SEND_B, Kind.POST_RECV_F, Kind.POST_RECV_B})


def numbers(program: Program) -> tuple[int, ...]:
    return tuple(most.num_kernels for most in resident_kernels(program))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(cases())
def test_the_number_is_that_of_the_worst_order_of_events(case: Case) -> None:
    program = case.lower()
    worst = most_kernels(program, limit=500)
    assume(worst is not None)
    assert numbers(program) == worst


@settings(max_examples=60, deadline=None)
@given(cases())
def test_receives_posted_late_take_no_more_places(case: Case) -> None:
    """Sums over shards apart, which then start next to those over replicas and a tie's: all stand at the end."""
    early, late = (numbers(replace(case, late_receives=flag, tp=False).lower()) for flag in (False, True))
    assert all(a >= b for a, b in zip(early, late, strict=True))


def receives_late(program: Program, rank: int, text: str) -> Program:
    """The receive launched where it is awaited."""
    return moved(program, rank, text.replace("WAIT", "POST"), before=text)


def test_with_one_place_too_few_a_device_may_hang() -> None:
    """Rank 0's posted receive keeps its only place, and the activations that its gradient needs are never sent."""
    program = lowered(ONE_MESSAGE, receive_ahead=1)
    assert numbers(program) == (2, 1)
    assert is_stuck_somewhere(program, 1)
    assert not is_stuck_somewhere(program, 2)


def test_two_launches_swapped_are_refused_with_the_grid() -> None:
    """Sent first and received late, rank 0 needs one place. Swapped, the receive spins in it, and the device hangs."""
    program = lowered(ONE_MESSAGE, receive_ahead=1)
    program = receives_late(program, 0, "0WAIT_RECV_B0.0")
    program = moved(program, 0, "0WAIT_SEND_F0.0", before="0POST_RECV_B0.0")
    prove(program, num_places=1)
    assert not is_stuck_somewhere(program, 1)

    swapped = moved(program, 0, "0POST_RECV_B0.0", before="0SEND_F0.0")
    prove(swapped)
    assert is_stuck_somewhere(swapped, 1)
    with pytest.raises(ProgramError) as caught:
        prove(swapped, num_places=1)
    assert str(caught.value) == (
        "rank 0, 0SEND_F0.0: may be kernel 2 that waits for its peer on a device with places for 1\n"
        "\n"
        "step    1      2             3      4\n"
        "rank 0  0F0.0  >0SEND_F0.0<  .      0B0.0\n"
        "rank 1  .      1F0.0         1B0.0  ."
    )


@pytest.mark.parametrize("late_receives", [False, True])
@pytest.mark.parametrize("text", SMALL)
def test_collectives_of_shards_leave_the_places_as_they_are(text: str, late_receives: bool) -> None:
    """Two shards of every rank meet in every action: the number of other kernels is that of one shard in the worst
    order, and with so many places, and one for the meetings, no order gets stuck.
    """
    program = lowered(text, receive_ahead=1, late_receives=late_receives, tp=True)
    both = sharded(program, 2)
    alone = numbers(lowered(text, receive_ahead=1, late_receives=late_receives))
    assert most_kernels(both, limit=MOST_STATES, num_shards=2) == tuple(number for number in alone for _ in range(2))
    assert not is_stuck_somewhere(both, max(alone), limit=MOST_STATES, num_shards=2)


def swaps(program: Program) -> Iterator[Program]:
    """Every Program in which two launches of one rank took each other's turn."""
    for number, rank in enumerate(program.ranks):
        launches = [at for at, i in enumerate(rank.instructions) if i.action.kind in LAUNCHES]
        for first, second in combinations(launches, 2):
            order = list(rank.instructions)
            order[first], order[second] = order[second], order[first]
            swapped = replace(rank, instructions=tuple(order))
            yield replace(program, ranks=(*program.ranks[:number], swapped, *program.ranks[number + 1 :]))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(cases())
def test_no_accepted_swap_of_launches_hangs_in_any_order_of_events(case: Case) -> None:
    program = case.lower()
    assume(sum(i.channel is not None for rank in program.ranks for i in rank.instructions) <= 12)
    num_places = max(numbers(program))
    for swapped in swaps(program):
        try:
            prove(swapped, sizes=case.sizes, remainder_sizes=case.remainder_sizes, num_places=num_places)
        except ProgramError:
            continue
        assert not is_stuck_somewhere(swapped, num_places, limit=300)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb", "zbv"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_generator_needs_at_most_the_stated_places(schedule: str, pp: int) -> None:
    """With receives posted late it needs no more places than with receives posted at the start."""
    plan = small_plan(schedule=schedule, pp=pp, num_microbatches=4, layers=6, dp=2)
    early, late = (program_of(replace(plan, late_receives=flag)) for flag in (False, True))
    assert max(numbers(late)) <= max(numbers(early)) <= NUM_PLACES
    for program in (early, late):
        prove(program, num_places=NUM_PLACES)
