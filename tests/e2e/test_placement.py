"""Three nodes with unequal cards: what is measured of their links, and where the planner puts ranks because of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import ClusterJob, shaped, submitted
from tests.support.installed import Installed
from tests.support.rehearsing import WAITS_FOR_LINKS, nodes_of, placed_everywhere, rehearsed
from tools.lab.network import bits_per_second

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS), pytest.mark.long]

RATES = {"node1": "500mbit", "node2": "500mbit", "node3": "50mbit"}
MOST_ERROR = 0.15
LITTLE_WORK = 0.05
"""As measured next to other tests, a rank may work so long that its links hardly count."""
LEAST_PREDICTED_RATIO, LEAST_RATIO = 1.2, 1.1
"""By how much is what `./dev bench cluster_placement` says, on a quiet machine."""


@pytest.fixture(scope="module")
def unequal(penstock_there: Installed) -> Iterator[Installed]:
    """The three nodes with such cards."""
    with shaped(penstock_there, RATES):
        yield penstock_there


@pytest.fixture(scope="module")
def job(unequal: Installed) -> Iterator[ClusterJob]:
    """The first job on them."""
    found = submitted(unequal, "unequal", **WAITS_FOR_LINKS)
    found.wait_for(Phase.SUCCEEDED)
    yield found
    unequal.kubectl("delete", "pj", found.name)


def with_little_work(profile: Profile) -> Profile:
    """The same links between ranks that need a tenth of the time for their work."""
    units = [
        dataclasses.replace(
            each,
            alone_seconds=LITTLE_WORK * each.alone_seconds,
            together_seconds=LITTLE_WORK * each.together_seconds,
        )
        for each in profile.units
    ]
    return dataclasses.replace(profile, units=tuple(units))


def test_a_link_is_as_fast_as_its_slower_end(job: ClusterJob) -> None:
    profile = job.run(1).read_profile()
    nodes = nodes_of(profile)
    assert sorted(nodes) == sorted(RATES)
    assert len(profile.links) == 6
    for link in profile.links:
        slower = min(bits_per_second(RATES[nodes[end]]) for end in (link.source, link.target))
        assert 8 * link.bytes_per_second == pytest.approx(slower, rel=MOST_ERROR), (nodes, profile.links)


def test_ranks_are_put_where_a_step_is_shortest(job: ClusterJob) -> None:
    """Not with the slow card in the middle, where it would carry twice as much."""
    plan, profile = job.run(1).read_plan(), job.run(1).read_profile()
    assert plan.prediction is not None
    steps = placed_everywhere(plan, profile)
    assert plan.prediction.step_seconds == pytest.approx(min(steps.values()), abs=1e-9)
    assert nodes_of(profile)[plan.placement[1]] != "node3"


def test_the_worst_placement_is_slower(unequal: Installed, job: ClusterJob) -> None:
    """Of the plan for little work: that of the job depends on how busy the machine was when it was measured."""
    profile = with_little_work(job.run(1).read_profile())
    manifest = job.get()
    head = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"], "metadata": {"name": job.name}}
    spec = PipelineJob.from_manifest({**head, "spec": manifest["spec"]}).spec
    plan = decide(problem_from_profile(spec, profile)).plan
    steps = placed_everywhere(plan, profile)
    best, worst = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    found = {
        name: rehearsed(unequal, name, dataclasses.replace(plan, placement=devices), profile).step_ns
        for name, devices in (("best", best), ("worst", worst))
    }
    assert steps[worst] > LEAST_PREDICTED_RATIO * steps[best]
    assert found["worst"] > LEAST_RATIO * found["best"], (steps, found)


def test_the_next_job_goes_by_the_same_measurement(unequal: Installed, job: ClusterJob) -> None:
    following = submitted(unequal, "following", **WAITS_FOR_LINKS)
    status = following.wait_for(Phase.SUCCEEDED)
    assert status.profile == job.status().profile
    assert [reason for reason, _ in following.events()] == ["Accepted", "Admitted", "Planned", "Bound", "Completed"]
    unequal.kubectl("delete", "pj", following.name)
    unequal.wait_for_room([following.name])
