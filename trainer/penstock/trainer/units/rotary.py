"""Rotary position embedding (arXiv 2104.09864), in the rotate-half convention of llama's published weights.

Shape letters: S positions of a sequence, B sequences, N tokens of the slice, A heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """Tables of angles for every position, and the rotation of queries or keys by them."""

    def __init__(
        self, head_dim: int, theta: float, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequency)[:, None]
        self._cos_S1D = torch.cat((angle, angle), dim=-1).cos().to(device, dtype)
        self._sin_S1d = angle.sin().to(device, dtype)

    def rotate(self, x_BNAD: Tensor, start: int, out_BNAD: Tensor) -> None:
        """Write x, rotated by the angles of positions start, start + 1, ..., to ``out``, which must not overlap x."""
        self._turn(x_BNAD, start, out_BNAD, 1)

    def rotate_back(self, x_BNAD: Tensor, start: int, out_BNAD: Tensor) -> None:
        """Apply the inverse rotation, which is also the gradient of `rotate`."""
        self._turn(x_BNAD, start, out_BNAD, -1)

    def _turn(self, x_BNAD: Tensor, start: int, out_BNAD: Tensor, sign: int) -> None:
        stop, half = start + x_BNAD.shape[1], x_BNAD.shape[-1] // 2
        sin = self._sin_S1d[start:stop]
        torch.mul(x_BNAD, self._cos_S1D[start:stop], out=out_BNAD)
        out_BNAD[..., :half].addcmul_(x_BNAD[..., half:], sin, value=-sign)
        out_BNAD[..., half:].addcmul_(x_BNAD[..., :half], sin, value=sign)
