"""What is lost comes back: pods, nodes, cables and ranks that hang, while a job trains on two real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Place
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile
from penstock.core.status import ConditionType, JobStatus
from penstock.kube.names import PROFILE_FILE
from penstock.kube.packing import unpacked
from penstock.kube.quantities import amount
from penstock.kube.resources import CONFIG_MAPS, NODES
from penstock.operator.grace import LEAST_SECONDS
from penstock.trainer.checkpoint import find_checkpoints
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.cluster_jobs import (
    PINNED,
    SEQUENCE,
    ClusterJob,
    paced,
    run_here,
    shaped,
    small_spec,
    small_training,
    submitted,
)
from tests.support.installed import PAIR_NODES, TEXT, Installed, operated_by
from tests.support.losing import (
    BEGUN_STEPS,
    LOST,
    SAVED_STEPS,
    SIBLING,
    delete_a_pod,
    not_ready_since,
    only,
    spare,
    trained,
)
from tests.support.story import Story
from tools.lab import lab

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

ASKED_SECONDS = LEAST_SECONDS + 10.0
"""Within which another attempt is asked for, once it can be seen that one is needed: what is left of the attempt has a
minute to make a checkpoint. What it takes on a machine that has nothing else to do: `./dev bench recovery_delay`.
"""

MORE_STEPS = 30
UNHEARD_STEPS = 15
DELETED_STEPS = 200
ENDLESS = 100_000
LONELY: dict[str, Any] = {
    "parallelism": {"pp": 1, "microBatch": 1, "slices": 1, "schedule": "1f1b"},
    "resources": {"ranks": 1, "memoryPerRank": "2Gi"},
    "checkpoint": {"everySteps": 40, "keep": 3},
}
"""Nothing slows down one rank alone."""

LINKED: dict[str, Any] = {
    "data": {"source": f"data://{TEXT}", "tokenizer": {"train": "bytes"}, "sequenceLength": 256},
    "parallelism": {"pp": 2, "microBatch": 8},
}
FAST, SLOW, SLOW_BYTES = "400mbit", "50mbit", 50e6 / 8
"""A job that waits for its messages, over cards of these speeds."""

MEASURED_RATIO = 2.0
"""A measured speed may be this far from a card's. Steps say less: a busy machine computes for longer than it waits."""


def asked_for_soon(job: ClusterJob, visible_at: float) -> None:
    asked_after = job.jobset_made_at(2) - visible_at
    assert asked_after <= ASKED_SECONDS, f"attempt 2 was asked for {asked_after} s later"


def goes_on(job: ClusterJob, visible_at: float, undisturbed: list[float]) -> None:
    """The second attempt was asked for soon, begins at the newest checkpoint, and has the undisturbed losses."""
    asked_for_soon(job, visible_at)
    attempt, step = job.checkpoints()[0]
    assert attempt == 1
    assert step >= SAVED_STEPS
    job.wait_for_step(step + MORE_STEPS, attempt=2)
    assert min(job.losses_of(2)) == step
    losses = job.losses()
    assert losses == undisturbed[: len(losses)]


def terminating(job: ClusterJob, node: str) -> list[str]:
    """Pods of the first attempt that are deleted and yet there, because nobody on the node hears of it."""
    pods = [each["metadata"] for each in job.pods(1) if each["spec"].get("nodeName") == node]
    return [each["name"] for each in pods if "deletionTimestamp" in each]


@pytest.fixture(scope="module")
def measured_beside(penstock_there: Installed, first: Story) -> None:
    """The pair that is left when a node is lost is known, or each such test would measure it by slow cards."""
    with only(penstock_there, SIBLING), spare(penstock_there):
        job = submitted(penstock_there, "sibling", parallelism=PINNED, training=small_training(2))
        job.wait_for(Phase.SUCCEEDED)
        job.wait(job.has_left, "its pods hold their places")


