"""Common parts of pages: head, navigation, the signed-in user, and the scripts that update them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.api.auth.identity import Identity, Role
from penstock.api.pages.static import url_of
from penstock.view.charts import Figure
from penstock.view.markup import Markup, element, join
from penstock.view.page import figures_json

PLACES: Final = (
    ("/", "Jobs", Role.VIEWER),
    ("/submit", "Submit", Role.EDITOR),
    ("/whatif", "What if", Role.EDITOR),
    ("/profiles", "Profiles", Role.VIEWER),
)
"""Links of the navigation, with the role that each needs."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Scripts come only from files of the service. Inline styles are allowed, because drawings contain them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A page: ``body`` is its markup, and messages of the live stream ``stream`` make it reload."""

    title: str
    body: Markup
    here: str = ""
    stream: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    scripts: tuple[str, ...] = ()

    def document(self, identity: Identity | None) -> str:
        """Return the page as HTML."""
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            + element("title", f"{self.title} · penstock")
            + "".join(_style(name) for name in ("view.css", "app.css"))
            + f'<link rel="icon" href="{url_of("icon.svg")}">'
            + "".join(_script(name) for name in ("live.js", "actions.js", *self.scripts))
        )
        stream = f' data-stream="{self.stream}"' if self.stream else ""
        body = join((_bar(self.here, identity), element("main", self.body, id="main"), self._figures()), Markup("\n"))
        return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body{stream}>{body}\n</body></html>\n'

    def _figures(self) -> Markup:
        """Return the figures as data; ``live.js`` draws each once it scrolls into view."""
        if not self.figures:
            return Markup()
        scripts = {"data-plotly": url_of("plotly.js"), "data-draw": url_of("report.js")}
        places = "".join(f' {name}="{url}"' for name, url in scripts.items())
        return Markup(f'{figures_json(self.figures)}<span id="drawers"{places} hidden></span>')


def _style(name: str) -> str:
    return f'<link rel="stylesheet" href="{url_of(name)}">'


def _script(name: str) -> str:
    return f'<script src="{url_of(name)}" defer></script>'


def _bar(here: str, identity: Identity | None) -> Markup:
    links = [element("a", "penstock", href="/", class_="brand")]
    if identity is not None:
        open_to = (place for place in PLACES if identity.may_anywhere(place[2]))
        for href, name, _ in open_to:
            current = {"aria_current": "page"} if href == here else {}
            links.append(element("a", name, href=href, **current))
    who = Markup() if identity is None else element("span", f"{identity.name} ({identity.role})", class_="who")
    state = element("span", "", id="connection", role="status", aria_live="polite")
    skip = element("a", "To the content", href="#main", class_="skip")
    return join((skip, element("nav", *links, state, who, class_="bar", aria_label="Penstock")))
