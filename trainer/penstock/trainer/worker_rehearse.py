"""One rank of a rehearsal: reads the plan and predicted timeline of a run directory, writes the rehearsed timeline."""

from __future__ import annotations

from penstock.core import jsontext
from penstock.core.mesh import Mesh
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Timeline
from penstock.planner.compile import program_of
from penstock.trainer.comm import everyone, open_transport
from penstock.trainer.rehearse import rehearse
from penstock.trainer.worker import Worker

NUM_STEPS = 3
"""The first step also warms up, and is slower. The step of median duration is written."""


def rehearse_run(run: RunDir, worker: Worker) -> None:
    """Rehearse plan.json with the durations of timeline-predicted.json. Rank 0 writes timeline-rehearsed.json."""
    plan = run.read_plan()
    predicted = Timeline.from_manifest(jsontext.load((run.root / "timeline-predicted.json").read_text()))
    program, mesh = program_of(plan), Mesh(dp=plan.dp, pp=plan.pp)  # one process acts for all shards of a rank
    own = program.ranks[mesh.pipeline_rank(worker.rank)]
    transport = open_transport(program, mesh, worker.rank, worker.groups)
    worker.status.start(str(instruction.action) for instruction in own.instructions)
    timeline = rehearse(
        program,
        mesh,
        worker.rank,
        predicted,
        num_steps=NUM_STEPS,
        transport=transport,
        group=worker.groups[everyone(mesh)],
        cursor=worker.status.cursor,
    )
    if worker.rank == 0:
        write_json(run.root / "timeline-rehearsed.json", timeline.to_manifest())