@pytest.fixture
def slow(on: Installed) -> Iterator[Installed]:
    with paced(on):
        yield on


def test_a_pod_is_deleted(slow: Installed, undisturbed: list[float]) -> None:
    job = trained(slow, "pod-deleted", steps=DELETED_STEPS)
    goes_on(job, delete_a_pod(slow, job), undisturbed)
    job.wait_for(Phase.SUCCEEDED)
    assert job.losses() == undisturbed[:DELETED_STEPS]
    assert "Disrupted" in [reason for reason, _ in job.events()]
    assert job.status().failures == 0


def test_a_node_is_lost(measured_beside: None, slow: Installed, undisturbed: list[float]) -> None:
    """Its kubelet and its container runtime end, and nobody there hears of anything any more."""
    job = trained(slow, "node-lost", steps=1000)
    with spare(slow):
        lab.kill(slow.lab, LOST)
        try:
            visible_at = not_ready_since(slow.cluster, LOST)
            goes_on(job, visible_at, undisturbed)
            assert terminating(job, LOST)
        finally:
            lab.bring_back(slow.lab, LOST)


@pytest.mark.long
def test_a_cable_is_pulled(measured_beside: None, slow: Installed, undisturbed: list[float]) -> None:
    """What was cut off comes back later, and changes nothing."""
    job = trained(slow, "cut-off", steps=1000)
    with spare(slow):
        lab.set_link(slow.lab, LOST, "down")
        try:
            visible_at = not_ready_since(slow.cluster, LOST)
            assert job.ranks(1), "nothing is left that could come back"
            goes_on(job, visible_at, undisturbed)
            assert terminating(job, LOST)
        finally:
            lab.set_link(slow.lab, LOST, "up")
        job.wait(lambda: not job.pods(1), "the pod that was cut off stays")
        job.wait_for_step(max(job.losses_of(2)) + MORE_STEPS, attempt=2)
        job.verify_checkpoints()
        assert job.checkpoints()[0][0] == 2
        losses = job.losses()
        assert losses == undisturbed[: len(losses)]
        assert job.status().attempt == 2


@pytest.mark.long
def test_a_rank_hangs(slow: Installed, undisturbed: list[float]) -> None:
    """It is stopped, so that it neither ends nor answers. Nothing else shows but that no step is taken."""
    job = trained(slow, "hung", steps=400)
    job.stop_rank(1)
    status = job.wait_for(Phase.QUEUED, Phase.PLANNING, Phase.BINDING, Phase.RUNNING, attempt=2)
    assert any("no step within 60 s" in message for _, message in job.events())
    stalled = status.condition(ConditionType.STALLED)
    assert stalled is not None
    assert status.failures == 1
    assert status.failed_at is not None
    goes_on(job, status.failed_at, undisturbed)


@pytest.mark.long
def test_what_killed_ranks_recorded_arrives(slow: Installed, undisturbed: list[float]) -> None:
    """Also what was not brought to the service before."""
    job = trained(slow, "killed", steps=DELETED_STEPS)
    with job.silenced(1):
        job.wait_for_step(max(job.losses_of(1)) + UNHEARD_STEPS)
    status = job.wait_for(Phase.QUEUED, Phase.PLANNING, Phase.BINDING, Phase.RUNNING, attempt=2)
    assert status.failures == 1
    with slow.client as client:
        series = client.metrics(Place(name=job.name, namespace=slow.namespace))
    loss = next(each for each in series if each.name == "loss")
    recorded = max(job.losses_of(1)) - 1  # of the last step the report may be unwritten
    assert max(point.step for point in loss.points if point.attempt == 1) >= recorded
    assert status.failed_at is not None
    goes_on(job, status.failed_at, undisturbed)


