"""The committed CustomResourceDefinitions: core's types, in what a structural schema can say."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cluster_profile import ClusterProfile
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.manifest import Manifest
from penstock.core.serialization import yamltext
from penstock.core.status import JobStatus
from penstock.operator.crd import cluster_profile_crd, pipeline_job_crd
from penstock.operator.policy import binding, policy
from tests.support.defaulting import defaulted
from tests.support.manifest_strategies import valid
from tests.support.manifests import CLUSTER_PROFILE, EXAMPLE, FULL, loaded
from tests.support.repository import ROOT

FOLDERS = (ROOT / "deploy" / "crds", ROOT / "helm" / "penstock" / "crd-files")
"""For kubectl, and for the chart, which may hold no links."""
RENEW = "PENSTOCK_RENEW"

CRDS = {"pipelinejobs": pipeline_job_crd(), "clusterprofiles": cluster_profile_crd()}
FILES = {**CRDS, "policy": policy(), "policy-binding": binding()}


@pytest.mark.parametrize("name", CRDS)
def test_bounds_fit_the_apiserver_s_whole_numbers(name: str) -> None:
    """It converts a bound to 64 bits where the value is whole, so 10000 was beyond 1e38."""

    def bounds(schema: Any) -> Iterator[float]:
        if isinstance(schema, Mapping):
            for key, value in schema.items():
                is_bound = key.lower().endswith(("imum", "length", "items", "properties"))
                if is_bound and isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield value
                else:
                    yield from bounds(value)
        elif isinstance(schema, list):
            for value in schema:
                yield from bounds(value)

    assert max(map(abs, bounds(schema_of(name)))) < 2**63


def schema_of(name: str) -> dict[str, Any]:
    (version,) = CRDS[name]["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def in_2020(schema: Any) -> Any:
    """A schema of OpenAPI 3.0 as the validator reads it: a flag next to a bound becomes the bound."""
    if isinstance(schema, list):
        return [in_2020(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: in_2020(value) for key, value in schema.items()}
    for side in ("minimum", "maximum"):
        flag = f"exclusive{side.capitalize()}"
        if found.get(flag) is True:
            found[flag] = found.pop(side)
    return found


def takes(name: str, document: Any) -> bool:
    """Whether the schema does; a field without type is any value."""
    return jsonschema_rs.is_valid(in_2020(schema_of(name)), document)


def schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below one, with its path."""
    if isinstance(schema, dict):
        yield path, schema
        for name, inner in schema.get("properties", {}).items():
            yield from schemas(inner, f"{path}.{name}")
        for name in ("items", "additionalProperties"):
            yield from schemas(schema.get(name), f"{path}.{name}")


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_made_from_the_types(name: str) -> None:
    """``PENSTOCK_RENEW=1`` writes it again."""
    text = yamltext.dump(FILES[name])
    for path in (folder / f"{name}.yaml" for folder in FOLDERS):
        if os.environ.get(RENEW):
            path.write_text(text)
        assert path.read_text() == text


def test_nothing_else_is_committed() -> None:
    for folder in FOLDERS:
        assert {path.stem for path in folder.iterdir()} == set(FILES)


@pytest.mark.parametrize("name", CRDS)
def test_every_property_says_what_it_means(name: str) -> None:
    silent = [
        f"{path}.{field}"
        for path, schema in schemas(schema_of(name))
        for field, inner in schema.get("properties", {}).items()
        if not inner.get("description") and (path, field) != ("", "metadata")  # which may say nothing
    ]
    assert silent == []


