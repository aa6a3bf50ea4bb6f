"""Summaries and reports of run directories, whole and half empty."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.local.reporting import report_data, trace_path, versions, write_report
from penstock.cli.summary import Summary, rendered, summarise
from penstock.core.errors import UserError
from penstock.core.model import step_flops
from penstock.core.records import WARM_UP_STEPS
from penstock.core.run.folder import RunDir, metrics_line
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Source
from penstock.planner.replay import simulated
from penstock.view.report import figures_of_merit, measured_step_seconds
from tests.support.fake_workers import fake_metrics
from tests.support.local_run import NUM_STEPS, finished_run, local_plan, local_profile


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return finished_run(tmp_path / "r")


def text(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=240)
    for each in rendered(summary):
        console.print(each, markup=False)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def test_a_summary_compares_promise_and_result(run: RunDir) -> None:
    summary = summarise(run, "Succeeded", 2)
    prediction = local_plan().prediction
    assert prediction is not None
    assert summary.predicted_step_seconds == prediction.step_seconds
    assert summary.predicted_peak_bytes == max(prediction.peak_bytes)
    assert summary.measured_step_seconds == 0.25
    assert summary.measured_peak_bytes == 2**28
    assert (summary.first_loss, summary.last_loss) == (5.0, 5.0 / NUM_STEPS)
    assert (summary.validation_loss, summary.unigram_loss) == (2.5, 6.0)
    assert summary.steps == NUM_STEPS
    assert summary.predicted_speed == prediction.speed
    tokens = local_plan().global_batch * local_plan().sequence_length
    assert summary.measured_speed is not None
    assert summary.measured_speed.tokens_per_second_per_device == tokens / 0.25 / local_plan().num_ranks
    assert summary.measured_speed.model_flops_utilization is None


def test_a_summary_survives_its_manifest(run: RunDir) -> None:
    summary = summarise(run, "Succeeded", 2)
    assert Summary.from_manifest(json.loads(json.dumps(summary.to_manifest()))) == summary


def test_a_damaged_line_of_metrics_is_a_warning_and_the_report_is_made(run: RunDir) -> None:
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join([lines[0].replace(b"attempt", b"attumpt"), *lines[1:]]))
    summary = summarise(run, "Succeeded", 2)
    assert summary.steps == NUM_STEPS
    assert "metrics.jsonl:1 is no entry" in text(summary).replace("\n", "")
    write_report(run)
    assert run.report.exists()


def test_warm_up_does_not_count(run: RunDir) -> None:
    slow = [dataclasses.replace(fake_metrics(step), step_seconds=99.0) for step in range(WARM_UP_STEPS)]
    fast = [fake_metrics(step) for step in range(WARM_UP_STEPS, NUM_STEPS)]
    run.metrics.write_text("".join(map(metrics_line, slow + fast)))
    assert summarise(run, "Succeeded", 1).measured_step_seconds == 0.25
    run.metrics.write_text("".join(map(metrics_line, slow)))
    assert summarise(run, "Failed", 1).measured_step_seconds == 99.0, "a run of few steps has nothing else"


def test_summary_and_report_tell_the_same_step_and_speed(run: RunDir) -> None:
    entries = [
        dataclasses.replace(fake_metrics(step), step_seconds=9.0 / (1 + step), tokens_per_second=float(step))
        for step in range(NUM_STEPS)
    ]
    run.metrics.write_text("".join(map(metrics_line, entries)))
    summary, data = summarise(run, "Succeeded", 1), report_data(run)
    assert summary.measured_step_seconds == measured_step_seconds(data)
    assert f">{summary.tokens_per_second:,.0f}<" in figures_of_merit(data)


def test_the_text_names_what_matters(run: RunDir) -> None:
    shown = text(summarise(run, "Succeeded", 2))
    for reason in local_plan().reasons:
        assert reason in shown
    assert "step time" in shown
    assert "peak memory" in shown
    assert "16,384 tokens/s" in shown
    assert "tokens/s per device" in shown
    assert "MFU" not in shown, "nothing is known of this device's peak"
    assert "loss 5.000 at first" in shown
    assert "guessing by token frequency gives 6.000" in shown
    assert "\x1b" not in shown


def test_the_share_of_the_peak_is_predicted_and_measured(run: RunDir) -> None:
    plan = run.read_plan()
    assert plan.prediction is not None
    known = dataclasses.replace(plan.prediction, peak_flops=1e12)
    known = dataclasses.replace(known, speed=dataclasses.replace(plan, prediction=known).speed())
    write_json(run.plan, dataclasses.replace(plan, prediction=known).to_manifest())
    summary = summarise(run, "Succeeded", 2)
    for speed, seconds in ((summary.predicted_speed, known.step_seconds), (summary.measured_speed, 0.25)):
        assert speed is not None
        flops = step_flops(plan.model, plan.global_batch, plan.sequence_length)
        assert speed.model_flops_utilization == pytest.approx(flops / (seconds * plan.num_ranks * 1e12))
    assert re.search(r"MFU +[\d.]+% +[\d.]+%", text(summary))


def test_a_doubtful_prediction_says_so_next_to_what_was_measured(run: RunDir) -> None:
    plan = run.read_plan()
    assert plan.prediction is not None
    doubtful = dataclasses.replace(plan.prediction, warnings=("the machine was busy",))
    write_json(run.plan, dataclasses.replace(plan, prediction=doubtful).to_manifest())
    summary = summarise(run, "Succeeded", 2)
    assert summary.warnings == ("the machine was busy",)
    assert "warning: the machine was busy" in text(summary)


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "r")
    for path in (run.plan, run.profile, run.metrics, run.timeline, run.result):
        path.unlink()
    summary = summarise(run, "Failed", 1)
    assert summary.steps == 0
    assert summary.measured_step_seconds is None
    assert "Sample" not in text(summary)
    write_report(run)
    assert run.report.exists()
    assert not trace_path(run).exists()


def test_the_report_has_both_steps_and_every_part(run: RunDir) -> None:
    data = report_data(run)
    assert data.predicted == simulated(local_plan(), local_profile()).timeline
    assert data.measured is not None
    assert data.measured.source is Source.MEASURED
    assert data.run.curves["loss"].count == NUM_STEPS
    assert data.unigram_loss == 6.0
    assert len(data.samples) == 1
    assert len(data.fit) == len(local_profile().units)


def test_memory_parts_add_up_to_the_prediction(run: RunDir) -> None:
    prediction = local_plan().prediction
    assert prediction is not None
    memory = report_data(run).memory
    assert tuple(rank.predicted_bytes for rank in memory) == prediction.peak_bytes
    assert all(min(rank.state_bytes, rank.slot_bytes, rank.constant_bytes) > 0 for rank in memory)
    assert all(rank.transient_bytes >= 0 for rank in memory)


def test_the_fit_is_near_what_was_measured(run: RunDir) -> None:
    errors = [abs(point.error) for point in report_data(run).fit if not point.record.held_out]
    assert sum(errors) / len(errors) < 0.1


def test_the_trace_holds_prediction_and_measurement(run: RunDir) -> None:
    write_report(run)
    events = json.loads(trace_path(run).read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}


@pytest.mark.parametrize("name", ["plan.json", "profile.json", "timeline.json", "state.json"])
def test_a_corrupt_file_is_named(run: RunDir, name: str) -> None:
    (run.root / name).write_text("{\n")
    with pytest.raises(UserError) as found:
        report_data(run)
    assert name in found.value.where
    assert found.value.remedy


def test_versions_name_what_runs_depend_on() -> None:
    assert {"python", "torch", "numpy"} <= {name for name, _ in versions()}
