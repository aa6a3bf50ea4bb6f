"""The schema of manifests: takes whatever is read, and refuses nothing that reading takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.manifest_schema import dataclass_schema, job_schema
from penstock.core.serialization import yamltext
from tests.support.manifests import example
from tests.support.repository import ROOT

JOBS = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))
VALUES: list[Any] = [None, True, 0, -1, 7, 2.5, "", "4Gi", "cosine", [], [1], {}, {"a": "b"}, [512, 512]]


def fits(document: Any, schema: dict[str, Any]) -> bool:
    return jsonschema_rs.is_valid(schema, document)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every value's path but the whole's."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in items:
        yield (*path, name)
        yield from places(value, (*path, name))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_examples_fit(path: Any) -> None:
    document = yamltext.load(path.read_text(), str(path))
    schema = job_schema() if document.get("kind") == "PipelineJob" else dataclass_schema(ClusterSpec)
    assert fits(document, schema)


@given(st.data())
def test_manifests_that_the_schema_refuses_are_refused_by_reading(data: st.DataObject) -> None:
    document = copy.deepcopy(example(parallelism={"slices": [512, 512], "schedule": "zb"}))
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, name = data.draw(st.sampled_from(sorted(places(document), key=str)))
        place: Any = document
        for parent in parents:
            place = place[parent]
        if data.draw(st.booleans()):
            place[name] = copy.deepcopy(data.draw(st.sampled_from(VALUES)))
        elif isinstance(place, dict):
            value = place.pop(name)
            if data.draw(st.booleans()):
                place[f"{name}x"] = value
    if not fits(document, job_schema()):
        with pytest.raises(UserError):
            PipelineJob.from_manifest(document)


def test_the_schema_has_required_fields_and_defaults() -> None:
    schema = job_schema()
    spec = schema["properties"]["spec"]
    assert (schema["required"], spec["required"]) == (
        ["apiVersion", "kind", "metadata", "spec"],
        ["model", "data", "training"],
    )
    training = spec["properties"]["training"]
    assert training["required"] == ["globalBatch", "steps"]
    assert training["properties"]["schedule"] == {
        "type": "string",
        "enum": ["cosine", "wsd", "constant"],
        "default": "cosine",
        "description": "how the learning rate falls: `cosine`, `wsd` (holds, then falls) or `constant`",
    }
    assert spec["properties"]["resources"]["properties"]["memoryPerRank"]["default"] == "4Gi"
    assert "vocab" not in spec["properties"]["model"]["required"]
    assert spec["properties"]["model"]["description"].startswith("A decoder's dimensions.")


def undescribed(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of fields that nothing is said about."""
    for name, field in schema.get("properties", {}).items():
        if "description" not in field and "const" not in field:
            yield f"{path}.{name}"
        yield from undescribed(field, f"{path}.{name}")


@pytest.mark.parametrize("schema", [job_schema(), dataclass_schema(ClusterSpec)], ids=["job", "cluster"])
def test_every_field_has_a_description(schema: dict[str, Any]) -> None:
    assert list(undescribed(schema)) == []