@pytest.mark.long
def test_what_is_cut_off_and_writes_on_harms_nothing(on: Installed) -> None:
    """A rank that needs nobody does not notice. For a while it is there twice, and both do the same.

    It may end, should the second attempt save its first checkpoint just while it writes one.
    """
    with only(on, LOST):
        job = submitted(on, "twice", training=small_training(ENDLESS), **LONELY)
        job.wait_for_step(BEGUN_STEPS)
    lab.set_link(on.lab, LOST, "down")
    try:
        asked_for_soon(job, not_ready_since(on.cluster, LOST))
        job.wait(lambda: job.losses_of(2), "attempt 2 takes no step")
        begun = min(job.losses_of(2))
        job.wait(lambda: max(job.losses_of(1)) > begun + MORE_STEPS, "what is cut off does not write on")
        job.wait_for_step(begun + MORE_STEPS, attempt=2)
        job.wait(
            lambda: any(attempt == 1 and step > begun for attempt, step in job.checkpoints()),
            "what is cut off leaves no checkpoint next to those that follow it",
        )
    finally:
        lab.set_link(on.lab, LOST, "up")
    job.wait(lambda: not job.pods(1), "the pod that was cut off stays")
    job.suspend(True)
    status = job.wait_for(Phase.SUSPENDED)
    assert (status.attempt, status.failures) == (2, 0)
    assert status.progress is not None
    assert status.progress.attempt == 2
    job.verify_checkpoints()
    first, second = job.losses_of(1), job.losses_of(2)
    assert sorted(second) == list(range(begun, begun + len(second)))
    both = sorted(first.keys() & second.keys())
    assert len(both) > MORE_STEPS
    assert [first[step] for step in both] == [second[step] for step in both]
    with on.client as client:
        series = client.metrics(Place(name=job.name, namespace=on.namespace))
    loss = next(each for each in series if each.name == "loss")
    assert {point.attempt for point in loss.points if point.step >= begun} == {2}


def most_of_a_node(cluster: Cluster) -> str:
    """So much memory that no node has room for two."""
    allocatable = cluster.get(NODES, LOST)["status"]["allocatable"]["memory"]
    return f"{int(amount(allocatable)) * 6 // 10 // 2**20}Mi"


@pytest.mark.long
def test_an_elastic_job_goes_on_with_the_nodes_left_and_grows_back(on: Installed, tmp_path: Path) -> None:
    """By an operator whose minutes are seconds. Cards are slow while two ranks train, and not while they measure.

    Every attempt has another plan, so it sums in another order, and training multiplies rounding errors by 20 in 60
    steps. Each attempt is therefore compared with a run of its own plan from the same state, which must be bit-equal.

    Containers of the lost node go on: where the disk is busy, a rank there may finish a checkpoint after attempt 3 has
    looked for the newest. So that is compared with what there was before.
    """
    resources = {"ranks": 2, "minRanks": 1, "memoryPerRank": most_of_a_node(on.cluster)}
    with operated_by(on, "tests.support.hurried_operator"):
        job = submitted(on, "elastic", resources=resources, training=small_training(ENDLESS))
        job.wait_for(Phase.RUNNING)
        with paced(on):
            job.wait_for_step(BEGUN_STEPS)
            lab.kill(on.lab, LOST)
            try:
                job.wait_for(Phase.PLANNING, Phase.BINDING, Phase.RUNNING, attempt=3)
                saved = max(step for attempt, step in job.checkpoints() if attempt < 3)
                shrunken = job.wait_for(Phase.RUNNING, attempt=3)
                assert (shrunken.ranks, shrunken.failures) == (1, 0)
                job.wait(lambda: job.losses_of(3), "attempt 3 takes no step")
                begun = min(job.losses_of(3))
                assert begun >= saved >= SAVED_STEPS
                job.wait_for_step(begun + MORE_STEPS, attempt=3)
            finally:
                lab.bring_back(on.lab, LOST)
        grown = job.wait_for(Phase.RUNNING, attempt=4)
        assert (grown.ranks, grown.failures) == (2, 0)
        stopped = max(job.losses_of(3)) + 1
        job.wait_for_step(stopped + MORE_STEPS, attempt=4)
        assert min(job.losses_of(4)) == stopped
        reasons = [reason for reason, _ in job.events()]
        assert (reasons.count("Shrink"), reasons.count("Grow")) == (1, 1)
    last = stopped + MORE_STEPS
    assert_losses_follow(job, tmp_path, [(1, 2, begun), (3, 1, stopped), (4, 2, last)])


