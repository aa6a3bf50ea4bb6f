"""The type of AdamW's moments, the part of the optimizer's state that may be narrower than its weights."""

from __future__ import annotations

import enum

from penstock.core.layout import Precision

WIDENED_ELEMENTS = {False: 2**16, True: 2**22}
"""Elements that are updated at once if moments are narrower than master weights: on the host and, which is True, on a
CUDA device. On the host their widened moments fit a core's cache; a device needs few launches.
"""


class MomentType(enum.StrEnum):
    """The type in which the two moments are stored; ``fp32`` is that of master weights, in proofs fp64."""

    FP32 = "fp32"
    BF16 = "bf16"

    def num_bytes(self, precision: Precision) -> int:
        """Bytes of one element of a moment."""
        return 2 if self is MomentType.BF16 else precision.accumulate_bytes
