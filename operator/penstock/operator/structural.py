"""JSON Schema of core's types as the structural schema of a custom resource, which allows less.

It has no alternatives but "integer or string": a null is left out, which the apiserver does with values too, and
what may be a number or a list has no type at all. Fields that are not known are not refused but pruned, unless the
client asks for strict checks, as kubectl does. A titled object gets the rules of its type. The apiserver takes them
because all that a person writes is bounded (`penstock.core.limits`): it counts what each rule could cost. See
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from penstock.core.manifest_schema import JsonSchema
from penstock.operator.rules import RULES

LIST_KEYS = {"env": "name", "conditions": "type"}
"""Lists whose items are known by a field, so that several clients may write their own."""
_BOUNDS = ("minimum", "maximum", "minItems", "maxItems", "maxLength", "maxProperties")
_KEPT = (*_BOUNDS, "pattern", "format", "default", "required")


def structural(schema: Mapping[str, Any], name: str = "") -> JsonSchema:
    """``schema``, of the field ``name``, for a custom resource."""
    plain = _collapsed(schema)
    found = {"description": plain["description"].replace("``", "`")} if "description" in plain else {}
    found |= _type(plain) | {key: plain[key] for key in _KEPT if key in plain and _is_exact(plain[key])}
    found |= _exclusive(plain)
    found |= _choices(plain)
    if "properties" in plain:
        properties = plain["properties"].items()
        found["properties"] = {each: structural(inner, each) for each, inner in properties}
    if isinstance(plain.get("additionalProperties"), Mapping):
        found["additionalProperties"] = structural(plain["additionalProperties"])
    if "items" in plain and "type" in found:
        found["items"] = structural(plain["items"])
    if name in LIST_KEYS:
        found |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [LIST_KEYS[name]]}
    elif found.get("type") == "array":
        found["x-kubernetes-list-type"] = "atomic"
    if rules := RULES.get(plain.get("title", "")):
        found["x-kubernetes-validations"] = [rule.to_manifest() for rule in rules]
    return found


def _is_exact(value: Any) -> bool:
    """Whether a bound is one for the apiserver, whose bounds are floats; ``format: int64`` says the others."""
    return not isinstance(value, int) or int(float(value)) == value


def _collapsed(schema: Mapping[str, Any]) -> JsonSchema:
    """Without null, and with the items of a tuple as those of a list, which are all alike."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    found = dict(schema)
    if len(options) == 1:
        found = {**options[0], **{key: value for key, value in schema.items() if key != "anyOf"}}
    if "prefixItems" in found:
        first, *others = found["prefixItems"]
        assert all(each == first for each in others), "a list's items have one schema"
        found["items"] = first
    return found


def _type(plain: Mapping[str, Any]) -> JsonSchema:
    options = {option["type"]: option for option in plain.get("anyOf", ())}
    if options.keys() == {"integer", "string"}:
        either = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
        return either | {key: value for option in options.values() for key, value in option.items() if key != "type"}
    if "type" in plain:
        return {"type": plain["type"]} | ({"format": "int64"} if plain["type"] == "integer" else {})
    values = plain.get("enum", [plain["const"]] if "const" in plain else [])
    return {"type": "string"} if values else {"x-kubernetes-preserve-unknown-fields": True}


def _exclusive(plain: Mapping[str, Any]) -> JsonSchema:
    """An excluded bound is a flag beside the bound in OpenAPI 3.0."""
    found: JsonSchema = {}
    for side in ("minimum", "maximum"):
        flag = f"exclusive{side.capitalize()}"
        if flag in plain:
            found |= {side: plain[flag], flag: True}
    return found


def _choices(plain: Mapping[str, Any]) -> JsonSchema:
    """All values, where they are few; so are those of either a word or a truth value."""
    options = [option for option in plain.get("anyOf", ()) if option != {"type": "null"}]
    of_options = [[True, False] if option["type"] == "boolean" else option.get("enum", []) for option in options]
    values = [plain["const"]] if "const" in plain else plain.get("enum", [])
    if all(of_options):
        values = [*values, *itertools.chain.from_iterable(of_options)]
    found = [each for each in values if each is not None]
    return {"enum": found} if found else {}
