"""Ranges of numbers, checked when a type is built; infinity and NaN are in none of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import UserError, shown
from penstock.core.limits import Limit


def require_within(value: Any, limit: Limit, where: str) -> None:
    """Raise `UserError` unless the numbers and lengths of ``value`` are in the range ``limit``."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _require_number(value, limit, where)
        return
    require_length(value, limit, where)
    if isinstance(value, (list, tuple)):
        item_limits = limit.get("prefixItems") or [limit.get("items", {})] * len(value)
        for i, (item, inner) in enumerate(zip(value, item_limits, strict=False)):
            if inner:
                require_within(item, inner, f"{where}[{i}]")
    elif isinstance(value, Mapping) and "additionalProperties" in limit:
        for name, item in value.items():
            require_within(item, limit["additionalProperties"], f"{where}.{name}")


_LENGTHS = (
    (str, "maxLength", "characters"),
    ((list, tuple), "maxItems", "items"),
    (Mapping, "maxProperties", "entries"),
)


def require_length(value: Any, limit: Limit, where: str) -> None:
    """Raise `UserError` if ``value`` is longer than ``limit``, even before ``value`` is converted to its type."""
    for kind, word, unit in _LENGTHS:
        if word in limit and isinstance(value, kind) and len(value) > limit[word]:
            raise UserError(
                what=f"has {len(value)} {unit}, more than {limit[word]}",
                where=where,
                remedy=f"write at most {limit[word]}",
            )
    if isinstance(value, Sequence) and not value and limit.get("minItems"):
        raise UserError(what="is empty", where=where, remedy="write at least one")


def _require_number(value: float, limit: Limit, where: str) -> None:
    least, most = limit.get("minimum"), limit.get("maximum", math.inf)
    if (least, most) == (0, 1) and not 0 <= value <= 1:
        raise UserError(what=f"{shown(value)} is not between 0 and 1", where=where, remedy="write a number from 0 to 1")
    if "exclusiveMinimum" in limit and not value > limit["exclusiveMinimum"]:
        raise UserError(what=f"{shown(value)} is not positive", where=where, remedy="write a positive number")
    if least == 0 and not value >= 0:
        raise UserError(what=f"{shown(value)} is negative or NaN", where=where, remedy="write 0 or more")
    if least is not None and not value >= least:
        raise UserError(what=f"{shown(value)} is less than {least}", where=where, remedy=f"write at least {least}")
    if "exclusiveMaximum" in limit and not value < limit["exclusiveMaximum"]:
        above = limit["exclusiveMaximum"]
        raise UserError(what=f"{shown(value)} is not below {above}", where=where, remedy=f"write less than {above}")
    if not value <= most or value == math.inf:
        raise UserError(what=f"{shown(value)} is more than {most}", where=where, remedy=f"write at most {most}")
