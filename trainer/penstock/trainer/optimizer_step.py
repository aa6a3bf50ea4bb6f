"""The beginning and the end of a step on one rank. At the beginning parameters are gathered. At the end gradients are
reduced, the global norm is summed, and the optimizers run.

Where replicas divide the optimizer state (`penstock.core.replicas`), gradients are reduce-scattered. Each replica
computes the norm of its sums and updates its part. The new parameters are gathered over replicas when they are needed:
bucket by bucket at the start of the next step, or before an evaluation. Checkpoints store the parts.

Some gradients are partial sums on each shard. They are many and small: those of a stage are packed into one buffer,
summed and unpacked. First the gradients that every shard has are summed, then those of shards with copies of the same
key/value heads.

One vector is summed over all ranks. Each rank fills only its own elements, so one message both adds and gathers:

    limbs of the squared gradient norm | summed loss | ranks asked to stop | notice | peak bytes of rank 0, 1, ...

The first rank's notice requests an action of all ranks after this step or in the next one, so that they act in the same
step.

The host reads the vector at the very end of the step, after launching the optimizers. This is the only time in a step
that the host waits for the device. The clipping factor, and the check that keeps weights unchanged if the norm is not
finite, are computed on the device. While the device finishes the step, the host can do other work: ``meanwhile`` of
`OptimizerStep.begin`.

The norm is summed exactly (`penstock.trainer.squared_norm`). It counts every element of the model once: on the shard
that owns it, and on the first replica that has its sum. The loss counts every token once, on the first shard.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.errors import RunError, UserError
from penstock.core.layout import tied_stages
from penstock.core.mesh import Mesh
from penstock.core.plan import Plan
from penstock.core.schedule import Action, Group
from penstock.trainer import memory
from penstock.trainer.comm import Transport
from penstock.trainer.dtypes import accumulate_dtype
from penstock.trainer.parameters import StageParameters
from penstock.trainer.shards import AllOf, InTurn, in_turn
from penstock.trainer.squared_norm import NUM_LIMBS, SquaredNorm
from penstock.trainer.units.collectives import Work

_TIED = "embedding.weight"
_LOSS, _STOP, _NOTICE, _NUM_SUMS = NUM_LIMBS, NUM_LIMBS + 1, NUM_LIMBS + 2, NUM_LIMBS + 3
_SQUARED_NORM = 0
"""Index of the squared norm, once the limbs are added up."""


class Notice(enum.IntFlag):
    """Requests of the first rank to all ranks. ``NEW_PLAN``: change the plan after this step. ``SAMPLE``: record a
    timeline of the next step.
    """

    NOTHING = 0
    NEW_PLAN = 1
    SAMPLE = 2


def no_notice() -> Notice:
    """The notice of a rank that requests nothing."""
    return Notice.NOTHING


class Optimizer(Protocol):
    """Updates the parameters of one stage and clears their gradients."""

    def step(self, step: int, squared_norm: Tensor) -> None:
        """Update from the gradients. ``squared_norm`` is that of the whole model, a scalar on the device. If its root
        is not finite, as in a warm-up, only the gradients change.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of a step over all ranks. ``peak_bytes`` per global rank is the maximum over this step up to its reduction
    and the whole previous step; the time between steps does not count.
    """

    loss_sum: float
    gradient_norm: float
    stop: bool
    notice: Notice = Notice.NOTHING
    peak_bytes: tuple[int, ...]


class _Packed:
    """``views`` of gradients that are summed as one tensor in ``memory``, which several sums share in turn."""

    def __init__(self, views: Sequence[Tensor], memory: Tensor) -> None:
        stops = list(accumulate(view.numel() for view in views))
        self._flat = memory[: stops[-1] if stops else 0]
        parts = [self._flat[stop - view.numel() : stop] for view, stop in zip(views, stops, strict=True)]
        self._pairs = [(view, part.view(view.shape)) for view, part in zip(views, parts, strict=True)]
        self._work: Work | None = None

    def start(self, start: Callable[[Tensor], Work]) -> Work:
        """Pack the gradients and ``start`` the sum; without views there is nothing to sum."""
        for view, part in self._pairs:
            part.copy_(view)
        self._work = start(self._flat) if self._pairs else None
        return self

    def wait(self) -> None:
        """Wait for the sum and unpack it."""
        if self._work is not None:
            self._work.wait()
        for view, part in self._pairs:
            view.copy_(part)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tie:
    """Gradient of the rows of a tied matrix that a stage of this rank shares with another stage, on pipeline rank
    ``peer``. If that is this rank, too, ``other`` is the gradient of the other stage.
    """

    peer: int
    gradient: Tensor
    other: Tensor | None = None


class OptimizerStep:
    """Reductions and optimizer step of the stages of one rank, by stage number; ``stage_ranks`` has the rank of every
    stage.

    ``stop_requested`` is called once a step; if it is true on one rank, all ranks stop. ``notice`` is called once a
    step on the first rank, and all ranks receive it.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        rank: int,
        *,
        stage_ranks: Sequence[int],
        parameters: Mapping[int, StageParameters],
        optimizers: Mapping[int, Optimizer],
        transport: Transport,
        stop_requested: Callable[[], bool],
        notice: Callable[[], Notice] = no_notice,
        device: torch.device,
    ) -> None:
        self._mesh, self._rank, self._device = mesh, rank, device
        self._transport = transport
        self._stop_requested, self._notice = stop_requested, notice
        self._optimizers = [optimizers[stage] for stage in sorted(optimizers)]
        self._parameters, self._is_divided = parameters, plan.zero > 0
        self._is_narrow = plan.gradient_reduction_type.is_narrow
        self._tied = list(_ties(plan, mesh, rank, stage_ranks, parameters))
        self._ties_with_norm = plan.dp == 1 and all(tie.other is not None for tie in self._tied)
        views = [
            tensors for stage in parameters.values() for tensors in (stage.shared_gradients(), stage.copied_gradients())
        ]
        most_elements = max((sum(view.numel() for view in tensors) for tensors in views), default=0)
        self._packing = torch.empty(most_elements, dtype=accumulate_dtype(plan.precision), device=device)
        self._squared_norm = SquaredNorm(
            [stretch for stage in sorted(parameters) for stretch in parameters[stage].counted_stretches()]
            if self._is_divided or mesh.replica(rank) == 0
            else [],
            device,
        )
        self._sums = torch.zeros(_NUM_SUMS + mesh.num_ranks, dtype=torch.float64, device=device)
        self._values = self._sums.tolist()
        self._ungathered: set[tuple[int, int]] = set()
        self._gradient_norm = 0.0
        self._peak_bytes = 0
        self._earlier_peak_bytes = 0
        self._step = 0
        self._meanwhile: Callable[[], object] = _nothing

    def begin(self, step: int, meanwhile: Callable[[], object] | None = None) -> None:
        """Begin a step. ``meanwhile`` is called once the whole step is launched, before the wait for its end."""
        self._step, self._meanwhile = step, meanwhile or _nothing
        self._earlier_peak_bytes = self.life_peak_bytes()
        memory.reset_peak(self._device)

    def life_peak_bytes(self) -> int:
        """The most bytes that this process has held since its start; on CUDA, on its device."""
        return max(self._earlier_peak_bytes, memory.peak_bytes(self._device))

    @property
    def totals(self) -> Totals:
        """The totals of the newest step."""
        loss_sum, stop, notice, *peaks = self._values[_LOSS:]
        return Totals(
            loss_sum=loss_sum,
            gradient_norm=self._gradient_norm,
            stop=stop > 0,
            notice=Notice(int(notice)),
            peak_bytes=tuple(int(peak) for peak in peaks),
        )

    def reduction(self, action: Action, losses: Tensor) -> Callable[[], Work]:
        """Return a function that starts the reduction of ``action``; ``losses`` holds this rank's part of the loss."""
        if action.group is Group.DP:
            return partial(self._start_replicas, self._parameters[action.stage].bucket(action.part))
        if action.group is Group.TIE:
            return self._start_tied
        if action.group is Group.TP:
            own = self._parameters[action.stage]
            shared, copied = own.shared_gradients(action.part), own.copied_gradients(action.part)
            return partial(self._start_shared, _Packed(shared, self._packing), _Packed(copied, self._packing))
        assert action.group is Group.NORM, f"{action} is no reduction"
        return partial(self._start_norm, losses)

    def step(self) -> None:
        """Run the optimizers, and end the step."""
        self._sums[_SQUARED_NORM] = self._squared_norm.total(self._sums[:NUM_LIMBS])
        for optimizer in self._optimizers:
            optimizer.step(self._step, self._sums[_SQUARED_NORM])
        self._ungathered = set(self._sections())
        self._peak_bytes = memory.peak_bytes(self._device)
        self._meanwhile()
        self._values = self._sums.tolist()
        self._gradient_norm = finite_norm(self._step, self._values[_SQUARED_NORM])

    def gather(self, action: Action) -> Callable[[], Work]:
        """Return a function that starts the gather of ``action``, over the replicas that updated the parameters. It
        does nothing if the parameters were gathered since.
        """
        return partial(self._start_gather, action.stage, self._parameters[action.stage].section_of(action.part))

    def gather_stepped(self) -> None:
        """Gather all parameters that were updated and not gathered since; collective over all ranks."""
        for stage, section in sorted(self._ungathered):
            self._start_gather(stage, section).wait()

    def gather_all(self) -> None:
        """Gather the parameters of all stages if replicas divide them; collective over all ranks."""
        self._ungathered = set(self._sections())
        self.gather_stepped()

    def refresh_compute(self) -> None:
        """Update the compute copies of this rank's master weights."""
        for parameters in self._parameters.values():
            parameters.refresh_compute()

    def warm_up(self) -> None:
        """Run the optimizers once without changing weights, moments or step counts; gradients are cleared."""
        self._sums.fill_(math.nan)
        for optimizer in self._optimizers:
            optimizer.step(0, self._sums[_SQUARED_NORM])
        self._sums.tolist()

    def _sections(self) -> Iterator[tuple[int, int]]:
        """All sections that replicas divide, by stage."""
        for stage, parameters in self._parameters.items() if self._is_divided else ():
            yield from ((stage, number) for number in range(len(parameters.sections)))

    def _start_gather(self, stage: int, section: int) -> Work:
        """Gather the compute weights, and sum the wider weights of norms if there are any: they are zero outside
        this replica's part.
        """
        if (stage, section) not in self._ungathered:
            return AllOf([])
        self._ungathered.remove((stage, section))
        parameters = self._parameters[stage]
        works = [self._transport.all_gather(parameters.compute_flat[parameters.sections[section].place])]
        wide = parameters.wide_section(section)
        if wide is not None:
            works.append(self._transport.all_reduce(Group.DP, wide))
        return AllOf(works)

    def _start_tied(self) -> Work:
        """Sum tied gradients between this rank's stages, then with every other rank that holds the same rows, in stage
        order.

        One sum runs at a time: the proof of `penstock.core.residency` assumes that at most one kernel of ties runs at a
        time.
        """
        self._sum_own_copies()
        ties = [tie for tie in self._tied if tie.other is None]
        starts = [partial(self._transport.sum_tied, tie.peer, tie.gradient) for tie in ties]
        return in_turn(starts) if starts else AllOf([])

    def _start_replicas(self, stretches: Sequence[Tensor]) -> Work:
        start: Callable[[Tensor], Work] = partial(self._transport.all_reduce, Group.DP)
        if self._is_narrow:
            start = partial(self._transport.sum_narrow, scattered=self._is_divided)
        elif self._is_divided:
            start = self._transport.reduce_scatter
        return AllOf([start(stretch) for stretch in stretches])

    def _start_shared(self, shared: _Packed, copied: _Packed) -> Work:
        """Start one sum after the other, so that one kernel of the two is under way at a time."""
        first = shared.start(partial(self._transport.all_reduce, Group.TP))
        return InTurn(first, lambda: copied.start(self._transport.sum_copies))

    def _start_norm(self, losses: Tensor) -> Work:
        if self._ties_with_norm:
            self._sum_own_copies()
        elif not self._is_divided:
            self._match_own_copies()
        sums = self._sums.zero_()
        sums[:NUM_LIMBS] = self._squared_norm.limbs()
        if self._mesh.shard(self._rank) == 0:
            sums[_LOSS] = losses.sum()
        sums[_STOP].fill_(self._stop_requested())  # an assignment would copy a host number, and wait for the device
        if self._rank == 0:
            sums[_NOTICE].fill_(self._notice())
        sums[_NUM_SUMS + self._rank].fill_(max(self._peak_bytes, memory.peak_bytes(self._device)))
        return self._transport.all_reduce(Group.NORM, sums)

    def _sum_own_copies(self) -> None:
        """Sum the gradients of rows that two stages of this rank share."""
        for tie in self._tied:
            if tie.other is not None:
                tie.gradient.add_(tie.other)
        self._match_own_copies()

    def _match_own_copies(self) -> None:
        """Make both copies equal to the last bit: an all-reduce may have added their terms in different orders."""
        for tie in self._tied:
            if tie.other is not None:
                tie.other.copy_(tie.gradient)


