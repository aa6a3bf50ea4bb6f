"""The end of a step on one rank: gradients reduced, the global norm, the optimizers, and what the step came to.

One vector is summed over all ranks; each rank fills its own cells, so one message both adds and gathers:

    squared gradient norm | summed loss | ranks asked to stop | peak bytes of rank 0, 1, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.plan import Plan
from penstock.core.schedule import Group
from penstock.trainer import memory
from penstock.trainer.comm import Mesh, Transport
from penstock.trainer.interpreter import Operation
from penstock.trainer.parameters import StageParameters

_TIED = "embedding.weight"
_SQUARED_NORM, _LOSS, _STOP, _NUM_SUMS = 0, 1, 2, 3


class Optimizer(Protocol):
    """Steps one stage's parameters and clears their gradients."""

    def step(self, step: int, squared_norm: float) -> float:
        """Update from the gradients; ``squared_norm`` is the whole model's. The norm before clipping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """A step over all ranks. ``peak_bytes`` per global rank: the most held in this step up to its reduction, or in the
    whole of the step before; what happens between steps does not count.
    """

    loss_sum: float
    gradient_norm: float
    stop: bool
    peak_bytes: tuple[int, ...]


class Closing:
    """Reductions and step of the stages that one rank holds, by stage number.

    ``stop_requested`` is asked once a step; one rank's yes stops all.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        rank: int,
        *,
        parameters: Mapping[int, StageParameters],
        optimizers: Mapping[int, Optimizer],
        transport: Transport,
        stop_requested: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self._mesh, self._rank, self._device = mesh, rank, device
        self._transport = transport
        self._stop_requested = stop_requested
        self._optimizers = [optimizers[stage] for stage in sorted(optimizers)]
        self._flat_gradients = [parameters[stage].gradient_flat for stage in sorted(parameters)]
        self._tied = _tied_gradients(plan, parameters)
        self._counted = _counted_gradients(plan, parameters)
        self._sums = torch.zeros(_NUM_SUMS + mesh.num_ranks, dtype=torch.float64, device=device)
        self._values = self._sums.tolist()
        self._gradient_norm = 0.0
        self._peak_bytes = 0
        self._earlier_peak_bytes = 0
        self._step = 0

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self._earlier_peak_bytes = self.life_peak_bytes()
        memory.reset_peak(self._device)

    def life_peak_bytes(self) -> int:
        """The most bytes that this process has held since its start; on CUDA, on its device."""
        return max(self._earlier_peak_bytes, memory.peak_bytes(self._device))

    @property
    def totals(self) -> Totals:
        """Of the newest step."""
        _, loss_sum, stop, *peaks = self._values
        return Totals(
            loss_sum=loss_sum,
            gradient_norm=self._gradient_norm,
            stop=stop > 0,
            peak_bytes=tuple(int(peak) for peak in peaks),
        )

    def reduce(self, group: Group | None, losses: Tensor) -> Operation:
        """The operation that reduces over ``group``; ``losses`` holds this rank's part of the loss."""
        if group is Group.DP:
            return self._reduce_replicas
        if group is Group.TIE:
            (gradient,) = self._tied
            return lambda: self._transport.all_reduce(Group.TIE, gradient)
        if group is Group.NORM:
            return lambda: self._reduce_norm(losses)
        raise ValueError(f"a plan that is run has no reduction over {group}")

    def step(self) -> None:
        """The optimizers' step, which ends the step."""
        for optimizer in self._optimizers:
            self._gradient_norm = optimizer.step(self._step, self._values[_SQUARED_NORM])
        self._peak_bytes = memory.peak_bytes(self._device)

    def _reduce_replicas(self) -> None:
        for gradient in self._flat_gradients:
            self._transport.all_reduce(Group.DP, gradient)

    def _reduce_norm(self, losses: Tensor) -> None:
        self._sum_own_copies()
        sums = self._sums.zero_()
        if self._mesh.replica(self._rank) == 0:
            sums[_SQUARED_NORM] = self._squared_norm()
        sums[_LOSS] = losses.sum()
        sums[_STOP] = float(self._stop_requested())
        sums[_NUM_SUMS + self._rank] = float(max(self._peak_bytes, memory.peak_bytes(self._device)))
        self._transport.all_reduce(Group.NORM, sums)
        self._values = sums.tolist()

    def _sum_own_copies(self) -> None:
        """A matrix tied between two stages of this rank is summed here; between ranks it was by REDUCE(tie)."""
        for first, last in [self._tied] if len(self._tied) == 2 else []:
            first += last
            last.copy_(first)

    def _squared_norm(self) -> Tensor:
        """Tensor by tensor, so that it hardly depends on how the model is divided."""
        norms = [torch.linalg.vector_norm(gradient) for gradient in self._counted]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(norms).double().square().sum()


def loss_of(totals: Totals, num_valid_tokens: int) -> float:
    """Nats per token; not a number if nothing counted."""
    return totals.loss_sum / num_valid_tokens if num_valid_tokens else math.nan


def _tied_gradients(plan: Plan, parameters: Mapping[int, StageParameters]) -> list[Tensor]:
    """The rank's copies of a matrix that two stages hold."""
    if not plan.model.tied or len(plan.stages) == 1:
        return []
    return [parameters[stage].gradients[_TIED] for stage in sorted(parameters) if _TIED in parameters[stage].gradients]


def _counted_gradients(plan: Plan, parameters: Mapping[int, StageParameters]) -> list[Tensor]:
    """What the norm counts on this rank: everything, but a tied matrix only on the first stage."""
    return [
        gradient
        for stage in sorted(parameters)
        for name, gradient in parameters[stage].gradients.items()
        if stage == 0 or name != _TIED or not plan.model.tied
    ]
