"""Whatever core takes the apiserver takes, and what the apiserver takes of a changed job core can read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from penstock.core.cluster_profile import ClusterProfile
from penstock.core.job import Metadata, PipelineJob
from penstock.core.serialization import yamltext
from tests.support.changed_manifests import changed, for_a_cluster
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.kubectl import Kubectl, kubectl_of, with_crds
from tests.support.manifest_strategies import valid
from tests.support.manifests import CLUSTER_PROFILE, FULL

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
