"""From situations of a cluster to what the life cycle is told: a table, and what follows from single facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Phase, Step
from penstock.core.pod import PodBinding
from penstock.core.status import JobProgress, JobStatus
from penstock.core.supervision import AttemptReport
from penstock.operator.capacity import Capacity
from penstock.operator.facts import Facts
from penstock.operator.observe import is_gone, measuring, observe
from penstock.operator.pending_reasons import missing_pods, unstarted_pods
from penstock.operator.snapshots import End, JobSetSnapshot, NodeSnapshot, PendingReason, PodSnapshot
from tests.support.manifests import example

NODES = {name: NodeSnapshot(name=name, uid=name, boot_id="b") for name in ("east", "west")}
JOBSET = JobSetSnapshot(
    namespace="team", name="a-a1", uid="j", job_uid="u", attempt=1, suspended=False, being_deleted=False
)
TAKEN = End(succeeded=False, message="preempted", at=2.0, disrupted=True)
BROKE = End(succeeded=False, message="broke", at=3.0)
BEREFT = End(succeeded=False, message="lost", at=3.0, report=AttemptReport(state=AttemptState.FAILED, message="lost"))
STOOD_STILL = End(
    succeeded=False,
    message="no step within 60 s",
    at=120.0,
    report=AttemptReport(state=AttemptState.FAILED, message="no step within 60 s"),
)
REFUSED = End(
    succeeded=False,
    message="mistake",
    at=120.0,
    report=AttemptReport(state=AttemptState.FAILED, message="mistake", refused=True),
)
DONE = End(succeeded=True, message="", at=4.0, report=AttemptReport(state=AttemptState.SUCCEEDED))
STOPPED = End(succeeded=True, message="", at=4.0, report=AttemptReport(state=AttemptState.STOPPED))


def binding(epoch: int) -> PodBinding:
    return PodBinding(
        pod_uid="p", attempt=1, epoch=epoch, node_rank=0, num_nodes=2, ranks_per_pod=1, master="m", port=1
    )


def pod(index: int, **changes: Any) -> PodSnapshot:
    whole: dict[str, Any] = {"address": f"10.0.0.{index}", "running": True, "being_deleted": False, **changes}
    whole.setdefault("node", ("east", "west")[index])
    name = f"a-a1-ranks-0-{index}"
    return PodSnapshot(namespace="team", name=name, uid=name, job_uid="u", attempt=1, index=index, **whole)


def facts(phase: Phase = Phase.RUNNING, *pods: PodSnapshot, **changes: Any) -> Facts:
    job = PipelineJob.from_manifest(example())
    status = JobStatus(phase=phase, attempt=1, launched=1, ranks=2, phase_entered_at=100.0)
    found = Facts(job=job, status=status, jobset=JOBSET, pods=pods or (pod(0), pod(1)), nodes=NODES, service_since=0.0)
    return replace(found, **changes)


BOUND = (pod(0, binding=binding(1)), pod(1, binding=binding(1)))
LOST = {**NODES, "west": NodeSnapshot(name="west", uid="west", boot_id="b", not_ready_since=50.0)}

SITUATIONS = {
    "nothing was launched": (facts(status=JobStatus()), AttemptState.NONE, ""),
    "nothing is left, and it waits": (facts(Phase.QUEUED, jobset=None, pods=()), AttemptState.NONE, ""),
    "its JobSet goes, and it waits": (
        facts(Phase.QUEUED, jobset=replace(JOBSET, being_deleted=True)),
        AttemptState.NONE,
        "",
    ),
    "its JobSet went under way": (facts(jobset=None), AttemptState.DISRUPTED, "the JobSet was deleted"),
    "no pods yet": (facts(Phase.QUEUED, pods=()), AttemptState.STARTING, ""),
    "one starts": (facts(Phase.QUEUED, pod(0), pod(1, running=False)), AttemptState.STARTING, ""),
    "one has no address": (facts(Phase.QUEUED, pod(0), pod(1, address="")), AttemptState.STARTING, ""),
    "one finds no node": (
        facts(
            Phase.QUEUED,
            pod(0),
            pod(1, node="", address="", pending_reason=PendingReason(reason="Unschedulable", message="0/2")),
        ),
        AttemptState.STARTING,
        "Unschedulable: 0/2",
    ),
    "a queue holds it": (
        facts(Phase.QUEUED, jobset=replace(JOBSET, suspended=True), pods=()),
        AttemptState.STARTING,
        "has not admitted the job yet",
    ),
    "a queue took it back before all were there": (
        facts(Phase.QUEUED, pod(0), jobset=replace(JOBSET, suspended=True)),
        AttemptState.DISRUPTED,
        "preempted",
    ),
    "a queue took it back": (facts(jobset=replace(JOBSET, suspended=True)), AttemptState.DISRUPTED, "preempted"),
    "all are there": (facts(Phase.QUEUED), AttemptState.READY, ""),
    "all measure": (
        facts(Phase.PROFILING, pod(0, binding=binding(0)), pod(1, binding=binding(0))),
        AttemptState.READY,
        "",
    ),
    "one was told to train": (facts(Phase.BINDING, BOUND[0], pod(1)), AttemptState.READY, ""),
    "all were told to train": (facts(Phase.BINDING, *BOUND), AttemptState.RUNNING, ""),
    "one has done its part": (facts(Phase.RUNNING, BOUND[0], replace(BOUND[1], end=DONE)), AttemptState.RUNNING, ""),
    "all are done": (facts(Phase.RUNNING, pod(0, end=DONE), pod(1, end=DONE)), AttemptState.SUCCEEDED, ""),
    "done, and its JobSet removed": (
        facts(Phase.RUNNING, pod(0, end=DONE), pod(1, end=DONE), jobset=None),
        AttemptState.SUCCEEDED,
        "",
    ),
    "all stopped": (facts(Phase.RUNNING, pod(0, end=STOPPED), pod(1, end=DONE)), AttemptState.STOPPED, "checkpoint"),
    "one broke": (facts(Phase.RUNNING, pod(0, end=BROKE), pod(1)), AttemptState.FAILED, "ranks-0-0: broke"),
    "the first to end speaks": (
        facts(Phase.RUNNING, pod(0, end=BROKE), pod(1, end=TAKEN)),
        AttemptState.DISRUPTED,
        "preempted",
    ),
    "one that was killed speaks before who lost it in the same second": (
        facts(Phase.RUNNING, pod(0, end=BEREFT), pod(1, end=BROKE)),
        AttemptState.FAILED,
        "ranks-0-1: broke",
    ),
    "one that was deleted failed for it": (
        facts(Phase.RUNNING, pod(0, end=BROKE, being_deleted=True), pod(1)),
        AttemptState.DISRUPTED,
        "broke",
    ),
    "one is being deleted": (
        facts(Phase.RUNNING, pod(0, being_deleted=True), pod(1)),
        AttemptState.DISRUPTED,
        "deleted",
    ),
    "one is gone": (facts(Phase.RUNNING, pod(0)), AttemptState.DISRUPTED, "1 of 2 pods are gone"),
    "one is gone, and so its JobSet failed": (
        facts(Phase.RUNNING, pod(0), jobset=replace(JOBSET, failure="FailedJobs")),
        AttemptState.DISRUPTED,
        "1 of 2 pods are gone",
    ),
    "its JobSet failed, and its pods say nothing": (
        facts(jobset=replace(JOBSET, failure="FailedJobs", message="why")),
        AttemptState.FAILED,
        "JobSet a-a1: why",
    ),
    "a node was lost, and so the other pod gave up while nobody watched": (
        facts(Phase.RUNNING, pod(0, end=STOOD_STILL), pod(1), nodes=LOST),
        AttemptState.DISRUPTED,
        "node west of pod a-a1-ranks-0-1 is not ready, and pod a-a1-ranks-0-0 ended: no step within 60 s",
    ),
    "its pod was removed since": (
        facts(Phase.RUNNING, pod(0, end=STOOD_STILL), pod(1, being_deleted=True), nodes=LOST),
        AttemptState.DISRUPTED,
        "node west",
    ),
    "its node was removed since": (
        facts(Phase.RUNNING, pod(0, end=STOOD_STILL), pod(1), nodes={"east": NODES["east"]}),
        AttemptState.DISRUPTED,
        "node west of pod a-a1-ranks-0-1 was deleted",
    ),
    "both are gone": (facts(Phase.RUNNING, pod(0, end=STOOD_STILL)), AttemptState.DISRUPTED, "1 of 2 pods are gone"),
    "a peer lost the connection before the node counted as lost": (
        facts(Phase.RUNNING, pod(0, end=replace(BEREFT, observed_at=10.0)), pod(1), nodes=LOST),
        AttemptState.DISRUPTED,
        "node west",
    ),
    "one broke long before a node was lost": (
        facts(Phase.RUNNING, pod(0, end=replace(BROKE, observed_at=-20.0)), pod(1), nodes=LOST),
        AttemptState.FAILED,
        "ranks-0-0: broke",
    ),
    "a mistake of the user's, and a node was lost": (
        facts(Phase.RUNNING, pod(0, end=REFUSED), pod(1), nodes=LOST),
        AttemptState.FAILED,
        "ranks-0-0: mistake",
    ),
    "all stand still, and nothing was lost": (
        facts(Phase.RUNNING, pod(0, end=STOOD_STILL), pod(1)),
        AttemptState.FAILED,
        "no step within",
    ),
    "a node is not ready": (facts(nodes=LOST), AttemptState.DISRUPTED, "node west"),
    "a node is not ready, and its pod has ended": (
        facts(Phase.RUNNING, BOUND[0], pod(1, end=DONE), nodes=LOST),
        AttemptState.RUNNING,
        "",
    ),
    "a node was deleted": (facts(nodes={"east": NODES["east"]}), AttemptState.DISRUPTED, "node west"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations(situation: str) -> None:
    told, state, message = SITUATIONS[situation]
    seen = observe(told)
    assert seen.attempt_state is state
    assert message in seen.message
    assert bool(message) == bool(seen.message)


GONE = {
    "nothing was made": (facts(Phase.RECOVERING, jobset=None, pods=()), True),
    "its JobSet is there": (facts(Phase.RECOVERING, pods=()), False),
    "a pod runs": (facts(Phase.RECOVERING, pod(0, being_deleted=True), jobset=None), False),
    "its pods have ended": (facts(Phase.RECOVERING, pod(0, end=BROKE), jobset=None), True),
    "its pod was never placed": (facts(Phase.RECOVERING, pod(0, node=""), jobset=None), True),
    "its pod is on a lost node": (facts(Phase.RECOVERING, pod(1), jobset=None, nodes=LOST), True),
    "its pod's node is gone": (facts(Phase.RECOVERING, pod(1), jobset=None, nodes={}), True),
    "it has succeeded": (facts(Phase.SUCCEEDED, pod(0, end=DONE), pod(1, end=DONE)), True),
    "it has failed, and may make pods": (facts(Phase.FAILED, pod(0, end=BROKE)), False),
    "it has failed for good": (facts(Phase.FAILED, pod(0, end=BROKE), jobset=replace(JOBSET, failure="x")), True),
}


@pytest.mark.parametrize("situation", GONE)
def test_whether_anything_is_left_to_write(situation: str) -> None:
    told, expected = GONE[situation]
    assert is_gone(told) is expected


def test_measuring_means_all() -> None:
    one = pod(0, binding=binding(0))
    assert not measuring(facts(Phase.PROFILING, one, pod(1)))
    assert not measuring(facts(Phase.PROFILING, one))
    assert measuring(facts(Phase.PROFILING, one, pod(1, binding=binding(0))))


@pytest.mark.parametrize(
    ("stepped_at", "entered_at", "service_since", "expected"),
    [(500.0, 100.0, 0.0, 500.0), (0.0, 100.0, 0.0, 100.0), (500.0, 100.0, 600.0, 600.0), (500.0, 100.0, None, None)],
)
def test_when_a_step_could_have_been_heard_of(
    stepped_at: float, entered_at: float, service_since: float | None, expected: float | None
) -> None:
    told = stepping(JobProgress(attempt=1, epoch=1, step=3), stepped_at=stepped_at, service_since=service_since)
    assert entered_at == told.status.phase_entered_at
    assert observe(told).last_step_at == expected


@pytest.mark.parametrize(
    "progress", [None, JobProgress(attempt=1, epoch=0, profile_ref="p"), JobProgress(attempt=0, epoch=1, step=3)]
)
def test_before_its_first_step_an_attempt_is_waited_for_since_it_was_bound(progress: JobProgress | None) -> None:
    seen = observe(stepping(progress, stepped_at=500.0, service_since=0.0))
    assert (seen.last_step_at, seen.training_since) == (None, 100.0)
    assert observe(stepping(progress, service_since=700.0)).training_since == 700.0
    assert observe(stepping(progress, service_since=None)).training_since is None


def stepping(progress: JobProgress | None, **changes: Any) -> Facts:
    told = facts(Phase.RUNNING, *BOUND, **changes)
    return replace(told, status=replace(told.status, progress=progress))


def test_a_checkpoint_of_an_earlier_attempt_is_not_this_one_s() -> None:
    status = JobStatus(phase=Phase.RUNNING, attempt=2, ranks=2, progress=JobProgress(attempt=1, last_checkpoint=40))
    assert observe(facts(status=status)).last_checkpoint is None


def test_a_mistake_is_told_apart() -> None:
    end = replace(BROKE, report=AttemptReport(state=AttemptState.FAILED, refused=True))
    assert observe(facts(Phase.RUNNING, pod(0, end=end), pod(1))).refused


def test_pods_that_are_not_made_are_told_of_after_a_while() -> None:
    told = facts(Phase.QUEUED, pod(0))
    assert missing_pods(told, 110.0) == ""
    assert missing_pods(told, 120.0).startswith("1 of 2 pods were made")
    assert missing_pods(facts(Phase.QUEUED), 120.0) == ""


def test_a_pod_that_does_not_start_is_told_of_after_a_while() -> None:
    late = pod(0, running=False, placed_at=100.0)
    told = facts(Phase.QUEUED, late, pod(1, placed_at=90.0))
    assert unstarted_pods(told, 129.0) == ""
    message = unstarted_pods(told, 130.0)
    remedy = f"kubectl describe pod {late.name} shows the reason"
    assert message == f"pod {late.name} has not started on node east yet; {remedy}"
    pulls = PendingReason(reason="ErrImagePull", message="no such image")
    for changes in ({"running": True}, {"end": BROKE}, {"pending_reason": pulls}, {"placed_at": None}):
        assert unstarted_pods(facts(Phase.QUEUED, replace(late, **changes), pod(1)), 130.0) == ""


def test_why_there_is_no_plan() -> None:
    told = facts(Phase.PLANNING, plan=Step.FAILED, plan_message="nothing fits")
    assert observe(told).message == "nothing fits"
    assert "ranks-0-0: broke" in observe(replace(told, pods=(pod(0, end=BROKE), pod(1)))).message


def pinned(pp: int) -> PipelineJob:
    return PipelineJob.from_manifest(example(resources={"ranks": 2, "minRanks": 1}, parallelism={"pp": pp}))


@pytest.mark.parametrize(("room", "expected"), [(0, 4), (1, 4), (2, 6), (3, 6), (4, 8), (9, 8)])
def test_an_elastic_job_has_as_many_ranks_as_what_is_pinned_divides(room: int, expected: int) -> None:
    job = PipelineJob.from_manifest(example(resources={"ranks": 8, "minRanks": 2}, parallelism={"pp": 2}))
    status = JobStatus(phase=Phase.RUNNING, attempt=1, launched=1, ranks=4)
    assert (
        observe(facts(status=status, job=job, capacity=Capacity(num_pods=room, since=0.0))).feasible_ranks == expected
    )


def test_a_node_that_the_job_never_had_is_none_that_it_lost() -> None:
    told = facts(Phase.QUEUED, pod(0), nodes=LOST)
    assert observe(replace(told, hosts=frozenset({"east"}))).node_lost_since is None
    assert observe(replace(told, hosts=frozenset({"east", "west"}))).node_lost_since == 50.0


def test_how_many_ranks_have_a_place() -> None:
    job = PipelineJob.from_manifest(example(resources={"ranks": 2, "minRanks": 1}))
    short = pod(1, node="", pending_reason=PendingReason(reason="Unschedulable", message="", since=7.0))
    seen = observe(facts(Phase.QUEUED, pod(0), short, job=job))
    assert (seen.feasible_ranks, seen.short_since) == (1, 7.0)
    assert observe(facts(Phase.QUEUED, pod(0), short, job=pinned(2))).feasible_ranks == 0
    assert observe(facts(Phase.QUEUED, pod(0), short)).feasible_ranks is None
