"""AdamW over flat buffers, clipping by the whole model's norm, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch

from penstock.core.job import Decay, TrainingSpec
from penstock.trainer.parameters import StageParameters


def learning_rate(training: TrainingSpec, step: int) -> float:
    """The rate of ``step`` (from 0): linear warm-up, then constant, cosine (arXiv 1608.03983) or warm-up-stable-decay
    (arXiv 2404.06395, linear fall).
    """
    peak = training.optimizer.learning_rate
    if step < training.warmup_steps:
        return peak * (step + 1) / training.warmup_steps
    least = peak * training.min_learning_rate
    if training.schedule is Decay.CONSTANT:
        return peak
    begin = training.warmup_steps
    if training.schedule is Decay.WSD:
        begin = max(begin, round(training.steps * (1 - training.decay_share)))
    done = min(max(step - begin, 0) / max(training.steps - 1 - begin, 1), 1.0)
    if training.schedule is Decay.WSD:
        return peak + (least - peak) * done
    return least + (peak - least) * (1 + math.cos(math.pi * done)) / 2


class AdamW:
    """torch's fused AdamW over a stage's two flat ranges; its moments are exposed by name for checkpoints."""

    def __init__(self, parameters: StageParameters, training: TrainingSpec) -> None:
        self._parameters = parameters
        self._training = training
        cut = parameters.num_decayed
        self._ranges = [part for part in (slice(0, cut), slice(cut, None)) if parameters.master_flat[part].numel()]
        groups = [self._group(part, decay=part.start == 0 and cut > 0) for part in self._ranges]
        self._adam = torch.optim.AdamW(groups, lr=1.0, fused=True)
        self._allocate()

    def _group(self, part: slice, *, decay: bool) -> dict[str, object]:
        weight = torch.nn.Parameter(self._parameters.master_flat[part], requires_grad=False)
        weight.grad = self._parameters.gradient_flat[part]
        optimizer = self._training.optimizer
        return {
            "params": [weight],
            "betas": optimizer.betas,
            "eps": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay if decay else 0.0,
        }

    def _allocate(self) -> None:
        """Make the moments now, contiguous over both ranges, so that memory is at its full size from the first step."""
        self.moments = [torch.zeros_like(self._parameters.master_flat) for _ in range(2)]
        for part, group in zip(self._ranges, self._adam.param_groups, strict=True):
            (weight,) = group["params"]
            self._adam.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": self.moments[0][part],
                "exp_avg_sq": self.moments[1][part],
            }

    @property
    def num_steps(self) -> int:
        """Steps taken, for Adam's bias correction."""
        return int(next(iter(self._adam.state.values()))["step"].item())

    @num_steps.setter
    def num_steps(self, count: int) -> None:
        for state in self._adam.state.values():
            state["step"].fill_(float(count))

    def step(self, step: int, squared_norm: float) -> float:
        """Clip by the global norm, update, clear the gradient; returns the norm before clipping.

        ``squared_norm`` is the sum over all ranks of squared gradients, tied copies counted once.
        """
        norm = math.sqrt(squared_norm)
        if norm > self._training.clip:
            self._parameters.gradient_flat.mul_(self._training.clip / (norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(self._training, step)
        self._adam.step()
        self._parameters.gradient_flat.zero_()
        self._parameters.refresh_compute()
        return norm
