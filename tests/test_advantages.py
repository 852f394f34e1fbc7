"""Group z-scores and step-level GAE equal their definitions, loop by loop."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstar.advantages import (
    StepTable,
    group_advantages,
    place_rewards,
    step_gae,
    truncated_as_wrong,
    within_accuracy_band,
)

# -- groups ------------------------------------------------------------------------------------

rewards_and_groups = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 0.25, 1.1]) | st.floats(-5, 5, allow_subnormal=False), st.integers(0, 4)
    ),
    max_size=40,
)


def as_arrays(pairs: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([r for r, _ in pairs], dtype=np.float64), np.array([g for _, g in pairs], dtype=np.int64)


@given(rewards_and_groups)
def test_group_advantages_are_z_scores(pairs: list[tuple[float, int]]) -> None:
    rewards, groups = as_arrays(pairs)
    found = group_advantages(rewards, groups * 7 - 3)
    num_uniform = 0
    for group in set(groups.tolist()):
        members = [r for r, g in pairs if g == group]
        std = statistics.pstdev(members)
        is_uniform = max(members) - min(members) <= 1e-9 * max(abs(r) for r in members)
        num_uniform += is_uniform
        expected = [0.0 if is_uniform else (r - statistics.fmean(members)) / std for r in members]
        np.testing.assert_allclose(found.advantages[groups == group], expected, rtol=1e-6, atol=1e-9)
    assert (found.num_groups, found.num_uniform_groups) == (len(set(groups.tolist())), num_uniform)


def test_group_advantages_by_hand() -> None:
    found = group_advantages(np.array([1.0, 0.0, 0.0, 0.0, 3.0]), np.array([0, 0, 0, 0, 1]))
    np.testing.assert_allclose(found.advantages, [math.sqrt(3), *[-1 / math.sqrt(3)] * 3, 0])
    assert (found.num_groups, found.num_uniform_groups) == (2, 1)


def test_rounding_is_no_spread() -> None:
    found = group_advantages(np.array([0.1 + 0.2, 0.3, 0.3]), np.zeros(3, dtype=np.int64))
    assert found.advantages.tolist() == [0, 0, 0]
    small_but_real = group_advantages(np.array([1.0, 1.001]), np.zeros(2, dtype=np.int64))
    np.testing.assert_allclose(small_but_real.advantages, [-1, 1])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=rf"rewards\[1\]: {wrong} is not a finite number"):
        group_advantages(np.array([0.0, wrong]), np.zeros(2, dtype=np.int64))


def test_groups_inside_the_band_stay_whole() -> None:
    correct = np.array([1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0], dtype=np.bool_)
    groups = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3])
    within = within_accuracy_band(correct, groups)
    assert sorted(set(groups[within])) == [0, 3]  # 0.2 and 0.5, of 0.2, 1, 0, 0.5
    assert within.tolist() == (np.isin(groups, [0, 3])).tolist()
    assert within_accuracy_band(correct, groups, 0.0, 1.0).all()
    assert not within_accuracy_band(correct, groups, 0.6, 0.9).any()


@pytest.mark.parametrize("band", [(-0.1, 0.5), (0.5, 1.1), (0.6, 0.5)])
def test_impossible_bands_are_refused(band: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"accuracy band: \[.*\] is no part of \[0, 1\]"):
        within_accuracy_band(np.ones(2, dtype=np.bool_), np.zeros(2, dtype=np.int64), *band)


def test_nothing_left_after_filtering_is_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    found = group_advantages(np.zeros(0), none)
    assert (len(found.advantages), found.num_groups, found.num_uniform_groups) == (0, 0, 0)
    assert len(within_accuracy_band(np.zeros(0, dtype=np.bool_), none)) == 0
    assert len(step_gae(StepTable(none, none), np.zeros(0), np.zeros(0)).advantages) == 0


def test_truncated_is_wrong() -> None:
    rewards, is_truncated = np.array([1.0, 1.0, 0.5]), np.array([False, True, True])
    assert truncated_as_wrong(rewards, is_truncated).tolist() == [1.0, 0.0, 0.0]
    assert truncated_as_wrong(rewards, is_truncated, -1.0).tolist() == [1.0, -1.0, -1.0]


# -- steps -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ragged:
    """Trajectories of steps of actions, and the same as a table with its actions shuffled."""

    sizes: list[list[int]]
    """|τ(t)| of each step of each trajectory."""
    table: StepTable
    rewards: np.ndarray
    values: np.ndarray

    def at(self, trajectory: int, t: int) -> list[int]:
        """The actions of a step."""
        step = sum(len(s) for s in self.sizes[:trajectory]) + t
        return np.flatnonzero(self.table.step_ids == step).tolist()


def make_ragged(sizes: list[list[int]], seed: int) -> Ragged:
    rng = np.random.default_rng(seed)
    flat = [size for trajectory in sizes for size in trajectory]
    step_ids = np.repeat(np.arange(len(flat)), flat)
    owners = np.repeat(np.arange(len(sizes)), [len(trajectory) for trajectory in sizes])
    rng.shuffle(step_ids)
    rewards, values = rng.normal(size=(2, len(step_ids)))
    return Ragged(sizes, StepTable(step_ids, owners[step_ids]), rewards, values)


ragged = st.builds(
    make_ragged,
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(0, 10_000),
)
factors = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def literal_gae(batch: Ragged, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """SPEC's formulas as recursive functions of (trajectory, t)."""
    rewards, values = batch.rewards, batch.values

    def r_star(n: int, t: int) -> float:
        return float(np.mean([rewards[j] for j in batch.at(n, t)]))

    def v_star(n: int, t: int) -> float:
        return float(np.mean([values[j] for j in batch.at(n, t)])) if t < len(batch.sizes[n]) else 0.0

    def return_star(n: int, t: int) -> float:
        return r_star(n, t) + gamma * return_star(n, t + 1) if t < len(batch.sizes[n]) else 0.0

    def a_star(n: int, t: int) -> float:
        if t == len(batch.sizes[n]):
            return 0.0
        delta = r_star(n, t) + gamma * v_star(n, t + 1) - v_star(n, t)
        return delta + gamma * lam * a_star(n, t + 1)

    advantages, returns = np.empty_like(rewards), np.empty_like(rewards)
    for n, trajectory in enumerate(batch.sizes):
        for t in range(len(trajectory)):
            for j in batch.at(n, t):
                advantages[j] = (
                    (rewards[j] - values[j]) + gamma * v_star(n, t + 1) + gamma * lam * a_star(n, t + 1)
                )
                returns[j] = rewards[j] + gamma * return_star(n, t + 1)
    return advantages, returns


