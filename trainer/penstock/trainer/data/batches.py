"""Training batches whose order is a pure function of (seed, step, sample), and fixed validation batches.

Tokens are cut into windows of L + 1. Each window starts at the last token of the previous one, so every token is a
label exactly once in an epoch, except the first one and those at the end that fill no window. Labels are shifted here,
before sequences are sliced.

Example with L = 4: the tokens 0 to 8 make two windows. The first has inputs 0 to 3 and labels 1 to 4; the second has
inputs 4 to 7 and labels 5 to 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.errors import UserError
from penstock.trainer.data.order import shuffled
from penstock.trainer.data.tokens import Tokens

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of ``sequence_length`` + 1 tokens in ``tokens``, for a model of ``vocab`` tokens.

    Raises:
        UserError: the tokens do not fill one window, or their vocabulary is larger than the model's.
    """

    tokens: Tokens
    sequence_length: int
    vocab: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.sequence_length:
            raise UserError(
                what=f"a sequence of {self.sequence_length} and its next token are longer than the data: "
                f"{len(self.tokens)} tokens of {self.tokens.path}",
                where="spec.data.sequenceLength",
                remedy="give more text or a shorter sequenceLength",
            )
        if self.tokens.vocab > self.vocab:
            raise UserError(
                what=f"the data's vocabulary of {self.tokens.vocab} exceeds the model's of {self.vocab}",
                where="spec.model.vocab",
                remedy=f"set it to {self.tokens.vocab} or more, or use a smaller tokenizer",
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def read(self, windows: npt.NDArray[np.integer]) -> tuple[Ids, Ids]:
        """Tokens and labels, both [len(windows), L] and contiguous.

        Raises:
            UserError: a token id is outside the model's vocabulary.
        """
        starts = windows.astype(np.int64)[:, None] * self.sequence_length
        ids = self.tokens.read(starts + np.arange(self.sequence_length + 1), vocab=self.vocab)
        return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatches:
    """An endless stream over ``windows``. Every epoch has each window once, in an order keyed by seed and epoch."""

    windows: Windows
    global_batch: int
    seed: int

    def batch(self, step: int, first_sample: int, count: int) -> tuple[Ids, Ids]:
        """Tokens and labels [count, L] of samples [first_sample, first_sample + count) of ``step`` (from 0).

        The content of a sample does not depend on how the samples of a step are divided over calls.

        Raises:
            UserError: a token id is not in the model's vocabulary.
        """
        if not 0 <= first_sample <= first_sample + count <= self.global_batch:
            raise ValueError(f"samples {first_sample}+{count} are not within a batch of {self.global_batch}")
        first = step * self.global_batch + first_sample
        positions = np.arange(first, first + count, dtype=np.uint64)
        return self.windows.read(shuffled(positions, size=len(self.windows), seed=self.seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationBatches:
    """At most ``limit`` of ``windows``, evenly spaced and always the same."""

    windows: Windows
    limit: int

    def __len__(self) -> int:
        return min(self.limit, len(self.windows))

    def batch(self, first_sample: int, count: int) -> tuple[Ids, Ids]:
        """Tokens and labels of samples [first_sample, first_sample + count), or fewer at the end.

        Raises:
            UserError: a token id is not in the model's vocabulary.
        """
        samples = np.arange(first_sample, min(first_sample + count, len(self)))
        return self.windows.read(samples * len(self.windows) // len(self))
