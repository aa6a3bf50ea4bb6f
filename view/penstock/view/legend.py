"""Legend of a Gantt chart, with only the colours that the chart has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.core.timeline import Activity, Event, Timeline
from penstock.view.markup import Markup, element
from penstock.view.spans import action_of, carries_gradient, compute_kind
from penstock.view.theme import KIND_NAMES, NUM_SHADES

_LINE: Final = 18.0
_SWATCH: Final = 12.0


def legend(timelines: Sequence[Timeline], width: float, top: float) -> tuple[Markup, float]:
    """Swatches and words, wrapped at ``width`` from ``top`` down, and the height they take."""
    x, y = 0.0, top
    parts: list[Markup] = []
    for classes, label in _entries(timelines):
        swatches_width = _SWATCH * len(classes)
        entry_width = swatches_width + 6 + text_width(label)
        if x and x + entry_width > width:
            x, y = 0.0, y + _LINE
        parts.extend(_swatch(class_, x + i * _SWATCH, y) for i, class_ in enumerate(classes))
        parts.append(element("text", label, x=x + swatches_width + 6, y=y + 9))
        x += entry_width + 16
    return element("g", *parts), y + _LINE - top


def _swatch(class_: str, x: float, y: float) -> Markup:
    height = {"wait": 2.0, "send-f": 3.0, "send-b": 3.0}.get(class_, 10.0)
    return element("rect", x=x, y=y + 5 - height / 2, width=_SWATCH, height=height, class_=class_)


def text_width(text: str) -> float:
    """Upper bound of the width of ``text`` in pixels, at a size of 12 pixels: the reader's font is not known here.

    The widest fonts in use are monospaced ones and DejaVu Sans, both about 7.3 pixels a character.
    """
    return 7.3 * len(text)


def wrapped(text: str, width: float) -> list[str]:
    """``text`` in lines of at most ``width`` pixels, broken between words."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _entries(timelines: Sequence[Timeline]) -> list[tuple[tuple[str, ...], str]]:
    """(classes of swatches, label) for everything the timelines hold, in one fixed order."""
    events = [event for timeline in timelines for event in timeline.events]
    held = {_class(event) for event in events}
    kinds = [(kind.value.lower(), f"{kind.value} {name}") for kind, name in KIND_NAMES.items()]
    entries: list[tuple[tuple[str, ...], str]] = [
        ((class_,), label) for class_, label in (*kinds, *_OTHERS) if class_ in held
    ]
    actions = [action_of(event.action) for event in events if event.activity is Activity.COMPUTE]
    if any(action and action.microbatch for action in actions):
        shades = tuple(f"f m{i}" for i in range(NUM_SHADES))
        entries.insert(sum(class_ in held for class_, _ in kinds), (shades, "shade: micro-batch"))
    return entries


_OTHERS: Final = (
    ("other", "other compute"),
    ("reduce", "reduction"),
    ("step", "optimizer"),
    ("wait", "waiting"),
    ("send-f", "transfer of activations"),
    ("send-b", "transfer of gradients"),
)


def _class(event: Event) -> str:
    if event.activity is Activity.TRANSFER:
        return "send-b" if carries_gradient(event) else "send-f"
    if event.activity is not Activity.COMPUTE:
        return event.activity.value
    kind = compute_kind(action_of(event.action))
    return kind.value.lower() if kind else "other"
