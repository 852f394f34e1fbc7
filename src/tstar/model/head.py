"""Log-probabilities of chosen tokens without ever holding tokens x vocabulary numbers.

The LM head is applied to a portion of the chosen hidden states at a time, and once more in the backward
pass; peak memory is one portion, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

MAX_LOGITS = 1 << 23
"""Logits held at once: large enough for full matmul speed, small enough for the last-level cache."""


def target_log_probs(
    hidden: Float[Tensor, "chosen hidden"],
    output_weight: Float[Tensor, "vocab hidden"],
    targets: Int64[Tensor, " chosen"],
) -> Float[Tensor, " chosen"]:
    """log softmax(hidden · weightᵀ)[target] for each chosen position, in fp32 (or better)."""
    out: Tensor = _TargetLogProbs.apply(hidden, output_weight, targets)
    return out


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        out = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        for rows in _portions(len(targets), len(weight)):
            log_probs = torch.log_softmax(hidden[rows] @ weight.T, dim=-1, dtype=dtype)
            out[rows] = log_probs.gather(1, targets[rows, None])[:, 0]
        ctx.save_for_backward(hidden, weight, targets)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Portions are summed in fp32: in bf16 a late portion would vanish beside the sum so far.
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype)
        for rows in _portions(len(targets), len(weight)):
            # d log p(target) / d logits = onehot(target) - softmax(logits)
            grad_logits = torch.softmax(hidden[rows] @ weight.T, dim=-1)
            own = grad[rows].to(hidden.dtype)[:, None]
            grad_logits.mul_(-own).scatter_add_(1, targets[rows, None], own)
            grad_hidden[rows] = grad_logits @ weight
            if grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[rows])
            else:
                grad_weight.add_(grad_logits.T @ hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None


def _portions(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, MAX_LOGITS // vocab_size)
    step = step // 64 * 64 or step  # whole tiles of the matmul kernels
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
