"""Rehearsals: a plan's real ranks and messages on this machine, waiting where they would compute."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.cli.manifests import read_timeline
from penstock.cli.output import working
from penstock.cli.stopping import listening
from penstock.cli.workers import LocalWorkers, finish
from penstock.core.cluster import ClusterSpec
from penstock.core.job import Metadata, PipelineJob
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline
from penstock.planner import yamltext
from penstock.planner.replay import simulated, spec_of
from penstock.trainer.rundir import RunDir, write_atomically, write_json


def rehearsed(plan: Plan, hardware: Profile | ClusterSpec) -> Timeline:
    """One step of ``plan``, played here at the pace that ``hardware`` would have.

    Raises:
        RunError: a rank failed.
    """
    predicted = simulated(plan, hardware).timeline
    job = PipelineJob(metadata=Metadata(name="rehearsal"), spec=spec_of(plan))
    with tempfile.TemporaryDirectory(prefix="penstock-rehearsal-") as folder:
        run = RunDir(Path(folder))
        run.create()
        write_atomically(run.job, yamltext.dump(job.to_manifest()))
        write_json(run.plan, plan.to_manifest())
        write_json(run.root / "timeline-predicted.json", predicted.to_manifest())
        with listening() as requests, working(f"rehearsing with {plan.num_ranks} ranks"):
            finish(LocalWorkers().rehearse(job, run, plan.num_ranks), requests)
        return read_timeline(run.root / "timeline-rehearsed.json")
