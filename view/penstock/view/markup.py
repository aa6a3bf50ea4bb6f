"""Building SVG and HTML text: everything that is not already `Markup` is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

_CHILDLESS = frozenset({"rect", "line", "path", "circle", "br", "col", "meta", "input"})
_UNSAFE = re.compile("[&<>\"'\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_REPLACED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}


class Markup(str):
    """Text that is already SVG or HTML and must not be escaped again."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """``text`` as markup, safe in elements and quoted attributes; characters that XML cannot hold are dropped."""
    if isinstance(text, Markup):
        return text
    return Markup(_UNSAFE.sub(lambda match: _REPLACED.get(match[0], ""), text))


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros, no negative zero."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def element(name: str, /, *children: str, **attributes: str | float) -> Markup:
    """``<name …>children</name>``; the attribute ``class_`` is written ``class``, ``stroke_width`` ``stroke-width``."""
    opening = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
    )
    if not children and name in _CHILDLESS:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{''.join(escape(child) for child in children)}</{name}>")


def join(parts: Iterable[str], separator: str = "") -> Markup:
    """All parts, each escaped unless it is markup."""
    return Markup(escape(separator).join(escape(part) for part in parts))
