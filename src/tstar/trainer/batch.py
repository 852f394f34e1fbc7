"""What an update trains on: rollouts with their advantages, and packs with all that stays fixed in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tstar.advantages import StepTable, group_advantages, truncated_as_wrong, within_accuracy_band
from tstar.loss import Actions, BatchTotals
from tstar.partition import PartitionRule
from tstar.replay import ReplayPack
from tstar.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Rollout:
    """A decoded response and what it earned."""

    trajectory: Trajectory
    reward: float
    group: int
    """Which prompt it answers: advantages compare the responses of one."""
    is_correct: bool
    """For the accuracy, whatever else the reward counts."""
    token_rewards: Float64[np.ndarray, " response"] | None = None
    """Process rewards, which a value model hands on; one of a step stands at each of its tokens."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rollouts that are trained on."""

    rollouts: tuple[Rollout, ...]
    numbers: Int64[np.ndarray, " rollouts"]
    """Their places among the rollouts that were given."""
    rewards: Float64[np.ndarray, " rollouts"]
    advantages: Float64[np.ndarray, " rollouts"]
    """Over the responses of a prompt."""

    @cached_property
    def sizes(self) -> Int64[np.ndarray, " rollouts"]:
        """Actions of each: the tokens up to the stop."""
        return np.array([r.trajectory.stop_length for r in self.rollouts], dtype=np.int64)

    def part(self, chosen: Int64[np.ndarray, " part"]) -> Batch:
        rollouts = tuple(self.rollouts[i] for i in chosen)
        return Batch(rollouts, self.numbers[chosen], self.rewards[chosen], self.advantages[chosen])

    def token_rewards(self, packs: Sequence[ReplayPack]) -> Float64[np.ndarray, " actions"] | None:
        """Process rewards at the packs' actions, where there are any."""
        given = [r.token_rewards for r in self.rollouts]
        if all(rewards is None for rewards in given):
            return None
        lengths = [len(r.trajectory.response_ids) for r in self.rollouts]
        each = [np.zeros(n) if x is None else x for n, x in zip(lengths, given, strict=True)]
        start = np.cumsum([0, *lengths[:-1]])
        at = [start[p.trajectories[p.actions.members]] + p.actions.index for p in packs]
        chosen: np.ndarray = np.concatenate(each)[np.concatenate(at)]
        return chosen

    def name(self, place: int) -> str:
        """For an error message."""
        t = self.rollouts[place].trajectory
        return (
            f"rollouts[{self.numbers[place]}] (seed {t.seed}, weight version {t.weight_version}, "
            f"{len(t.prompt_ids)} prompt and {len(t.response_ids)} response tokens)"
        )


@dataclass(frozen=True, eq=False)
class Selection:
    """The batch that filters leave, and what all rollouts were like."""

    batch: Batch
    num_groups: int
    num_uniform_groups: int
    reward_mean: float
    accuracy: float


def select(
    rollouts: Sequence[Rollout], truncated_is_wrong: bool, accuracy_band: tuple[float, float] | None
) -> Selection:
    """Rewards, filters, and advantages over groups."""
    rewards = np.array([r.reward for r in rollouts], dtype=np.float64)
    groups = np.array([r.group for r in rollouts], dtype=np.int64)
    is_correct = np.array([r.is_correct for r in rollouts], dtype=np.bool_)
    if truncated_is_wrong:
        is_truncated = np.array([r.trajectory.finish_reason == "length" for r in rollouts], dtype=np.bool_)
        rewards, is_correct = truncated_as_wrong(rewards, is_truncated), is_correct & ~is_truncated
    kept = np.arange(len(rollouts))
    if accuracy_band is not None:
        kept = np.flatnonzero(within_accuracy_band(is_correct, groups, *accuracy_band))
    by_group = group_advantages(rewards[kept], groups[kept])
    return Selection(
        batch=Batch(tuple(rollouts[int(i)] for i in kept), kept, rewards[kept], by_group.advantages),
        num_groups=by_group.num_groups,
        num_uniform_groups=by_group.num_uniform_groups,
        reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
        accuracy=float(is_correct.mean()) if len(rewards) else 0.0,
    )


@dataclass(frozen=True, eq=False)
class FixedPack:
    """A pack, and what all optimizer steps of the update hold fixed for its actions."""

    pack: ReplayPack
    actions: Actions
    advantages: Float[Tensor, " actions"]
    engine_log_probs: Float[Tensor, " actions"] | None = None
    """None where the engine did not decode under these blocks, step by step."""
    old_log_probs: Float[Tensor, " actions"] | None = None
    """None where there is one optimizer step: π_old is the π_θ of its own forward."""
    base_log_probs: Float[Tensor, " actions"] | None = None
    old_values: Float[Tensor, " actions"] | None = None
    returns: Float[Tensor, " actions"] | None = None


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The rollouts of one optimizer step."""

    batch: Batch
    rule: PartitionRule
    totals: BatchTotals
    packs: tuple[FixedPack, ...]


def loss_actions(pack: ReplayPack, device: torch.device) -> Actions:
    """A pack's actions as the objective counts them."""
    actions = pack.actions
    ids = (actions.steps, pack.trajectories[actions.members], actions.blocks, actions.steps_in_block)
    return Actions(*(torch.from_numpy(x).to(device) for x in ids))


def step_table(packs: Sequence[ReplayPack]) -> StepTable:
    """The steps of all packs in order, for GAE: a trajectory may be spread over packs."""
    columns = [(p.trajectories[p.actions.members], p.actions.blocks, p.actions.steps_in_block) for p in packs]
    keys = np.concatenate([np.stack(column, axis=1) for column in columns])
    steps, step_ids = np.unique(keys, axis=0, return_inverse=True)
    step_ids = step_ids.reshape(-1)
    return StepTable(step_ids.astype(np.int64), steps[step_ids, 0])
