"""Generators: every action once, in an order that can run, equal on every rank that asks, refused with a remedy."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given

from penstock.core.errors import UserError
from penstock.core.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleSpec,
    flatten,
    import_spec,
    parse_action,
    parse_schedule,
)
from penstock.planner.order import Order, from_schedule, to_schedule
from penstock.planner.passes.rounds import find_rounds
from penstock.planner.schedules import generator as generator_module
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.recorded import MOST_ACTIONS
from penstock.planner.schedules.registry import BUILT_IN, find, from_spec, order_from_spec, stage_ranks, to_spec
from tests.support.step_costs import shape, zb_inputs
from tests.support.strategies import schedules

SMALL = list(product((1, 2, 3, 5), (1, 2, 3), (1, 2, 4)))


def texts(order: Order, rank: int) -> str:
    return " ".join(map(str, to_schedule(order).ranks[rank]))


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_small_pipeline_is_complete_and_can_run(name: str) -> None:
    for num_ranks, num_microbatches, num_slices in SMALL:
        schedule = to_schedule(find(name).generate(shape(num_ranks, num_microbatches, num_slices, name)))
        ordered = find_rounds(schedule)
        assert ordered.stage_ranks == stage_ranks(name, num_ranks)
        kinds = Counter(action.kind for row in ordered.rows for action in row)
        units = len(ordered.stage_ranks) * num_microbatches * num_slices
        backward = {Kind.I: units, Kind.W: units} if find(name).splits_backward else {Kind.B: units}
        assert kinds == {Kind.F: units, **backward}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_generator_is_a_function_of_its_inputs(name: str) -> None:
    inputs = shape(3, 4, 2, name)
    assert find(name).generate(inputs).same_as(find(name).generate(inputs))


def test_orders_written_out() -> None:
    pipeline = shape(2, 2, 2)
    assert texts(find("gpipe").generate(pipeline), 0) == "0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0B0.0 0B1.1 0B1.0"
    assert texts(find("1f1b").generate(pipeline), 0) == "0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B0.0 0B1.1 0B1.0"
    assert texts(find("1f1b").generate(pipeline), 1) == "1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0"
    assert texts(find("zb-h1").generate(shape(2, 1, 2)), 1) == "1F0.0 1F0.1 1I0.1 1I0.0 1W0.1 1W0.0"


def test_one_slice_is_the_published_1f1b() -> None:
    """Warm-up of K - 1 - rank forwards, then one forward and one backward in turn, then the backwards left."""
    for num_ranks, num_microbatches in product((1, 2, 4), (1, 3, 8)):
        order = find("1f1b").generate(shape(num_ranks, num_microbatches, 1))
        for rank in range(num_ranks):
            warm_up = min(num_ranks - 1 - rank, num_microbatches)
            steady = num_microbatches - warm_up
            expected = "F" * warm_up + "FB" * steady + "B" * warm_up
            assert "".join(action.kind.value for action in to_schedule(order).ranks[rank]) == expected


def held_slices(order: Order, rank: int, *, until: Kind) -> int:
    """The most slices between their F and their ``until``."""
    held = peak = 0
    for action in to_schedule(order).ranks[rank]:
        held += (action.kind is Kind.F) - (action.kind is until)
        peak = max(peak, held)
    return peak


def test_1f1b_and_h1_hold_the_stated_number_of_micro_batches() -> None:
    """K + S - 1 - rank slices under 1F1B and K + S - 1 under H1 (token-level: Seq1F1B, arXiv 2406.03488)."""
    for num_ranks, num_slices in product((1, 2, 4, 6), (1, 2, 4)):
        pipeline = shape(num_ranks, 12, num_slices)
        for rank in range(num_ranks):
            held = num_ranks + num_slices - 1
            assert held_slices(find("1f1b").generate(pipeline), rank, until=Kind.B) == held - rank
            assert held_slices(find("zb-h1").generate(pipeline), rank, until=Kind.W) == held


@given(schedules())
def test_an_order_is_its_schedule(schedule: Schedule) -> None:
    order = from_schedule(schedule)
    schedule = to_schedule(order)
    assert from_schedule(schedule).same_as(order)
    assert order.num_actions == sum(len(actions) for actions in schedule.ranks)
    assert tuple(order.stage_ranks) == schedule.stage_ranks


def test_an_overlap_becomes_its_children_in_order() -> None:
    overlap = parse_action("(0F1.0;0B0.0)OVERLAP_F_B")
    first, last = Action(Kind.F, 0, 0, 0), Action(Kind.B, 0, 1, 0)
    schedule = Schedule(ranks=((first, overlap, last),), num_stages=1, num_microbatches=2, num_slices=1)
    assert [str(action) for action in to_schedule(from_schedule(schedule)).ranks[0]] == [
        "0F0.0",
        "0F1.0",
        "0B0.0",
        "0B1.0",
    ]


# Recipes


@given(zb_inputs())
def test_a_recipe_regenerates_the_schedule_exactly(inputs: ScheduleInputs) -> None:
    counts: dict[str, Any] = {
        "num_ranks": inputs.num_ranks,
        "num_microbatches": inputs.num_microbatches,
        "num_slices": inputs.num_slices,
    }
    for name in (name for name, generator in BUILT_IN.items() if generator.stages_per_rank == 1):
        spec = ScheduleSpec.from_manifest(to_spec(name, inputs).to_manifest())
        assert order_from_spec(spec, **counts).same_as(find(name).generate(inputs))


def test_a_recipe_of_a_fixed_order_is_its_name() -> None:
    assert to_spec("1f1b", shape(4, 8, 2)) == ScheduleSpec(generator="1f1b", version=1)


def test_a_recipe_from_costs_needs_no_costs_and_stays_small() -> None:
    inputs = dataclasses.replace(shape(8, 512, 4), variant=9)
    spec = to_spec("zb", inputs)
    order = order_from_spec(spec, num_ranks=8, num_microbatches=512, num_slices=4)
    assert order.same_as(find("zb").generate(inputs))
    assert len(spec.text) < order.num_actions // 8


def test_a_recorded_order_outlives_the_version_of_its_generator() -> None:
    inputs = dataclasses.replace(shape(2, 2, 2), variant=1)
    spec = dataclasses.replace(to_spec("zb", inputs), version=1)
    assert order_from_spec(spec, num_ranks=2, num_microbatches=2, num_slices=2).same_as(find("zb").generate(inputs))


BOMB = base64.b64encode(zlib.compress(bytes(100 * MOST_ACTIONS), level=1)).decode()
CUT = base64.b64encode(zlib.compress(bytes(400))[:-4]).decode()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ScheduleSpec(generator="1f1"), "did you mean 1f1b"),
        (
            ScheduleSpec(generator="nothing-like-it"),
            "known schedules: 1f1b, braided-1f1b, eager-1f1b, gpipe, interleaved-1f1b, interleaved-zb, v-half",
        ),
        (ScheduleSpec(generator="gpipe", version=7), "made with version 7"),
        (ScheduleSpec(generator="zb", version=2, text="!"), "does not hold an order of this plan's shape"),
        (ScheduleSpec(generator="zb", version=2, text="AAAA"), "does not hold an order of this plan's shape"),
        (ScheduleSpec(generator="zb", version=2, text=BOMB), "does not hold an order of this plan's shape"),
        (ScheduleSpec(generator="zb", version=2, text=CUT), "does not hold an order of this plan's shape"),
        (to_spec("zb", shape(2, 3, 2)), "does not hold an order of this plan's shape"),
        (to_spec("zb", shape(3, 2, 2)), "does not hold an order of this plan's shape"),
        (to_spec("zb", shape(2, 2, 3)), "does not hold an order of this plan's shape"),
    ],
)
def test_a_bad_recipe_is_refused(spec: ScheduleSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        order_from_spec(spec, num_ranks=2, num_microbatches=2, num_slices=2)


def test_counts_are_positive() -> None:
    with pytest.raises(UserError, match="num_slices: 0 is not positive"):
        shape(1, 1, 0)


# Imports

TORCH_CSV = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def test_torch_csv_imports_and_is_kept_as_text() -> None:
    spec, warnings = import_spec("0UNSHARD,0F0,0SEND_F0,0F1,,0RECV_B0,0B0,0B1\n,1F0,1B0,1F1,1B1\n", "a.csv")
    assert spec.text == "0F0.0,0F1.0,0B0.0,0B1.0\n1F0.0,1B0.0,1F1.0,1B1.0\n"
    assert warnings == ("UNSHARD actions are not used here and were dropped",)
    schedule = from_spec(spec, num_ranks=2, num_microbatches=2, num_slices=1)
    assert schedule.to_csv() == spec.text
    assert order_from_spec(spec, num_ranks=2, num_microbatches=2, num_slices=1).same_as(from_schedule(schedule))


def test_virtual_stages_come_from_imports() -> None:
    spec, _ = import_spec("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", "v.csv")
    assert from_spec(spec, num_ranks=2, num_microbatches=1, num_slices=1).stage_ranks == (0, 1, 1, 0)


def test_an_import_for_another_shape_is_refused() -> None:
    spec, _ = import_spec(TORCH_CSV, "a.csv")
    with pytest.raises(UserError, match="is for 2 micro-batches, the plan has 4"):
        from_spec(spec, num_ranks=2, num_microbatches=4, num_slices=1)


def test_an_empty_import_is_refused() -> None:
    with pytest.raises(UserError, match=r"empty\.csv: holds no actions"):
        import_spec("\n,,\n", "empty.csv")


# Schedules of other packages


class FakePoint:
    """Entry point as `importlib.metadata.entry_points` returns it, for a given function."""

    value = "package.module:function"

    def __init__(self, name: str, function: object) -> None:
        self.name = name
        self.function = function

    def load(self) -> object:
        return self.function


def install(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    points = [FakePoint(name, function) for name, function in functions.items()]
    monkeypatch.setattr(generator_module, "entry_points", lambda group: points)


def test_an_installed_schedule_is_found_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mine=lambda inputs: to_schedule(find("1f1b").generate(inputs)))
    inputs = ScheduleInputs(num_ranks=2, num_microbatches=2, num_slices=1, forward_ns=((3,), (4,)))
    spec = to_spec("mine", inputs)
    order = order_from_spec(spec, num_ranks=2, num_microbatches=2, num_slices=1)
    assert order.same_as(find("1f1b").generate(inputs))


@pytest.mark.parametrize(
    ("first", "num_pairs"), [("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2", 3), ("0F0,(0F1;0B0)OVERLAP_F_B,0F2,0B1,0B2", 0)]
)
def test_pairs_of_an_installed_schedule_are_recorded_where_they_can_begin_together(
    monkeypatch: pytest.MonkeyPatch, first: str, num_pairs: int
) -> None:
    schedule, _ = parse_schedule(f"{first}\n1F0,(1B0;1F1)OVERLAP_F_B,(1B1;1F2)OVERLAP_F_B,1B2\n")
    install(monkeypatch, mine=lambda inputs: schedule)
    inputs = ScheduleInputs(num_ranks=2, num_microbatches=3, num_slices=1)
    parsed = from_spec(to_spec("mine", inputs), num_ranks=2, num_microbatches=3, num_slices=1)
    assert sum(action.is_pair for actions in parsed.ranks for action in actions) == num_pairs
    parsed_actions, expected = ([list(flatten(actions)) for actions in source.ranks] for source in (parsed, schedule))
    assert parsed_actions == expected


def test_a_built_in_name_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gpipe=lambda inputs: None)
    assert find("gpipe") is BUILT_IN["gpipe"]


def refuse(inputs: ScheduleInputs) -> Schedule:
    raise UserError(what="only for two ranks")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda inputs: [], r"schedule bad \(package\.module:function\): returned list, not a Schedule"),
        (lambda inputs: 1 // 0, "failed with ZeroDivisionError"),
        (refuse, "only for two ranks"),
    ],
)
def test_an_installed_schedule_that_fails_is_the_users_matter(
    monkeypatch: pytest.MonkeyPatch, function: object, message: str
) -> None:
    install(monkeypatch, bad=function)
    with pytest.raises(UserError, match=message):
        find("bad").generate(shape(3, 1, 1))
