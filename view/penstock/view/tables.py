"""Small pieces of HTML that the report's sections share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from penstock.view.markup import Markup, element, join

MOST_NUMBERS: Final = 4
"""Number of columns of numbers that have a place next to the first column on a narrow screen."""


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), chosen: int | None = None
) -> Markup:
    """A table that scrolls sideways where it must; columns in ``numbers`` align right, row ``chosen`` stands out.

    A last column of words gets the width that numbers do not need; on narrow screens it goes below its row, and the
    first column above it where numbers leave no space.
    """
    head = (heading(text, **_align(i, numbers)) for i, text in enumerate(headers))
    body = []
    for index, row in enumerate(rows):
        cells = (element("td", text, **_align(i, numbers)) for i, text in enumerate(row))
        body.append(element("tr", *cells, class_="chosen") if index == chosen else element("tr", *cells))
    content = Markup(element("thead", element("tr", *head)) + element("tbody", *body))
    if len(headers) - 1 in numbers:
        return scroll(element("table", content))
    class_ = "remarks many" if len(numbers) > MOST_NUMBERS else "remarks"
    return scroll(element("table", content, class_=class_, style=f"--numbers:{len(numbers)}"))


def heading(text: str, **attributes: str | float) -> Markup:
    """The heading of a column, or an empty cell if there are no words."""
    return element("th", text, scope="col", **attributes) if text else element("td", **attributes)


def scroll(table: Markup, name: str = "table") -> Markup:
    """A table that scrolls horizontally if it has to, with the keyboard, too. ``name`` is its label when scrolled."""
    return element("div", table, class_="scroll", tabindex="0", role="group", aria_label=name)


def _align(column: int, numbers: Sequence[int]) -> dict[str, str | float]:
    return {"class_": "number"} if column in numbers else {}


def keys(rows: Mapping[str, str]) -> Markup:
    """A table of names and values."""
    body = (element("tr", element("td", name, class_="key"), element("td", value)) for name, value in rows.items())
    return scroll(element("table", element("tbody", *body), class_="keys"))


def facts(rows: Mapping[str, str]) -> Markup:
    """Names and values in a line that wraps."""
    pairs = (element("div", element("dt", name), element("dd", value)) for name, value in rows.items())
    return element("dl", *pairs, class_="facts")


def card(*children: str, title: str = "", class_: str = "") -> Markup:
    """A framed box."""
    heading = (element("h3", title),) if title else ()
    return element("div", *heading, *children, class_=f"card {class_}".strip())


def chart(name: str, title: str, *, caption: str = "", class_: str = "") -> Markup:
    """A framed place for the figure called ``name``."""
    place = element("div", class_="chart", data_figure=name, role="img", aria_label=title)
    captions = (element("figcaption", caption),) if caption else ()
    return element("figure", element("h3", title), place, *captions, class_=f"card {class_}".strip())


def drawing(wide: str, narrow: str) -> Markup:
    """A framed SVG in a form for wide and one for narrow screens, of which the style sheet shows one."""
    forms = (element("div", Markup(svg), class_=name) for name, svg in (("wide", wide), ("narrow", narrow)))
    return element("div", *forms, class_="card drawing")


def paragraphs(texts: Iterable[str], class_: str = "note") -> Markup:
    """One paragraph per text."""
    return join(element("p", text, class_=class_) for text in texts)


_PHASE_CLASSES: Final = {
    "Succeeded": "good",
    "Failed": "bad",
    "Suspended": "warn",
    "Recovering": "warn",
    "Running": "on",
}


def phase_badge(phase: str) -> Markup:
    """A phase in its colour."""
    return element("span", phase, class_=f"phase {_PHASE_CLASSES.get(phase, '')}".strip())
