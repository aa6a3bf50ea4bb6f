"""What the apiserver does to a custom resource before anybody sees it: defaults, from the outside in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def defaulted(schema: Mapping[str, Any], value: Any) -> Any:
    """``value`` with the schema's defaults, also inside of defaults."""
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), each) for each in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, inner in schema.get("properties", {}).items():
        if name not in filled and "default" in inner:
            filled[name] = copy.deepcopy(inner["default"])
    known = schema.get("properties", {})
    extra = schema.get("additionalProperties") or {}
    return {name: defaulted(known.get(name, extra), each) for name, each in filled.items()}
