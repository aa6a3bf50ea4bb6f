"""A tiny real job: a corpus that can be learnt in seconds, a run directory, and ranks started as in production."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from penstock.agent.launch import LaunchSpec, Ranks, launch
from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import StatusFile, status_path
from penstock.core.schedule import ScheduleSpec
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.planner.compile import program_of
from penstock.planner.schedules.registry import find
from penstock.trainer import loop
from penstock.trainer.loop import Outcome
from penstock.trainer.metrics_writer import MetricsWriter, TrainingListener
from penstock.trainer.prepare import prepare_data
from penstock.trainer.session import Session
from penstock.trainer.worker import Worker
from tests.support.worker_pool import CPU, PoolRank, WorkerPool

SLICES = (24, 24, 16)
STAGES = {1: ((0, 6),), 2: ((0, 3), (3, 6)), 4: ((0, 2), (2, 3), (3, 4), (4, 6))}
"""By number of stages: embedding, two blocks of two units, head."""

TIMEOUT_SECONDS = 120


def write_corpus(folder: Path) -> Path:
    """Sentences from a small grammar: far more predictable than their words' frequencies say."""
    dice = random.Random(0)
    who = ["the miller", "the river", "a heron", "the old turbine", "a child"]
    does = ["turns", "waits for", "listens to", "carries", "forgets"]
    what = ["the wheel", "seven stones", "the morning", "a paper boat", "its own name"]
    lines = [f"{dice.choice(who)} {dice.choice(does)} {dice.choice(what)}.\n" for _ in range(6000)]
    folder.mkdir(parents=True)
    (folder / "corpus.txt").write_text("".join(lines))
    return folder / "corpus.txt"


def tiny_job(
    corpus: Path | str,
    *,
    family: str = "llama",
    every_steps: int = 20,
    resume_from: Path | None = None,
    **training: Any,
) -> PipelineJob:
    """Two blocks of width 32 over 300 tokens; ``training`` in manifest names changes how it learns."""
    checkpoint = {"everySteps": every_steps, "keep": 10, **({"resumeFrom": str(resume_from)} if resume_from else {})}
    model = {"family": family, "layers": 2, "hidden": 32, "heads": 4}
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "PipelineJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {**model, "kvHeads": 2} if family == "llama" else model,
            "data": {
                "source": str(corpus),
                "tokenizer": {"train": "bpe", "vocab": 300},
                "sequenceLength": sum(SLICES),
            },
            "training": {
                "globalBatch": 4,
                "steps": 50,
                "warmupSteps": 5,
                "optimizer": {"learningRate": 1e-2},
                **training,
            },
            "checkpoint": checkpoint,
        },
    }
    return PipelineJob.from_manifest(manifest)


def tiny_plan(job: PipelineJob, pp: int, *, dp: int = 1, schedule: str = "1f1b") -> Plan:
    """The job's plan with everything pinned."""
    spec = job.spec
    return Plan(
        model=spec.model,
        precision=spec.training.precision,
        dp=dp,
        pp=pp,
        microbatch=1,
        num_microbatches=spec.training.global_batch // dp,
        slices=SLICES,
        stages=STAGES[pp],
        schedule=ScheduleSpec(generator=schedule, version=find(schedule).version),
    )


def make_run(root: Path, job: PipelineJob, plan: Plan | None = None) -> RunDir:
    """A run directory as the command line leaves it before ranks start. The data's cache is the environment's."""
    run = RunDir(root)
    run.create()
    run.job.write_text(yamltext.dump(job.to_manifest()))
    prepare_data(job, run)
    if plan is not None:
        write_json(run.plan, plan.to_manifest())
    return run


def start(run: RunDir, command: str, num_ranks: int, *arguments: str) -> Ranks:
    """Start the trainer's ranks."""
    return launch(
        LaunchSpec(
            module="penstock.trainer",
            arguments=(command, "--run-dir", str(run.root), *arguments),
            device=run.read_job().spec.resources.device,
            num_ranks=num_ranks,
            threads_per_rank=1,
            log_folder=run.logs / f"{command}-{'-'.join(arguments)}",
            status_folder=run.status,
        )
    )


def finish(ranks: Ranks) -> None:
    """Wait for a good end."""
    outcome = ranks.wait(TIMEOUT_SECONDS)
    if outcome is None:
        ranks.kill()
    assert outcome is not None, "the ranks did not end"
    assert outcome.failure is None, outcome.failure


def train(run: RunDir, attempt: int = 1, *arguments: str) -> None:
    """Train by the run's plan to the end."""
    finish(start(run, "train", run.read_plan().num_ranks, "--attempt", str(attempt), *arguments))


def train_in_pool(pool: WorkerPool, run: RunDir, attempt: int = 1) -> list[Outcome]:
    """The same on ranks that are there already; every rank's outcome."""
    plan = run.read_plan()
    pool.connect(plan, program_of(plan))
    return pool.run(_train_rank, run, plan.num_ranks, attempt, num_ranks=plan.num_ranks)


def _train_rank(me: PoolRank, run: RunDir, num_ranks: int, attempt: int) -> Outcome:
    status = StatusFile(status_path(run.status, me.rank), os.getpid())
    worker = Worker(
        rank=me.rank, num_ranks=num_ranks, device=CPU, groups=me.groups, status=status, stop_requested=lambda: False
    )
    session = Session(run, worker)
    if me.rank:
        return loop.train(session, attempt, TrainingListener())
    with MetricsWriter(run, session.job, session.plan, attempt, None) as writer:
        return loop.train(session, attempt, writer)


def losses(run: RunDir) -> list[float]:
    """Of every step, the newest entry."""
    found = run.read_metrics()
    assert [each.step for each in found] == list(range(len(found)))
    return [each.loss for each in found]
