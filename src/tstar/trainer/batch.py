"""What an update trains on: rollouts with their advantages, and packs with all that stays fixed in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tstar.advantages import group_advantages, truncated_as_wrong, within_accuracy_band
from tstar.loss import Actions, BatchTotals
from tstar.partition import PartitionRule
from tstar.replay import ReplayedActions, ReplayPack
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

    def part(self, chosen: Int64[np.ndarray, " part"]) -> Batch:
        rollouts = tuple(self.rollouts[i] for i in chosen)
        return Batch(rollouts, self.numbers[chosen], self.rewards[chosen], self.advantages[chosen])

    def token_rewards(self, pack: ReplayPack) -> Float64[np.ndarray, " actions"] | None:
        """Process rewards at a pack's actions, where there are any."""
        rollouts = [self.rollouts[i] for i in pack.trajectories]
        if all(r.token_rewards is None for r in rollouts):
            return None
        lengths = [len(r.trajectory.response_ids) for r in rollouts]
        flat = np.concatenate(
            [
                np.zeros(n) if r.token_rewards is None else r.token_rewards
                for n, r in zip(lengths, rollouts, strict=True)
            ]
        )
        start = np.cumsum([0, *lengths[:-1]])
        chosen: np.ndarray = flat[start[pack.actions.members] + pack.actions.index]
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


def loss_actions(actions: ReplayedActions, device: torch.device) -> Actions:
    """A pack's actions as the objective counts them."""
    ids = (actions.steps, actions.members, actions.blocks, actions.steps_in_block)
    return Actions(*(torch.from_numpy(x).to(device) for x in ids))
