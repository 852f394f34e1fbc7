"""Matmuls with a weight, and the faster way to a few tokens' worth of one on a CPU.

A block being denoised is a handful of rows, and there torch's `F.linear` in fp32 reaches a fraction of
the memory's bandwidth: the BLAS behind it (oneMKL) has a kernel for few rows, but takes it only when the
few are the *first* operand. So the product is asked for the other way round, weight · xᵀ, and turned
back, which is a few kilobytes. Two to five times as fast for 2 to 8 rows (docs/log.md); the numbers
differ by rounding alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

MOST_ROWS = 10
"""The kernel takes up to so many rows ..."""
MOST_NUMBERS = 6144
"""... of so many numbers together: 24 KiB, what stays in a first-level cache beside the weights."""
LONGEST_ONE = 1536
"""A single row is computed twice, as two, where it is not longer: still twice as fast."""


class Linear(nn.Linear):
    """`nn.Linear`, which is fast for few tokens too."""

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return linear(x, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*batch inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "*batch outputs"]:
    """x · weightᵀ + bias."""
    if not _is_thin(x):
        return F.linear(x, weight, bias)
    rows = x if len(x) > 1 else torch.cat([x, x])
    out = torch.mm(weight, rows.t()).t()[: len(x)].contiguous()
    return out if bias is None else out.add_(bias)


def _is_thin(x: Tensor) -> bool:
    if x.dtype != torch.float32 or x.dim() != 2 or not x.is_cpu or torch.is_grad_enabled():
        return False
    num_rows, num_inputs = x.shape
    if num_rows == 1:
        return num_inputs <= LONGEST_ONE
    return 1 < num_rows <= MOST_ROWS and x.numel() <= MOST_NUMBERS
