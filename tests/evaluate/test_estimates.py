"""pass@k against enumeration, intervals against their promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tstar.evaluate.estimates import Estimate, pass_at_k, ratio_estimates, widened


def ratio(numerators: np.ndarray, denominators: np.ndarray | None = None) -> Estimate:
    columns = np.asarray(numerators, dtype=np.float64)[:, None]
    below = np.ones_like(columns) if denominators is None else np.asarray(denominators, np.float64)[:, None]
    (estimate,) = ratio_estimates(columns, below)
    return estimate


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        samples = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            draws = list(itertools.combinations(samples, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_unbiased() -> None:
    # Over all outcomes of 4 samples, each correct with p = 0.3, the mean is that 1 of 2 fresh ones passes.
    p, mean = 0.3, 0.0
    for outcome in itertools.product([0, 1], repeat=4):
        chance = np.prod([p if correct else 1 - p for correct in outcome])
        mean += chance * pass_at_k(4, sum(outcome), 2)
    assert mean == pytest.approx(1 - (1 - p) ** 2, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not within"):
        pass_at_k(n, c, k)


def test_an_interval_holds_the_truth_in_95_of_100_worlds() -> None:
    rng = np.random.default_rng(1)
    num_worlds, num_problems = 300, 80
    share_hits = ratio_hits = 0
    for _ in range(num_worlds):
        share = ratio(rng.random(num_problems) < 0.3)
        share_hits += share.low <= 0.3 <= share.high
        steps = rng.integers(1, 40, size=num_problems)
        tokens = steps * rng.choice([1.0, 2.0, 6.0], size=num_problems)  # 3 a step, in expectation
        tpf = ratio(tokens, steps)
        assert tpf.low < tpf.value < tpf.high
        ratio_hits += tpf.low <= 3.0 <= tpf.high
    # 0.95 ± 3.5 standard errors of 300 coin throws, and the percentile bootstrap's known shortfall at n = 80.
    assert 0.90 <= share_hits / num_worlds <= 0.99
    assert 0.90 <= ratio_hits / num_worlds <= 0.99


def test_the_interval_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(2)
    tokens, steps = rng.integers(5, 60, size=25), rng.integers(5, 30, size=25)
    found = ratio(tokens, steps)
    resampled = []
    for _ in range(4000):
        chosen = [int(rng.integers(25)) for _ in range(25)]
        resampled.append(sum(tokens[chosen]) / sum(steps[chosen]))
    assert found.value == tokens.sum() / steps.sum()
    width = found.high - found.low
    assert found.low == pytest.approx(np.quantile(resampled, 0.025), abs=0.08 * width)
    assert found.high == pytest.approx(np.quantile(resampled, 0.975), abs=0.08 * width)


def test_intervals_are_reproducible_and_many_problems_need_no_table_at_once() -> None:
    values = np.random.default_rng(3).random(20_000)  # 2000 x 20 000 draws pass what is held together
    found = ratio(values)
    assert found == ratio(values)
    standard_error = values.std() / np.sqrt(len(values))
    assert found.high - found.low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)


def test_no_spread_is_no_certainty() -> None:
    assert ratio(np.zeros(30)) == Estimate(0.0, 0.0, 0.0)
    none = widened(ratio(np.zeros(30)), 30)
    assert (none.value, none.low) == (0, 0)
    assert (1 - none.high) ** 30 == pytest.approx(0.025)  # so often would such a model give 0 of 30
    everything = widened(ratio(np.ones(30)), 30)
    assert (everything.value, everything.high) == (1, 1)
    assert everything.low == pytest.approx(1 - none.high)
    some = ratio(np.arange(30) % 2)
    assert widened(some, 30) == some


def test_nothing_has_no_estimate() -> None:
    with pytest.raises(ValueError, match="empty"):
        ratio(np.zeros(0))
