"""A ClusterProfile on a real cluster: measured by pods of its own, and a job that comes to these nodes need not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.cluster_profile import ClusterProfileStatus
from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus
from penstock.kube.resources import CLUSTER_PROFILES, CONFIG_MAPS
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import SEQUENCE, small_spec, small_training, submitted
from tests.support.installed import PAIR, Installed

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

NAME = "pool"
MEMORY = "1100Mi"
"""Other resources, so that what others measured does not count."""


@pytest.fixture
def profile(on: Installed) -> Iterator[str]:
    """Its name; it is applied, and removed at the end."""
    spec = {
        "model": {**small_spec(on.cluster.image)["model"], "vocab": 257},
        "sequenceLength": SEQUENCE,
        "ranks": 2,
        "memoryPerRank": MEMORY,
        "nodeSelector": PAIR,
        "image": on.cluster.image,
    }
    head = {"apiVersion": "penstock.dev/v1alpha1", "kind": "ClusterProfile", "metadata": {"name": NAME}}
    on.cluster.kubectl("create", "--filename", "-", stdin=json.dumps({**head, "spec": spec}))
    yield NAME
    on.cluster.kubectl("delete", "cprof", NAME, "--ignore-not-found")


def status_of(on: Installed, name: str) -> ClusterProfileStatus:
    return ClusterProfileStatus.from_manifest(on.cluster.get(CLUSTER_PROFILES, name).get("status") or {})


def test_it_is_measured_once_and_for_all(on: Installed, profile: str) -> None:
    def measured() -> ClusterProfileStatus | None:
        found = status_of(on, profile)
        holds = any(each.status is ConditionStatus.TRUE for each in found.conditions)
        return found if holds else None

    status: Any = on.cluster.wait(measured, f"it is not measured: {on.cluster.get(CLUSTER_PROFILES, profile)}")
    assert status.links.num_links == 2
    assert status.links.slowest.bytes_per_second > 0
    namespace, _, name = status.profile_ref.partition("/")
    assert namespace == on.namespace
    columns = on.cluster.kubectl("get", "cprof", profile).splitlines()[1].split()
    assert columns[:3] == [NAME, "True", "2"]
    on.cluster.wait(lambda: not _jobs(on, "pool-profile"), "the job that measured stays")
    on.wait_for_room(["pool-profile"])

    job = submitted(on, "ahead", resources={"ranks": 2, "memoryPerRank": MEMORY}, training=small_training(2))
    ended = job.wait_for(Phase.SUCCEEDED)
    assert ended.profile is not None
    assert ended.profile.ref == status.profile_ref
    assert not [message for _, message in job.events() if message.startswith(str(Phase.PROFILING))]

    on.cluster.kubectl("delete", "cprof", profile)
    on.cluster.wait(lambda: name not in _config_maps(on), "what it held stays")


def _jobs(on: Installed, name: str) -> list[str]:
    return [each["metadata"]["name"] for each in on.jobs() if each["metadata"]["name"] == name]


def _config_maps(on: Installed) -> list[str]:
    found = on.cluster.all(CONFIG_MAPS, on.namespace)
    return [each["metadata"]["name"] for each in found]
