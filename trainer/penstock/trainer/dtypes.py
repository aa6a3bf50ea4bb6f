"""Precisions as torch types."""

from __future__ import annotations

import torch

from penstock.core.layout import Precision
from penstock.core.moments import MomentType

_COMPUTE = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP64: torch.float64}


def compute_dtype(precision: Precision) -> torch.dtype:
    """Data type of activations and of weights in matrix products."""
    return _COMPUTE[precision]


def accumulate_dtype(precision: Precision) -> torch.dtype:
    """Data type of gradients, statistics, accumulators and master weights."""
    return torch.float64 if precision is Precision.FP64 else torch.float32


def moment_dtype(moment_type: MomentType, accumulate: torch.dtype) -> torch.dtype:
    """Data type of the optimizer's moments, where gradients are of type ``accumulate``."""
    return torch.bfloat16 if moment_type is MomentType.BF16 else accumulate
