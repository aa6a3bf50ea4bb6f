"""A job on two real nodes, from its submission to its end: what people see, and that it learns what it learns here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Place
from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus, ConditionType
from penstock.operator.statuses import summarize
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import local_losses, small_spec, submitted
from tests.support.installed import PAIR_NODES, Installed
from tests.support.story import AGE, Story

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

REASONS = {
    "Pending": "",
    "Queued": "Accepted",
    "Profiling": "Admitted",
    "Planning": "Profiled",
    "Binding": "Planned",
    "Running": "Bound",
    "Succeeded": "Completed",
}
"""Of a job that nothing happens to, in order."""


def status_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job.get("status", {})
    return found


def phases(story: Story) -> list[str]:
    """In order, those of unchanged ones once."""
    return [phase for phase, _ in itertools.groupby(status_of(each)["phase"] for each in story.objects)]


def row_of(job: dict[str, Any]) -> list[str]:
    """What should be printed of a job, in words; nothing for what it does not have yet, and none for its age."""
    status = status_of(job)
    progress, plan = status.get("progress", {}), status.get("plan", {})
    steps = job["spec"]["training"]["steps"]
    named = [job["metadata"]["name"], status.get("phase"), plan.get("summary"), progress.get("step"), steps]
    named += [progress.get("loss"), status.get("attempt"), status.get("ranks"), status.get("reason")]
    return " ".join(str(each) for each in named if each is not None).split()


def without_age(row: list[str]) -> list[str]:
    """The one age that every row has is left out."""
    assert len([word for word in row if AGE.fullmatch(word)]) == 1, row
    return [word for word in row if not AGE.fullmatch(word)]


def test_every_phase_is_entered_in_order(first: Story) -> None:
    assert phases(first) == list(REASONS)
    assert {status_of(each)["phase"]: status_of(each)["reason"] for each in first.objects} == REASONS


def test_kubectl_prints_every_column_right_at_every_phase(first: Story) -> None:
    expected = ["NAME", "PHASE", "PLAN", "STEP", "STEPS", "LOSS", "ATTEMPT", "RANKS", "AGE", "REASON"]
    assert first.header == expected
    printed = [without_age(row) for row in first.rows]
    assert printed == [row_of(each) for each in first.objects]
    assert len(printed) > len(REASONS)


def test_what_is_printed_is_true(first: Story) -> None:
    """Plan, step, loss, attempt and ranks against what the ranks left."""
    job, run = first.job, first.job.run(1)
    summary, losses = summarize(run.read_plan()).summary, job.losses()
    for status in map(status_of, first.objects):
        launched = status["phase"] not in ("Pending", "Queued")
        assert not launched or (status["attempt"], status["ranks"]) == (1, 2)
        planned = status["phase"] in ("Binding", "Running", "Succeeded")
        assert status.get("plan", {}).get("summary") == (summary if planned else None)
        progress = status.get("progress", {})
        if progress.get("step"):
            assert float(progress["loss"]) == pytest.approx(losses[progress["step"] - 1], rel=1e-5)
    last = status_of(first.objects[-1])["progress"]
    assert (last["step"], last["lastCheckpoint"]) == (60, 60)


def test_the_job_spans_two_nodes(first: Story) -> None:
    assert {each["spec"]["nodeName"] for each in first.pods} == set(PAIR_NODES)


def test_events_tell_the_story(first: Story) -> None:
    assert [reason for reason, _ in first.events] == [*REASONS.values()][1:]
    assert all(message.startswith(phase) for (_, message), phase in zip(first.events, [*REASONS][1:], strict=True))


def test_conditions_tell_the_story(first: Story) -> None:
    status = first.job.status()
    true = ("Admitted", "Profiled", "Planned", "Bound", "Complete")
    found = {each.type: each.status for each in status.conditions}
    found.pop(ConditionType.DRIFTED, None)  # what a step takes here is other processes' doing, too
    assert found == {
        **dict.fromkeys(map(ConditionType, true), ConditionStatus.TRUE),
        ConditionType.FAILED: ConditionStatus.FALSE,
    }
    times = [each.last_transition_time for each in status.conditions if each.type in true]
    assert times == sorted(times, key=lambda each: each or 0.0)
    assert status.observed_generation == first.job.get()["metadata"]["generation"]


def test_losses_are_those_of_one_machine(first: Story, penstock_there: Installed, tmp_path: Path) -> None:
    spec = small_spec(penstock_there.cluster.image)
    assert local_losses(penstock_there, tmp_path, spec, first.job.run(1)) == first.job.losses()


def test_the_service_tells_of_it(first: Story, penstock_there: Installed) -> None:
    """Phase, plan, metrics, and lines that ranks of both nodes printed."""
    place = Place(name="first", namespace=penstock_there.namespace)
    losses = first.job.losses()
    with penstock_there.client as client:
        penstock_there.cluster.wait(
            lambda: client.get(place).status.phase is Phase.SUCCEEDED, "the service does not hear of the end"
        )
        [planned] = client.plans_of(place)
        assert planned.plan.for_ranks == first.job.run(1).read_plan()
        assert planned.plan.prediction is not None
        assert planned.plan.prediction.low_seconds is not None, "what only people read is lost on the way"
        loss = next(each for each in client.metrics(place) if each.name == "loss")
        assert [point.last for point in loss.points] == losses
        assert {line.rank for line in client.logs(place).items} >= {0, 1}


def test_the_next_job_need_not_measure(on: Installed, first: Story) -> None:
    job = submitted(on, "second")
    job.wait_for(Phase.SUCCEEDED)
    assert [reason for reason, _ in job.events()] == ["Accepted", "Admitted", "Planned", "Bound", "Completed"]
    assert job.status().profile == first.job.status().profile
    assert job.losses() == first.job.losses()
