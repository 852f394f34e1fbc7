"""Matmuls with a weight, and the faster way to a few tokens' worth of one on a CPU.

A block being denoised is a handful of rows, and there torch's `F.linear` in fp32 reaches a fraction of
the memory's bandwidth: oneMKL has a kernel for few rows, but takes it only when the few are the *first*
operand. So the product is asked for the other way round, weight · xᵀ, and turned back, which is a few
kilobytes. That pays where weights come from memory, up to 3 times for a layer and 5 for an LM head
(docs/log.md); small weights, which stay in a cache, are multiplied as usual. The numbers differ by rounding
alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

MOST_ROWS = 8
"""The kernel takes up to so many rows ..."""
MOST_NUMBERS = 6144
"""... of so many numbers together: 24 KiB, what stays in a first-level cache beside the weights."""
LONGEST_ONE = 1536
"""A single row is computed twice, as two, where it is not longer: still twice as fast."""
LEAST_WEIGHT = 1 << 17
"""Numbers of a weight below which its model is small, and stays in a cache."""
_HAS_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


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
    if not _is_thin(x, weight):
        return F.linear(x, weight, bias)
    rows = x if len(x) > 1 else torch.cat([x, x])
    out = torch.mm(weight, rows.t()).t()[: len(x)].contiguous()
    return out if bias is None else out.add_(bias)


def _is_thin(x: Tensor, weight: Tensor) -> bool:
    if x.dtype != torch.float32 or x.dim() != 2 or not (x.is_cpu and _HAS_MKL) or torch.is_grad_enabled():
        return False
    if weight.numel() < LEAST_WEIGHT:
        return False
    num_rows, num_inputs = x.shape
    if num_rows == 1:
        return num_inputs <= LONGEST_ONE
    return 1 < num_rows <= MOST_ROWS and x.numel() <= MOST_NUMBERS
