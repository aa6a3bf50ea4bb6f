"""AdamW over flat buffers, clipping by the whole model's norm, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.core.job import Decay, TrainingSpec
from penstock.trainer.parameters import FlatParameters

Flats = Sequence[Tensor]
"""Masters, gradients and both moments of the same elements."""

_VECTOR = 64
"""Elements: as many as any CPU's vector register holds, and more."""


def learning_rate(training: TrainingSpec, step: int) -> float:
    """The rate of ``step`` (from 0): linear warm-up to the peak, then constant, cosine (arXiv 1608.03983), or
    warm-up-stable-decay (arXiv 2404.06395) with a linear fall. The last step has the least rate.
    """
    peak = training.optimizer.learning_rate
    least = peak * training.min_learning_rate
    if step < training.warmup_steps:
        return peak * (step + 1) / training.warmup_steps
    if training.schedule is Decay.CONSTANT:
        return peak
    begin = training.warmup_steps
    if training.schedule is Decay.WSD:
        begin = max(begin, round(training.steps * (1 - training.decay_share)))
    done = min(max((step - begin) / max(training.steps - 1 - begin, 1), 0.0), 1.0)
    if training.schedule is Decay.WSD:
        return peak + (least - peak) * done
    return least + (peak - least) * (1 + math.cos(math.pi * done)) / 2


class AdamW:
    """AdamW over two flat ranges of what this replica steps: the matrices, which decay, and the rest.

    ``moments`` are laid out like the parameters' ``master_flat``. The kernel is torch's own and called directly:
    ``torch.optim`` would load a compiler, five seconds and 160 MB in every rank, before its first step.
    """

    def __init__(self, parameters: FlatParameters, training: TrainingSpec) -> None:
        self.parameters, self._training = parameters, training
        self.moments = {name: torch.zeros_like(parameters.master_flat) for name in ("exp_avg", "exp_avg_sq")}
        self._num_steps = torch.zeros((), device=parameters.master_flat.device)
        cut, decay = parameters.own_decayed, training.optimizer.weight_decay
        flats = (parameters.master_flat, parameters.own_gradient_flat, *self.moments.values())
        self._ranges = [(_Range([flat[:cut] for flat in flats]), decay), (_Range([flat[cut:] for flat in flats]), 0.0)]

    @property
    def num_steps(self) -> int:
        """Steps taken, for Adam's bias correction."""
        return int(self._num_steps.item())

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        self._num_steps.fill_(count)

    def step(self, step: int, squared_norm: Tensor) -> None:
        """Clip by the global norm, update, clear the gradient; the host never waits for the device.

        ``squared_norm``, a scalar on the parameters' device, is the sum over all ranks of squared gradients, tied
        copies counted once. If it has no finite root, weights, moments and the number of steps stay as they were.
        """
        norm = _root(squared_norm)
        clip = torch.full_like(norm, self._training.clip)  # a number over a tensor would be rounded twice
        factor = torch.where(norm > clip, clip / (norm + 1e-6), 1.0)
        self.parameters.own_gradient_flat.mul_(factor)
        is_unusable = torch.logical_not(norm.isfinite()).to(self._num_steps.dtype)
        self._num_steps += 1 - is_unusable
        rate = learning_rate(self._training, step)
        for own, weight_decay in self._ranges:
            own.update(partial(self._update, rate=rate, weight_decay=weight_decay, is_unusable=is_unusable))
        self.parameters.gradient_flat.zero_()
        self.parameters.refresh_compute()

    def _update(self, flats: Flats, *, rate: float, weight_decay: float, is_unusable: Tensor) -> None:
        optimizer = self._training.optimizer
        torch.ops.aten._fused_adamw_(
            *([flat] for flat in flats),
            [],
            [self._num_steps],
            lr=rate,
            beta1=optimizer.betas[0],
            beta2=optimizer.betas[1],
            weight_decay=weight_decay,
            eps=optimizer.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=is_unusable,
        )


class _Range:
    """A range of masters, gradients and moments, updated in the same way wherever its elements lie.

    On CPUs the kernel updates the last few elements, less than a vector register, by other instructions, which round
    otherwise. Replicas that divide the range would update others in this way than one that has all of it. So what is
    left of a multiple of `_VECTOR` elements is updated in memory that is one.
    """

    def __init__(self, flats: Flats) -> None:
        size = len(flats[0])
        rest = size % _VECTOR if flats[0].device.type == "cpu" else 0
        self._whole = [flat[: size - rest] for flat in flats]
        self._rest = [flat[size - rest :] for flat in flats]
        self._padded = [flat.new_zeros(_VECTOR) for flat in flats]

    def update(self, update: Callable[[Flats], None]) -> None:
        """Call ``update`` with all of it."""
        if len(self._whole[0]):
            update(self._whole)
        if len(self._rest[0]):
            views = [padded[: len(rest)] for padded, rest in zip(self._padded, self._rest, strict=True)]
            for view, rest in zip(views, self._rest, strict=True):
                view.copy_(rest)
            update(self._padded)
            for view, rest in zip(views, self._rest, strict=True):
                rest.copy_(view)


def _root(value: Tensor) -> Tensor:
    """The square root of a scalar, correctly rounded everywhere, so that machines clip alike; NaN of a negative number.

    On CPUs torch takes the root of MKL, whose last bit is sometimes wrong. CUDA rounds as IEEE 754 says, and the host
    need not wait for it.
    """
    if value.device.type != "cpu":
        return value.sqrt()
    number = float(value)
    return torch.full_like(value, math.nan if number < 0 else math.sqrt(number))
