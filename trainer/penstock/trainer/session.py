"""One rank of an attempt, wired: plan, Program, stages, optimizers, transport, data and checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.planner.realise import program_of
from penstock.trainer import checkpoint
from penstock.trainer.checkpoint import Checkpoint, Tensors
from penstock.trainer.clock import device_clock
from penstock.trainer.comm import Mesh, open_transport
from penstock.trainer.optimizer import AdamW
from penstock.trainer.prepare import open_data, training_batches, validation_batches
from penstock.trainer.rundir import RunDir
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stages import build_stages
from penstock.trainer.worker import Worker

VALIDATION_SEQUENCES = 16


class Session:
    """What the training loop works with; built once, after the ranks have joined."""

    def __init__(self, run: RunDir, worker: Worker) -> None:
        self.run, self.worker = run, worker
        self.clock = device_clock(worker.device)
        self.job: PipelineJob = run.read_job()
        self.plan: Plan = run.read_plan()
        require_runnable(self.plan, worker.num_ranks)
        self.program = program_of(self.plan)
        self.mesh = Mesh(dp=self.plan.dp, pp=self.plan.pp)
        prepared = open_data(run)
        self._training = training_batches(self.job, prepared)
        self._validation = validation_batches(self.job, prepared, VALIDATION_SEQUENCES)
        own = self.program.ranks[self.mesh.pipeline_rank(worker.rank)]
        self._stages = build_stages(self.plan, own, device=worker.device, seed=self.job.spec.training.seed)
        self._optimizers = {n: AdamW(stage.parameters, self.job.spec.training) for n, stage in self._stages.items()}
        self.runtime = Runtime(
            self.plan,
            self.program,
            worker.rank,
            stages=self._stages,
            optimizers=self._optimizers,
            transport=open_transport(self.program, self.mesh, worker.rank, worker.groups),
            device=worker.device,
            cursor=worker.status.cursor,
            stop_requested=worker.stop_requested,
        )
        worker.status.start(str(instruction.action) for instruction in own.instructions)

    @property
    def num_tokens(self) -> int:
        """Tokens of one step over all replicas."""
        return self.plan.global_batch * self.plan.sequence_length

    def batch(self, step: int) -> Batch:
        """The replica's share of a step."""
        share = self.plan.num_microbatches * self.plan.microbatch
        ids, labels = self._training.batch(step, self.mesh.replica(self.worker.rank) * share, share)
        return Batch(token_ids=torch.from_numpy(ids), labels=torch.from_numpy(labels), num_valid_tokens=self.num_tokens)

    def validation_loss(self, step: int) -> float:
        """Nats per token over the held-out windows, shared out among the replicas."""
        count = len(self._validation)
        bounds = [count * replica // self.plan.dp for replica in range(self.plan.dp + 1)]
        replica = self.mesh.replica(self.worker.rank)
        first, stop = bounds[replica], bounds[replica + 1]
        ids, labels = self._validation.batch(first, stop - first)
        total = self.runtime.evaluate(step, torch.from_numpy(ids), torch.from_numpy(labels))
        return total / (count * self.plan.sequence_length)

    def restore(self) -> int:
        """Load the newest checkpoint, or the one that the job begins from; the number of steps it has taken."""
        folder = self._resume_folder()
        if folder is None:
            return 0
        manifest = checkpoint.load(folder, self._tensors())
        for number, stage in self._stages.items():
            stage.parameters.refresh_compute()
            self._optimizers[number].num_steps = manifest.step
        return manifest.step

    def _resume_folder(self) -> Path | None:
        found = checkpoint.find_checkpoints(self.run.checkpoints)
        if found:
            return found[0].folder
        named = self.job.spec.checkpoint.resume_from
        return Path(named) if named else None

    def save(self, step: int, attempt: int) -> Checkpoint:
        """A checkpoint after ``step`` steps; raises `RunError` if it could not be written."""
        return checkpoint.save(
            self.run.checkpoints,
            attempt,
            step,
            self._tensors(),
            self.plan.model,
            self.plan.precision,
            keep=self.job.spec.checkpoint.keep,
        )

    def _tensors(self) -> Tensors:
        """Weights and moments of this rank by global name."""
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for number, stage in self._stages.items():
            parts["weights"] |= stage.parameters.master
            for part, moment in zip(("exp_avg", "exp_avg_sq"), self._optimizers[number].moments, strict=True):
                parts[part] |= stage.parameters.by_name(moment)
        return parts


def require_runnable(plan: Plan, num_ranks: int) -> None:
    """Raise `UserError` for a plan that this version, or this number of ranks, cannot run."""
    if plan.tp != 1:
        raise UserError(
            what=f"tensor parallelism of {plan.tp} is planned and simulated, but not run yet",
            where="plan.tp",
            remedy="pin parallelism.tp to 1",
        )
    if plan.num_ranks != num_ranks:
        raise UserError(
            what=f"is for {plan.num_ranks} ranks, but {num_ranks} were started",
            where="plan",
            remedy="plan again for these ranks",
        )