def assert_losses_follow(job: ClusterJob, folder: Path, attempts: list[tuple[int, int, int]]) -> None:
    """Fails unless attempts, each given with its ranks and the step before which its losses stop counting, have the
    losses of runs on this machine by the same plans, each of which goes on from the last step of the one before.
    """
    begun = 0
    resumed: dict[str, str] = {}
    for attempt, ranks, end in attempts:
        here = folder / f"a{attempt}"
        here.mkdir()
        spec = small_spec(
            job.on.cluster.image,
            data={"source": str(job.on.text), "tokenizer": {"train": "bytes"}, "sequenceLength": SEQUENCE},
            resources={"ranks": ranks, "memoryPerRank": "2Gi"},
            training=small_training(end),
            checkpoint={"everySteps": end, **resumed},
        )
        expected = {each.step: each.loss for each in run_here(here, spec, job.run(attempt))}
        measured = job.losses_of(attempt)
        steps = range(begun, end)
        assert [measured[step] for step in steps] == [expected[step] for step in steps], attempt
        [checkpoint] = find_checkpoints(here / "run" / "checkpoints")
        begun, resumed = end, {"resumeFrom": str(checkpoint.folder)}


@pytest.mark.long
def test_a_job_whose_cards_became_slow_is_measured_and_planned_anew(on: Installed) -> None:
    """It begins by what another measured with fast cards. By an operator whose half hour is ten seconds.

    The second attempt stays, also where this machine has so much else to do that its steps are slower than predicted.
    """
    apart = {**LINKED, "resources": {"ranks": 2, "memoryPerRank": most_of_a_node(on.cluster)}}
    with shaped(on, dict.fromkeys(PAIR_NODES, FAST)):
        other = submitted(on, "fast", **apart, training={**small_training(2), "globalBatch": 32})
        other.wait_for(Phase.SUCCEEDED)
        other.wait(other.has_left, "its pods hold their places")
    policy, training = {"replanOnDrift": True}, {**small_training(ENDLESS), "globalBatch": 32}
    with shaped(on, dict.fromkeys(PAIR_NODES, SLOW)), operated_by(on, "tests.support.hurried_operator"):
        job = submitted(on, "drifted", **apart, training=training, runPolicy=policy)
        before = job.wait_for(Phase.RUNNING)
        after = job.wait_for(Phase.RUNNING, attempt=2)
        assert before.profile == other.status().profile != after.profile
        assert slowest_link(on, before) > MEASURED_RATIO * SLOW_BYTES > slowest_link(on, after)
        assert before.plan != after.plan
        job.wait(lambda: job.losses_of(2), "attempt 2 takes no step")
        begun = min(job.losses_of(2))
        assert begun == max(job.losses_of(1)) + 1
        job.wait_for_step(begun + BEGUN_STEPS, attempt=2)
        assert len(job.losses()) > begun + BEGUN_STEPS
        assert (job.status().attempt, job.status().failures) == (2, 0)
        assert "Drift" in [reason for reason, _ in job.events()]


def slowest_link(on: Installed, status: JobStatus) -> float:
    """Bytes per second, as the measurement that the plan was made from has it."""
    assert status.profile is not None
    name = status.profile.ref.rpartition("/")[2]
    files = on.cluster.get(CONFIG_MAPS, name, on.namespace)["binaryData"]
    return min(link.bytes_per_second for link in Profile.from_manifest(unpacked(files[PROFILE_FILE])).links)
