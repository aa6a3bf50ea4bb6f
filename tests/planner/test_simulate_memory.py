"""The bytes of an order: by hand on a small one, by growth on long ones (any Program: test_simulate_reference)."""

from __future__ import annotations

import pytest

from penstock.core.layout import REMADE_SLOTS, SlotKind
from penstock.core.program import SlotSizes
from penstock.core.schedule import Kind, parse_schedule
from penstock.planner.order import Order, from_schedule
from penstock.planner.schedules.registry import find
from penstock.planner.simulate.memory import Transients, high_water_bytes
from tests.support.step_costs import shape, slot_arrays

POWERS: dict[SlotKind, int] = {kind: 1 << 2 * place for place, kind in enumerate(SlotKind)}
"""A slot's bytes identify its kind, and sums of up to three of a kind are unambiguous."""


REMADE = {again: slot for slot, again in REMADE_SLOTS.items()}


def by_kind(kind: SlotKind, stage: int, tokens: int) -> int:
    """Of stages that keep everything."""
    return 0 if kind in REMADE else POWERS[kind]


def by_kind_remade(kind: SlotKind, stage: int, tokens: int) -> int:
    """Of stages that make everything again, which is as much."""
    return 0 if kind in REMADE_SLOTS else POWERS[REMADE.get(kind, kind)]


def only(*kinds: SlotKind) -> SlotSizes:
    return lambda kind, stage, tokens: tokens if kind in kinds else 0


def held_bytes(
    order: Order,
    sizes: SlotSizes,
    slices: tuple[int, ...],
    receive_ahead: int,
    transients: Transients | None = None,
    *,
    prefix_by_slice: bool = False,
) -> list[int]:
    arrays = slot_arrays(sizes, order.num_stages)
    held: list[int] = high_water_bytes(
        order, arrays, slices, receive_ahead, transients or {}, prefix_by_slice=prefix_by_slice
    ).tolist()
    return held


def total(*kinds: str) -> int:
    return sum(POWERS[SlotKind(kind)] for kind in kinds)


def peaks(text: str, receive_ahead: int = 1, sizes: SlotSizes = by_kind) -> list[int]:
    schedule, _ = parse_schedule(text)
    order = from_schedule(schedule)
    return held_bytes(order, sizes, (1,) * order.num_slices, receive_ahead)


def test_one_rank_at_its_backward() -> None:
    """Embedding to head on one rank: no messages; B holds its own ``w`` while it runs."""
    assert peaks("0F0,0B0\n") == [total("a", "l", "kv", "h", "dkv", "w")]


def test_a_split_backward_keeps_the_linears_until_w() -> None:
    assert peaks("0F0,0I0,0W0\n") == peaks("0F0,0B0\n")
    late = peaks("0F0,0I0,0F1,0I1,0W0,0W1\n")
    assert late == [total("a", "l", "kv", "h", "dkv", "w") + total("l", "w")]


def test_two_ranks() -> None:
    """Rank 0's ``y`` is held until the WAIT_SEND at its end, its ``g_in`` from the POST_RECV at its start."""
    assert peaks("0F0,0B0\n1F0,1B0\n") == [
        total("a", "l", "kv", "y", "g_in", "dkv", "w"),
        total("x", "a", "l", "kv", "h", "dkv", "w", "g_out"),
    ]


def test_more_receives_ahead_hold_more_messages() -> None:
    """Rank 0 may send twice before it waits, so both ``y`` are held while its first backward runs."""
    near, far = (peaks("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", receive_ahead) for receive_ahead in (1, 2))
    assert [b - a for a, b in zip(near, far, strict=True)] == [total("y"), 0]


def test_recomputation_leaves_nothing_of_the_forward_but_its_input() -> None:
    kept = peaks("0F0,0F1,0F2,0B2,0B1,0B0\n")
    dropped = peaks("0F0,0F1,0F2,0R2,0B2,0R1,0B1,0R0,0B0\n", sizes=by_kind_remade)
    assert kept[0] - dropped[0] == 2 * total("a", "l")


def test_a_split_backward_keeps_the_remade_linears_until_w() -> None:
    """Those of R as those of F: only what I alone reads goes with it."""
    late = peaks("0F0,0R0,0I0,0F1,0R1,0I1,0W0,0W1\n", sizes=by_kind_remade)
    assert late == [total("a", "l", "kv", "h", "dkv", "w") + total("l", "w")]


