"""The frontier on pages: a row and a mark for each of its plans, in the picture's bounds."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.view.frontier import NARROW, WIDE, frontier_card, frontier_svg
from tests.support.frontiers import frontier

SVG = "{http://www.w3.org/2000/svg}"


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e9), st.floats(1e-6, 1e12)), min_size=1, max_size=12),
    st.sampled_from([WIDE, NARROW]),
)
def test_every_plan_has_a_mark_inside_the_picture(times_and_costs: list[tuple[float, float]], width: int) -> None:
    """Time goes to the right and money upward."""
    root = ET.fromstring(frontier_svg(frontier(times_and_costs), width=width))
    height = float(root.attrib["height"])
    marks = [(float(mark.attrib["cx"]), float(mark.attrib["cy"])) for mark in root.iter(f"{SVG}circle")]
    assert len(marks) == len(times_and_costs)
    assert all(0 < x < width and 0 < y < height for x, y in marks)
    by_time = sorted(range(len(marks)), key=lambda i: times_and_costs[i][0])
    lefts = [marks[i][0] for i in by_time]
    assert lefts == sorted(lefts)
    by_cost = sorted(range(len(marks)), key=lambda i: times_and_costs[i][1])
    heights = [marks[i][1] for i in by_cost]
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize(("seconds", "unit"), [(90.0, "seconds"), (900.0, "minutes"), (90_000.0, "hours")])
def test_the_axis_has_a_suitable_unit(seconds: float, unit: str) -> None:
    assert f"time of all steps, {unit}" in frontier_svg(frontier([(seconds, 1.0)]))


def test_the_table_numbers_the_marks() -> None:
    card = frontier_card(frontier([(3600.0, 90.0), (7200.0, 80.0)]))
    rows = re.findall(r"<tr><td[^>]*>(\d)</td><td[^>]*>([^<]*)</td>", card)
    assert rows == [("1", "1 x H100"), ("2", "2 x H100")]
    assert "4 plans were compared" in card
