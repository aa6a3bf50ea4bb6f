"""A plan as a picture: the model's depth downward, a sequence's tokens to the right, one tile per stage and slice.

Both directions are to scale: a tile is as high as its stage has units and as wide as its slice has tokens. The rail on
the left of the tiles shows every unit; the text next to it names the stage's units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.model import Unit, UnitKind
from penstock.core.plan import Plan
from penstock.core.remaking import remakes_text
from penstock.core.units import format_count
from penstock.view.legend import text_width, wrapped
from penstock.view.markup import Markup, element
from penstock.view.theme import UNIT_NAMES, css_variables

_STYLE: Final = """
.stages{background:var(--surface);font-family:var(--sans);font-size:12px;font-variant-numeric:tabular-nums}
.stages text{fill:var(--muted)}.stages .strong{fill:var(--ink);font-weight:600;font-size:13px}
.stages .middle{text-anchor:middle}.stages .end{text-anchor:end}
.stages .tile{stroke:var(--surface);stroke-width:1.5}.stages .grid{stroke:var(--line)}
.stages .c0{fill:var(--series-1)}.stages .c1{fill:var(--series-4)}.stages .c2{fill:var(--series-5)}
.stages .c3{fill:var(--series-3)}.stages .c4{fill:var(--series-2)}
.stages .embedding,.stages .head{fill:var(--ink)}.stages .attention{fill:var(--faint)}
.stages .mlp{fill:var(--faint);fill-opacity:.4}
.stages .tile:hover{stroke:var(--ink)}
"""
_MARGIN: Final = 10.0
_NUM_COLOURS: Final = 5
_MAX_TILES: Final = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Pixels: the tiles' left edge and extent, and how many a unit and a token take."""

    width: float
    left: float
    top: float
    unit: float
    token: float

    @property
    def is_wide(self) -> bool:
        """Whether names stand next to the tiles (else above them)."""
        return self.width >= 600


def stages(plan: Plan, *, width: int = 1120) -> str:
    """The stages and slices of ``plan`` as an SVG document ``width`` pixels wide."""
    frame = _frame(plan, width)
    bands = list(_bands(plan, frame))
    parts = [_header(plan, frame), *(_band(plan, stage, y, frame) for stage, y in bands)]
    stage, y = bands[-1]
    bottom = y + _height(plan, stage, frame)
    parts.append(_legend(plan, bottom + 12, frame))
    num_stages, num_slices = format_count(len(plan.stages), "stage"), format_count(len(plan.slices), "slice")
    size = (width + 2 * _MARGIN, bottom + 12 + (1 if frame.is_wide else 2) * _LINE + 2 * _MARGIN)
    return element(
        "svg",
        element("style", Markup(css_variables() + _STYLE)),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"{-_MARGIN:g} {-_MARGIN:g} {size[0]:g} {size[1]:g}",
        width=size[0],
        height=size[1],
        role="img",
        aria_label=f"{num_stages} by {num_slices} of {plan.sequence_length} tokens",
        class_="stages",
    )


_RAIL: Final = 12.0
_LINE: Final = 16.0
_TWO_LINES: Final = 30.0


def _frame(plan: Plan, width: int) -> _Frame:
    smallest = min(stop - first for first, stop in plan.stages)
    num_units = plan.model.num_units
    # The picture is about 380 pixels high, or up to 900 if stages would otherwise be too low for their names.
    unit = max(min(16.0, 380.0 / num_units), min(14.0 / smallest, 900.0 / num_units))
    prefix = "stage 00: " if smallest * unit < _TWO_LINES else ""
    names = max(text_width(prefix + owned_units(plan, i)) for i in range(len(plan.stages)))
    left = _RAIL + 28 + min(max(names, 230.0), 380.0) if width >= 600 else _RAIL + 6
    return _Frame(width=width, left=left, top=40.0, unit=unit, token=(width - left) / plan.sequence_length)


def _height(plan: Plan, stage: int, frame: _Frame) -> float:
    first, stop = plan.stages[stage]
    return (stop - first) * frame.unit


def _bands(plan: Plan, frame: _Frame) -> Iterator[tuple[int, float]]:
    """(stage, top of its tiles) for every stage."""
    y = frame.top
    for stage in range(len(plan.stages)):
        y += 0.0 if frame.is_wide else _LINE * len(_caption(plan, stage, frame)) + 1
        yield stage, y
        y += _height(plan, stage, frame) + 4


def _header(plan: Plan, frame: _Frame) -> Markup:
    """The slices' numbers and lengths above the tiles; a slice too narrow for its length shows neither."""
    parts = []
    if frame.is_wide:
        parts.append(element("text", "the model's units, top to bottom", x=0, y=28))
    start = 0
    for index, length in enumerate(plan.slices):
        x, wide = frame.left + start * frame.token, length * frame.token
        texts = (f"slice {index}", f"{length} tokens") if wide > 72 else (f"{index}", f"{length}")
        if wide >= max(map(text_width, texts)) + 2:
            parts.append(element("text", texts[0], x=x + wide / 2, y=14, class_="middle strong"))
            parts.append(element("text", texts[1], x=x + wide / 2, y=28, class_="middle"))
        start += length
    return element("g", *parts)


def _band(plan: Plan, stage: int, y: float, frame: _Frame) -> Markup:
    parts = list(_names(plan, stage, y, frame))
    first, stop = plan.stages[stage]
    for unit in plan.model.units[first:stop]:
        top = y + (unit.index - first) * frame.unit
        gap = min(1.0, frame.unit * 0.2)
        tooltip = element("title", _unit_name(plan, unit))
        box = {"x": frame.left - _RAIL - 4, "y": top, "width": _RAIL, "height": frame.unit - gap}
        parts.append(element("rect", tooltip, **box, class_=unit.kind.value))
    parts.extend(_tiles(plan, stage, y, frame))
    return element("g", *parts)


