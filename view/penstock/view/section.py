"""A section of a report: its content, or the reason why it is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.view.charts import Figure
from penstock.view.markup import Markup, element


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """``body`` is its markup below the heading; ``figures`` the charts that the body names."""

    anchor: str
    title: str
    body: Markup
    figures: Mapping[str, Figure] = field(default_factory=dict)
    is_missing: bool = False

    @property
    def markup(self) -> Markup:
        """The section with its heading."""
        return element("section", element("h2", self.title), self.body, id=self.anchor)


def left_out(anchor: str, title: str, why: str) -> Section:
    """A section without data: its heading, and a sentence that says why there is nothing."""
    sentence = element("p", f"Left out: {why}", class_="missing")
    return Section(anchor=anchor, title=title, body=sentence, is_missing=True)
