"""Every manifest that core writes can be read from JSON and from YAML."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.job import PipelineJob
from penstock.core.manifest import Manifest
from penstock.core.plan import Plan
from penstock.core.serialization import yamltext
from tests.support.manifest_strategies import manifest_types, valid

TYPES = manifest_types()


def test_the_types_are_found() -> None:
    assert {PipelineJob, Plan} < set(TYPES)
    assert len(TYPES) > 30


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__qualname__)
@settings(max_examples=20)
@given(data=st.data())
def test_a_manifest_round_trips_by_json_and_yaml(cls: type[Manifest], data: Any) -> None:
    original = data.draw(valid(cls))
    written = original.to_manifest()
    assert cls.from_manifest(json.loads(json.dumps(written))) == original
    assert cls.from_manifest(yamltext.load(yamltext.dump(written))) == original
