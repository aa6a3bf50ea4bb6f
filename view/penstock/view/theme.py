"""Colours and type of everything that is drawn, for light and dark, as CSS variables.

Hues follow the custom of pipeline diagrams: forward blue, full backward green; split backward is coral (input
gradient) and gold (weight gradient), recompute violet. Chosen in OKLCH at near-equal lightness, so that dark letters
read on every bar.
"""

from __future__ import annotations

from typing import Final

from penstock.core.model import UnitKind
from penstock.core.schedule import Kind

LIGHT: Final = {
    "page": "#f4f7f9",
    "surface": "#ffffff",
    "ink": "#181f28",
    "muted": "#565e69",
    "faint": "#69717b",
    "line": "#dee2e7",
    "track": "#edf0f5",
    "on-bar": "#101720",
    "forward": "#5596dc",
    "backward": "#54b581",
    "input-gradient": "#e57e5e",
    "weight-gradient": "#e6bf5d",
    "recompute": "#ad79cb",
    "other": "#95a0ab",
    "accent": "#2063b0",
    "series-1": "#266ec3",
    "series-2": "#d45c36",
    "series-3": "#9353b7",
    "series-4": "#258e6a",
    "series-5": "#c8942d",
    "good": "#1e7546",
    "warn": "#9c5d0c",
    "bad": "#ba3630",
    "shade-1": "0.84",
    "shade-2": "0.7",
    "shade-3": "0.58",
}
DARK: Final = {
    "page": "#0b0f14",
    "surface": "#13181e",
    "ink": "#e4e8ed",
    "muted": "#a5abb4",
    "faint": "#878e97",
    "line": "#282e36",
    "track": "#1e232b",
    "on-bar": "#0b0f14",
    "forward": "#6da9eb",
    "backward": "#68c894",
    "input-gradient": "#ee8d70",
    "weight-gradient": "#e8c365",
    "recompute": "#c191de",
    "other": "#89939e",
    "accent": "#76b3f1",
    "series-1": "#6aa9ed",
    "series-2": "#f08c6d",
    "series-3": "#c797e5",
    "series-4": "#5bc99e",
    "series-5": "#e8c365",
    "good": "#6cd092",
    "warn": "#edbb64",
    "bad": "#f28881",
    "shade-1": "0.88",
    "shade-2": "0.77",
    "shade-3": "0.66",
}
NUM_SHADES: Final = 4
"""Micro-batches take turns in this many shades of their kind's colour."""

SANS: Final = 'Inter, "SF Pro Text", "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif'
MONO: Final = '"JetBrains Mono", "SF Mono", Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono", monospace'

KIND_NAMES: Final = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "recompute",
}
UNIT_NAMES: Final = {
    UnitKind.EMBEDDING: "embedding",
    UnitKind.ATTENTION: "attention",
    UnitKind.MLP: "MLP",
    UnitKind.HEAD: "head",
}


def kind_variable(kind: Kind) -> str:
    """The palette's name for a compute kind."""
    return KIND_NAMES[kind].replace(" ", "-") if kind in KIND_NAMES else "other"


def css_variables() -> str:
    """The palette as custom properties of the root: light, dark where the reader prefers it, light again on paper."""
    light, dark = (";".join(f"--{name}:{value}" for name, value in palette.items()) for palette in (LIGHT, DARK))
    fonts = f"--sans:{SANS};--mono:{MONO}"
    return (
        f":root{{{light};{fonts};color-scheme:light dark}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"@media print{{:root{{{light};color-scheme:light}}}}"
    )
