"""One rank of a rehearsal: ``python -m penstock.trainer.worker_rehearse FOLDER STEPS``; see `penstock.trainer.launch`.

FOLDER holds plan.json and predicted.json (a simulated step of one replica); rank 0 leaves timeline.json there. Status
files lie in FOLDER/status.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.planner.realise import program_of
from penstock.trainer.comm import Mesh, everyone, open_transport
from penstock.trainer.rehearse import rehearse
from penstock.trainer.rundir import write_json
from penstock.trainer.worker import Worker, run_worker

PLAN, PREDICTED, TIMELINE, STATUS = "plan.json", "predicted.json", "timeline.json", "status"


def rehearse_folder(worker: Worker, folder: Path, num_steps: int) -> None:
    """Rehearse what lies in ``folder``."""
    plan = Plan.from_manifest(json.loads((folder / PLAN).read_text()))
    predicted = Timeline.from_manifest(json.loads((folder / PREDICTED).read_text()))
    program, mesh = program_of(plan), Mesh(dp=plan.dp, pp=plan.pp)
    own = program.ranks[mesh.pipeline_rank(worker.rank)]
    worker.status.start(str(instruction.action) for instruction in own.instructions)
    timeline = rehearse(
        program,
        mesh,
        worker.rank,
        predicted,
        num_steps=num_steps,
        transport=open_transport(program, mesh, worker.rank, worker.groups),
        group=worker.groups[everyone(mesh)],
        cursor=worker.status.cursor,
    )
    if worker.rank == 0:
        write_json(folder / TIMELINE, timeline.to_manifest())


if __name__ == "__main__":
    run_folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    sys.exit(
        run_worker(
            lambda worker: rehearse_folder(worker, run_folder, steps), device="cpu", status_folder=run_folder / STATUS
        )
    )
