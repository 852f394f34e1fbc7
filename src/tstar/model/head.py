"""Log-probabilities of chosen tokens without ever holding tokens x vocabulary numbers.

The LM head is applied to a portion of the chosen hidden states at a time. The first portions keep their
logits for the backward pass, up to a fixed number; the others compute them again there. Peak memory is
that number, whatever the vocabulary and the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

MAX_LOGITS = 1 << 23
"""Logits of one portion: large enough for full matmul speed, small enough for the last-level cache."""
MAX_KEPT_LOGITS = 1 << 26
"""Logits kept for the backward pass (256 MiB in fp32): small inputs pay no second LM head."""


def target_log_probs(
    hidden: Float[Tensor, "chosen hidden"],
    output_weight: Float[Tensor, "vocab hidden"],
    targets: Int64[Tensor, " chosen"],
) -> Float[Tensor, " chosen"]:
    """log softmax(hidden · weightᵀ)[target] for each chosen position, in fp32 (or better)."""
    will_train = torch.is_grad_enabled() and (hidden.requires_grad or output_weight.requires_grad)
    num_kept = min(MAX_KEPT_LOGITS // len(output_weight), len(targets)) if will_train else 0
    out: Tensor = _TargetLogProbs.apply(hidden, output_weight, targets, num_kept)  # type: ignore[no-untyped-call]
    return out


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, num_kept: int) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        out = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        ctx.kept = hidden.new_empty(num_kept, len(weight))
        for rows in _portions(len(targets), len(ctx.kept), len(weight)):
            if rows.stop <= len(ctx.kept):
                logits = torch.mm(hidden[rows], weight.T, out=ctx.kept[rows])
            else:
                logits = hidden[rows] @ weight.T
            log_probs = torch.log_softmax(logits, dim=-1, dtype=dtype)
            out[rows] = log_probs.gather(1, targets[rows, None])[:, 0]
        ctx.save_for_backward(hidden, weight, targets)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        kept, ctx.kept = (
            ctx.kept,
            hidden.new_empty(0, len(weight)),
        )  # overwritten below: good for one use
        grad_hidden = torch.empty_like(hidden)
        # Later portions are summed in fp32: in bf16 they would vanish beside the sum so far.
        wants_weight = ctx.needs_input_grad[1]  # not so where adapters alone are trained
        is_split = wants_weight and len(kept) < len(targets)
        recomputed = torch.zeros_like(weight, dtype=grad.dtype) if is_split else None
        for rows in _portions(len(targets), len(kept), len(weight)):
            is_kept = rows.stop <= len(kept)
            # d log p(target) / d logits = onehot(target) - softmax(logits)
            grad_logits = torch.softmax(kept[rows] if is_kept else hidden[rows] @ weight.T, dim=-1)
            own = grad[rows].to(hidden.dtype)[:, None]
            grad_logits.mul_(-own).scatter_add_(1, targets[rows, None], own)
            grad_hidden[rows] = grad_logits @ weight
            if is_kept and wants_weight:
                kept[rows] = grad_logits
            elif recomputed is not None:
                recomputed += grad_logits.T @ hidden[rows]
        grad_weight = kept.T @ hidden[: len(kept)] if wants_weight else None
        if grad_weight is not None and recomputed is not None:
            grad_weight = (recomputed + grad_weight).to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def _portions(num_rows: int, num_kept: int, vocab_size: int) -> Iterator[slice]:
    """Rows a portion at a time; no portion lies across the end of the kept ones."""
    step = max(1, MAX_LOGITS // vocab_size)
    step = step // 64 * 64 or step  # whole tiles of the matmul kernels
    for first, last in ((0, num_kept), (num_kept, num_rows)):
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))
