"""A rank that torchrun starts in tests: ``python -m tests.support.launched_rank FOLDER BEHAVIOUR``.

It trains a small pipeline, a step each hundredth of a second, until somebody stops it. BEHAVIOUR is ``train``, or
``fail``: then rank 1's optimizer fails in step 5.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from torch import Tensor

from penstock.core.mesh import Mesh
from penstock.core.plan import Plan
from penstock.planner.compile import program_of
from penstock.trainer.comm import open_transport
from penstock.trainer.parameters import StageParameters
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stages import build_stages
from penstock.trainer.worker import Worker, run_worker
from tests.support.pipeline_ranks import SEED, sample
from tests.support.small_plans import small_plan

FATAL_STEP = 5


def plan_for(num_ranks: int) -> Plan:
    """What the ranks run."""
    return small_plan(pp=num_ranks, schedule="1f1b", num_microbatches=2)


class Optimizer:
    """Clears the gradients, and misbehaves when told to."""

    def __init__(self, parameters: StageParameters, behaviour: str) -> None:
        self._parameters, self._behaviour = parameters, behaviour

    def step(self, step: int, squared_norm: Tensor) -> None:
        self._parameters.gradient_flat.zero_()
        if step == FATAL_STEP and self._behaviour == "fail":
            raise OSError("the disk is full")


def train(worker: Worker, folder: Path, behaviour: str) -> None:
    """Steps until stopped; leaves the number of the last in ``folder/last-<rank>``."""
    plan = plan_for(worker.num_ranks)
    program, mesh = program_of(plan), Mesh(dp=1, pp=worker.num_ranks)
    own = program.ranks[worker.rank]
    stages = build_stages(plan, own, device=worker.device, seed=SEED)
    runtime = Runtime(
        plan,
        program,
        worker.rank,
        stages=stages,
        optimizers={
            number: Optimizer(stage.parameters, behaviour if worker.rank == 1 else "train")
            for number, stage in stages.items()
        },
        transport=open_transport(program, mesh, worker.rank, worker.groups),
        device=worker.device,
        cursor=worker.status.cursor,
        stop_requested=worker.stop_requested,
    )
    worker.status.start(str(instruction.action) for instruction in own.instructions)
    ids, labels = sample(plan.model.vocab, plan.global_batch, plan.sequence_length)
    step = 0
    while not runtime.train_step(step, Batch(token_ids=ids, labels=labels, num_valid_tokens=1)).stop:
        step += 1
        time.sleep(0.01)
    (folder / f"last-{worker.rank}").write_text(str(step))


if __name__ == "__main__":
    run_folder = Path(sys.argv[1])
    sys.exit(run_worker(lambda worker: train(worker, run_folder, sys.argv[2]), device="cpu", status_folder=run_folder))
