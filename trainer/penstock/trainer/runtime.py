"""One rank of a running plan: instructions are bound to tensors once, then every step runs the rank's Program.

    runtime = Runtime(plan, program, rank, stages=..., optimizers=..., transport=..., device=...)
    totals = runtime.train_step(0, batch)

Shape letters: N sequences, S tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.plan import Plan
from penstock.core.program import Instruction, Program, RankProgram
from penstock.core.run.rank_status import Cursor
from penstock.core.schedule import Group, Kind
from penstock.trainer.comm import Transport
from penstock.trainer.dtypes import accumulate_dtype
from penstock.trainer.executor import EvaluationExecutor, SamplingExecutor, StageExecutor
from penstock.trainer.interpreter import SILENT, Interpreter, Recorder
from penstock.trainer.optimizer_step import Notice, Optimizer, OptimizerStep, Totals, no_notice
from penstock.trainer.recorder import waits_on
from penstock.trainer.stage import Stage
from penstock.trainer.units.collectives import WaitingShards

_IGNORED = -1
_FORWARD = frozenset({Kind.F, Kind.POST_RECV_F, Kind.WAIT_RECV_F, Kind.SEND_F, Kind.WAIT_SEND_F})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One replica's share of a step: token ids and shifted labels, int64 [the plan's num_sequences, S].

    The loss ignores labels below 0. ``num_valid_tokens``, at least one, is the number of other labels over *all*
    replicas. The caller must not change the tensors before the step ends, since pinned memory is copied asynchronously.
    """

    token_ids: Tensor
    labels: Tensor
    num_valid_tokens: int


def _never() -> bool:
    return False


