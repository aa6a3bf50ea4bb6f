"""Files that pages refer to: by a name with a digest of their content, so browsers may cache them indefinitely."""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Final

from penstock.view.page import asset, plotly_javascript
from penstock.view.theme import css_variables

JAVASCRIPT, CSS, SVG = "text/javascript", "text/css", "image/svg+xml"
DIGEST_LENGTH = 12


def _own(name: str) -> Callable[[], str]:
    return lambda: resources.files("penstock.api.pages").joinpath("assets", name).read_text(encoding="utf-8")


FILES: Final[Mapping[str, tuple[str, Callable[[], str]]]] = {
    "view.css": (CSS, lambda: css_variables() + asset("report.css")),
    "report.js": (JAVASCRIPT, lambda: asset("report.js")),
    "plotly.js": (JAVASCRIPT, plotly_javascript),
    "app.css": (CSS, _own("app.css")),
    "live.js": (JAVASCRIPT, _own("live.js")),
    "actions.js": (JAVASCRIPT, _own("actions.js")),
    "login.js": (JAVASCRIPT, _own("login.js")),
    "whatif.js": (JAVASCRIPT, _own("whatif.js")),
    "icon.svg": (SVG, _own("icon.svg")),
}


@functools.cache
def content(name: str) -> bytes:
    """Return the file."""
    return FILES[name][1]().encode()


@functools.cache
def compressed(name: str) -> bytes:
    """Return the file as gzip, made at its first request."""
    return gzip.compress(content(name), mtime=0)


@functools.cache
def url_of(name: str) -> str:
    """Return the URL of the file. plotly's has the version of its package, which avoids reading 5 MB at the start."""
    if name == "plotly.js":
        from importlib.metadata import version

        return f"/static/{name}?v={version('plotly')}"
    return f"/static/{name}?v={hashlib.sha256(content(name)).hexdigest()[:DIGEST_LENGTH]}"
