"""Run directories as a finished run leaves them, made without training: profile, plan, metrics, timeline, result."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from penstock.agent.probe import Identity
from penstock.agent.run_state import PhaseChange, RunState, write_state
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.run.folder import RunDir, metrics_line
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Source
from penstock.planner.budget import Budget
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from penstock.planner.replay import simulated
from tests.support.fake_workers import fake_metrics
from tests.support.manifests import example
from tests.support.sample_run import sample_profile

NUM_STEPS = 30


def local_job(**changes: Any) -> PipelineJob:
    """The design's example."""
    return PipelineJob.from_manifest(example(**{"training__steps": NUM_STEPS, **changes}))


@functools.cache
def local_profile() -> Profile:
    """The sample measurements at every micro-batch of the example, in proportion."""
    profile = sample_profile()
    units = tuple(
        dataclasses.replace(
            record,
            batch=batch,
            alone_seconds=batch * record.alone_seconds,
            together_seconds=batch * record.together_seconds,
        )
        for batch in (1, 2, 4)
        for record in profile.units
    )
    return dataclasses.replace(profile, units=units)


def local_identity(job: PipelineJob) -> Identity:
    """What the sample profile is of."""
    profile = local_profile()
    return Identity(
        key=profile.key,
        model_digest=profile.model_digest,
        precision=job.spec.training.precision,
        num_ranks=job.spec.resources.ranks,
    )


@functools.cache
def local_plan() -> Plan:
    """A real plan of the example for two stages and four slices, from a short search."""
    pinned = local_job(parallelism={"pp": 2, "microBatch": 1, "slices": 4})
    budget = Budget(candidates=8, moves=0)
    return decide(problem_from_profile(pinned.spec, local_profile()), budget).plan


def finished_run(root: Path) -> RunDir:
    """A run that succeeded at its second attempt; its measured step is the predicted one."""
    run = RunDir(root)
    run.create()
    run.job.write_text(yamltext.dump(local_job().to_manifest()))
    write_json(run.profile, local_profile().to_manifest())
    write_json(run.plan, local_plan().to_manifest())
    run.metrics.write_text("".join(metrics_line(fake_metrics(step)) for step in range(NUM_STEPS)))
    timeline = dataclasses.replace(simulated(local_plan(), local_profile()).timeline, source=Source.MEASURED)
    write_json(run.timeline, timeline.to_manifest())
    result = {"outcome": "succeeded", "step": NUM_STEPS, "validation_loss": 2.5, "unigram_loss": 6.0}
    run.result.write_text(json.dumps({**result, "sample": "def f(x):\n    return x\x1b[31m\n"}))
    folder = run.checkpoints / "a2" / f"step-{NUM_STEPS}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    history = (PhaseChange(phase=Phase.SUCCEEDED, at=1.0, reason="Completed"),)
    write_state(root, RunState(phase=Phase.SUCCEEDED, attempt=2, finished_at=1.0, history=history))
    return run
