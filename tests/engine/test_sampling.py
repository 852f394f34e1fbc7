"""Draws against the whole distribution written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tstar.engine.sampling import FEW_LOGITS, NUCLEUS_SIZES, Draws, read_distribution

EXCLUDED = 7
FILTERS = [  # (top_k, top_p, min_p); 0, 1 and 0 filter nothing
    (0, 1.0, 0.0),
    (3, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.2),
    (40, 0.9, 0.01),
    (1, 1.0, 0.0),
    (5000, 0.999, 0.0),
]


def read(logits: torch.Tensor, uniforms: Any = None, max_logits: int = 10**9, **columns: Any) -> np.ndarray:
    """`read_distribution` of given logits: hidden states are rows of the identity."""
    num = len(logits)
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **columns}
    rows = {name: np.broadcast_to(value, num) for name, value in values.items()}
    draws = Draws.of(
        torch.device("cpu"),
        np.zeros(num) if uniforms is None else uniforms,
        rows["temperature"].astype(np.float64),
        rows["top_k"].astype(np.int64),
        rows["top_p"].astype(np.float64),
        rows["min_p"].astype(np.float64),
        wants_entropy=True,
    )
    hidden = torch.eye(num, dtype=logits.dtype)
    return read_distribution(hidden, logits.T.contiguous(), draws, EXCLUDED, max_logits).numpy()


def probabilities(logits: torch.Tensor, temperature: float) -> np.ndarray:
    scaled = logits.double() / temperature
    scaled[:, EXCLUDED] = -torch.inf
    return torch.softmax(scaled, -1).numpy()


def filtered(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution that tokens are drawn from, for one row."""
    kept = p > 0
    if top_k:
        kept &= p >= np.sort(p)[-min(top_k, len(p))]
    left = np.where(kept, p, 0.0)
    if top_p < 1:
        order = np.argsort(-left, kind="stable")
        last = order[np.flatnonzero(left[order].cumsum() >= top_p * left.sum())[0]]
        kept &= left >= left[last]
    kept &= p >= min_p * p.max()
    return np.where(kept, p, 0.0) / p[kept].sum()


@pytest.mark.parametrize("vocab_size", [50, 128, 1000])
def test_tokens_are_drawn_as_often_as_their_filtered_probability(vocab_size: int) -> None:
    """Evenly spread uniforms give every token its share, to one in their number; rows with other filters,
    and with none, stand beside."""
    num = 500
    logits = 1.5 * torch.randn(len(FILTERS), vocab_size)
    uniforms = (np.arange(num) + 0.5) / num
    top_k, top_p, min_p = (np.repeat(column, num) for column in zip(*FILTERS, strict=True))
    got = read(
        logits.repeat_interleave(num, 0),
        np.tile(uniforms, len(FILTERS)),
        temperature=0.8,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    for row, (p, given) in enumerate(zip(probabilities(logits, 0.8), FILTERS, strict=True)):
        own = got[row * num : (row + 1) * num]
        counts = np.bincount(own[:, 0].astype(int), minlength=vocab_size)
        expected = filtered(p, *given)
        assert (counts[expected == 0] == 0).all(), given
        assert np.abs(counts - num * expected).max() <= 1.01, given
        np.testing.assert_allclose(own[:, 1], np.log(p[own[:, 0].astype(int)]), atol=1e-5)


def test_confidence_and_entropy_are_of_the_whole_distribution() -> None:
    logits = torch.randn(6, 300)
    got = read(logits, np.full(6, 0.5), temperature=0.7, top_k=1)
    p = probabilities(logits, 0.7)
    np.testing.assert_allclose(got[:, 2], np.log(p.max(1)), atol=1e-5)
    np.testing.assert_allclose(got[:, 3], -(p * np.log(np.maximum(p, 1e-300))).sum(1), atol=1e-5)
    np.testing.assert_array_equal(got[:, 0], p.argmax(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [300, FEW_LOGITS // 20 + 100])
def test_greedy_takes_the_likeliest_and_of_equals_the_left(dtype: torch.dtype, vocab_size: int) -> None:
    """Searched at once, and run by run."""
    logits = torch.randn(20, vocab_size).to(dtype)
    logits[:, 9] = logits[:, 250] = logits[:, 20] = 8.0
    logits[:, EXCLUDED] = 100.0
    mixed = read(logits, np.full(20, 0.999), temperature=np.arange(20) % 2 * 0.001)
    assert (mixed[::2, 0] == 9).all()
    assert (mixed[1::2, 0] == 250).all(), "nearly 1: the last of the three"
    assert (read(logits, temperature=0.0)[:, 0] == 9).all()


def test_a_nucleus_larger_than_any_portion_that_is_sorted() -> None:
    """A flat distribution over more tokens than `NUCLEUS_SIZES`: top-p needs nearly all of them."""
    vocab_size = NUCLEUS_SIZES[-1] + 700
    logits = 0.01 * torch.randn(3, vocab_size)
    p = probabilities(logits, 1.0)
    uniforms = np.array([0.0, 0.5, 1 - 2.0**-53])
    got = read(logits, uniforms, top_p=np.array([0.99, 0.5, 0.98]))
    for row, top_p in enumerate((0.99, 0.5, 0.98)):
        cumulative = filtered(p[row], 0, top_p, 0.0).cumsum()
        expected = np.searchsorted(cumulative, uniforms[row] * cumulative[-1], side="right")
        assert abs(got[row, 0] - expected) <= 2, "sums in fp32 may fall a token beside"


def test_portions_change_nothing() -> None:
    logits = torch.randn(11, 300)
    columns = {"temperature": np.arange(11) / 10, "top_k": np.arange(11), "top_p": 0.9}
    uniforms = np.random.default_rng(0).random(11)
    whole = read(logits, uniforms, **columns)
    for max_logits in (1, 300, 900):
        np.testing.assert_allclose(read(logits, uniforms, max_logits, **columns), whole, atol=1e-6)
