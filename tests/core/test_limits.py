"""Ranges in schemas are those that the types keep: what lies on a bound is read, what lies beyond is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema_rs
import pytest

from penstock.core.cluster import ClusterSpec
from penstock.core.cluster_profile import ClusterProfile
from penstock.core.errors import UserError
from penstock.core.job import Metadata, PipelineJob, TokenizerSpec
from penstock.core.manifest import Manifest, declarations
from penstock.core.manifest_schema import cluster_profile_schema, dataclass_schema, job_schema
from penstock.core.plan import Plan
from penstock.core.pod import AgentReport, PodBinding
from tests.support.manifest_strategies import manifest_types
from tests.support.manifests import AGENT_REPORT, BINDING, CLUSTER, CLUSTER_PROFILE, FULL, MIXED_CLUSTER, PLAN, loaded

READERS: dict[str, tuple[dict[str, Any], type[Manifest], str]] = {
    "PipelineJob": (job_schema(), PipelineJob, FULL),
    "ClusterProfile": (cluster_profile_schema(), ClusterProfile, CLUSTER_PROFILE),
    "ClusterSpec": (dataclass_schema(ClusterSpec), ClusterSpec, CLUSTER),
    "ClusterSpec of two kinds": (dataclass_schema(ClusterSpec), ClusterSpec, MIXED_CLUSTER),
    "Plan": (dataclass_schema(Plan), Plan, PLAN),
    "PodBinding": (dataclass_schema(PodBinding), PodBinding, BINDING),
    "AgentReport": (dataclass_schema(AgentReport), AgentReport, AGENT_REPORT),
    "Metadata": (dataclass_schema(Metadata), Metadata, "{name: full, uid: u}"),
    "TokenizerSpec": (dataclass_schema(TokenizerSpec), TokenizerSpec, "{file: tokenizer.json}"),
}

Part = tuple[str, tuple[Any, ...], frozenset[str]]
"""A type's name, where it is written, and the fields that are."""


def parts(schema: Mapping[str, Any], value: Any, path: tuple[Any, ...] = ()) -> Iterator[Part]:
    """Every part of a manifest that a type describes."""
    for option in (schema, *schema.get("anyOf", ())):
        if isinstance(value, Mapping):
            if "title" in option:
                yield option["title"], path, frozenset(value)
            for name, inner in value.items():
                extra = option.get("additionalProperties") or {}
                yield from parts(option.get("properties", {}).get(name, extra), inner, (*path, name))
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                yield from parts(option.get("items") or {}, inner, (*path, i))


LIMITS = {
    cls.__name__: {name: field.limit for name, field in declarations(cls).items() if field.limit}
    for cls in manifest_types()
}
"""Declared ranges, by the type's name and the field's name in manifests."""

BEYOND: dict[str, Callable[[Any], list[Any]]] = {
    "minimum": lambda least: [least - 1],
    "exclusiveMinimum": lambda below: [below],
    "maximum": lambda most: [most + 1 if isinstance(most, int) else 2 * most],
    "exclusiveMaximum": lambda above: [above],
    "multipleOf": lambda part: [part / 2],
    "enum": lambda _: ["neither"],
    "pattern": lambda _: ["a b", "a" * 400, "a\n"],
    "minItems": lambda _: [[]],
    "maxLength": lambda most: ["a" * (most + 1)],
    "maxItems": lambda most: [[1] * (most + 1)],
    "maxProperties": lambda most: [{f"a{number}": "" for number in range(most + 1)}],
    "additionalProperties": lambda inner: [{"a": value} for value in beyond(inner)],
    "items": lambda inner: [[value] for value in beyond(inner)],
    "prefixItems": lambda items: [[value] * len(items) for value in beyond(items[0])],
}


def beyond(limit: Mapping[str, Any]) -> list[Any]:
    """Values outside of a limit."""
    return [value for word, far in BEYOND.items() if word in limit for value in far(limit[word])]


CASES = [
    (kind, path, name, value)
    for kind, (schema, _, text) in READERS.items()
    for title, path, present in parts(schema, loaded(text))
    for name, limit in LIMITS.get(title, {}).items()
    if name in present
    for value in beyond(limit)
]


def test_every_limited_field_is_tried() -> None:
    tried = {(path[-1] if path else "", name) for _, path, name, _ in CASES}
    assert {name for _, name in tried} == {name for limits in LIMITS.values() for name in limits}


def unlimited(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of values that may be as large as you like."""
    options = [schema, *schema.get("anyOf", ())]
    kinds = {option.get("type") for option in options}
    words = {word for option in options for word in option}
    if kinds & {"integer", "number"} and not words & {"maximum", "exclusiveMaximum"}:
        yield f"{path}: a number"
    if "string" in kinds and not words & {"maxLength", "enum"}:
        yield f"{path}: a string"
    if "array" in kinds and "maxItems" not in words:
        yield f"{path}: a list"
    for option in options:
        more = option.get("additionalProperties")
        if isinstance(more, Mapping):
            if "maxProperties" not in words:
                yield f"{path}: a mapping"
            yield from unlimited(more, f"{path}.*")
        for name, inner in option.get("properties", {}).items():
            yield from unlimited(inner, f"{path}.{name}")
        items = [{**option["items"], **schema.get("items", {})}] if "items" in option and option is not schema else []
        items += [schema["items"]] if option is schema and schema.get("type") == "array" and "items" in schema else []
        for inner in (*items, *option.get("prefixItems", ())):
            yield from unlimited(inner, f"{path}[]")


@pytest.mark.parametrize("kind", ["PipelineJob", "ClusterProfile", "ClusterSpec"])
def test_all_that_a_person_writes_has_a_maximum(kind: str) -> None:
    schema = READERS[kind][0]
    properties = {name: inner for name, inner in schema["properties"].items() if name not in ("status", "kind")}
    assert list(unlimited({**schema, "properties": properties})) == []


@pytest.mark.parametrize(("kind", "path", "name", "value"), CASES, ids=lambda value: str(value)[:40])
def test_beyond_a_limit(kind: str, path: tuple[Any, ...], name: str, value: Any) -> None:
    schema, cls, text = READERS[kind]
    document = loaded(text)
    assert jsonschema_rs.is_valid(schema, document)
    place = document
    for step in path:
        place = place[step]
    place[name] = value
    assert not jsonschema_rs.is_valid(schema, document), "the schema takes it"
    with pytest.raises(UserError) as caught:
        cls.from_manifest(json.loads(json.dumps(document)))
    assert name in caught.value.where


def test_a_whole_number_that_no_float_holds_is_a_mistake() -> None:
    """Also where nothing bounds it from above: `math.isinf` raised an OverflowError. Found by the soak."""
    prediction = {**loaded(PLAN)["prediction"], "stepSeconds": 10**400}
    with pytest.raises(UserError, match=r"prediction\.stepSeconds"):
        Plan.from_manifest({**loaded(PLAN), "prediction": prediction})
