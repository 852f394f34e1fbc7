"""Chunked log-probabilities against torch's own, values and gradients."""

from __future__ import annotations

import pytest
import torch

from tstar.model import head
from tstar.model.head import target_log_probs


@pytest.mark.parametrize(
    ("max_logits", "max_kept"), [(10**9, 10**9), (310, 10**9), (310, 700), (310, 0), (1, 0)]
)
def test_values_and_gradients_equal_the_whole_softmax(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, max_kept: int
) -> None:
    """Whole, in portions, with all, some or none of the logits kept."""
    monkeypatch.setattr(head, "MAX_LOGITS", max_logits)
    monkeypatch.setattr(head, "MAX_KEPT_LOGITS", max_kept)
    hidden = torch.randn(50, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 6, dtype=torch.float64, requires_grad=True)
    targets, upstream = torch.randint(31, (50,)), torch.randn(50, dtype=torch.float64)
    out = target_log_probs(hidden, weight, targets)
    expected = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(out, [hidden, weight], upstream, retain_graph=True)
    expected_grads = torch.autograd.grad(expected, [hidden, weight], upstream)
    again = torch.autograd.grad(out, [hidden, weight], upstream)
    for grad, second, expected_grad in zip(grads, again, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(second, expected_grad, rtol=0, atol=1e-12)


def test_bf16_gives_fp32_log_probs() -> None:
    hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(100, 16).bfloat16()
    out = target_log_probs(hidden, weight, torch.arange(40))
    logits = (hidden @ weight.T).float()
    expected = torch.log_softmax(logits, -1)[torch.arange(40), torch.arange(40)]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_kept", [0, 10**9])
def test_a_frozen_head_gives_the_gradient_of_the_hidden_states(
    monkeypatch: pytest.MonkeyPatch, max_kept: int
) -> None:
    monkeypatch.setattr(head, "MAX_KEPT_LOGITS", max_kept)
    hidden, weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True), torch.randn(31, 6).double()
    targets = torch.randint(31, (9,))
    (grad,) = torch.autograd.grad(target_log_probs(hidden, weight, targets).sum(), hidden)
    expected = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None]).sum()
    torch.testing.assert_close(grad, torch.autograd.grad(expected, hidden)[0], rtol=0, atol=1e-12)


def test_nothing_is_kept_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    new_empty = torch.Tensor.new_empty

    def counting(self: torch.Tensor, *size: int) -> torch.Tensor:
        allocated.append(size[0])
        return new_empty(self, *size)

    monkeypatch.setattr(torch.Tensor, "new_empty", counting)
    hidden, weight = torch.randn(50, 6, requires_grad=True), torch.randn(31, 6)
    with torch.no_grad():
        target_log_probs(hidden, weight, torch.zeros(50, dtype=torch.int64))
    assert allocated == [0]


def test_no_chosen_position_is_no_work() -> None:
    hidden = torch.randn(0, 6, requires_grad=True)
    weight = torch.randn(31, 6, requires_grad=True)
    target_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
