"""The type of AdamW's moments, the part of the optimizer's state that may be narrower than master weights."""

from __future__ import annotations

import enum

from penstock.core.layout import Precision

WIDENED_ELEMENTS = {False: 2**16, True: 2**22}
"""Number of elements that are updated at once if moments are narrower than master weights, by whether they are on a
CUDA device. On the host, the widened moments of this many elements fit into a core's cache. On a device, larger parts
mean fewer launches.
"""


class MomentType(enum.StrEnum):
    """The type in which the two moments are stored; ``fp32`` is the type of master weights: fp64 in jobs of fp64."""

    FP32 = "fp32"
    BF16 = "bf16"

    def num_bytes(self, precision: Precision) -> int:
        """Bytes of one element of a moment."""
        return 2 if self is MomentType.BF16 else precision.accumulate_bytes
