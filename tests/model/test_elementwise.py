"""The layer's elementwise formulas against autograd through their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tstar.model.elementwise import rms_norm, swiglu


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(7, 12), (5, 3, 8), (1, 1), (0, 4)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_and_its_gradients_equal_the_definition(shape: tuple[int, ...], eps: float) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    actual, expected = rms_norm(x, weight, eps), plain_rms_norm(x, weight, eps)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(shape, dtype=torch.float64)
    grads = torch.autograd.grad(actual, [x, weight], upstream)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, [x, weight], upstream), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-11)


def test_swiglu_and_its_gradients_equal_the_definition() -> None:
    gate, up = (torch.randn(9, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    actual, expected = swiglu(gate, up), F.silu(gate) * up
    assert torch.equal(actual, expected)
    upstream = torch.randn(9, 5, dtype=torch.float64)
    grads = torch.autograd.grad(actual, [gate, up], upstream)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, [gate, up], upstream), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-14)


def test_a_norm_of_bf16_is_rounded_once() -> None:
    """The result and the gradients are those of fp32, each rounded at the end."""
    x, weight, upstream = (torch.randn(s).bfloat16() for s in ((300, 64), (64,), (300, 64)))
    low = [x.requires_grad_(), weight.requires_grad_()]
    high = [p.detach().float().requires_grad_() for p in low]
    actual, expected = rms_norm(*low, 1e-6), plain_rms_norm(*high, 1e-6)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-6)
    grads = torch.autograd.grad(actual, low, upstream)
    wanted = torch.autograd.grad(expected, high, upstream.float())
    for grad, exact in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.float(), exact, rtol=2**-8, atol=1e-5)


def test_what_is_frozen_gets_no_gradient() -> None:
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6)
    (grad,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).sum(), x)
    assert grad.shape == x.shape
    x, weight = x.detach(), weight.requires_grad_()
    (grad,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).sum(), weight)
    torch.testing.assert_close(grad, rms_norm(x, torch.ones(6), 1e-6).sum(0))


def test_little_is_kept_for_the_backward_pass() -> None:
    """What is kept grows with the input alone: no silu, no normalised or widened copy beside it."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    x, weight = torch.randn(100, 32).bfloat16().requires_grad_(), torch.ones(32).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(x, weight, 1e-6)
        assert sum(kept) == 2 * 100 * 32 + 2 * 32 + 4 * 100
        kept.clear()
        swiglu(x, x + 1)
        assert sum(kept) == 2 * 2 * 100 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_the_bits_are_the_same(dtype: torch.dtype) -> None:
    """The engine computes without, the trainer with them."""
    x, weight, gate = (torch.randn(*shape).to(dtype) for shape in ((7, 3, 32), (32,), (7, 3, 32)))
    weight.requires_grad_()
    normed, product = rms_norm(x, weight, 1e-6), swiglu(gate, x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(rms_norm(x, weight, 1e-6), normed)
            assert torch.equal(swiglu(gate, x), product)
