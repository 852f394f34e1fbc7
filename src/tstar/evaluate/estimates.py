"""Numbers over problems, with the interval that another draw of such problems would fall in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

import numpy as np
from jaxtyping import Float64

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
_RESAMPLES_AT_ONCE = 1 << 22
"""Draws of a problem held in memory together."""


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold a correct one: 1 - C(n-c,k) / C(n,k).

    Its mean over problems is the unbiased estimate of pass@k (Chen et al. 2021, Eq. 1); that of
    1 - (1 - c/n)^k is not.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k: {k} is not within 1 to {num_samples} samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct: {num_correct} is not within 0 to {num_samples} samples")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def ratio_estimates(
    numerators: Float64[np.ndarray, "problems numbers"], denominators: Float64[np.ndarray, "problems numbers"]
) -> tuple[Estimate, ...]:
    """Σ numerator / Σ denominator over problems, each with its percentile bootstrap interval.

    A mean has the denominator 1. What is drawn again is problems, each with all its samples: samples of one
    problem are alike, and as many draws from it say less than as many problems. The draws are the same at
    every call and for every number.
    """
    num_problems = len(numerators)
    if num_problems == 0:
        raise ValueError("numerators: empty; an estimate needs at least one problem")
    values = numerators.sum(axis=0) / denominators.sum(axis=0)
    rng = np.random.default_rng(0)
    portion = max(1, _RESAMPLES_AT_ONCE // num_problems)
    resampled = []
    for start in range(0, NUM_RESAMPLES, portion):
        counts = _resample_counts(rng, min(portion, NUM_RESAMPLES - start), num_problems)
        resampled.append((counts @ numerators) / (counts @ denominators))
    tail = 100 * (1 - CONFIDENCE) / 2
    lows, highs = np.percentile(np.concatenate(resampled), [tail, 100 - tail], axis=0)
    return tuple(
        Estimate(float(value), float(low), float(high))
        for value, low, high in zip(values, lows, highs, strict=True)
    )


def widened(share: Estimate, num_problems: int) -> Estimate:
    """A share's interval, where all problems have the same one: 0 or 1.

    Resampling sees no spread then and would call 0 of 30 certain. What replaces it is the exact binomial
    bound (Clopper-Pearson) over problems: 0 of 30 is compatible with up to 11.6 %.
    """
    reach = 1 - ((1 - CONFIDENCE) / 2) ** (1 / num_problems)
    if share.high == 0:
        return replace(share, high=reach)
    return replace(share, low=1 - reach) if share.low == 1 else share


def _resample_counts(
    rng: np.random.Generator, num_resamples: int, num_problems: int
) -> Float64[np.ndarray, "resamples problems"]:
    """How often each resample draws each problem."""
    draws = rng.integers(num_problems, size=(num_resamples, num_problems))
    cells = draws + num_problems * np.arange(num_resamples)[:, None]
    counts = np.bincount(cells.ravel(), minlength=num_resamples * num_problems)
    return counts.reshape(num_resamples, num_problems).astype(np.float64)
