"""Predicted values next to measured ones."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.profile import UnitRecord


def prediction_error(predicted: float, measured: float) -> float:
    """The error of a prediction as a share of the measured value: negative if less was predicted."""
    return predicted / measured - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Predicted bytes of one rank by cause, and the measured peak of the whole process if it was measured.

    ``constant_bytes`` is the process before any parameter; ``state_bytes`` parameters, gradients and optimizer state;
    ``slot_bytes`` the arena; ``transient_bytes`` the largest that an action needs beyond its slots, and the buffer in
    which shards sum gradients.
    """

    constant_bytes: int
    state_bytes: int
    slot_bytes: int
    transient_bytes: int
    measured_bytes: int | None = None

    @property
    def predicted_bytes(self) -> int:
        """The sum of all parts."""
        return self.constant_bytes + self.state_bytes + self.slot_bytes + self.transient_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FitPoint:
    """A measured cost record next to the fitted cost model's prediction of its ``together_seconds``."""

    record: UnitRecord
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_seconds / self.record.together_seconds - 1.0 if self.record.together_seconds else 0.0
