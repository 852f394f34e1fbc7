"""What stands between the matmuls of a layer, in few passes over memory, and few tensors kept.

Written out of torch's operations, autograd keeps a copy of each intermediate and takes a pass for each
derivative. On a CPU in bf16 that makes an RMSNorm and its gradient four times as slow as the formulas
below (docs/log.md), an eighth of a training step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "*batch size"], weight: Float[Tensor, " size"], eps: float
) -> Float[Tensor, "*batch size"]:
    """x / sqrt(mean x² + ε), scaled; in fp32 whatever x is, rounded once at the end."""
    if x.device.type != "cpu":  # torch has a kernel for it elsewhere
        return F.rms_norm(x, weight.shape, weight, eps)
    if not torch.is_grad_enabled():  # the same numbers, in two thirds of the time for a few tokens
        return (x * _inverse_rms(x, eps)).mul_(weight).to(x.dtype)
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def swiglu(
    gate: Float[Tensor, "*batch size"], up: Float[Tensor, "*batch size"]
) -> Float[Tensor, "*batch size"]:
    """silu(gate) · up, of which the backward pass finds nothing but the two."""
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    product: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


def _inverse_rms(x: Float[Tensor, "*batch size"], eps: float) -> Float[Tensor, "*batch 1"]:
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With u = x / rms: d weight = Σ grad u;  d x = (w grad - u · mean(w grad u)) / rms."""
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        product = unit * grad
        wide_weight = weight.to(unit.dtype)
        grad_weight = (
            product.reshape(-1, len(weight)).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        along = (product @ wide_weight).div_(len(weight))
        grad_x = torch.mul(grad, wide_weight, out=product).addcmul_(unit, along[..., None], value=-1)
        return grad_x.mul_(inverse).to(x.dtype), grad_weight, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, F.silu(gate).mul_(grad)
