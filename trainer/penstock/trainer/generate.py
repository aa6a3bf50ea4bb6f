"""Text generation in one process: one slice for the prompt, then one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.layout import Precision, SlotKind, stage_slot_bytes
from penstock.core.model import Family, ModelSpec
from penstock.core.scratch import scratch_bytes
from penstock.trainer.parameters import StageParameters
from penstock.trainer.stage import Stage
from penstock.trainer.units.collectives import NO_SHARDS, run_pass
from penstock.trainer.units.views import SlotViews, scratch_views, slot_views
from penstock.trainer.units.workspace import Workspace, workspace_bytes

CPU = torch.device("cpu")


class Generator:
    """A whole model in fp32 in one process; ``length`` limits prompt and continuation together, in tokens.

    Raises `UserError` if the weights do not fit the model, or if the model has fewer positions than ``length``.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor], length: int) -> None:
        if spec.family is Family.GPT2 and length > spec.positions:
            raise UserError(
                what=f"{length} tokens exceed the model's {spec.positions} positions",
                where="length",
                remedy=f"ask for at most {spec.positions}, prompt included",
            )
        self._spec, self._length = spec, length
        parameters = StageParameters(spec, 0, spec.num_units, precision=Precision.FP32, device=CPU, seed=0)
        parameters.load(weights, where="checkpoint")
        workspace_size = workspace_bytes(spec, Precision.FP32, 0, spec.num_units, length)
        self._stage = Stage(
            spec,
            0,
            spec.num_units,
            parameters=parameters,
            workspace=Workspace(workspace_size, CPU),
            sequence_length=length,
        )
        self._keys_values = self._slot(SlotKind.KEYS_VALUES)
        scratch_size = scratch_bytes(spec, Precision.FP32, 0, spec.num_units, 1, length)
        self._scratch = torch.empty(scratch_size, dtype=torch.uint8)

    def _slot(self, slot: SlotKind) -> dict[int, dict[str, Tensor]]:
        shape = (self._spec, Precision.FP32, 0, self._spec.num_units, slot, 1, self._length)
        memory = torch.zeros(stage_slot_bytes(*shape), dtype=torch.uint8)
        return slot_views(memory, *shape)

    def continue_from(self, prompt: Sequence[int], *, temperature: float, seed: int) -> Iterator[int]:
        """Generate token ids after ``prompt`` until the length is reached; temperature 0 takes the most likely token.

        Only the end of a long prompt is used, so that at least one token can follow. Raises `UserError` for an empty
        prompt.
        """
        if not prompt:
            raise UserError(what="is empty", where="prompt", remedy="give at least one token to begin with")
        chooser = torch.Generator().manual_seed(seed)
        start, ids = 0, list(prompt[max(len(prompt) - self._length + 1, 0) :])
        while (stop := start + len(ids)) < self._length:
            views, token_ids = self._views(len(ids)), torch.tensor([ids])
            forward = self._stage.logits_after(views, start, stop, position=stop - 1, token_ids=token_ids)
            logits = run_pass(forward, NO_SHARDS)
            assert logits is not None, "the stage holds the head"
            chosen = choose(logits, temperature, chooser)
            yield chosen
            start, ids = stop, [chosen]

    def _views(self, tokens: int) -> SlotViews:
        views = scratch_views(self._scratch, self._spec, Precision.FP32, 0, self._spec.num_units, 1, tokens)
        return {**views, SlotKind.KEYS_VALUES: self._keys_values}


def choose(logits: Tensor, temperature: float, chooser: torch.Generator) -> int:
    """Choose a token by its logits [V] on the CPU; temperature 0 takes the most likely one."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=chooser))