@pytest.mark.parametrize("name", CRDS)
def test_it_is_structural(name: str) -> None:
    """Each part has a type, or says why not; nothing that only JSON Schema knows is left."""
    known = {"type", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"}
    for path, schema in schemas(schema_of(name)):
        assert len(known & schema.keys()) == 1, path
        assert not schema.keys() & {"const", "prefixItems", "title", "$ref", "propertyNames"}, path
        assert schema.get("additionalProperties") is not False, path
        assert ("anyOf" in schema) == ("x-kubernetes-int-or-string" in schema), path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_what_people_write_is_bounded() -> None:
    for path, schema in schemas(schema_of("pipelinejobs")["properties"]["spec"]):
        bound = {"string": "maxLength", "array": "maxItems"}.get(schema.get("type", ""))
        assert bound is None or bound in schema or "enum" in schema, path
        assert "additionalProperties" not in schema or "maxProperties" in schema, path


def test_what_the_operator_writes_is_not() -> None:
    """It could not say that something went wrong if the apiserver refused what it says."""
    for path, schema in schemas(schema_of("pipelinejobs")["properties"]["status"]):
        assert not schema.keys() & {"maxLength", "maxItems", "maxProperties"}, path


@pytest.mark.parametrize("name", CRDS)
def test_every_list_has_a_type(name: str) -> None:
    """So that server-side apply knows whether its items have owners of their own."""
    lists = {path: schema for path, schema in schemas(schema_of(name)) if schema.get("type") == "array"}
    kinds = {path: schema.get("x-kubernetes-list-type") for path, schema in lists.items()}
    assert set(kinds.values()) <= {"atomic", "map"}
    assert all("x-kubernetes-list-map-keys" in lists[path] for path, kind in kinds.items() if kind == "map")


@pytest.mark.parametrize("name", CRDS)
def test_every_column_and_scale_path_is_a_field(name: str) -> None:
    (version,) = CRDS[name]["spec"]["versions"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"].get("scale", {}).values()
    for path in paths:
        place = schema_of(name)
        for step in path.partition("[")[0].strip(".").split("."):
            place = place["properties"][step] if step != "creationTimestamp" else {}


@pytest.mark.parametrize("name", CRDS)
def test_a_rule_is_about_a_field_that_is_there(name: str) -> None:
    for path, schema in schemas(schema_of(name)):
        for rule in schema.get("x-kubernetes-validations", ()):
            place = schema
            for step in rule.get("fieldPath", "").strip(".").split("."):
                place = place["properties"][step] if step else place
            assert rule["message"], path


DOCUMENTS = [("pipelinejobs", EXAMPLE), ("pipelinejobs", FULL), ("clusterprofiles", CLUSTER_PROFILE)]
TYPES: dict[str, type[Manifest]] = {"pipelinejobs": PipelineJob, "clusterprofiles": ClusterProfile}


@pytest.mark.parametrize(("name", "text"), DOCUMENTS)
def test_what_is_written_is_taken(name: str, text: str) -> None:
    assert takes(name, loaded(text))


@pytest.mark.parametrize("name", CRDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_core_writes_is_taken_and_read_again_with_defaults(name: str, data: st.DataObject) -> None:
    told = data.draw(valid(TYPES[name]))
    written = told.to_manifest()
    assert takes(name, written)
    full = defaulted(schema_of(name), written)
    assert full["status"] == defaulted(schema_of(name)["properties"]["status"], {})
    assert takes(name, full)
    assert TYPES[name].from_manifest(full) == told


@settings(max_examples=60, deadline=None)
@given(status=valid(JobStatus))
def test_a_status_is_taken_and_read_again_with_defaults(status: JobStatus) -> None:
    schema = schema_of("pipelinejobs")["properties"]["status"]
    written = status.to_manifest()
    assert jsonschema_rs.is_valid(in_2020(schema), written)
    assert repr(JobStatus.from_manifest(defaulted(schema, written))) == repr(status)  # a loss may be no number


def test_a_job_that_nobody_has_seen_is_pending() -> None:
    assert defaulted(schema_of("pipelinejobs"), loaded(EXAMPLE))["status"]["phase"] == "Pending"


VALUES: list[Any] = [True, 0, -1, 7, 2.5, "", "4Gi", "cosine", "a b", [], [1], {}, {"a": "b"}, [512, 512]]


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for name, value in items:
        yield (*path, name)
        if isinstance(value, dict | list):
            yield from places(value, (*path, name))


@pytest.mark.parametrize(("name", "text"), DOCUMENTS[1:])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_what_it_refuses_core_refuses(name: str, text: str, data: st.DataObject) -> None:
    document = copy.deepcopy(loaded(text))
    spec = [path for path in places(document) if path[0] == "spec"]
    *parents, last = data.draw(st.sampled_from(spec))
    place: Any = document
    for step in parents:
        place = place[step]
    if data.draw(st.booleans()):
        place[last] = data.draw(st.sampled_from(VALUES))
    else:
        place.pop(last)
    if not takes(name, document):
        with pytest.raises(UserError):
            TYPES[name].from_manifest(document)
