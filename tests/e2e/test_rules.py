"""Both forms of core's rules on the same manifests: the predicates in Python, and CEL in a real apiserver."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import mistakes_raised_by
from penstock.core.job import PipelineJob
from penstock.kube.transport import KubeError, Transport
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.kubectl import kubectl_of, with_crds
from tests.support.manifests import example
from tests.support.rule_definitions import DEFINITIONS, GROUP, broken_in_cel, definition
from tests.support.rule_manifests import MANIFESTS, Broken, broken_in_python

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

DRY = {"dryRun": "All"}


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Transport:
    kubectl = with_crds(kubectl_of(cluster))
    for kind in DEFINITIONS:
        kubectl.apply(definition(kind))
        plural = DEFINITIONS[kind]["spec"]["names"]["plural"]
        kubectl.ask("wait", "--for=condition=Established", f"crd/{plural}.{GROUP}", "--timeout=30s")
    return cluster.api


def refusal(api: Transport, path: str, manifest: dict[str, Any]) -> KubeError | None:
    """Why the apiserver does not take a manifest, or nothing."""
    try:
        api.call("POST", path, body=manifest, query=DRY)
    except KubeError as error:
        return error
    return None


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifest=MANIFESTS)
def test_both_forms_of_every_rule_agree(api: Transport, manifest: dict[str, Any]) -> None:
    plural = DEFINITIONS[manifest["kind"]]["spec"]["names"]["plural"]
    posted = {**copy.deepcopy(manifest), "apiVersion": f"{GROUP}/v1alpha1"}
    error = refusal(api, f"/apis/{GROUP}/v1alpha1/{plural}", posted)
    in_cel = broken_in_cel(error.causes) if error else Broken()
    assert in_cel == broken_in_python(manifest), error


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(slices=st.integers(1, 12) | st.lists(st.integers(1, 6), min_size=1, max_size=4), length=st.integers(1, 12))
def test_both_forms_of_the_rules_about_slices_agree(api: Transport, slices: Any, length: int) -> None:
    manifest = example(parallelism={"slices": slices}, data__sequenceLength=length)
    error = refusal(api, "/apis/penstock.dev/v1alpha1/namespaces/default/pipelinejobs", manifest)
    mistakes = mistakes_raised_by(lambda: PipelineJob.from_manifest(manifest))
    assert (error is not None) == bool(mistakes)
    assert error is None or mistakes[0].what in error.message
