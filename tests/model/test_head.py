"""Chunked log-probabilities against torch's own, values and gradients."""

from __future__ import annotations

import pytest
import torch

from tstar.model import head
from tstar.model.head import target_log_probs, target_scores


@pytest.mark.parametrize(
    ("max_logits", "max_kept", "max_softmax"),
    [(10**9, 10**9, 10**9), (310, 10**9, 100), (310, 700, 1), (310, 0, 64), (1, 0, 1)],
)
def test_values_and_gradients_equal_the_whole_softmax(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, max_kept: int, max_softmax: int
) -> None:
    """Whole, in portions, with all, some or none of the logits kept."""
    monkeypatch.setattr(head, "CPU_LIMITS", head.LogitLimits(max_logits, max_kept, max_softmax))
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
    monkeypatch.setattr(head, "CPU_LIMITS", head.CPU_LIMITS._replace(kept=max_kept))
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


def slow_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    excluded: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One position at a time, over the vocabulary without the excluded token."""
    log_probs, entropies = [], []
    allowed = torch.tensor([v for v in range(len(weight)) if v != excluded])
    for row in range(len(hidden)):
        own = temperature[row] if isinstance(temperature, torch.Tensor) else temperature
        distribution = torch.distributions.Categorical(logits=(weight[allowed] @ hidden[row]) / own)
        log_probs.append(distribution.log_prob((allowed == targets[row]).nonzero()[0, 0]))
        entropies.append(distribution.entropy())
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("excluded", [None, 17])
@pytest.mark.parametrize("temperature", [1.0, 0.6, torch.linspace(0.5, 2.0, 50, dtype=torch.float64)])
@pytest.mark.parametrize(
    ("max_logits", "max_kept", "max_softmax"), [(10**9, 10**9, 10**9), (310, 700, 100), (310, 0, 1)]
)
def test_temperature_exclusion_and_entropy_equal_the_slow_distribution(
    monkeypatch: pytest.MonkeyPatch,
    excluded: int | None,
    temperature: float | torch.Tensor,
    max_logits: int,
    max_kept: int,
    max_softmax: int,
) -> None:
    monkeypatch.setattr(head, "CPU_LIMITS", head.LogitLimits(max_logits, max_kept, max_softmax))
    hidden = torch.randn(50, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(17, (50,))
    expected = slow_scores(hidden, weight, targets, temperature, excluded)
    with torch.no_grad():
        scores = target_scores(hidden, weight, targets, temperature, excluded)
    torch.testing.assert_close(tuple(scores), expected, rtol=0, atol=1e-12)

    upstream = torch.randn(2, 50, dtype=torch.float64)
    for used in ([0], [1], [0, 1]):
        if used == [0]:
            out = [target_log_probs(hidden, weight, targets, temperature, excluded)]
        else:
            scores = target_scores(hidden, weight, targets, temperature, excluded)
            out = [scores[i] for i in used]
        grads = torch.autograd.grad(out, [hidden, weight], [upstream[i] for i in used])
        expected_grads = torch.autograd.grad(
            [expected[i] for i in used], [hidden, weight], [upstream[i] for i in used], retain_graph=True
        )
        torch.testing.assert_close(grads, expected_grads, rtol=0, atol=1e-12)


def test_a_distribution_of_one_token_has_no_entropy_and_a_finite_gradient() -> None:
    """exp(log p) rounds to 0 and to 1 there: nothing may become NaN."""
    hidden = torch.ones(2, 4, requires_grad=True)
    weight = torch.tensor([[1e4] * 4, [0.0] * 4, [-1e4] * 4])
    scores = target_scores(hidden, weight, torch.tensor([0, 1]), temperature=0.5, excluded=2)
    assert scores.entropies.tolist() == [0.0, 0.0]
    (grad,) = torch.autograd.grad(scores.entropies.sum() + scores.log_probs.sum(), hidden)
    assert torch.isfinite(grad).all()


def test_bf16_takes_its_softmax_in_fp32_at_any_temperature() -> None:
    hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(100, 16).bfloat16()
    scores = target_scores(hidden, weight, torch.arange(40), temperature=0.3, excluded=99)
    logits = (hidden @ weight.T).float()[:, :99] / 0.3
    expected = torch.log_softmax(logits, -1)
    torch.testing.assert_close(scores.log_probs, expected[range(40), range(40)], rtol=0, atol=1e-6)
    torch.testing.assert_close(scores.entropies, -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-5)
