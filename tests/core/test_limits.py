"""Ranges in schemas are those that the types keep: what lies on a bound is read, what lies beyond is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs
import pytest

from penstock.core.cluster_profile import ClusterProfile
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.limits import LIMITS
from penstock.core.manifest import Manifest, camel
from penstock.core.manifest_schema import cluster_profile_schema, job_schema
from tests.support.manifests import CLUSTER_PROFILE, FULL, loaded

JOB = job_schema()
READERS: dict[str, tuple[dict[str, Any], type[Manifest]]] = {
    "PipelineJob": (JOB, PipelineJob),
    "ClusterProfile": (cluster_profile_schema(), ClusterProfile),
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


def beyond(limit: Mapping[str, Any]) -> list[Any]:
    """Values outside of a limit."""
    found: list[Any] = []
    if "minimum" in limit:
        found.append(limit["minimum"] - 1)
    if "exclusiveMinimum" in limit:
        found.append(limit["exclusiveMinimum"])
    if "maximum" in limit:
        found.append(limit["maximum"] + 0.5)
    if "exclusiveMaximum" in limit:
        found.append(limit["exclusiveMaximum"])
    if "multipleOf" in limit:
        found.append(limit["multipleOf"] / 2)
    if "enum" in limit:
        found.append("neither")
    if "pattern" in limit:
        found += ["a b", "a" * 300, "a\n"]
    if "minItems" in limit:
        found.append([])
    if "additionalProperties" in limit:
        found += [{"a": value} for value in beyond(limit["additionalProperties"])]
    for items in (limit.get("prefixItems"), [limit["items"]] if "items" in limit else None):
        found += [[value] * len(items) for value in beyond(items[0])] if items else []
    return found


CASES = [
    (kind, path, name, value)
    for kind, document in (("PipelineJob", loaded(FULL)), ("ClusterProfile", loaded(CLUSTER_PROFILE)))
    for title, path, present in parts(READERS[kind][0], document)
    for cls, limits in LIMITS.items()
    if cls.__name__ == title
    for name, limit in limits.items()
    if name in present
    for value in beyond(limit)
]


def test_every_limited_field_is_tried() -> None:
    tried = {(path[-1] if path else "", name) for _, path, name, _ in CASES}
    assert len({name for _, name in tried}) == len({name for limits in LIMITS.values() for name in limits})


def test_limits_are_of_fields_that_exist() -> None:
    for cls, limits in LIMITS.items():
        assert limits.keys() <= {camel(field.name) for field in dataclasses.fields(cls)}


@pytest.mark.parametrize(("kind", "path", "name", "value"), CASES, ids=str)
def test_beyond_a_limit(kind: str, path: tuple[Any, ...], name: str, value: Any) -> None:
    schema, cls = READERS[kind]
    document = loaded(FULL if kind == "PipelineJob" else CLUSTER_PROFILE)
    assert jsonschema_rs.is_valid(schema, document)
    place = document
    for step in path:
        place = place[step]
    place[name] = value
    assert not jsonschema_rs.is_valid(schema, document), "the schema takes it"
    with pytest.raises(UserError) as caught:
        cls.from_manifest(json.loads(json.dumps(document)))
    assert name in caught.value.where
