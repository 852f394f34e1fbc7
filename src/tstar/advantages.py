"""From rewards to advantages: over a prompt's group, or over a trajectory's steps with a value model.

All in float64 and on the CPU: these are a few numbers per token, and differences of near-equal ones.

Rewards are any floats. What they mean (an answer's correctness, a bonus for parallelism, a process
reward) is decided where they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64

SPREAD_TOLERANCE = 1e-9
"""Rewards of a group that differ by less, relative to the largest, differ by rounding alone. A z-score
would blow that up to advantages of size 1."""


# -- groups ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GroupAdvantages:
    """Advantages without a value model, and how many groups had nothing to say."""

    advantages: Float64[np.ndarray, " responses"]
    num_groups: int
    num_uniform_groups: int
    """Groups whose rewards are all equal: their advantages are 0. Groups of one response are among them."""


def group_advantages(
    rewards: Float64[np.ndarray, " responses"], group_ids: Int64[np.ndarray, " responses"]
) -> GroupAdvantages:
    """The z-score of each reward among the responses of its prompt.

    The standard deviation is the population's (divided by G, not G - 1), as in the public code. A group
    without spread gives 0. Group ids are any numbers; no response, no group.
    """
    _check_rewards(rewards)
    groups = _Groups.of(group_ids)
    spread = groups.spread(rewards)
    is_uniform = spread <= SPREAD_TOLERANCE * groups.maximum(np.abs(rewards))
    # In units of the spread first: squares of tiny rewards would underflow.
    deviation = (rewards - groups.mean(rewards)[groups.index]) / np.where(is_uniform, 1, spread)[groups.index]
    std = np.sqrt(groups.mean(deviation**2))
    z_scores = deviation / np.where(is_uniform, 1, std)[groups.index]
    return GroupAdvantages(
        advantages=np.where(is_uniform[groups.index], 0.0, z_scores),
        num_groups=len(groups.sizes),
        num_uniform_groups=int(is_uniform.sum()),
    )


def within_accuracy_band(
    is_correct: Bool[np.ndarray, " responses"],
    group_ids: Int64[np.ndarray, " responses"],
    lowest: float = 0.2,
    highest: float = 0.8,
) -> Bool[np.ndarray, " responses"]:
    """Which responses belong to a group whose accuracy lies in [lowest, highest].

    A group is kept or dropped whole. None may be left: then there is nothing to train on.
    """
    if not 0 <= lowest <= highest <= 1:
        raise ValueError(
            f"accuracy band: [{lowest}, {highest}] is no part of [0, 1]; use 0 <= lowest <= highest <= 1"
        )
    groups = _Groups.of(group_ids)
    accuracy = groups.mean(is_correct.astype(np.float64))[groups.index]
    is_within: np.ndarray = (accuracy >= lowest) & (accuracy <= highest)
    return is_within


def truncated_as_wrong(
    rewards: Float64[np.ndarray, " responses"],
    is_truncated: Bool[np.ndarray, " responses"],
    wrong_reward: float = 0.0,
) -> Float64[np.ndarray, " responses"]:
    """Rewards in which a response that ran out of tokens counts as wrong, whatever it says."""
    return np.where(is_truncated, wrong_reward, rewards)


@dataclass(frozen=True, eq=False)
class _Groups:
    """Responses by prompt."""

    index: np.ndarray
    """The group of each response, 0 to the number of groups."""
    sizes: np.ndarray

    @classmethod
    def of(cls, group_ids: np.ndarray) -> _Groups:
        _, index, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    def mean(self, values: np.ndarray) -> np.ndarray:
        mean: np.ndarray = np.bincount(self.index, values, minlength=len(self.sizes)) / self.sizes
        return mean

    def maximum(self, values: np.ndarray) -> np.ndarray:
        largest = np.full(len(self.sizes), -np.inf)
        np.maximum.at(largest, self.index, values)
        return largest

    def spread(self, values: np.ndarray) -> np.ndarray:
        spread: np.ndarray = self.maximum(values) + self.maximum(-values)
        return spread


# -- steps -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepTable:
    """Which step and trajectory each action of a batch belongs to.

    Step ids are dense (0, 1, ... over the whole batch) and rise in time within a trajectory; all steps of
    a trajectory come before those of the next. Actions may stand in any order.
    """

    step_ids: Int64[np.ndarray, " actions"]
    trajectory_ids: Int64[np.ndarray, " actions"]

    def __post_init__(self) -> None:
        for name in ("step_ids", "trajectory_ids"):
            ids = getattr(self, name)
            counts = np.bincount(ids)
            if (counts == 0).any():
                raise ValueError(f"{name}: {int(np.argmin(counts))} does not occur; ids are dense")
        owners = self.step_trajectories
        if (owners[self.step_ids] != self.trajectory_ids).any():
            step = int(self.step_ids[np.argmax(owners[self.step_ids] != self.trajectory_ids)])
            raise ValueError(f"step_ids: step {step} has actions of two trajectories")
        if (np.diff(owners) < 0).any():
            step = int(np.argmax(np.diff(owners) < 0)) + 1
            raise ValueError(
                f"step_ids: step {step} is of trajectory {owners[step]}, after one of {owners[step - 1]}"
            )

    @property
    def num_trajectories(self) -> int:
        return int(self.trajectory_ids.max(initial=-1)) + 1

    @cached_property
    def step_sizes(self) -> Int64[np.ndarray, " steps"]:
        """|τ(t)|."""
        return np.bincount(self.step_ids).astype(np.int64)

    @cached_property
    def step_trajectories(self) -> Int64[np.ndarray, " steps"]:
        owners = np.zeros(len(self.step_sizes), dtype=np.int64)
        owners[self.step_ids] = self.trajectory_ids
        return owners

    @cached_property
    def times(self) -> Int64[np.ndarray, " steps"]:
        """t of each step, counted from its trajectory's first."""
        first = np.searchsorted(self.step_trajectories, self.step_trajectories)
        times: np.ndarray = np.arange(len(first)) - first
        return times

    @cached_property
    def is_last(self) -> Bool[np.ndarray, " steps"]:
        """Whether a step is the last of its trajectory."""
        is_last: np.ndarray = np.diff(self.step_trajectories, append=-1) != 0
        return is_last

    def mean(self, values: Float64[np.ndarray, " actions"]) -> Float64[np.ndarray, " steps"]:
        """The mean over τ(t) of each step: the paper's aggregation of tokens into steps."""
        mean: np.ndarray = (
            np.bincount(self.step_ids, values, minlength=len(self.step_sizes)) / self.step_sizes
        )
        return mean


