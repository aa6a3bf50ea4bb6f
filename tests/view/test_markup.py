"""Everything is escaped unless it says that it is markup."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.view.markup import Markup, element, escape, join, number


@given(st.text())
def test_any_text_round_trips_in_elements_and_attributes(text: str) -> None:
    parsed = ET.fromstring(element("p", text, title=text))
    kept = escape(text)
    assert "<" not in kept
    assert '"' not in kept
    shown = "".join(c for c in text if c in "\t\n\r" or (c >= " " and c not in "\x7f\ufffe\uffff"))
    # XML turns every line ending into one newline in text, and every blank in an attribute into a space.
    assert (parsed.text or "") == shown.replace("\r\n", "\n").replace("\r", "\n")
    assert len(parsed.attrib["title"]) <= len(shown)


def test_markup_is_not_escaped_twice() -> None:
    assert element("p", element("b", "a < b")) == "<p><b>a &lt; b</b></p>"
    assert escape(escape("&")) == "&amp;"


def test_lone_surrogates_and_control_characters_are_dropped() -> None:
    assert escape("a\ud800b\x00c\x1b[0m\ufffe") == "abc[0m"
    assert escape("tab\tline\n") == "tab\tline\n"


def test_python_names_become_names_of_attributes() -> None:
    assert element("rect", x=1.0, class_="bar", stroke_width=0.5) == '<rect x="1" class="bar" stroke-width="0.5"/>'


def test_only_shapes_close_themselves() -> None:
    assert element("div") == "<div></div>"
    assert element("rect") == "<rect/>"
    assert element("rect", element("title", "t")) == "<rect><title>t</title></rect>"


def test_join_escapes_plain_parts_and_separators() -> None:
    assert join(["a<", Markup("<b>")], " & ") == "a&lt; &amp; <b>"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-0.0, "0"), (-0.001, "0"), (10, "10"), (100.0, "100"), (1.005, "1"), (2.5, "2.5"), (-3.14159, "-3.14")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e7, 1e7))
def test_numbers_keep_two_decimals(value: float) -> None:
    assert abs(float(number(value)) - value) <= 0.005 + 1e-9
