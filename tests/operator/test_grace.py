"""How long pods get to end, and that they are given as much."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.limits import MOST_LAYERS
from penstock.core.model import ModelSpec
from penstock.core.status import JobProgress, JobStatus, PlanStatus
from penstock.kube.resources import JOBSETS, PODS
from penstock.operator.grace import checkpoint_seconds, grace_seconds
from tests.support import manifests
from tests.support.fake_planner import FakePlanner
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

SPEC = PipelineJob.from_manifest(manifests.example()).spec
LARGE_MODEL = replace(SPEC.model, layers=32, hidden=4096, heads=32, kv_heads=32, ffn_hidden=11_008, vocab=32_000)
LARGE = replace(SPEC, model=LARGE_MODEL)
"""The size of Llama 2 7B, which has 6.74 thousand million parameters (arXiv 2307.09288)."""

SECONDS = st.none() | st.floats(0.0, 1e4)


def status(planned: float | None = None, measured: float | None = None) -> JobStatus:
    plan = PlanStatus(digest="d", summary="s", step_seconds=planned)
    return JobStatus(plan=plan, progress=JobProgress(attempt=1, step_seconds=measured))


@pytest.mark.parametrize(
    ("planned", "measured", "expected"),
    [(None, None, 60.0), (1.0, None, 60.0), (40.0, None, 110.0), (40.0, 50.0, 130.0), (None, 50.0, 130.0)],
)
def test_two_steps_and_a_margin_but_a_minute(planned: float | None, measured: float | None, expected: float) -> None:
    assert grace_seconds(SPEC, status(planned, measured)) == pytest.approx(expected, abs=2.0)


def test_nothing_is_known_of_a_first_attempt_but_its_checkpoint() -> None:
    assert grace_seconds(SPEC, JobStatus()) == 60.0
    assert checkpoint_seconds(LARGE) == pytest.approx(6.74e9 * 12 / 100e6, rel=0.01)
    assert grace_seconds(LARGE, JobStatus()) == pytest.approx(2 * checkpoint_seconds(LARGE) + 30)


def test_no_unit_is_built_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million layers took 105 s and 1.1 GB in the operator."""

    def refuse(spec: ModelSpec) -> None:
        raise AssertionError("units are built")

    monkeypatch.setattr(ModelSpec, "units", property(refuse))
    deepest = replace(LARGE, model=replace(LARGE_MODEL, layers=MOST_LAYERS))
    assert grace_seconds(deepest, JobStatus()) > 400 * grace_seconds(LARGE, JobStatus())


@given(SECONDS, SECONDS)
def test_it_is_never_less_than_was_promised(planned: float | None, measured: float | None) -> None:
    found = grace_seconds(LARGE, status(planned, measured))
    for step_seconds in (planned or 0.0, measured or 0.0):
        assert found >= max(60.0, 2 * (step_seconds + checkpoint_seconds(LARGE)) + 30) - 1e-6


def grace_of_pods(operating: Operating) -> int:
    [jobset] = operating.kube.all(JOBSETS)
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    grace: int = spec["terminationGracePeriodSeconds"]
    return grace


def test_a_later_attempt_has_what_steps_were_measured_to_take() -> None:
    operating = Operating(FakePlanner())
    manifest = manifests.example(kubernetes={"volumes": {"out": {"claim": "shared"}}})
    uid = operating.running(manifest, sample_profile(), "east", "west")
    assert grace_of_pods(operating) == 60
    operating.kube.report(uid, attempt=1, epoch=1, step=9, stepSeconds=100.0)
    operating.kube.remove(operating.kube.all(PODS)[0])
    operating.turn(8)
    assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.QUEUED, 2)
    assert grace_of_pods(operating) == pytest.approx(2 * 100 + 30, abs=2), json.dumps(operating.kube.writes)
