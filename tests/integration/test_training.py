"""A tiny job trained for real: ranks started by torchrun, the run directory, stopping, and going on elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent.launch import Ranks
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.layout import Precision
from penstock.core.plan import Plan, Prediction
from penstock.core.records import RecordKind
from penstock.core.run.folder import RunDir
from penstock.core.run.outbox import read_records
from penstock.core.run.rank_status import State
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Source, Timeline
from penstock.trainer import checkpoint
from penstock.trainer.session import require_runnable
from tests.support.checkpoint_ranks import spoil
from tests.support.small_plans import looped_schedule
from tests.support.training_run import (
    TIMEOUT_SECONDS,
    finish,
    losses,
    make_run,
    start,
    tiny_job,
    tiny_plan,
    train,
    train_in_pool,
    write_corpus,
)
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

STEPS = 50
DOCUMENTED = {"step", "loss", "step_seconds", "tokens_per_second", "learning_rate", "gradient_norm", "peak_bytes"}
CLOSE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all runs of this module, with a cache of its own for data."""
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(folder: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Path:
    return write_corpus(folder / "corpus")


@pytest.fixture(scope="module")
def job(corpus: Path) -> PipelineJob:
    return tiny_job(corpus, validateEvery=25)


@pytest.fixture(scope="module")
def straight(folder: Path, job: PipelineJob) -> RunDir:
    """Trained on two stages, undisturbed."""
    run = make_run(folder / "straight", job, tiny_plan(job, 2))
    train(run)
    return run


def result(run: RunDir) -> dict[str, object]:
    found: dict[str, object] = json.loads(run.result.read_text())
    return found


@pytest.mark.parametrize("pp", [1, 4])
def test_the_number_of_stages_does_not_change_what_is_learnt(
    folder: Path, job: PipelineJob, straight: RunDir, pp: int
) -> None:
    run = make_run(folder / f"pp-{pp}", job, tiny_plan(job, pp))
    train(run)
    assert losses(run)[0] == losses(straight)[0]
    assert losses(run) == pytest.approx(losses(straight), abs=CLOSE)
    assert [m.validation_loss for m in run.read_metrics() if m.validation_loss] == pytest.approx(
        [m.validation_loss for m in straight.read_metrics() if m.validation_loss], abs=CLOSE
    )
    assert result(run)["sample"] == result(straight)["sample"]


def sharded(job: PipelineJob, tp: int, pp: int, *, dp: int = 1, by_tokens: bool = True) -> Plan:
    """Ranks that share the units of a stage."""
    return dataclasses.replace(tiny_plan(job, pp, dp=dp), tp=tp, sequence_parallel=by_tokens)


@pytest.mark.parametrize(("tp", "pp", "by_tokens"), [pytest.param(2, 2, True, marks=pytest.mark.long), (2, 1, False)])
def test_the_number_of_shards_does_not_change_what_is_learnt(
    folder: Path, job: PipelineJob, straight: RunDir, tp: int, pp: int, by_tokens: bool
) -> None:
    """Nor does whether they divide hidden states by tokens."""
    run = make_run(folder / f"tp-{tp}-{pp}-{by_tokens}", job, sharded(job, tp, pp, by_tokens=by_tokens))
    train(run)
    assert losses(run) == pytest.approx(losses(straight), abs=CLOSE)
    assert [m.validation_loss for m in run.read_metrics() if m.validation_loss] == pytest.approx(
        [m.validation_loss for m in straight.read_metrics() if m.validation_loss], abs=CLOSE
    )
    end = result(run)
    assert end["sample"] == result(straight)["sample"]
    assert isinstance(end["peak_bytes"], list)
    assert len(end["peak_bytes"]) == tp * pp


def smaller_last(job: PipelineJob, pp: int) -> Plan:
    """The four sequences of a step as three and one, which has slices of its own."""
    plan, alone = tiny_plan(job, pp), (job.spec.data.sequence_length,)
    return dataclasses.replace(plan, microbatch=3, num_microbatches=2, remainder=1, remainder_slices=alone)


def test_a_smaller_last_micro_batch_does_not_change_what_is_learnt(
    folder: Path, job: PipelineJob, straight: RunDir
) -> None:
    run = make_run(folder / "smaller-last", job, smaller_last(job, 2))
    train(run)
    assert losses(run) == pytest.approx(losses(straight), abs=CLOSE)
    assert [m.validation_loss for m in run.read_metrics() if m.validation_loss] == pytest.approx(
        [m.validation_loss for m in straight.read_metrics() if m.validation_loss], abs=CLOSE
    )
    assert result(run)["sample"] == result(straight)["sample"]


def test_more_is_learnt_than_how_frequent_tokens_are(straight: RunDir) -> None:
    end = result(straight)
    assert (end["outcome"], end["step"]) == ("succeeded", STEPS)
    assert isinstance(end["validation_loss"], float)
    assert isinstance(end["unigram_loss"], float)
    assert end["validation_loss"] < 0.5 * end["unigram_loss"]
    assert isinstance(end["sample"], str)
    assert end["sample"].startswith(str(end["prompt"]))


def test_metrics_have_exactly_the_documented_fields(straight: RunDir, job: PipelineJob) -> None:
    lines = [json.loads(line) for line in straight.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line in lines:
        validated = {"validation_loss"} if line["step"] in (24, 49) else set()
        assert line.keys() == {*DOCUMENTED, "attempt"} | validated
        assert line["tokens_per_second"] == pytest.approx(4 * 64 / line["step_seconds"])
        assert all(line[name] > 0 for name in DOCUMENTED - {"step"})
    assert lines[-1]["learning_rate"] == pytest.approx(0.1 * job.spec.training.optimizer.learning_rate)


def test_timelines_checkpoints_and_records_are_left(straight: RunDir) -> None:
    timeline = Timeline.from_manifest(json.loads(straight.timeline.read_text()))
    assert (timeline.source, timeline.num_ranks, timeline.step) == (Source.MEASURED, 2, STEPS - 1)
    assert {event.rank for event in timeline.events} == {0, 1}
    assert [found.step for found in checkpoint.find_checkpoints(straight.checkpoints)] == [50, 40, 20]
    records = read_records(straight.outbox / "a1-rank-0.jsonl")
    assert [record.sequence for record in records] == list(range(len(records)))
    assert sum(record.kind is RecordKind.METRICS for record in records) == STEPS
    assert [record.progress.last_checkpoint for record in records if record.progress] == [20, 40, 50]
    assert sum(record.kind is RecordKind.TIMELINE for record in records) == 8


def test_training_that_diverges_is_the_user_s_mistake(folder: Path, corpus: Path, job: PipelineJob) -> None:
    """Executors do not retry it."""
    diverging = tiny_job(corpus, optimizer={"learningRate": 1e18})
    run = make_run(folder / "diverging", diverging, tiny_plan(job, 2))
    outcome = start(run, "train", 2, "--attempt", "1").wait(TIMEOUT_SECONDS)
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.refused
    assert re.search("spec.training.optimizer.learningRate: .*training diverged", outcome.failure.message)
    assert "remedy: " in outcome.failure.message


def interrupted(straight: RunDir, root: Path, job: PipelineJob, pp: int, *, dp: int = 1, step: int = 20) -> RunDir:
    """What a run that died after a checkpoint left behind, and a plan to go on with."""
    run = make_run(root, job, tiny_plan(job, pp, dp=dp))
    shutil.copytree(straight.checkpoints / "a1" / f"step-{step}", run.checkpoints / "a1" / f"step-{step}")
    lines = straight.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[: step + 7]) + lines[step + 7][:30])
    return run


