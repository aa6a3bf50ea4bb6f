"""Builds one rank of an attempt: plan, Program, stages, optimizers, transport, data and checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.errors import PenstockError, UserError
from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.core.plan_change import restart_reasons
from penstock.core.program import Program, RankProgram
from penstock.core.residency import NUM_PLACES
from penstock.core.run.folder import RunDir
from penstock.planner.compile import fitting_program_of
from penstock.trainer import checkpoint
from penstock.trainer.checkpoint import Checkpoint, Tensors
from penstock.trainer.checkpoint_shards import HeldShard, held_shard, rank_tensors
from penstock.trainer.collectives import gather
from penstock.trainer.comm import everyone, open_transport
from penstock.trainer.data.batches import Ids
from penstock.trainer.data.feed import BatchFeed
from penstock.trainer.memory import release_unused
from penstock.trainer.optimizer import AdamW
from penstock.trainer.optimizer_step import Notice
from penstock.trainer.parameters import StageParameters
from penstock.trainer.prepare import open_data, training_batches, validation_batches
from penstock.trainer.resume import Restored, load_newest
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.stages import build_stages, stages_with
from penstock.trainer.worker import Worker

VALIDATION_SEQUENCES = 16
CPU = torch.device("cpu")


class Session:
    """All objects that the training loop uses. Built once, after the ranks have joined."""

    def __init__(self, run: RunDir, worker: Worker) -> None:
        self.run, self.worker = run, worker
        self.job: PipelineJob = run.read_job()
        self.plan: Plan = run.read_plan()
        require_runnable(self.plan, self.job, worker.num_ranks)
        self.program = self._compiled(self.plan)
        self.mesh = self.plan.mesh
        prepared = open_data(run)
        self._training = training_batches(self.job, prepared)
        self._feed = BatchFeed(self._share, (self._num_samples, self.plan.sequence_length), worker.device)
        self._validation = validation_batches(self.job, prepared, VALIDATION_SEQUENCES)
        self._stages = build_stages(
            self.plan,
            self._own_program,
            shard=self.mesh.shard(worker.rank),
            replica=self.mesh.replica(worker.rank),
            device=worker.device,
            seed=self.job.spec.training.seed,
        )
        self._optimizers = {n: AdamW(stage.parameters, self.job.spec.training) for n, stage in self._stages.items()}
        self._life_peak_bytes = 0
        self.notice = Notice.NOTHING
        self._bind()

    def _compiled(self, plan: Plan) -> Program:
        num_places = NUM_PLACES if self.worker.device.type == "cuda" else None
        return fitting_program_of(plan, self.job.spec.resources.memory_per_rank, num_places=num_places)

    @property
    def _own_program(self) -> RankProgram:
        return self.program.ranks[self.mesh.pipeline_rank(self.worker.rank)]

    def _bind(self) -> None:
        """Bind the stages to the plan's Program and a new arena. Collective."""
        worker = self.worker
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
            notice=self._take_notice,
        )
        release_unused(worker.device)  # temporaries of the construction
        worker.status.start(str(instruction.action) for instruction in self._own_program.instructions)

    def _take_notice(self) -> Notice:
        """The first rank's notice to all: what it has requested, and whether a plan waits in the run directory of a job
        that may be planned again.
        """
        notice, self.notice = self.notice, Notice.NOTHING
        has_plan = self.job.spec.run_policy.replan_on_drift and self.run.next_plan.exists()
        return notice | Notice.NEW_PLAN if has_plan else notice

    def change_plan(self) -> str:
        """Continue with the plan in the run directory, from the next step and with the same parameters.

        Collective. Return the reason if no rank changed its plan, else an empty string. First all ranks compile and
        prove the new Program while the old one can still run. Then the arena of the old one is freed before the new
        one's is allocated, so a rank never holds both.
        """
        (plan, program), problem = self._next_program()
        if problem:
            return problem
        self.runtime.gather_parameters()
        self._life_peak_bytes = max(self._life_peak_bytes, self.runtime.life_peak_bytes)
        parameters = self._parameters
        del self.runtime, self._stages
        release_unused(self.worker.device)
        self.plan, self.program = plan, program
        self._stages = stages_with(parameters, plan, self._own_program, device=self.worker.device)
        self._bind()
        self.warm_up()
        return ""

    def _next_program(self) -> tuple[tuple[Plan, Program], str]:
        """The waiting plan, which the first rank reads for all, with its Program; or the present ones, and the reason
        on the first rank that refuses it.
        """
        prepared, problem = (self.plan, self.program), ""
        try:
            first_plan = self.run.read_next_plan() if self.worker.rank == 0 else None
        except UserError as error:
            first_plan, problem = None, str(error)
        plan, *_ = gather(first_plan, self.everyone)
        if plan is None:
            return prepared, next(filter(None, gather(problem, self.everyone)), "")
        try:
            require_runnable(plan, self.job, self.worker.num_ranks)
            prepared = plan, self._compiled(plan)
            reasons = restart_reasons(self.plan, self.program.stage_ranks, plan, prepared[1].stage_ranks)
            if reasons:
                problem = f"the ranks would have to start again, because it changes {' and '.join(reasons)}"
        except PenstockError as error:
            problem = str(error)
        return prepared, next(filter(None, gather(problem, self.everyone)), "")

    @property
    def everyone(self) -> dist.ProcessGroup:
        """All ranks of the run."""
        return self.worker.groups[everyone(self.mesh)]

    @property
    def num_tokens(self) -> int:
        """Tokens of one step over all replicas."""
        return self.plan.global_batch * self.plan.sequence_length

    def batch(self, step: int) -> Batch:
        """The replica's batch of a step, the same on all ranks of the replica."""
        ids, labels = self._feed.take(step)
        return Batch(token_ids=ids, labels=labels, num_valid_tokens=self.num_tokens)

    def read_ahead(self, step: int) -> None:
        """Read the batch of ``step``, if the run has such a step. The host calls it while the device works."""
        if step < self.job.spec.training.steps:
            self._feed.read_ahead(step)

    def warm_up(self) -> None:
        """Load the kernels of a step on CUDA before the first one. A CPU process has them from its start.

        Call it after everything that releases unused memory, such as `restore`: steps reuse what it allocates.
        """
        if self.worker.device.type == "cuda":
            self.runtime.warm_up()

    @property
    def _num_samples(self) -> int:
        return self.plan.num_sequences

    def _share(self, step: int) -> tuple[Ids, Ids]:
        return self._training.batch(step, self.mesh.replica(self.worker.rank) * self._num_samples, self._num_samples)

    def validation_loss(self, step: int) -> float:
        """Mean loss per token, in nats, over the validation windows, which are divided among the replicas."""
        count = len(self._validation)
        bounds = [count * replica // self.plan.dp for replica in range(self.plan.dp + 1)]
        replica = self.mesh.replica(self.worker.rank)
        first, stop = bounds[replica], bounds[replica + 1]
        ids, labels = self._validation.batch(first, stop - first)
        total = self.runtime.evaluate(step, torch.from_numpy(ids), torch.from_numpy(labels))
        return total / (count * self.plan.sequence_length)

    def held_out_start(self, num_tokens: int) -> list[int]:
        """The first tokens of the first validation window."""
        ids, _ = self._validation.batch(0, 1)
        return [int(token) for token in ids[0, :num_tokens]]

    def life_peaks(self) -> list[int]:
        """Peak of the bytes that each rank has held since its start. Collective."""
        return gather(max(self._life_peak_bytes, self.runtime.life_peak_bytes), self.everyone)

    def restore(self) -> Restored:
        """Resume from the run's newest complete checkpoint; without any, from the one that the job names.

        Raises `UserError` if there are checkpoints but none that this job can use.
        """
        tensors, named = self._tensors(), self.job.spec.checkpoint.resume_from
        restored = load_newest(self.run.checkpoints, tensors, self.plan.model, shard=self._shard, group=self.everyone)
        if restored is None and named is not None:
            restored = Restored(step=self._load_named(named, tensors))
        if restored is None:
            return Restored(step=0)
        self._take_over(restored.step)
        return restored

    def _load_named(self, named: str, tensors: Tensors) -> int:
        loaded = checkpoint.load(Path(named), tensors, self.plan.model, shard=self._shard, group=self.everyone)
        step = loaded.step
        num_steps = self.job.spec.training.steps
        if step >= num_steps:
            raise UserError(
                what=f"{named} has taken {step} steps, and training.steps is {num_steps}: nothing is left to do",
                where="spec.checkpoint.resumeFrom",
                remedy="raise training.steps",
            )
        return step

    def _take_over(self, num_steps: int) -> None:
        for optimizer in self._optimizers.values():
            optimizer.num_steps = num_steps
        self.runtime.take_over_weights()

    def save(self, step: int, attempt: int) -> Checkpoint:
        """Write a checkpoint after ``step`` steps. Raises `RunError` if that fails."""
        saved = checkpoint.save(
            self.run.checkpoints,
            attempt,
            step,
            self._tensors(),
            self.plan.model,
            self.plan.precision,
            keep=self.job.spec.checkpoint.keep,
            shard=self._shard,
            group=self.everyone,
        )
        release_unused(CPU)  # host copies for the file; the next step reuses the cached memory of a device
        return saved

    @property
    def _shard(self) -> HeldShard:
        """The part of each named tensor that this rank holds."""
        return held_shard(self._parameters, self.plan.tp, self.mesh.shard(self.worker.rank))

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and moments of this rank by stage and global name."""
        return rank_tensors(
            self._parameters, {number: optimizer.moments for number, optimizer in self._optimizers.items()}
        )

    @property
    def _parameters(self) -> dict[int, StageParameters]:
        return {number: stage.parameters for number, stage in self._stages.items()}


def require_runnable(plan: Plan, job: PipelineJob, num_ranks: int) -> None:
    """Raise `UserError` if the plan is of another job or number of ranks, or if its shards cannot divide the model."""
    training, length = job.spec.training, job.spec.data.sequence_length
    for name, planned, expected in (
        ("model", plan.model.whole, job.spec.model),
        ("precision", plan.precision.value, training.precision.value),
        ("training.optimizer.momentType", plan.moment_type.value, training.optimizer.moment_type.value),
        (
            "training.gradientReductionType",
            plan.gradient_reduction_type.value,
            training.gradient_reduction_type.value,
        ),
        ("global batch", plan.global_batch, training.global_batch),
        ("sequence length", plan.sequence_length, length),
        ("number of ranks", plan.num_ranks, num_ranks),
    ):
        if planned != expected:
            raise UserError(
                what=f"is of another job: its {name} is {planned}, here it is {expected}",
                where="plan",
                remedy="plan again for this job",
            )
    if not plan.model.can_be_sharded(plan.tp):
        degrees = [tp for tp in range(1, plan.model.heads + 1) if plan.model.can_be_sharded(tp)]
        raise UserError(
            what=f"{plan.tp} shards cannot divide the model: {plan.model.heads} heads, {plan.model.kv_heads} key/value "
            f"heads, feed-forward width {plan.model.ffn_hidden}",
            where="plan.tp",
            remedy=f"pin parallelism.tp to one of {', '.join(map(str, degrees))}",
        )
