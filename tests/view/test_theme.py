"""Colours: the same names in light and dark, all of them used names, and legible."""

from __future__ import annotations

import re

import pytest

from penstock.core.schedule import COMPUTE_KINDS, Kind
from penstock.view.page import plotly_javascript
from penstock.view.report import report
from penstock.view.theme import DARK, KIND_NAMES, LIGHT, css_variables, kind_variable
from tests.support.sample_report import sample_report

PALETTES = {"light": LIGHT, "dark": DARK}
RGB = tuple[float, float, float]


def rgb(colour: str) -> RGB:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def over(top: RGB, bottom: RGB, opacity: float) -> RGB:
    red, green, blue = (opacity * a + (1 - opacity) * b for a, b in zip(top, bottom, strict=True))
    return red, green, blue


def contrast(first: RGB, second: RGB) -> float:
    """WCAG 2.2, relative luminance and contrast ratio."""

    def luminance(colour: RGB) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_light_and_dark_have_the_same_names() -> None:
    assert list(LIGHT) == list(DARK)


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
@pytest.mark.parametrize("name", ["ink", "muted", "faint", "accent", "good", "warn", "bad"])
def test_text_is_legible_on_page_and_cards(name: str, palette: dict[str, str]) -> None:
    assert contrast(rgb(palette[name]), rgb(palette["surface"])) >= 4.5
    assert contrast(rgb(palette[name]), rgb(palette["page"])) >= 4.5


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
@pytest.mark.parametrize("kind", sorted(COMPUTE_KINDS))
def test_labels_are_legible_on_bars_of_every_shade(kind: Kind, palette: dict[str, str]) -> None:
    for shade in ("1", *(palette[f"shade-{i}"] for i in (1, 2, 3))):
        bar = over(rgb(palette[kind_variable(kind)]), rgb(palette["track"]), float(shade))
        assert contrast(rgb(palette["on-bar"]), bar) >= 4.0


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
def test_lines_of_charts_stand_out_from_their_card(palette: dict[str, str]) -> None:
    for i in range(1, 6):
        assert contrast(rgb(palette[f"series-{i}"]), rgb(palette["surface"])) >= 2.5


def test_every_compute_kind_has_a_name_and_a_colour() -> None:
    assert set(KIND_NAMES) == COMPUTE_KINDS
    assert {kind_variable(kind) for kind in KIND_NAMES} <= set(LIGHT)
    assert kind_variable(Kind.STEP) == "other"


def test_every_variable_that_is_used_is_declared() -> None:
    text = report(sample_report())
    used = set(re.findall(r"var\(--([\w-]+)\)", text.replace(plotly_javascript(), "")))
    assert used <= {*LIGHT, "sans", "mono", "numbers"}
    assert all(f"--{name}:" in text for name in used)


def test_paper_is_always_light() -> None:
    printed = css_variables().split("@media print")[1]
    assert f"--surface:{LIGHT['surface']}" in printed
    assert f"--forward:{LIGHT['forward']}" in printed