def test_going_on_is_as_if_nothing_had_happened(
    worker_pool: WorkerPool, tmp_path: Path, job: PipelineJob, straight: RunDir
) -> None:
    run = interrupted(straight, tmp_path / "run", job, 2)
    train_in_pool(worker_pool, run, attempt=2)
    assert losses(run) == losses(straight)
    assert [m.attempt for m in run.read_metrics()] == [1] * 20 + [2] * 30
    assert [(c.attempt, c.step) for c in checkpoint.find_checkpoints(run.checkpoints)] == [(2, 50), (2, 40), (1, 20)]


@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (4, 1), (2, 2)])
def test_going_on_with_another_partition(
    worker_pool: WorkerPool, tmp_path: Path, job: PipelineJob, straight: RunDir, pp: int, dp: int
) -> None:
    run = interrupted(straight, tmp_path / "run", job, pp, dp=dp)
    train_in_pool(worker_pool, run, attempt=2)
    assert losses(run) == pytest.approx(losses(straight), abs=CLOSE)


@pytest.mark.parametrize(("tp", "pp", "dp"), [pytest.param(4, 1, 1, marks=pytest.mark.long), (2, 2, 1), (2, 1, 2)])
def test_going_on_with_shards_and_without(
    worker_pool: WorkerPool, tmp_path: Path, job: PipelineJob, straight: RunDir, tp: int, pp: int, dp: int
) -> None:
    """From two stages to shards, and from their checkpoint to one rank again. Four shards hold copies of two heads."""
    run = interrupted(straight, tmp_path / "run", job, pp, dp=dp)
    write_json(run.plan, sharded(job, tp, pp, dp=dp).to_manifest())
    train_in_pool(worker_pool, run, attempt=2)
    assert losses(run) == pytest.approx(losses(straight), abs=CLOSE)
    again = make_run(tmp_path / "again", job, tiny_plan(job, 1))
    shutil.copytree(run.checkpoints / "a2" / "step-40", again.checkpoints / "a2" / "step-40")
    train_in_pool(worker_pool, again, attempt=3)
    assert [m.loss for m in again.read_metrics()] == pytest.approx(losses(straight)[40:], abs=CLOSE)


