"""Speed of a step, in two numbers that are comparable across models, devices and software.

*Tokens per second per device*: the tokens of a step, divided by its seconds and by the devices that take part.

*Model FLOP utilization* (MFU; PaLM, arXiv 2204.02311, appendix B): the FLOPs that the model itself needs for a step,
over those that all devices could do in that time at their peak. The convention, since papers differ:

- The model's FLOPs are forward and backward, 3 x forward (`penstock.core.model.step_flops`). Repeated computation
  (recomputed activations, the scores in the backward of flash attention) does not count.
- Attention counts causal pairs, s (s + 1) / 2 of a sequence of s tokens. PaLM counts all s^2, so the same step has a
  higher utilization there, the more so the longer the sequence.
- The peak is that of dense 16-bit products, as stated by the maker (`penstock.core.devices`) or by a description.

Example: llama 7B, 1 sequence of 2,048 tokens on one A100 (312 TFLOP/s) in 0.5 s. Matrices: 6 x 6.61e9 x 2,048 = 81.2
TFLOP; attention: 3 x 32 layers x 4 x 4,096 x 2.1e6 pairs = 3.3 TFLOP. 84.5 / (0.5 x 312) = 54.2 %, and 4,096 tokens/s.

A device without a stated peak has no utilization: a CPU, or a GPU of a kind that penstock does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from penstock.core.manifest import Manifest
from penstock.core.model import ModelSpec, step_flops
from penstock.core.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed(Manifest):
    """A step's speed. ``model_flops_utilization`` is a share; none where the devices' peak is unknown."""

    tokens_per_second_per_device: Annotated[float, "tokens of a step, divided by its seconds and its devices"]
    model_flops_utilization: Annotated[
        float | None,
        "FLOPs of the model as a share of the devices' peak; none: the peak is unknown",
    ] = None

    @property
    def text(self) -> str:
        """Text for people: ``3,120 tokens/s per device, MFU 41.2 %``."""
        tokens = f"{format_rate(self.tokens_per_second_per_device)} tokens/s per device"
        return f"{tokens}, MFU {self.utilization_text}" if self.utilization_text else tokens

    @property
    def utilization_text(self) -> str:
        """Text of the utilization; empty if it is unknown."""
        share = self.model_flops_utilization
        return "" if share is None else f"{100 * share:.1f} %"

    def slowed(self, factor: float) -> Speed:
        """The speed of a step that takes ``factor`` times as long."""
        share = self.model_flops_utilization
        return Speed(
            tokens_per_second_per_device=self.tokens_per_second_per_device / factor,
            model_flops_utilization=None if share is None else share / factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedColumns:
    """Columns for the speeds of a table's rows: their headers, and the cells of each row."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def speed_columns(speeds: Sequence[Speed | None], missing: str = "") -> SpeedColumns:
    """A column for each of the two numbers that any row has; none if no speed is known.

    ``missing`` is the cell of rows without that number.
    """
    rates = ["" if speed is None else format_rate(speed.tokens_per_second_per_device) for speed in speeds]
    shares = ["" if speed is None else speed.utilization_text for speed in speeds]
    columns = {"tokens/s per device": rates, "MFU": shares}
    shown = {header: cells for header, cells in columns.items() if any(cells)}
    rows = tuple(tuple(cells[i] or missing for cells in shown.values()) for i in range(len(speeds)))
    return SpeedColumns(headers=tuple(shown), rows=rows)


def step_text(seconds: float, speed: Speed | None) -> str:
    """Text of a step's time, with its speed if known: ``1.23 s (3,324 tokens/s per device)``."""
    return format_seconds(seconds) if speed is None else f"{format_seconds(seconds)} ({speed.text})"


def format_rate(per_second: float) -> str:
    """Text of a number per second: three digits below a thousand, whole numbers above."""
    return f"{per_second:,.0f}" if abs(per_second) >= 999.5 else f"{per_second:.3g}"


def speed_of(
    model: ModelSpec,
    *,
    num_sequences: int,
    sequence_length: int,
    num_devices: int,
    step_seconds: float,
    peak_flops: float | None = None,
) -> Speed | None:
    """The speed of a step of ``num_sequences`` on ``num_devices`` in ``step_seconds``; None without duration."""
    device_seconds = step_seconds * num_devices
    if device_seconds <= 0:
        return None
    flops = step_flops(model, num_sequences, sequence_length)
    return Speed(
        tokens_per_second_per_device=num_sequences * sequence_length / device_seconds,
        model_flops_utilization=flops / (device_seconds * peak_flops) if peak_flops else None,
    )
