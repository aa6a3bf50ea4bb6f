"""AdamW over flat buffers, clipping by the whole model's norm, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.core.job import Decay, TrainingSpec
from penstock.core.moments import WIDENED_ELEMENTS
from penstock.trainer.dtypes import moment_dtype
from penstock.trainer.parameters import FlatParameters

Flats = Sequence[Tensor]
"""Master weights, gradients and both moments of the same elements."""

_VECTOR = 64
"""A number of elements that is a multiple of any CPU's vector register size."""


def learning_rate(training: TrainingSpec, step: int) -> float:
    """The learning rate of ``step`` (from 0): linear warm-up to the peak, then constant, cosine (arXiv 1608.03983), or
    warm-up-stable-decay (arXiv 2404.06395) with linear decay. A decay reaches ``min_learning_rate`` times the peak in
    the last step.
    """
    peak_rate = training.optimizer.learning_rate
    least_rate = peak_rate * training.min_learning_rate
    if step < training.warmup_steps:
        return peak_rate * (step + 1) / training.warmup_steps
    if training.schedule is Decay.CONSTANT or (training.schedule is Decay.WSD and training.decay_share == 0):
        return peak_rate
    decay_begin = training.warmup_steps
    if training.schedule is Decay.WSD:
        decay_begin = max(decay_begin, round(training.steps * (1 - training.decay_share)))
    # the decay spans at least the last two steps, so that the last one has the lowest rate
    decay_begin = max(min(decay_begin, training.steps - 2), 0)
    decay_done = min(max((step - decay_begin) / max(training.steps - 1 - decay_begin, 1), 0.0), 1.0)
    if training.schedule is Decay.WSD:
        return peak_rate + (least_rate - peak_rate) * decay_done
    return least_rate + (peak_rate - least_rate) * (1 + math.cos(math.pi * decay_done)) / 2


class AdamW:
    """AdamW over two flat ranges of this replica's part of every section: matrices with weight decay, and all else
    without.

    ``moments`` have the layout of the parameters' ``masters``. If they are in bf16, they are widened part by part for
    the update and rounded to nearest after it (`penstock.core.job_rules.MOST_BF16_BETA`). The class calls torch's
    kernel directly: ``torch.optim`` would load a compiler before the first step, which takes five seconds and 160 MB in
    every rank.
    """

    def __init__(self, parameters: FlatParameters, training: TrainingSpec) -> None:
        self.parameters, self._training = parameters, training
        dtype = moment_dtype(training.optimizer.moment_type, parameters.gradient_flat.dtype)
        zeros = partial(torch.zeros_like, dtype=dtype)
        self.moments = {name: tuple(map(zeros, parameters.masters)) for name in ("exp_avg", "exp_avg_sq")}
        self._num_steps = torch.zeros((), device=parameters.compute_flat.device)
        self._ranges: list[tuple[_Range, float]] = []
        sections = zip(parameters.masters, parameters.own_gradients, *self.moments.values(), strict=True)
        for cut, flats in zip(parameters.own_decayed, sections, strict=True):
            self._ranges.append((_Range([flat[:cut] for flat in flats]), training.optimizer.weight_decay))
            self._ranges.append((_Range([flat[cut:] for flat in flats]), 0.0))

    @property
    def num_steps(self) -> int:
        """Steps taken, for Adam's bias correction."""
        return int(self._num_steps.item())

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        self._num_steps.fill_(count)

    def step(self, step: int, squared_norm: Tensor) -> None:
        """Clip by the global norm, update the weights, and clear the gradients, without waiting for the device.

        ``squared_norm``, a scalar on the parameters' device, is the sum of squared gradients over all ranks; tied
        copies count once. If its root is not finite, weights, moments and the number of steps stay unchanged.
        """
        norm = _root(squared_norm)
        clip = torch.full_like(norm, self._training.clip)  # dividing a number by a tensor would round twice
        factor = torch.where(norm > clip, clip / (norm + 1e-6), 1.0)
        for gradients in self.parameters.own_gradients:
            gradients.mul_(factor)
        is_unusable = torch.logical_not(norm.isfinite()).to(self._num_steps.dtype)
        self._num_steps += 1 - is_unusable
        rate = learning_rate(self._training, step)
        for own, weight_decay in self._ranges:
            own.update(partial(self._update_widened, rate=rate, weight_decay=weight_decay, is_unusable=is_unusable))
        self.parameters.gradient_flat.zero_()
        self.parameters.refresh_compute()

    def _update_widened(self, flats: Flats, **step: Any) -> None:
        """`_update`; if moments are narrower than masters, part by part, with widened copies that are rounded back."""
        master, gradient, *moments = flats
        if moments[0].dtype == master.dtype:
            self._update(flats, **step)
            return
        size = WIDENED_ELEMENTS[master.is_cuda]
        buffers = master.new_empty(len(moments), min(size, len(master)))
        for start in range(0, len(master), size):
            part = slice(start, start + size)
            wide = [
                buffer[: len(master[part])].copy_(moment[part]) for buffer, moment in zip(buffers, moments, strict=True)
            ]
            self._update([master[part], gradient[part], *wide], **step)
            for moment, value in zip(moments, wide, strict=True):
                moment[part].copy_(value)

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
    """A range of masters, gradients and moments whose update does not depend on how replicas divide it.

    On CPUs the kernel updates the last elements of a tensor, fewer than a vector register holds, with other
    instructions that round differently. With the range divided over replicas, other elements would be last. So the
    remainder modulo `_VECTOR` elements is updated in a padded buffer of that size.
    """

    def __init__(self, flats: Flats) -> None:
        size = len(flats[0])
        rest = size % _VECTOR if flats[0].device.type == "cpu" else 0
        self._whole = [flat[: size - rest] for flat in flats]
        self._rest = [flat[size - rest :] for flat in flats]
        self._padded = [flat.new_zeros(_VECTOR) for flat in flats]

    def update(self, update: Callable[[Flats], None]) -> None:
        """Call ``update`` on the whole range."""
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
    """The square root of a scalar, correctly rounded everywhere, so that all machines clip alike; NaN for negative
    numbers.

    On CPUs torch uses MKL's root, whose last bit is sometimes wrong. CUDA rounds as IEEE 754 requires, and there the
    host need not wait for the value.
    """
    if value.device.type != "cpu":
        return value.sqrt()
    number = float(value)
    return torch.full_like(value, math.nan if number < 0 else math.sqrt(number))