def test_going_on_with_a_smaller_last_micro_batch(
    worker_pool: WorkerPool, tmp_path: Path, job: PipelineJob, straight: RunDir
) -> None:
    run = interrupted(straight, tmp_path / "run", job, 4)
    write_json(run.plan, smaller_last(job, 4).to_manifest())
    train_in_pool(worker_pool, run, attempt=2)
    assert losses(run) == pytest.approx(losses(straight), abs=CLOSE)


def copied_checkpoint(straight: RunDir, run: RunDir, step: int) -> Path:
    folder = run.checkpoints / "a1" / f"step-{step}"
    shutil.copytree(straight.checkpoints / "a1" / f"step-{step}", folder)
    return folder


def test_going_on_from_an_older_checkpoint_where_the_newest_is_corrupt(
    worker_pool: WorkerPool, tmp_path: Path, job: PipelineJob, straight: RunDir
) -> None:
    run = interrupted(straight, tmp_path / "run", job, 2)
    spoil(copied_checkpoint(straight, run, 40) / "__1_0.distcp")
    train_in_pool(worker_pool, run, attempt=2)
    assert losses(run) == losses(straight)
    assert [m.attempt for m in run.read_metrics()] == [1] * 20 + [2] * 30
    assert [(c.attempt, c.step) for c in checkpoint.find_checkpoints(run.checkpoints)] == [(2, 50), (2, 40), (1, 20)]
    (warning,) = run.warnings.read_text().splitlines()
    assert "checkpoint a1/step-40 is corrupt: __1_0.distcp is not what was written" in warning
    assert "goes on from step 20" in warning


def test_a_corrupt_checkpoint_that_the_job_names_is_refused(
    worker_pool: WorkerPool, tmp_path: Path, corpus: Path, straight: RunDir
) -> None:
    """Older ones may lie next to it, but were not requested."""
    other = RunDir(tmp_path / "other")
    copied_checkpoint(straight, other, 20)
    named = copied_checkpoint(straight, other, 40)
    spoil(named / "__0_0.distcp")
    begun = tiny_job(corpus, resume_from=named)
    run = make_run(tmp_path / "run", begun, tiny_plan(begun, 1))
    with pytest.raises(AssertionError, match=r"step-40: is corrupt: __0_0.distcp is not what was written"):
        train_in_pool(worker_pool, run)
    assert named.is_dir()


def test_a_job_may_begin_from_another_s_checkpoint(
    worker_pool: WorkerPool, tmp_path: Path, corpus: Path, straight: RunDir
) -> None:
    begun = tiny_job(corpus, resume_from=straight.checkpoints / "a1" / "step-40")
    run = make_run(tmp_path / "run", begun, tiny_plan(begun, 2))
    train_in_pool(worker_pool, run)
    assert [each.loss for each in run.read_metrics()] == losses(straight)[40:]


def test_a_checkpoint_with_nothing_left_to_do_is_refused(
    worker_pool: WorkerPool, tmp_path: Path, corpus: Path, straight: RunDir
) -> None:
    begun = tiny_job(corpus, resume_from=straight.checkpoints / "a1" / "step-50")
    run = make_run(tmp_path / "run", begun, tiny_plan(begun, 1))
    with pytest.raises(AssertionError, match=r"has taken 50 steps, and training.steps is 50"):
        train_in_pool(worker_pool, run)


def test_an_attempt_that_finds_everything_done_only_concludes(
    worker_pool: WorkerPool, tmp_path: Path, job: PipelineJob, straight: RunDir
) -> None:
    run = interrupted(straight, tmp_path / "run", job, 2, step=50 - 10)
    shutil.copytree(straight.checkpoints / "a1" / "step-50", run.checkpoints / "a1" / "step-50")
    before = run.metrics.read_text()
    (outcome, _) = train_in_pool(worker_pool, run, attempt=2)
    assert (outcome.step, outcome.stopped) == (STEPS, False)
    assert outcome.validation_loss == straight.read_metrics()[-1].validation_loss
    assert before.startswith(run.metrics.read_text())


