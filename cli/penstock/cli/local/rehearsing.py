"""Rehearsals: a plan's real ranks and messages on this machine, which wait instead of computing."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.agent.workers import LocalWorkers, finish
from penstock.cli.lines import working
from penstock.cli.output import say
from penstock.core.cluster import ClusterSpec
from penstock.core.errors import UserError
from penstock.core.host.stopping import listening
from penstock.core.job import Metadata, PipelineJob
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.run.documents import read_timeline
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Timeline
from penstock.planner.replay import simulated, spec_of

MOST_RANKS = 64
"""Largest number of processes. Each loads PyTorch, about 300 MB, and most machines would run out of memory."""


def ranks_of(plan: Plan) -> int:
    """Return the number of processes of the plan's rehearsal; raises `UserError` if there are too many.

    Shards of a pipeline rank do the same work concurrently, and their collectives are predicted as part of their
    compute: one process represents all of them.
    """
    num_ranks = plan.dp * plan.pp
    if num_ranks > MOST_RANKS:
        raise UserError(
            what=f"needs {num_ranks} processes on this machine, dp {plan.dp} x pp {plan.pp}; {MOST_RANKS} may start",
            where="plan",
            remedy="show it with penstock simulate, or plan with parallelism.dp or pp pinned lower",
        )
    return num_ranks


def rehearsed(plan: Plan, hardware: Profile | ClusterSpec) -> Timeline:
    """Play one step of ``plan`` on this machine, with the times that ``hardware`` would have.

    Raises:
        UserError: the plan is too large for one machine.
        RunError: a rank failed.
    """
    num_ranks = ranks_of(plan)
    with tempfile.TemporaryDirectory(prefix="penstock-rehearsal-") as folder:
        run = RunDir(Path(folder))
        job = lay_out(run, plan, hardware)
        if plan.tp > 1:
            say(f"each rank stands for {plan.tp} tensor parallel devices: their collectives take time but send nothing")
        with listening() as requests, working(f"rehearsing with {num_ranks} ranks"):
            finish(LocalWorkers().rehearse(job, run, num_ranks), requests)
        return read_timeline(run.root / "timeline-rehearsed.json")


def lay_out(run: RunDir, plan: Plan, hardware: Profile | ClusterSpec) -> PipelineJob:
    """Write the input of the ranks of a rehearsal; return their job."""
    predicted = simulated(plan, hardware).timeline
    job = PipelineJob(metadata=Metadata(name="rehearsal"), spec=spec_of(plan))
    run.create()
    run.write_job(job)
    write_json(run.plan, plan.to_manifest())
    write_json(run.root / "timeline-predicted.json", predicted.to_manifest())
    return job
