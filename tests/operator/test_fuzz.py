"""Whatever spec a cluster lets pass is refused with the field's name, or runs; the operator neither fails nor loops."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, event, given, settings

from penstock.core.job import PipelineJob
from penstock.core.job_policy import CONTROL_PLANE, Allowance, JobPolicy
from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.resources import JOBSETS
from tests.support.changed_manifests import changed, for_a_cluster
from tests.support.fake_planner import FakePlanner
from tests.support.manifest_strategies import valid
from tests.support.manifests import FULL
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
PROFILE = sample_profile()
EVERYTHING = ("*", *sorted(CONTROL_PLANE))
ALLOWING_ALL = JobPolicy(
    everywhere=Allowance(
        images=("*",),
        secrets=("*",),
        claims=("*",),
        storage_classes=("*",),
        tolerations=EVERYTHING,
        node_selectors=EVERYTHING,
    )
)
MOST_WRITES, MOST_WRITES_PER_POD = 40, 2
"""Of a life up to its running: a place and a plan for every pod, and for the job what it has phases for."""


def lived(manifest: dict[str, Any]) -> None:
    """Let the job live for as long as it does, with a cluster that has room for it."""
    operating = Operating(FakePlanner(), ALLOWING_ALL)
    submitted = {**manifest, "metadata": {"name": "fuzzed"}}
    uid = operating.kube.submit(submitted)
    settled(operating, uid)
    num_pods = 0
    for jobset in operating.kube.all(JOBSETS):
        num_pods = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
        assert 1 <= num_pods <= PipelineJob.from_manifest(submitted).spec.resources.ranks
        jobset["spec"]["suspend"] = False
        nodes = [f"node-{number}" for number in range(num_pods)]
        for node in nodes:
            operating.kube.add_node(node)
        operating.kube.start_pods(*nodes)
        settled(operating, uid)
        operating.measured(uid, PROFILE)
        settled(operating, uid)
    status = operating.status(uid)
    event(f"{status.phase} {status.reason}")
    if status.phase is Phase.FAILED:
        failed = status.condition(ConditionType.FAILED)
        assert failed is not None
        assert (failed.status, failed.message) == (ConditionStatus.TRUE, status.message)
        assert "spec." in failed.message
        assert num_pods == 0, "it was begun, and is refused for what was known before"
    else:
        assert status.phase in (Phase.RUNNING, Phase.SUSPENDED), status
    assert len(operating.kube.writes) <= MOST_WRITES + MOST_WRITES_PER_POD * num_pods


def settled(operating: Operating, uid: str) -> None:
    """Until there is nothing more to do; fails if there always is."""
    operating.turn(8)
    written = list(operating.kube.writes)
    operating.turn(2)
    assert operating.kube.writes == written


@settings(max_examples=60, **UNHURRIED)
@given(job=valid(PipelineJob).map(for_a_cluster))
def test_what_is_well_written_runs_or_says_why_not(job: PipelineJob) -> None:
    manifest = job.to_manifest()
    kubernetes = manifest["spec"].setdefault("kubernetes", {})
    kubernetes["volumes"] = {**kubernetes.get("volumes", {}), "out": {"claim": "shared"}}
    lived(manifest)


@settings(max_examples=300, **UNHURRIED)
@given(manifest=changed(FULL.replace("suspend: true", "suspend: false")))
def test_what_is_not_is_refused_with_its_place(manifest: dict[str, Any]) -> None:
    """Nobody checks here but the operator: a cluster whose definition is older may let anything pass."""
    lived(manifest)