def test_recomputation_inside_a_backward_is_in_no_slot_but_what_w_reads() -> None:
    inside = peaks("0F0,0F1,0F2,0R2,0B2,0B1,0B0\n", sizes=by_kind_remade)
    assert inside == peaks("0F0,0F1,0F2,0R2,0B2,0R1,0B1,0R0,0B0\n", sizes=by_kind_remade)
    assert peaks("0F0,0B0\n", sizes=by_kind_remade) == [total("kv", "h", "dkv", "w")]
    late = peaks("0F0,0I0,0F1,0I1,0W0,0W1\n", sizes=by_kind_remade)
    assert late == [total("l", "kv", "h", "dkv", "w") + total("l", "w")]


def test_neighbours_on_one_rank_share_a_buffer() -> None:
    """Stage 0's output is stage 1's ``x``, stage 1's gradient stage 0's ``g_in``: no ``y``, nothing in flight."""
    assert peaks("0F0,1F0,1B0,0B0\n") == [
        total("a", "l", "kv") + total("x", "a", "l", "kv", "h", "dkv", "w") + total("g_in")
    ]


def test_transients_count_at_their_action_alone() -> None:
    schedule, _ = parse_schedule("0F0,0B0\n")
    order = from_schedule(schedule)
    bare = held_bytes(order, by_kind, (1,), 1)[0]
    small = held_bytes(order, by_kind, (1,), 1, {(Kind.F, 0, 0): 5})[0]
    large = held_bytes(order, by_kind, (1,), 1, {(Kind.B, 0, 0): 5})[0]
    assert (small - bare, large - bare) == (0, 5)


@pytest.mark.parametrize(("name", "grows"), [("gpipe", True), ("1f1b", False), ("zb-h1", False)])
def test_only_the_flush_grows_with_micro_batches(name: str, grows: bool) -> None:
    few, many = (
        held_bytes(find(name).generate(shape(4, count, 2)), only(SlotKind.ACTIVATIONS), (3, 2), 2) for count in (8, 16)
    )
    if grows:
        assert many == [2 * each for each in few] == [16 * 5] * 4
    else:
        assert many == few


def test_1f1b_holds_what_the_paper_says() -> None:
    """Activations of K + S - 1 - rank slices (Seq1F1B, arXiv 2406.03488)."""
    order = find("1f1b").generate(shape(4, 8, 4))
    held = held_bytes(order, only(SlotKind.ACTIVATIONS), (10,) * 4, 2)
    assert held == [10 * (4 + 4 - 1 - rank) for rank in range(4)]


@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_keys_and_values_are_held_per_micro_batch(num_slices: int) -> None:
    """Whole micro-batches: those of all slices begun before the oldest one's last gradient, 2 S + K - 2 - rank."""
    order = find("1f1b").generate(shape(4, 8, num_slices))
    held = held_bytes(order, only(SlotKind.KEYS_VALUES), (10,) * num_slices, 2)
    begun = [2 * num_slices + 2 - rank for rank in range(4)]
    assert held == [10 * num_slices * -(-each // num_slices) for each in begun]


@pytest.mark.parametrize("num_slices", [1, 2, 4, 7])
def test_keys_and_values_by_slice_are_held_like_activations(num_slices: int) -> None:
    """Those of K + S - 1 - rank slices, and next to them the gradients of one micro-batch."""
    order, slices = find("1f1b").generate(shape(4, 8, num_slices)), (10,) * num_slices
    keys = held_bytes(order, only(SlotKind.KEYS_VALUES), slices, 2, prefix_by_slice=True)
    assert keys == [10 * (4 + num_slices - 1 - rank) for rank in range(4)]
    gradients = held_bytes(order, only(SlotKind.KEYS_VALUES_GRADIENTS), slices, 2, prefix_by_slice=True)
    assert gradients == [10 * num_slices] * 4
    both = held_bytes(
        order, only(SlotKind.KEYS_VALUES, SlotKind.KEYS_VALUES_GRADIENTS), slices, 2, prefix_by_slice=True
    )
    assert both == [a + b for a, b in zip(keys, gradients, strict=True)]


def test_every_slice_holds_what_its_tokens_need() -> None:
    """Unequal slices, and a smaller last micro-batch with fewer of them: when its backward begins, all of it."""
    order, slices = find("1f1b").generate(shape(1, 2, 3)).with_remainder(2), (5, 3, 2)
    sizes = slot_arrays(only(SlotKind.KEYS_VALUES, SlotKind.KEYS_VALUES_GRADIENTS), 1)
    held = high_water_bytes(order, sizes, slices, 1, remainder=(sizes, (20, 30)), prefix_by_slice=True)
    assert held.tolist() == [2 * (20 + 30)]
