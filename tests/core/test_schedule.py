"""Actions and schedules have a textual form that parses back; torch's own CSV imports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.schedule import Action, Group, Kind, Part, Schedule, flatten, parse_action, parse_schedule
from tests.support.manifest_strategies import valid

ACTIONS = valid(Action)


@given(ACTIONS)
def test_an_action_parses_back(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.lists(ACTIONS, min_size=1, max_size=3))
def test_an_overlap_parses_back(children: list[Action]) -> None:
    overlap = Action(Kind.OVERLAP, children[0].stage, children=tuple(children))
    assert parse_action(str(overlap)) == overlap


def test_the_text_is_torchs_with_a_slice() -> None:
    assert parse_action("1F3.2") == Action(Kind.F, 1, 3, 2)
    assert parse_action("1F3") == Action(Kind.F, 1, 3)
    assert str(Action(Kind.POST_RECV_B, 0, 2, 1)) == "0POST_RECV_B2.1"
    assert str(Action(Kind.START_REDUCE, 0, group=Group.NORM)) == "0START_REDUCE(norm)"


@given(st.integers(0, 9), st.integers(1, 9))
def test_a_part_of_a_recomputation_parses_back(first: int, length: int) -> None:
    action = Action(Kind.R, 1, 3, 2, part=Part(first, first + length))
    assert parse_action(str(action)) == action
    schedule, _ = parse_schedule(f"0F0.0,0R0.0[0:{length}],0R0.0[{length}],0B0.0\n")
    assert parse_schedule(schedule.to_csv()) == (schedule, ())
    assert schedule.recomputed_units == {0: length + 1}


def test_one_unit_is_written_as_one() -> None:
    assert str(Action(Kind.R, 1, 3, 2, part=Part(2, 3))) == "1R3.2[2]"
    assert parse_action("1R3.2[2:3]") == parse_action("1R3.2[2]")
    assert parse_action("1R3.2[0:2]") == Action(Kind.R, 1, 3, 2, part=Part(0, 2))


def test_only_a_recomputation_has_parts() -> None:
    with pytest.raises(UserError, match=r"0F0.0\[0\] is for a part of its stage") as caught:
        parse_schedule("0F0.0[0],0B0.0\n")
    assert caught.value.where == "rank 0"


@pytest.mark.parametrize("text", ["1R3.2[2:2]", "1R3.2[3:1]"])
def test_a_part_without_units_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(UserError, match="are no part of a stage") as caught:
        parse_action(text, "line 4")
    assert caught.value.where == "line 4"


NO_ACTIONS = ["", "F3", "1X3.2", "1F.2", "1F3.", "1F3.2.1", "1START_REDUCE(all)", "1REDUCE(norm)", "()OVERLAP_F_B"]


@pytest.mark.parametrize("text", [*NO_ACTIONS, "1R3.2[]", "1R3.2[-1]", "1R3.2[1:]"])
def test_an_invalid_action_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_action(text, "line 4")
    assert caught.value.where == "line 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * 9_000 + "0F0;0B0" + ")OVERLAP_F_B" * 9_000, "is not an action"),
        ("((0F0;0B0)OVERLAP_F_B;0F1)OVERLAP_F_B", "is not an action"),
        ("0F0," + "x" * 200_000, "field larger than field limit"),
        ("9" * 5_000 + "F0", "is not an action"),
        ("0F" + "9" * 5_000, "is not an action"),
        ("0F0\x00", "is not an action|NUL"),
        ("0F0\n" * 5_000_000, "characters, more than"),
    ],
    ids=["deep", "nested", "long cell", "large stage", "large micro-batch", "NUL", "long"],
)
def test_an_impossible_schedule_is_refused_before_it_is_built(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_schedule(text)
    assert len(str(caught.value)) < 400


def test_a_missing_stage_is_found_without_a_list_of_all() -> None:
    schedule, _ = parse_schedule("0F0,0B0\n9999999F0,9999999B0\n")
    with pytest.raises(UserError, match="stage 1 has no actions"):
        assert schedule.stage_ranks


def test_a_schedule_parses_back() -> None:
    text = "0F0.0,0F0.1,0I0.1,0I0.0,0W0.1,0W0.0\n1F0.0,1F0.1,1I0.1,1I0.0,1W0.1,1W0.0\n"
    schedule, warnings = parse_schedule(text)
    assert schedule.to_csv() == text
    assert warnings == ()
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_slices) == (2, 1, 2)
    assert schedule.stage_ranks == (0, 1)


def test_torchs_csv_is_imported() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0,,\n"
    schedule, warnings = parse_schedule(text)
    assert [[str(a) for a in flatten(row)] for row in schedule.ranks] == [["0F0.0", "0B0.0"], ["1F0.0", "1B0.0"]]
    assert any("UNSHARD" in warning for warning in warnings)
    assert any("REDUCE_GRAD" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no actions"),
        ("0F0.0,0B0.0\n0F0.1\n", "on ranks 0 and 1"),
        ("0F0.0,0SEND_F0.0\n", "not a compute action"),
        ("0F0.0,boom\n", "line 1"),
    ],
)
def test_a_bad_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_schedule(text)


def test_a_stage_without_actions_is_named() -> None:
    schedule, _ = parse_schedule("0F0.0,0B0.0\n2F0.0,2B0.0\n")
    with pytest.raises(UserError, match="stage 1 has no actions"):
        assert schedule.stage_ranks


def test_indices_are_checked() -> None:
    with pytest.raises(UserError, match="micro-batch 1 is not in"):
        Schedule(ranks=((Action(Kind.F, 0, 1, 0),),), num_stages=1, num_microbatches=1, num_slices=1)