@given(ragged, factors, factors)
def test_gae_equals_the_literal_recursion(batch: Ragged, gamma: float, lam: float) -> None:
    found = step_gae(batch.table, batch.rewards, batch.values, gamma, lam)
    advantages, returns = literal_gae(batch, gamma, lam)
    np.testing.assert_allclose(found.advantages, advantages, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.returns, returns, rtol=1e-12, atol=1e-12)


@given(ragged)
def test_without_discounting_the_advantage_is_return_minus_value(batch: Ragged) -> None:
    found = step_gae(batch.table, batch.rewards, batch.values)
    np.testing.assert_allclose(found.advantages, found.returns - batch.values, rtol=1e-12, atol=1e-12)


@given(ragged, factors)
def test_without_lambda_the_advantage_is_the_td_error(batch: Ragged, gamma: float) -> None:
    found = step_gae(batch.table, batch.rewards, batch.values, gamma, lam=0.0)
    step_values = np.append(batch.table.mean(batch.values), 0.0)
    following = np.where(batch.table.is_last, 0.0, step_values[1:])[batch.table.step_ids]
    expected = batch.rewards + gamma * following - batch.values
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-12, atol=1e-12)


@given(ragged, factors)
def test_the_outcome_is_discounted_from_the_last_step(batch: Ragged, gamma: float) -> None:
    outcome = np.arange(1.0, len(batch.sizes) + 1)
    rewards = place_rewards(batch.table, outcome)
    returns = step_gae(batch.table, rewards, np.zeros_like(rewards), gamma).returns
    for n, trajectory in enumerate(batch.sizes):
        for t in range(len(trajectory)):
            expected = gamma ** (len(trajectory) - 1 - t) * outcome[n]
            np.testing.assert_allclose(returns[batch.at(n, t)], expected, rtol=1e-12)


def test_process_rewards_by_hand() -> None:
    # Trajectory 0: steps {a, b}, {c}; trajectory 1: one step {d, e}.
    table = StepTable(np.array([0, 0, 1, 2, 2]), np.array([0, 0, 0, 1, 1]))
    outcome = np.array([1.0, 0.0])
    assert place_rewards(table, outcome).tolist() == [0, 0, 1, 0, 0]
    assert place_rewards(table, outcome, per_step=np.array([0.5, 0.25, -1.0])).tolist() == [
        *[0.5, 0.5, 1.25],
        *[-1, -1],
    ]
    per_token = np.array([2.0, 4.0, 0.0, 0.0, 6.0])
    rewards = place_rewards(table, outcome, per_token=per_token)
    assert rewards.tolist() == [2, 4, 1, 0, 6]
    found = step_gae(table, rewards, np.zeros(5))
    assert found.returns.tolist() == [3, 5, 1, 0, 6]  # a token's own reward, and the mean of later steps


@pytest.mark.parametrize(
    ("step_ids", "trajectory_ids", "message"),
    [
        ([0, 2], [0, 0], "step_ids: 1 does not occur; ids are dense"),
        ([0, 1], [0, 2], "trajectory_ids: 1 does not occur; ids are dense"),
        ([0, 0, 1], [0, 1, 1], "step_ids: step 0 has actions of two trajectories"),
        ([0, 1, 2], [0, 1, 0], "step_ids: step 2 is of trajectory 0, after one of 1"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(step_ids: Any, trajectory_ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepTable(np.array(step_ids), np.array(trajectory_ids))


@pytest.mark.parametrize("factors", [{"gamma": -0.1}, {"gamma": 1.1}, {"lam": 1.5}])
def test_impossible_factors_are_refused(factors: dict[str, float]) -> None:
    (name,) = factors
    table = StepTable(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match=f"{name}: {factors[name]} is outside 0 to 1"):
        step_gae(table, np.zeros(1), np.zeros(1), **factors)
