"""The chart with all its programs on a real cluster, restricted: jobs outlive upgrade, removal and return of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.demonstration import Demonstration, shown, with_storage
from deploy.installation import SERVICE_PORT, Installation
from penstock.core.lifecycle import Phase
from tests.support.charted import CRDS, chart_space, charted, nodes_of_programs, prefer, programs, values
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.cluster_jobs import PINNED, SEQUENCE, ClusterJob, paced, small_spec, small_training, submitted
from tests.support.installed import JobSpace
from tests.support.losing import BEGUN_STEPS, LOST, not_ready_since, spare
from tools.lab import lab, node
from tools.lab.console import LabError

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

STEPS = 400
ENDLESS = 100_000
RESTART = {"operator.log": "text", "service.resources.requests.cpu": "110m"}
"""Values that give both programs new pods."""


@pytest.fixture(scope="module")
def space(cluster: Cluster) -> Iterator[JobSpace]:
    with chart_space(cluster) as space:
        yield space


@pytest.fixture(scope="module")
def installation(space: JobSpace) -> Iterator[Installation]:
    with charted(space, values(space)) as installation:
        yield installation


def uids(job: ClusterJob) -> set[str]:
    return {each["metadata"]["uid"] for each in job.pods()}


def goes_on(job: ClusterJob, pods: set[str], steps: int = 10) -> None:
    """The same pods take further steps of the same attempt."""
    job.wait_for_step(max(job.losses_of(1)) + steps)
    assert uids(job) == pods
    assert [each["metadata"]["name"] for each in job.jobsets()] == [f"{job.name}-a1"]


def told_step(job: ClusterJob) -> int:
    progress = job.status().progress
    return progress.step if progress else 0


@pytest.mark.long
def test_what_a_demonstration_shows(
    installation: Installation, space: JobSpace, capfd: pytest.CaptureFixture[str]
) -> None:
    """The lines of kubectl itself up to the end, and what was predicted next to what was measured."""
    unmeasured = {"data": {**small_spec("")["data"], "sequenceLength": SEQUENCE // 2}}
    spec: dict[str, Any] = small_spec(space.cluster.image, training=small_training(12), **unmeasured)
    manifest = {"apiVersion": "penstock.dev/v1alpha1", "kind": "PipelineJob", "metadata": {"name": "shown"}}
    found = Demonstration(
        site=installation.site, manifest=with_storage({**manifest, "spec": spec}), namespace=space.namespace
    )
    capfd.readouterr()
    assert shown(found)
    out = capfd.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("shown ")]
    assert {"Profiling", "Running", "Succeeded"} <= {row[1] for row in rows}
    assert rows[-1][1] == "Succeeded"
    assert any(line.split()[:2] == ["NAME", "PHASE"] for line in out.splitlines())
    step_time = next(line.split() for line in out.splitlines() if line.strip().startswith("step time"))
    assert step_time[-1] == "%"
    assert "12 steps, attempt 1" in out


@pytest.mark.long
def test_the_operator_s_log_can_be_searched_by_job_and_phase(installation: Installation, space: JobSpace) -> None:
    job = submitted(space, "logged", training=small_training(2))
    job.wait_for(Phase.SUCCEEDED)
    operator = f"deploy/{installation.release}-operator"
    said = space.cluster.kubectl("--namespace", installation.namespace, "logs", operator).splitlines()
    lines = [json.loads(line) for line in said]
    phases = [line["phase"] for line in lines if line.get("job") == job.name and "reason" in line]
    assert (phases[0], phases[-1]) == (Phase.QUEUED, Phase.SUCCEEDED)
    assert {line["namespace"] for line in lines if "job" in line} == {space.namespace}


def test_people_get_a_token_where_the_service_runs(installation: Installation) -> None:
    """As the guide says, but that it is asked from within the pod."""
    inside = ("exec", f"deploy/{installation.release}-service", "--", "env")
    penstock = ("python", "-m", "penstock.cli")

    def said(*words: str, **environment: str) -> str:
        variables = [f"{name}={value}" for name, value in environment.items()]
        return installation.site.kubectl("--namespace", installation.namespace, *inside, *variables, *penstock, *words)

    token = said("token", "create", "me", "--role", "admin", "--folder", "/var/lib/penstock").strip()
    server = {"PENSTOCK_SERVER": f"http://127.0.0.1:{SERVICE_PORT}"}
    said("status", **server, PENSTOCK_TOKEN=token)
    with pytest.raises(LabError, match="token"):
        said("status", **server, PENSTOCK_TOKEN="another")


@pytest.mark.long
def test_a_job_outlives_upgrade_removal_and_return(installation: Installation, space: JobSpace) -> None:
    with paced(space):
        job = submitted(space, "outlives", training=small_training(STEPS))
        job.wait_for_step(5)
        pods, before = uids(job), programs(space)
        assert before.keys() == {"operator", "service"}

        installation.install({**values(space), **RESTART})
        after = programs(space)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        goes_on(job, pods)
        heard = max(job.losses_of(1))
        job.wait(lambda: told_step(job) > heard, "the new service does not tell of steps")

        installation.uninstall()
        assert programs(space) == {}
        assert {name for name in CRDS if space.kubectl("get", "crd", name, "--ignore-not-found")} == set(CRDS)
        goes_on(job, pods)
        assert job.status().phase is Phase.RUNNING

        installation.install(values(space))
        heard = max(job.losses_of(1))
        job.wait(lambda: told_step(job) > heard, "the service that returned does not tell of steps")
        assert uids(job) == pods
    status = job.wait_for(Phase.SUCCEEDED)
    assert (status.attempt, status.failures) == (1, 0)
    assert len(job.losses()) == STEPS
    job.wait(lambda: told_step(job) == STEPS, "the last step is not told")


@pytest.mark.long
def test_a_node_with_service_operator_and_a_rank_is_lost(installation: Installation, space: JobSpace) -> None:
    """By its power. The job goes on where nothing was measured before, and the service comes back, without a hand."""
    installation.install({**values(space), **prefer(LOST)})
    assert nodes_of_programs(space) == {"operator": LOST, "service": LOST}
    kept = {"everySteps": 200, "keep": 3}
    job = submitted(space, "all-lost", parallelism=PINNED, checkpoint=kept, training=small_training(ENDLESS))
    job.wait_for_step(kept["everySteps"] + BEGUN_STEPS)
    assert LOST in {each["spec"]["nodeName"] for each in job.pods(1)}
    try:
        with spare(space):
            lab.crash(space.lab, LOST)
            try:
                not_ready_since(space.cluster, LOST)
                job.wait(lambda: job.losses_of(2), "attempt 2 takes no step")
                begun = min(job.losses_of(2))
                assert begun >= kept["everySteps"]
                job.wait_for_step(begun + BEGUN_STEPS, attempt=2)
                job.wait(lambda: told_step(job) > begun, "the service that came back does not tell of steps")
                status = job.status()
                assert (status.attempt, status.failures) == (2, 0)
                assert LOST not in nodes_of_programs(space).values()
            finally:
                lab.bring_back(space.lab, LOST)
            assert space.lab.machine(LOST).programs(node.PROXY), "services lead nowhere from there"
    finally:
        space.kubectl("delete", "pj", job.name)