def place_rewards(
    table: StepTable,
    outcome: Float64[np.ndarray, " trajectories"],
    per_step: Float64[np.ndarray, " steps"] | None = None,
    per_token: Float64[np.ndarray, " actions"] | None = None,
) -> Float64[np.ndarray, " actions"]:
    """r_j: each trajectory's outcome on its last step, plus process rewards where there are any.

    A step's reward stands at each of its actions, so that its mean over the step, r*_t, is that reward.
    """
    _check_rewards(outcome)
    step_rewards = np.where(table.is_last, outcome[table.step_trajectories], 0.0)
    if per_step is not None:
        step_rewards = step_rewards + per_step
    rewards: np.ndarray = step_rewards[table.step_ids]
    return rewards if per_token is None else rewards + per_token


@dataclass(frozen=True, eq=False)
class TokenReturns:
    """What the policy (advantages) and the value model (returns) learn from, per action."""

    advantages: Float64[np.ndarray, " actions"]
    returns: Float64[np.ndarray, " actions"]


def step_gae(
    table: StepTable,
    rewards: Float64[np.ndarray, " actions"],
    values: Float64[np.ndarray, " actions"],
    gamma: float = 1.0,
    lam: float = 1.0,
) -> TokenReturns:
    """GAE(γ, λ) over denoising steps, handed back to the tokens.

    With r*_t, V*_t the means over τ(t), and 0 beyond the last step::

        R*_t = r*_t + γ R*_{t+1}                    R_j = r_j + γ R*_{t+1}
        A*_t = δ_t + γλ A*_{t+1}                    A_j = (r_j - V_j) + γ V*_{t+1} + γλ A*_{t+1}
        δ_t  = r*_t + γ V*_{t+1} - V*_t

    With γ = λ = 1, A_j = R_j - V_j.
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ValueError(f"{name}: {factor} is outside 0 to 1")
    # [time, trajectory], with zeros after a trajectory's end: they are what the recursions start from.
    num_times = int(table.times.max(initial=-1)) + 1
    shape = (num_times + 1, table.num_trajectories)
    now = (table.times, table.step_trajectories)
    reward, value = np.zeros(shape), np.zeros(shape)
    reward[now], value[now] = table.mean(rewards), table.mean(values)
    step_return, advantage = np.zeros(shape), np.zeros(shape)
    for t in reversed(range(num_times)):
        step_return[t] = reward[t] + gamma * step_return[t + 1]
        delta = reward[t] + gamma * value[t + 1] - value[t]
        advantage[t] = delta + gamma * lam * advantage[t + 1]
    later = (table.times[table.step_ids] + 1, table.trajectory_ids)
    return TokenReturns(
        advantages=rewards - values + gamma * value[later] + gamma * lam * advantage[later],
        returns=rewards + gamma * step_return[later],
    )


def _check_rewards(rewards: np.ndarray) -> None:
    if not np.isfinite(rewards).all():
        index = int(np.argmin(np.isfinite(rewards)))
        raise ValueError(f"rewards[{index}]: {rewards[index]} is not a finite number")
