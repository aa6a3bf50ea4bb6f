"""Whatever is applied to a real cluster is refused with the field's name, or launched, or fails and says why."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus, ConditionType
from tests.support.changed_manifests import changed
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import ClusterJob, made
from tests.support.installed import Installed
from tests.support.manifests import EXAMPLE
from tools.lab.console import LabError

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
NOWHERE = EXAMPLE.replace("nodeSelector: {}", "nodeSelector: {no: such}").replace(
    "volumes: {}", "volumes: {out: {claim: out}}"
)
"""A job that waits, or the machines would be busy with what it becomes."""

_numbers = itertools.count(1)


@pytest.fixture
def verify_unharmed(on: Installed) -> Callable[[], None]:
    """Fails unless the operator is the same process as before, and has met nothing unforeseen."""
    operator, said = on.operator.process, on.operator.log.stat().st_size

    def verify() -> None:
        assert operator is not None
        assert on.operator.process is operator
        assert operator.poll() is None
        assert b"Traceback" not in on.operator.log.read_bytes()[said:]

    return verify


@settings(max_examples=60, **UNHURRIED)
@given(manifest=changed(NOWHERE))
def test_what_is_applied_is_refused_or_seen_to(
    on: Installed, verify_unharmed: Callable[[], None], manifest: dict[str, Any]
) -> None:
    job = taken(on, manifest)
    if isinstance(job, str):
        assert "spec" in job
        return
    job.wait(lambda: seen_to(job), "it is not seen to")
    on.kubectl("delete", "pj", job.name, "--wait=false")
    verify_unharmed()


def taken(on: Installed, manifest: dict[str, Any]) -> ClusterJob | str:
    """The job, or why the apiserver does not take it."""
    try:
        return made(on, {**manifest, "metadata": {"name": f"fuzzed-{next(_numbers)}"}})
    except LabError as refused:
        return str(refused)


def seen_to(job: ClusterJob) -> bool:
    """Whether it was launched, or does not go on and says why."""
    status = job.status()
    failed, admitted = status.condition(ConditionType.FAILED), status.condition(ConditionType.ADMITTED)
    if failed is not None and failed.status is ConditionStatus.TRUE:
        assert "spec." in failed.message
        return True
    if status.phase is Phase.SUSPENDED:
        return True
    return status.phase is Phase.QUEUED and admitted is not None and bool(job.jobsets() or admitted.message)
