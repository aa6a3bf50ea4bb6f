"""The picture of the components in the architecture is what the code has."""

from __future__ import annotations

import functools

import pytest

from tests.support.repository import packages
from tools import tower
from tools.tower import Arrow, Arrows


@pytest.fixture(scope="module")
def arrows() -> Arrows:
    return tower.arrows()


def test_the_page_shows_the_imports_that_there_are(arrows: Arrows) -> None:
    page = tower.PAGE.read_text()
    assert page == tower.renewed(page, arrows), "run: python -m tools.tower"


def test_every_component_is_in_it(arrows: Arrows) -> None:
    assert {name for pair in arrows for name in pair} == set(packages()) - tower.OLD_NAMES


def test_imports_inside_functions_are_told_apart(arrows: Arrows) -> None:
    """The agent starts the trainer, and imports of it where a function needs it; all of the trainer knows core."""
    assert arrows["agent", "trainer"].at_once == 0
    assert arrows["agent", "trainer"].late > 0
    assert arrows["trainer", "core"].at_once > 50


def test_arrows_that_others_imply_are_left_out() -> None:
    assert tower.implied([("c", "b"), ("b", "a"), ("c", "a")]) == {("c", "a")}
    assert tower.implied([("d", "c"), ("c", "b"), ("b", "a"), ("d", "a")]) == {("d", "a")}
    assert tower.implied([("c", "a"), ("b", "a")]) == set()


def test_a_page_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="has no place"):
        tower.renewed("# Architecture\n", {("b", "a"): Arrow(at_once=1, late=0)})


def test_a_page_is_renewed_once() -> None:
    page = f"above\n{tower.BEGIN}old\n{tower.END}below\n"
    renew = functools.partial(tower.renewed, found={("b", "a"): Arrow(at_once=2, late=1)})
    assert renew(renew(page)) == renew(page)
    assert "| `b` | 2 + 1 |" in renew(page)
    assert "b --> a" in renew(page)
    assert "old" not in renew(page)