class Runtime:
    """Runs steps of ``plan`` on one rank.

    ``rank`` is the global rank (`penstock.core.mesh.Mesh`). ``stages`` and ``optimizers`` are those of this rank, by
    stage number. ``transport`` connects it to the other ranks. The current step and instruction are written to
    ``cursor``. ``stop_requested`` is called once a step, and one true result stops all ranks after the same step.
    ``notice`` is called once a step on the first rank, whose result is in the `Totals` of all ranks.
    ``poison`` overwrites freed slots, to find reads after free.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        rank: int,
        *,
        stages: Mapping[int, Stage],
        optimizers: Mapping[int, Optimizer],
        transport: Transport,
        device: torch.device,
        cursor: Cursor | None = None,
        stop_requested: Callable[[], bool] = _never,
        notice: Callable[[], Notice] = no_notice,
        poison: bool = False,
    ) -> None:
        mesh = plan.mesh
        self._plan, self._transport = plan, transport
        self._program = program.ranks[mesh.pipeline_rank(rank)]
        self._optimizer_step = OptimizerStep(
            plan,
            mesh,
            rank,
            stage_ranks=program.stage_ranks,
            parameters={number: stage.parameters for number, stage in stages.items()},
            optimizers=optimizers,
            transport=transport,
            stop_requested=stop_requested,
            notice=notice,
            device=device,
        )
        self.waits = waits_on(device)
        shards = WaitingShards(transport.shards, self.waits)
        executor = StageExecutor(
            plan, self._program, stages, self._optimizer_step, device=device, shards=shards, poison=poison
        )
        bind = partial(
            Interpreter, rank=rank, transport=transport, cursor=array("q", (0, 0)) if cursor is None else cursor
        )
        self._executor = executor
        self._training = bind(enumerate(self._program.instructions), executor=executor)
        self._evaluation = bind(_forward_of_first(self._program), executor=EvaluationExecutor(executor))
        self._sampling = SamplingExecutor(executor)
        self._counts = mesh.shard(rank) == 0
        self._chooses = self._counts and mesh.replica(rank) == 0
        self._has_last = any(stage.returns_loss for stage in stages.values())
        self._bind = bind

    def warm_up(self) -> None:
        """Run every kernel of a step once, so that no step loads kernels, initialises libraries or allocates memory.

        Collective; no message may be in flight. Weights and moments do not change. The order is: compute actions on
        the present content of the arena, which also records them (`penstock.trainer.graphs`); reductions in the
        Program's order; optimizers; gathers.
        """
        instructions = self._program.instructions
        self._executor.warm_up(instructions)
        for instruction in instructions:
            if instruction.action.kind is Kind.START_REDUCE:
                self._executor.reduction(instruction)().wait()
        self._optimizer_step.warm_up()
        self._optimizer_step.gather_all()

    def gather_parameters(self) -> None:
        """Gather the parameters that replicas updated and have not gathered since. Collective."""
        self._optimizer_step.gather_stepped()

    def take_over_weights(self) -> None:
        """Copy the masters, which the caller has changed, to the weights that compute uses. Collective."""
        self._optimizer_step.refresh_compute()
        self._optimizer_step.gather_all()

    def without_messages(self) -> Interpreter:
        """Interpreter of the step's compute actions only, to time them while no other rank computes.

        They run on the present content of the arena and add meaningless gradients.
        """
        compute = (
            (index, instruction)
            for index, instruction in enumerate(self._program.instructions)
            if instruction.action.is_compute
        )
        return self._bind(compute, executor=self._executor)

    def train_step(
        self, step: int, batch: Batch, recorder: Recorder = SILENT, meanwhile: Callable[[], object] | None = None
    ) -> Totals:
        """Run forward and backward of the whole batch, reductions and optimizer step. The device is idle at return.

        The host calls ``meanwhile`` after it has launched everything, while the device works. Raises `RunError` that
        names rank, step, action and channel if anything fails, a lost peer included. Raises `UserError` if a retry
        would fail alike, as after a gradient that is not finite.
        """
        self._executor.token_ids_NS.copy_(batch.token_ids, non_blocking=True)
        self._executor.labels_NS.copy_(batch.labels, non_blocking=True)
        self._executor.scale_gradients(1.0 / batch.num_valid_tokens)
        self._optimizer_step.begin(step, meanwhile)
        self._training.run(step, recorder)
        return self._optimizer_step.totals

    @property
    def life_peak_bytes(self) -> int:
        """Peak of the bytes that this rank has held since its start, within and between steps."""
        return self._optimizer_step.life_peak_bytes()

    def evaluate(self, step: int, token_ids_NS: Tensor, labels_NS: Tensor) -> float:
        """Run the forward of any number of sequences of this replica; return the loss summed over all replicas.

        All ranks of a replica pass the same sequences. The first shard of a rank counts the losses. Evaluation needs no
        memory beyond training's: micro-batches run one after the other in the slots of micro-batch 0.
        """
        self._optimizer_step.gather_stepped()
        losses_MP = self._executor.losses_MP
        total_1 = losses_MP.new_zeros(1)
        for start in range(0, len(token_ids_NS), self._plan.microbatch):
            share = slice(start, start + self._plan.microbatch)
            self._fill_first(token_ids_NS[share], labels_NS[share])
            self._evaluation.run(step)
            if self._counts:
                total_1 += losses_MP[0].sum()
        self._transport.all_reduce(Group.NORM, total_1).wait()
        return float(total_1.item())

    def continue_from(
        self, step: int, prompt: Sequence[int], length: int, choose: Callable[[Tensor], int | None]
    ) -> list[int]:
        """Continue ``prompt`` up to ``length`` tokens, or until ``choose`` returns None. All ranks return the same.

        ``choose`` is called with the logits [V] on the first rank that holds the end of the head. ``prompt`` must not
        be empty, and ``length`` may not exceed the sequence length. Like `evaluate`, it needs no memory beyond
        training's. Every token runs through all slices up to its own, since the next pass overwrites the slots.
        """
        self._optimizer_step.gather_stepped()
        ids = list(prompt)[:length]
        ends = list(accumulate(self._plan.slices))
        passes: dict[int, Interpreter] = {}
        while len(ids) < length:
            num_slices = bisect_left(ends, len(ids)) + 1
            if num_slices not in passes:
                forward = _forward_of_first(self._program, num_slices)
                passes[num_slices] = self._bind(forward, executor=self._sampling)
            chosen = self._chosen(passes[num_slices], step, ids, choose)
            if chosen is None:
                break
            ids.append(chosen)
        return ids

    def _chosen(
        self, forward: Interpreter, step: int, ids: Sequence[int], choose: Callable[[Tensor], int | None]
    ) -> int | None:
        """The token that follows ``ids``, on all ranks. It is sent over the host, so that no rank waits in a kernel."""
        self._executor.token_ids_NS[self._executor.rows_of(0)].zero_()
        self._executor.token_ids_NS[0, : len(ids)].copy_(torch.tensor(ids))
        self._sampling.begin(len(ids) - 1)
        forward.run(step)
        logits = self._whole(self._sampling.logits)
        chosen = choose(logits) if self._chooses and logits is not None else None
        shared = torch.tensor([0 if chosen is None else chosen + 1])
        self._transport.all_reduce(Group.NORM, shared).wait()
        return int(shared) - 1 if shared else None

    def _whole(self, logits: Tensor | None) -> Tensor | None:
        """Logits of the whole vocabulary on the rank with the last part of the head; None on the others.

        The parts of a divided head are joined by a sum, each with zeros for the others. Collective in that case.
        """
        model = self._plan.model
        if not model.is_divided:
            return logits
        whole = torch.zeros(model.vocab, dtype=accumulate_dtype(self._plan.precision))
        if logits is not None and self._chooses:
            whole.copy_(logits)
        self._transport.all_reduce(Group.NORM, whole).wait()
        return whole if self._has_last else None

    def _fill_first(self, token_ids_NS: Tensor, labels_NS: Tensor) -> None:
        """Copy the tokens to micro-batch 0 and fill it up with sequences that the loss ignores."""
        missing = (0, 0, 0, self._plan.microbatch - len(token_ids_NS))
        first = self._executor.rows_of(0)
        self._executor.token_ids_NS[first].copy_(functional.pad(token_ids_NS, missing))
        self._executor.labels_NS[first].copy_(functional.pad(labels_NS, missing, value=_IGNORED))


def _forward_of_first(program: RankProgram, num_slices: int | None = None) -> Iterator[tuple[int, Instruction]]:
    """The forward actions and transfers of micro-batch 0, for its first ``num_slices`` slices or for all.

    They keep the program's order, so none overwrites a slot that a later one still needs, and every channel keeps its
    order. A forward in parts runs as one, in place of its first part.
    """
    for index, instruction in enumerate(program.instructions):
        for child in program.apart(instruction):
            action = child.action
            is_selected = num_slices is None or (action.slice or 0) < num_slices
            is_later_part = action.part is not None and action.part.first > 0
            if action.kind in _FORWARD and action.microbatch == 0 and is_selected and not is_later_part:
                yield index, replace(child, action=replace(action, part=None))