def wait_for(condition: Callable[[], bool], ranks: Ranks) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert ranks.poll() is None, "the ranks ended"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("rank", [1])
def test_sigterm_to_one_rank_leaves_one_complete_checkpoint(
    worker_pool: WorkerPool, tmp_path: Path, job: PipelineJob, straight: RunDir, rank: int
) -> None:
    """The signal comes before the first step, so that it is known after which step all ranks stop: the first."""
    run = make_run(tmp_path / "run", job, tiny_plan(job, 2))
    ranks = start(run, "train", 2, "--attempt", "1")
    wait_for(lambda: all(status is not None for status in ranks.statuses()), ranks)
    status = ranks.statuses()[rank]
    assert status is not None
    os.kill(status.pid, signal.SIGTERM)
    finish(ranks)
    assert {status.state for status in ranks.statuses() if status} == {State.DONE}
    assert result(run) == {"outcome": "stopped", "step": 1}
    (found,) = checkpoint.find_checkpoints(run.checkpoints)
    assert checkpoint.verify(found.folder).step == 1
    train_in_pool(worker_pool, run, attempt=2)
    assert losses(run) == losses(straight)


@pytest.mark.parametrize(("family", "dp", "schedule"), [("gpt2", 1, "zb"), ("llama", 2, "gpipe")])
def test_bf16_learns_too(
    worker_pool: WorkerPool, tmp_path: Path, corpus: Path, family: str, dp: int, schedule: str
) -> None:
    mixed = tiny_job(corpus, family=family, precision="bf16", schedule="wsd", decayShare=0.4)
    run = make_run(tmp_path / "run", mixed, tiny_plan(mixed, 2, dp=dp, schedule=schedule))
    train_in_pool(worker_pool, run)
    found = losses(run)
    assert sum(found[-5:]) < 0.5 * sum(found[:5])
    rates = [m.learning_rate for m in run.read_metrics()]
    assert rates[5] == rates[29] == max(rates)
    assert rates[-1] == pytest.approx(0.1 * max(rates))


def test_two_stages_of_one_rank_both_get_the_tied_matrix_back(
    worker_pool: WorkerPool, tmp_path: Path, corpus: Path
) -> None:
    tied = tiny_job(corpus, family="gpt2", every_steps=2, steps=4)
    schedule = looped_schedule(num_ranks=1, num_stages=2, num_microbatches=4, num_slices=3)
    plan = dataclasses.replace(tiny_plan(tied, 2), pp=1, schedule=schedule)
    whole = make_run(tmp_path / "whole", tied, plan)
    train_in_pool(worker_pool, whole)
    run = make_run(tmp_path / "run", tied, plan)
    shutil.copytree(whole.checkpoints / "a1" / "step-2", run.checkpoints / "a1" / "step-2")
    train_in_pool(worker_pool, run, attempt=2)
    assert [each.loss for each in run.read_metrics()] == losses(whole)[2:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_microbatches": 2}, "its global batch is 2, here it is 4"),
        ({"slices": (24, 24, 24)}, "its sequence length is 72, here it is 64"),
        ({"precision": Precision.BF16}, "its precision is bf16, here it is fp32"),
        ({"dp": 2, "num_microbatches": 2}, "its number of ranks is 2, here it is 1"),
        ({"tp": 2}, "its number of ranks is 2, here it is 1"),
    ],
)
def test_a_plan_of_another_job_is_refused(job: PipelineJob, change: dict[str, object], message: str) -> None:
    plan = dataclasses.replace(tiny_plan(job, 1), **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        require_runnable(plan, job, 1)


def test_a_plan_whose_shards_cannot_divide_the_model_is_refused(job: PipelineJob) -> None:
    plan = dataclasses.replace(tiny_plan(job, 1), tp=3)
    with pytest.raises(UserError, match=r"plan.tp: 3 shards cannot divide the model: 4 heads, 2 key/value") as caught:
        require_runnable(plan, job, 3)
    assert "one of 1, 2, 4" in caught.value.remedy
    require_runnable(dataclasses.replace(plan, tp=4), job, 4)


def test_ranks_refuse_a_plan_that_takes_more_memory_than_is_allowed(job: PipelineJob, tmp_path: Path) -> None:
    told = Prediction(
        step_seconds=1.0,
        compute_seconds=1.0,
        bubble_seconds=0.0,
        communication_seconds=0.0,
        reduction_seconds=0.0,
        optimizer_seconds=0.0,
        peak_bytes=(2**40,),
        slot_bytes=(0,),
    )
    run = make_run(tmp_path / "run", job, dataclasses.replace(tiny_plan(job, 1), prediction=told))
    outcome = start(run, "train", 1, "--attempt", "1").wait(TIMEOUT_SECONDS)
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure.refused
    assert outcome.failure.message.startswith("spec.resources.memoryPerRank: the plan needs 1 TiB on rank 0")


def test_a_run_directory_that_is_none_is_said_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from penstock.trainer.__main__ import main

    assert main(["train", "--run-dir", str(tmp_path), "--attempt", "1"]) == 2
    assert "job.yaml: cannot be read: No such file" in capfd.readouterr().err


def test_data_that_is_too_short_to_hold_out_is_refused_beforehand(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a word and another. " * 40)
    with pytest.raises(UserError, match=r"spec.data.sequenceLength.*longer than the data"):
        make_run(tmp_path / "run", tiny_job(short))
