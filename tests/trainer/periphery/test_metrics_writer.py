"""Reports of the first rank about an attempt, apart from its steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock.core.plan import Plan
from penstock.core.records import RecordKind
from penstock.core.run.folder import RunDir
from penstock.core.run.outbox import read_records
from penstock.core.serialization.files import write_json
from penstock.trainer.metrics_writer import MetricsWriter
from penstock.trainer.resume import Restored
from tests.support.local_run import local_job
from tests.support.small_plans import small_plan


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    return made


def metrics_writer(run: RunDir, plan: Plan, attempt: int = 1) -> MetricsWriter:
    return MetricsWriter(run, local_job(), plan, attempt, None)


def test_every_attempt_records_the_profile_of_its_plan_once(run: RunDir) -> None:
    planned = dataclasses.replace(small_plan(), profile_digest="5eed")
    for attempt in (1, 2):
        with metrics_writer(run, planned, attempt):
            pass
        (record,) = read_records(run.outbox / f"a{attempt}-rank-0.jsonl")
        assert (record.kind, record.profile_digest) == (RecordKind.PROFILE, "5eed")


def test_a_plan_for_described_hardware_records_no_profile(run: RunDir) -> None:
    with metrics_writer(run, small_plan()):
        pass
    assert read_records(run.outbox / "a1-rank-0.jsonl") == []


def test_corrupt_checkpoints_are_warnings(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with metrics_writer(run, small_plan()) as writer:
        writer.began(Restored(step=40, corrupt=("a1/step-80 is corrupt: x", "a1/step-60 is corrupt: y")))
    warnings = run.warnings.read_text().splitlines()
    assert [text.split(";")[0] for text in warnings] == [
        "checkpoint a1/step-80 is corrupt: x",
        "checkpoint a1/step-60 is corrupt: y",
    ]
    assert all(text.endswith("goes on from step 40") for text in warnings)
    assert capsys.readouterr().out.splitlines() == [f"WARNING: {text}" for text in warnings]


def test_a_start_from_an_intact_checkpoint_writes_no_warning(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with metrics_writer(run, small_plan()) as writer:
        writer.began(Restored(step=40))
    assert not run.warnings.exists()
    assert capsys.readouterr().out == ""


def test_a_plan_that_ranks_have_taken_is_the_run_s(run: RunDir) -> None:
    old, new = small_plan(), dataclasses.replace(small_plan(), slices=(6, 6), profile_digest="5eed")
    write_json(run.plan, old.to_manifest())
    write_json(run.next_plan, new.to_manifest())
    with metrics_writer(run, old) as writer:
        writer.changed_plan(new, "")
    assert run.read_plan() == new
    assert not run.next_plan.exists()
    assert not run.warnings.exists()
    (record,) = read_records(run.outbox / "a1-rank-0.jsonl")
    assert (record.kind, record.profile_digest) == (RecordKind.PROFILE, "5eed")


def test_a_plan_that_ranks_refuse_is_a_warning(run: RunDir) -> None:
    old, new = small_plan(), dataclasses.replace(small_plan(), slices=(6, 6))
    write_json(run.plan, old.to_manifest())
    write_json(run.next_plan, new.to_manifest())
    with metrics_writer(run, old) as writer:
        writer.changed_plan(old, "it is too large")
    assert run.read_plan() == old
    assert not run.next_plan.exists()
    assert run.warnings.read_text() == ("the run keeps its plan; the new one was refused: it is too large\n")
