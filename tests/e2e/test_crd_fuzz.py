"""Whatever core takes the apiserver takes, and what the apiserver takes of a changed job core can read."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.cluster_profile import ClusterProfile
from penstock.core.job import Metadata, PipelineJob, TokenizerSpec
from penstock.planner import yamltext
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.kubectl import Kubectl, kubectl_of, with_crds
from tests.support.manifest_strategies import valid
from tests.support.manifests import CLUSTER_PROFILE, FULL, loaded

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Kubectl:
    return with_crds(kubectl_of(cluster))


def taken(kubectl: Kubectl, manifest: dict[str, Any]) -> dict[str, Any] | str:
    """What the apiserver makes of it, or why it does not."""
    done = kubectl.run("apply", "--dry-run=server", "-o", "json", "-f", "-", text=yamltext.dump(manifest))
    if done.returncode != 0:
        return done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "metadata": {"name": found["metadata"]["name"]}}


def for_a_cluster(job: PipelineJob) -> PipelineJob:
    """The same job where it says what means something there."""
    tokenizer = job.spec.data.tokenizer
    if tokenizer.file is not None:
        tokenizer = TokenizerSpec(train="bytes")
    data = dataclasses.replace(job.spec.data, source="python-stdlib", tokenizer=tokenizer)
    checkpoint = dataclasses.replace(job.spec.checkpoint, resume_from=None)
    changed = job.with_spec(data=data, checkpoint=checkpoint)
    return dataclasses.replace(changed, metadata=Metadata(name="fuzzed"))


@settings(max_examples=40, **UNHURRIED)
@given(job=valid(PipelineJob).map(for_a_cluster))
def test_what_core_takes_the_apiserver_takes(kubectl: Kubectl, job: PipelineJob) -> None:
    found = taken(kubectl, job.to_manifest())
    assert isinstance(found, dict), found
    assert PipelineJob.from_manifest(found).spec == job.spec


@settings(max_examples=20, **UNHURRIED)
@given(profile=valid(ClusterProfile))
def test_what_core_takes_of_profiles_too(kubectl: Kubectl, profile: ClusterProfile) -> None:
    named = dataclasses.replace(profile, metadata=Metadata(name="fuzzed"))
    found = taken(kubectl, named.to_manifest())
    assert isinstance(found, dict), found
    assert ClusterProfile.from_manifest(found).spec == profile.spec


VALUES: list[Any] = [
    *(True, False, 0, -1, 1, 2, 3, 7, 256, 1024, 2**31, 2**62, 2.5, 0.5, -0.5, 1e300, 1e-300),
    *("", "4Gi", "0", "1e3", "cosine", "bytes", "bpe", "gpt2", "llama", "cost", "a b", "A", "data://corpus", "x/y/z"),
    *([], [1], [0.5, 7.5], [512, 512], [1024], ["ReadWriteOnce"], {}, {"a": "b"}, {"train": "bytes"}, {"claim": "c"}),
    *({"file": "data://corpus/t"}, {"generator": "zb"}, {"template": {"size": 1}}, {"": ""}, [[]], [{}], {"out": {}}),
]


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for name, value in items:
        yield (*path, name)
        if isinstance(value, dict | list):
            yield from places(value, (*path, name))


@st.composite
def changed(draw: st.DrawFn, text: str) -> dict[str, Any]:
    """A manifest with one or two fields of its spec replaced, left out or renamed."""
    document = copy.deepcopy(loaded(text))
    for _ in range(draw(st.integers(1, 2))):
        *parents, last = draw(st.sampled_from([*places(document["spec"])]))
        place: Any = document["spec"]
        for step in parents:
            place = place[step]
        match draw(st.sampled_from(["replace", "replace", "drop", "rename"])):
            case "replace":
                place[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "drop":
                place.pop(last)
            case _ if isinstance(place, dict):
                place[f"{last}x"] = place.pop(last)
    return document


@settings(max_examples=150, **UNHURRIED)
@given(manifest=changed(FULL))
def test_what_the_apiserver_takes_core_reads(kubectl: Kubectl, manifest: dict[str, Any]) -> None:
    found = taken(kubectl, manifest)
    if isinstance(found, dict):
        PipelineJob.from_manifest(found)
    else:
        assert "spec" in found


@settings(max_examples=40, **UNHURRIED)
@given(manifest=changed(CLUSTER_PROFILE))
def test_what_the_apiserver_takes_of_profiles_core_reads(kubectl: Kubectl, manifest: dict[str, Any]) -> None:
    found = taken(kubectl, manifest)
    if isinstance(found, dict):
        ClusterProfile.from_manifest(found)
    else:
        assert "spec" in found
