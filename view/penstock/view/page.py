"""The shell of a self-contained page: styles, the drawings' palette, plotly's own JavaScript and the figures' data.

The page contains everything that it shows, so it works from ``file://``. A Content-Security-Policy forbids all
requests, so the page sends no data anywhere. All data was escaped on its way into `Markup`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Final

from penstock.view.charts import Figure
from penstock.view.markup import Markup, element
from penstock.view.theme import DARK, LIGHT, css_variables

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def page(title: str, body: Markup, figures: Mapping[str, Figure]) -> str:
    """An HTML document; every element of ``body`` with ``data-figure="name"`` becomes the figure of that name."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        + element("title", title)
        + element("style", Markup(css_variables() + asset("report.css")))
    )
    scripts = _scripts(figures) if figures else ""
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n{scripts}</body></html>\n'


def _scripts(figures: Mapping[str, Figure]) -> str:
    return f"<script>{plotly_javascript()}</script>\n{figures_json(figures)}\n<script>{asset('report.js')}</script>"


def figures_json(figures: Mapping[str, Figure]) -> Markup:
    """The figures that `assets/report.js` draws."""
    data = json_in_html({"figures": figures, "palettes": {"light": LIGHT, "dark": DARK}})
    return Markup(f'<script type="application/json" id="figures">{data}</script>')


def json_in_html(value: object) -> str:
    """JSON that may stand inside a ``<script>`` element: it can neither close the element nor open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def asset(name: str) -> str:
    """The text of a file that ships with this package."""
    return resources.files("penstock.view").joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def plotly_javascript() -> str:
    """plotly.js as the package plotly ships it (4.8 MB). The import is late, because it takes long."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