def finite_norm(step: int, squared_norm: float) -> float:
    """The gradient norm before clipping, from the sum of squares over all ranks.

    Raises `UserError` if it is not finite, since a retry would give the same. Raises `RunError` if the sum is negative:
    no sum of squares is, so a device or the network returned wrong values, as NCCL may after losing a peer.
    """
    if squared_norm < 0:
        raise RunError(
            f"the sum of squared gradients over all ranks is {squared_norm}, which is impossible: a device or the "
            "network returned wrong values; check the hardware, the attempt is retried"
        )
    norm = math.sqrt(squared_norm)
    if not math.isfinite(norm):
        raise UserError(
            what=f"training diverged: the gradient's norm in step {step} is {norm}",
            where="spec.training.optimizer.learningRate",
            remedy="lower it, or raise warmupSteps; the same job would diverge again",
        )
    return norm


def _nothing() -> None:
    pass


def loss_of(totals: Totals, num_valid_tokens: int) -> float:
    """Loss in nats per token; NaN if no token counts."""
    return totals.loss_sum / num_valid_tokens if num_valid_tokens else math.nan


def _ties(
    plan: Plan, mesh: Mesh, rank: int, stage_ranks: Sequence[int], parameters: Mapping[int, StageParameters]
) -> Iterator[_Tie]:
    """The rows of a tied matrix that this rank's stages share with others, in the order of those stages."""
    own, first = mesh.pipeline_rank(rank), stage_ranks[0]
    for stage in tied_stages(plan.model, plan.stages)[1:]:
        owner = stage_ranks[stage]
        if own not in (first, owner):
            continue
        other = parameters[stage].gradients[_TIED] if owner == own else None
        if own != first:
            assert other is not None
            yield _Tie(peer=first, gradient=other)
            continue
        rows = plan.model.rows_of(*plan.stages[stage])
        place = parameters[0].declared[_TIED].place_of(rows, plan.tp, mesh.shard(rank))
        yield _Tie(peer=owner, gradient=parameters[0].gradients[_TIED][place], other=other)