def _unit_name(plan: Plan, unit: Unit) -> str:
    is_part = unit.kind is UnitKind.HEAD and plan.head_parts > 1
    return f"{unit.name}, part {unit.part + 1} of {plan.head_parts}" if is_part else unit.name


def _tiles(plan: Plan, stage: int, y: float, frame: _Frame) -> Iterator[Markup]:
    recomputed = recomputation_text(plan, stage)
    for start, length, slices in _columns(plan, frame):
        tooltip = f"stage {stage}, {slices}: tokens {start} to {start + length - 1}, attending to {start} before them"
        tooltip += f"; recomputed: {recomputed}" if recomputed else ""
        yield element(
            "rect",
            element("title", tooltip),
            x=frame.left + start * frame.token,
            y=y,
            width=length * frame.token,
            height=_height(plan, stage, frame),
            fill_opacity=0.34 + 0.5 * start / plan.sequence_length,
            class_=f"tile c{stage % _NUM_COLOURS}",
        )


def _columns(plan: Plan, frame: _Frame) -> Iterator[tuple[int, int, str]]:
    """(first token, tokens, which slices); neighbours too narrow to draw share a column: a picture stays small."""
    narrowest = max(2.0, frame.width * len(plan.stages) / _MAX_TILES)
    start, length, first = 0, 0, 0
    for index, tokens in enumerate(plan.slices):
        length += tokens
        if length * frame.token >= narrowest or index == len(plan.slices) - 1:
            yield start, length, f"slice {index}" if first == index else f"slices {first} to {index}"
            start, length, first = start + length, 0, index + 1


def _caption(plan: Plan, stage: int, frame: _Frame) -> list[str]:
    """The heading above a stage's tiles where it does not fit next to them."""
    return wrapped(f"{stage_name(plan, stage)}: {owned_units(plan, stage)}", frame.width)


def _names(plan: Plan, stage: int, y: float, frame: _Frame) -> Iterator[Markup]:
    name, owns = stage_name(plan, stage), owned_units(plan, stage)
    height = _height(plan, stage, frame)
    if not frame.is_wide:
        lines = _caption(plan, stage, frame)
        for above, text in enumerate(reversed(lines)):
            yield element("text", text, x=0, y=y - 5 - above * _LINE)
    elif height >= _TWO_LINES:
        yield element("text", name, x=0, y=y + height / 2 - 2, class_="strong")
        yield element("text", owns, x=0, y=y + height / 2 + 13)
    elif height >= 11:
        yield element("text", f"stage {stage}: {owns}", x=0, y=y + height / 2 + 4)


def _legend(plan: Plan, y: float, frame: _Frame) -> Markup:
    layers = plan.model.layers
    head = "embedding, head" if plan.head_parts == 1 else f"embedding, head in {plan.head_parts} parts"
    entries = (("head", head), ("attention", f"{layers} attention"), ("mlp", f"{layers} MLP"))
    x = 0.0
    parts = []
    for class_, label in entries:
        parts.append(element("rect", x=x, y=y, width=10, height=10, class_=class_))
        parts.append(element("text", label, x=x + 15, y=y + 9))
        x += 15 + text_width(label) + 16
    place = (x, y + 9) if frame.is_wide else (0.0, y + 9 + _LINE)
    parts.append(element("text", "stronger colour: more tokens to attend to", x=place[0], y=place[1]))
    return element("g", *parts)


def stage_name(plan: Plan, stage: int) -> str:
    """``stage 1, rank 1``, or ``stage 1, ranks 4–7`` if shards share it. Ranks are those of the first replica.

    If ranks hold several stages, only the schedule knows which, and the name is ``stage 1``.
    """
    if len(plan.stages) != plan.pp:
        return f"stage {stage}"
    first, last = stage * plan.tp, (stage + 1) * plan.tp - 1
    return f"stage {stage}, rank {first}" if first == last else f"stage {stage}, ranks {first}–{last}"


def owned_units(plan: Plan, stage: int) -> str:
    """A stage's units in words: ``embedding, blocks 0–3, attention of 4``."""
    first, stop = plan.stages[stage]
    return ", ".join(_words(plan.model.units[first:stop], plan.head_parts))


def recomputation_text(plan: Plan, stage: int) -> str:
    """The units that a stage recomputes before its backwards, in words; empty where it keeps everything."""
    remakes = plan.recompute[stage] if plan.recompute else ()
    return remakes_text(plan.model, plan.stages[stage], remakes)


def _words(units: Sequence[Unit], head_parts: int) -> Iterator[str]:
    """One phrase for each run of whole blocks or of parts of the head, and for each unit that stands alone."""
    parts = [unit.part + 1 for unit in units if unit.kind is UnitKind.HEAD and head_parts > 1]
    layers = [layer for layer, count in Counter(u.layer for u in units if u.layer is not None).items() if count == 2]
    for unit in units:
        if parts and unit.kind is UnitKind.HEAD:
            continue
        if unit.layer not in layers:
            yield UNIT_NAMES[unit.kind] if unit.layer is None else f"{UNIT_NAMES[unit.kind]} of {unit.layer}"
        elif unit.layer == layers[0] and unit.kind is UnitKind.ATTENTION:
            yield f"block {layers[0]}" if len(layers) == 1 else f"blocks {layers[0]}–{layers[-1]}"
    if parts:
        numbers = f"part {parts[0]}" if len(parts) == 1 else f"parts {parts[0]}–{parts[-1]}"
        yield f"{numbers} of {head_parts} of the head"
