"""What the operator takes from objects of the cluster, also from those that others wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.lifecycle import AttemptState
from penstock.core.pod import PodBinding
from penstock.core.supervision import AttemptReport
from penstock.kube.names import ATTEMPT_LABEL, BINDING_ANNOTATION, INDEX_LABEL, STOP_ANNOTATION, UID_LABEL
from penstock.operator.snapshots import PendingReason, PodSnapshot, jobset_snapshot, node_snapshot, pod_snapshot

BINDING = PodBinding(
    pod_uid="p", attempt=2, epoch=1, node_rank=0, num_nodes=1, ranks_per_pod=1, master="10.0.0.1", port=29_500
)


def pod(**status: Any) -> dict[str, Any]:
    labels = {UID_LABEL: "job", ATTEMPT_LABEL: "2", INDEX_LABEL: "1"}
    metadata = {"namespace": "team", "name": "a-a2-ranks-0-1", "uid": "p", "labels": labels, "resourceVersion": "7"}
    return {"metadata": metadata, "spec": {"nodeName": "east"}, "status": {"podIP": "10.0.0.1", **status}}


def container(**state: Any) -> dict[str, Any]:
    others = {"name": "sidecar", "state": {"terminated": {"exitCode": 9}}}
    return {"containerStatuses": [others, {"name": "trainer", "imageID": "sha256:1", "state": state}]}


def sidecar(**state: Any) -> dict[str, Any]:
    return {"initContainerStatuses": [{"name": "reporter", "imageID": "sha256:2", "state": state}]}


def ended(code: int, message: str = "", phase: str = "Failed", **more: Any) -> dict[str, Any]:
    terminated = {"exitCode": code, "message": message, "finishedAt": "2026-01-01T00:00:00Z", **more}
    return pod(phase=phase, **container(terminated=terminated))


def annotated(**annotations: str) -> PodSnapshot:
    found = pod(**container(running={}))
    found["metadata"]["annotations"] = annotations
    return pod_snapshot(found)


class TestPods:
    def test_its_place(self) -> None:
        seen = pod_snapshot(pod(**container(running={})))
        assert (seen.job_uid, seen.attempt, seen.index, seen.node, seen.address) == ("job", 2, 1, "east", "10.0.0.1")
        assert (seen.running, seen.being_deleted, seen.image_id, seen.end, seen.pending_reason) == (
            True,
            False,
            "sha256:1",
            None,
            None,
        )

    def test_what_reports_runs_before_the_ranks_do(self) -> None:
        waiting = container(waiting={"reason": "PodInitializing"})
        del waiting["containerStatuses"][1]["imageID"]
        seen = pod_snapshot(pod(phase="Pending", **waiting, **sidecar(running={})))
        assert (seen.running, seen.image_id, seen.pending_reason, seen.end) == (True, "sha256:2", None, None)

    def test_it_has_ended_once_its_reports_are_brought(self) -> None:
        terminated = container(terminated={"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z"})
        assert pod_snapshot(pod(phase="Running", **terminated, **sidecar(running={}))).end is None
        seen = pod_snapshot(pod(phase="Running", **terminated, **sidecar(terminated={"exitCode": 0})))
        assert seen.end is not None
        assert seen.end.succeeded

    def test_what_keeps_it_from_reporting_keeps_its_ranks_from_starting(self) -> None:
        waiting = container(waiting={"reason": "PodInitializing"})
        seen = pod_snapshot(pod(**waiting, **sidecar(waiting={"reason": "ErrImagePull", "message": "not found"})))
        assert seen.pending_reason is not None
        assert (seen.pending_reason.reason, seen.pending_reason.message) == ("ErrImagePull", "not found")

    def test_one_that_nobody_has_placed(self) -> None:
        seen = pod_snapshot({"metadata": {"namespace": "team", "name": "a", "uid": "p"}, "spec": {}})
        assert (seen.node, seen.address, seen.running, seen.attempt, seen.index) == ("", "", False, 0, 0)

    def test_versions_are_no_difference(self) -> None:
        one, two = pod(), pod()
        two["metadata"]["resourceVersion"] = "8"
        assert pod_snapshot(one) == pod_snapshot(two)
        assert pod_snapshot(one).version < pod_snapshot(two).version

    def test_its_binding(self) -> None:
        assert annotated(**{BINDING_ANNOTATION: json.dumps(BINDING.to_manifest())}).binding == BINDING

    @pytest.mark.parametrize("text", ["", "{", "5", "null", "[]", '{"epoch": -1}', "[" * 100_000, '{"a":' * 50_000])
    def test_what_is_no_binding_is_none(self, text: str) -> None:
        assert annotated(**{BINDING_ANNOTATION: text}).binding is None

    def test_when_it_was_asked_to_stop(self) -> None:
        assert annotated(**{STOP_ANNOTATION: "1970-01-01T00:01:00Z"}).stop_requested_at == 60.0
        assert annotated(**{STOP_ANNOTATION: "yesterday"}).stop_requested_at == 0.0
        assert annotated().stop_requested_at is None


def test_when_it_was_put_on_its_node() -> None:
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "1970-01-01T00:00:05Z"}
    assert pod_snapshot(pod(conditions=[placed])).placed_at == 5.0
    assert pod_snapshot(pod(conditions=[{**placed, "status": "False"}])).placed_at is None


class TestHindrances:
    def test_no_node_fits(self) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
        seen = pod_snapshot(pod(conditions=[{**condition, "lastTransitionTime": "1970-01-01T00:00:05Z"}]))
        assert seen.pending_reason is not None
        assert (seen.pending_reason.reason, seen.pending_reason.message, seen.pending_reason.since) == (
            "Unschedulable",
            "0/2 nodes",
            5,
        )

    @pytest.mark.parametrize(
        ("causes", "lacks_capacity"),
        [
            ("", True),
            ("2 Insufficient cpu.", True),
            ("1 Too many pods, 1 node(s) didn't match Pod's node affinity/selector.", True),
            ("1 node(s) had untolerated taint {a: b, c}, 1 a cause of another plugin.", True),
            ("2 node(s) didn't match Pod's node affinity/selector. preemption: 2 Preemption is not helpful.", False),
            ("1 node(s) had untolerated taint {a: b}, 1 node(s) were unschedulable.", False),
            ('persistentvolumeclaim "x" not found.', False),
            ("pod has unbound immediate PersistentVolumeClaims.", False),
        ],
    )
    def test_others_may_leave_room(self, causes: str, lacks_capacity: bool) -> None:
        message = f"0/2 nodes are available: {causes}"
        assert PendingReason(reason="Unschedulable", message=message).lacks_capacity is lacks_capacity

    @pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError"])
    def test_the_container_cannot_start(self, reason: str) -> None:
        seen = pod_snapshot(pod(**container(waiting={"reason": reason, "message": "no such image"})))
        assert seen.pending_reason is not None
        assert (seen.pending_reason.reason, seen.pending_reason.since) == (reason, None)

    @pytest.mark.parametrize("waiting", [{}, {"reason": "ContainerCreating"}, {"reason": "PodInitializing"}])
    def test_starting_is_no_hindrance(self, waiting: dict[str, str]) -> None:
        assert pod_snapshot(pod(**container(waiting=waiting))).pending_reason is None


class TestEnds:
    def test_what_it_said_itself(self) -> None:
        report = AttemptReport(state=AttemptState.FAILED, message="data: empty", refused=True)
        end = pod_snapshot(ended(2, json.dumps(report.to_manifest()))).end
        assert end is not None
        assert (end.succeeded, end.message, end.report) == (False, "data: empty", report)

    @pytest.mark.parametrize("message", ["", "Killed", "[1]", "[" * 4096])
    def test_another_s_last_word(self, message: str) -> None:
        end = pod_snapshot(ended(137, message)).end
        assert end is not None
        assert (end.report, end.succeeded) == (None, False)
        assert end.message.startswith("ended with code 137")

    def test_too_much_memory(self) -> None:
        end = pod_snapshot(ended(137, reason="OOMKilled")).end
        assert end is not None
        assert "raise resources.memoryPerRank" in end.message

    def test_taken_by_the_cluster(self) -> None:
        found = pod(phase="Failed", conditions=[{"type": "DisruptionTarget", "status": "True", "message": "preempted"}])
        end = pod_snapshot(found).end
        assert end is not None
        assert (end.disrupted, end.message) == (True, "preempted")

    def test_one_that_never_ran(self) -> None:
        end = pod_snapshot(pod(phase="Failed", reason="Evicted", message="node was low on memory")).end
        assert end is not None
        assert (end.succeeded, end.message, end.at) == (False, "node was low on memory", 0.0)

    def test_success(self) -> None:
        end = pod_snapshot(ended(0, phase="Succeeded")).end
        assert end is not None
        assert end.succeeded

    @given(message=st.text(), code=st.integers(0, 255))
    def test_whatever_it_leaves_behind(self, message: str, code: int) -> None:
        end = pod_snapshot(ended(code, message)).end
        assert end is not None
        assert end.succeeded == (code == 0)


class TestJobSets:
    def test_one_that_failed(self) -> None:
        failed = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "jobset failed"}
        metadata = {"namespace": "team", "name": "a-a1", "uid": "j", "labels": {UID_LABEL: "job", ATTEMPT_LABEL: "1"}}
        seen = jobset_snapshot({"metadata": metadata, "spec": {"suspend": True}, "status": {"conditions": [failed]}})
        assert (seen.job_uid, seen.attempt, seen.suspended, seen.failure) == ("job", 1, True, "FailedJobs")

    def test_one_that_somebody_else_made(self) -> None:
        seen = jobset_snapshot({"metadata": {"namespace": "team", "name": "a", "uid": "j"}, "spec": {}})
        assert (seen.job_uid, seen.attempt, seen.failure, seen.being_deleted) == ("", 0, "", False)


class TestNodes:
    def node(self, *conditions: dict[str, str]) -> dict[str, Any]:
        status = {"nodeInfo": {"bootID": "b"}, "conditions": list(conditions)}
        return {"metadata": {"name": "east", "uid": "n"}, "status": status}

    def test_ready(self) -> None:
        assert node_snapshot(self.node({"type": "Ready", "status": "True"})).not_ready_since is None

    @pytest.mark.parametrize("status", ["False", "Unknown"])
    def test_lost(self, status: str) -> None:
        condition = {"type": "Ready", "status": status, "lastTransitionTime": "1970-01-01T00:00:09Z"}
        assert node_snapshot(self.node(condition)).not_ready_since == 9.0

    def test_one_that_has_not_said_anything(self) -> None:
        assert node_snapshot(self.node()).not_ready_since == 0.0
