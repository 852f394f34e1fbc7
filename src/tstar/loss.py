"""TraceRL's objective (Eqs. 3-4) and the value model's loss: pure functions of flat action tensors.

An *action* is one token at the step that finalised it. The tensors hold the actions of one pack; the
denominators are those of the whole minibatch. So a pack's loss is its share, and the shares add up to the
same loss however the minibatch is cut into packs. It is what is minimised: -J.

To the letter, J is per trajectory the sum over t of the mean over τ(t) of the clipped surrogate, minus
β KL, and then the mean over trajectories. KL is estimated at each action and summed with the weights of
the surrogate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tstar.loss_metrics import TraceLossMetrics, ValueLossMetrics

StepNorm = Literal["mean", "length"]
Average = Literal["trajectories", "rounds"]
KLEstimator = Literal["k1", "k3"]
KLReference = Literal["old", "base"]


# -- what is given -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Actions:
    """Which step, block and trajectory each action of a pack belongs to.

    The actions of a step stand in one pack; a trajectory may be spread over several.
    """

    step_ids: Int64[Tensor, " actions"]
    """One id for each step of the pack that took an action, from 0: τ(t) is the actions of one id. Where a
    trajectory is replayed under another partition, a step that falls into two of its blocks counts as two."""
    trajectory_ids: Int64[Tensor, " actions"]
    """Trajectory of the minibatch, from 0."""
    block_indices: Int64[Tensor, " actions"]
    """Block of the response, from 0."""
    steps_in_block: Int64[Tensor, " actions"]
    """Step within the block, from 0."""

    def __post_init__(self) -> None:
        if self.step_ids.numel() == 0:
            raise ValueError("step_ids: empty; a pack holds at least one action")

    @cached_property
    def step_sizes(self) -> Int64[Tensor, " actions"]:
        """|τ(t)| of the step of each action."""
        return torch.bincount(self.step_ids)[self.step_ids]


@dataclass(frozen=True)
class BatchTotals:
    """Denominators of a whole minibatch, the same for each of its packs and on every process."""

    num_trajectories: int
    num_rounds: int
    """Rounds of the public replay, which predicts one step of every block of a response at a time: for
    each trajectory as many as the most steps that any of its blocks took, summed."""
    padded_length: int
    """Response tokens of the longest trajectory: what the public code pads every response to."""

    def __post_init__(self) -> None:
        for name in ("num_trajectories", "num_rounds", "padded_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; a batch without trajectories has no loss")

    @classmethod
    def of(cls, packs: Sequence[Actions], response_lengths: Sequence[int]) -> BatchTotals:
        most_steps = torch.zeros(len(response_lengths), dtype=torch.int64)
        for actions in packs:
            steps = actions.steps_in_block.cpu() + 1
            most_steps.scatter_reduce_(0, actions.trajectory_ids.cpu(), steps, "amax")
        return cls(len(response_lengths), int(most_steps.sum()), max(response_lengths, default=0))


@dataclass(frozen=True)
class TraceLossConfig:
    """The objective. The defaults are Eq. 3.

    dLLM-RL's, with a batch as long as its own, is ``step_norm="length", average_over="rounds",
    log_ratio_clamp=10``.
    """

    clip_eps: float = 0.2
    """ε: the ratio counts between 1 - ε and 1 + ε."""
    clip_eps_high: float | None = None
    """Another ε above 1. Default: the same."""
    kl_beta: float = 0.01
    """β."""
    kl_estimator: KLEstimator = "k3"
    """Per action, with d = log π_θ - log π_ref: k1 is d, k3 is exp(-d) - 1 + d, never negative. The
    gradient of k1 lowers every taken token's probability, however near π_ref is; k3's is 0 at π_ref."""
    kl_reference: KLReference = "old"
    """``old``: the policy before the update (Eq. 3). ``base``: the model that training began with (§3.1)."""
    step_norm: StepNorm = "mean"
    """``mean``: over τ(t), then summed over steps (Eq. 3). ``length``: all actions summed and divided by
    the batch's padded length."""
    average_over: Average = "trajectories"
    """``rounds`` divides by the public replay's rows (`BatchTotals.num_rounds`) in place of trajectories."""
    log_ratio_clamp: float | None = None
    """Bound on |log ρ|, in the ratio and in k3's exponential; outside it the gradient is 0."""
    importance_cap: float | None = None
    """Weight each action's surrogate by π_old / π_engine, at most this: truncated importance sampling,
    for an engine whose numbers are not the trainer's. Default: no weight."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_eps < 1:
            raise ValueError(f"clip_eps: {self.clip_eps} is not between 0 and 1")
        if self.kl_beta < 0:
            raise ValueError(f"kl_beta: {self.kl_beta} is negative; use 0 for no penalty")
        for name in ("clip_eps_high", "log_ratio_clamp", "importance_cap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value} is not positive")

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        high = self.clip_eps if self.clip_eps_high is None else self.clip_eps_high
        return 1 - self.clip_eps, 1 + high


@dataclass(frozen=True, eq=False)
class TraceLossInputs:
    """The actions of one pack, with the log-prob of each under every policy that has a say."""

    actions: Actions
    log_probs: Float[Tensor, " actions"]
    """log π_θ, with gradient."""
    old_log_probs: Float[Tensor, " actions"]
    """log π_old: the trainer's own, under the same partition, before the update."""
    advantages: Float[Tensor, " actions"]
    entropies: Float[Tensor, " actions"]
    """Of π_θ at the action's position; a metric only."""
    engine_log_probs: Float[Tensor, " actions"] | None = None
    """What the engine recorded; None where it decoded under another partition."""
    base_log_probs: Float[Tensor, " actions"] | None = None


# -- the objective -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TraceLossOutputs:
    """One pack's share of the loss, and what to watch."""

    loss: Float[Tensor, ""]
    trajectory_losses: Float[Tensor, " trajectories"]
    """The share of each trajectory of the minibatch, without gradient: where a loss that is not finite
    comes from."""
    metrics: TraceLossMetrics


def trace_loss(inputs: TraceLossInputs, totals: BatchTotals, config: TraceLossConfig) -> TraceLossOutputs:
    """-J(θ) of Eqs. 3-4, this pack's share."""
    log_ratio = inputs.log_probs - inputs.old_log_probs
    ratio = _clamp(log_ratio, config.log_ratio_clamp).exp()
    surrogate = torch.minimum(
        ratio * inputs.advantages, ratio.clamp(*config.ratio_bounds) * inputs.advantages
    )
    importance = _importance_weights(inputs, config)
    if importance is not None:
        surrogate = surrogate * importance
    weights = action_weights(inputs.actions, totals, config.step_norm, config.average_over).to(ratio)
    policy_losses = -weights * surrogate
    kl_losses = torch.zeros_like(policy_losses)
    if config.kl_beta:
        kl_losses = config.kl_beta * weights * _kl_to_reference(inputs, config)
    losses = policy_losses + kl_losses
    per_trajectory = losses.new_zeros(totals.num_trajectories)
    with torch.no_grad():
        metrics = _measure(inputs, config, ratio, importance, policy_losses, kl_losses)
        per_trajectory.index_add_(0, inputs.actions.trajectory_ids, losses.detach())
    return TraceLossOutputs(losses.sum(), per_trajectory, metrics)


def action_weights(
    actions: Actions, totals: BatchTotals, step_norm: StepNorm, average_over: Average
) -> Float64[Tensor, " actions"]:
    """What each action counts: 1 / |τ(t)| or 1 / L, over the number of trajectories or rounds."""
    num = totals.num_trajectories if average_over == "trajectories" else totals.num_rounds
    if step_norm == "mean":
        return 1 / (actions.step_sizes.double() * num)
    return torch.full_like(actions.step_ids, 1 / (totals.padded_length * num), dtype=torch.float64)


def kl_estimates(
    log_ratio: Float[Tensor, " actions"], estimator: KLEstimator, clamp: float | None = None
) -> Float[Tensor, " actions"]:
    """An estimate of KL(π_θ || π_ref) at each action, from log π_θ - log π_ref."""
    if estimator == "k1":
        return log_ratio
    return _clamp(-log_ratio, clamp).exp() - 1 + log_ratio


def _kl_to_reference(inputs: TraceLossInputs, config: TraceLossConfig) -> Tensor:
    reference = inputs.old_log_probs if config.kl_reference == "old" else inputs.base_log_probs
    if reference is None:
        raise ValueError("base_log_probs: None; kl_reference = 'base' needs them")
    return kl_estimates(inputs.log_probs - reference, config.kl_estimator, config.log_ratio_clamp)


def _importance_weights(inputs: TraceLossInputs, config: TraceLossConfig) -> Tensor | None:
    if config.importance_cap is None:
        return None
    if inputs.engine_log_probs is None:
        raise ValueError(
            "engine_log_probs: None; importance_cap needs them, so replay under the partition that was "
            "decoded, or set it to None"
        )
    return (inputs.old_log_probs - inputs.engine_log_probs).exp().clamp(max=config.importance_cap)


def _clamp(log_ratio: Tensor, bound: float | None) -> Tensor:
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def _measure(
    inputs: TraceLossInputs,
    config: TraceLossConfig,
    ratio: Tensor,
    importance: Tensor | None,
    policy_losses: Tensor,
    kl_losses: Tensor,
) -> TraceLossMetrics:
    """Every KL here is k3's estimate; the clip fractions count where the clip takes the gradient away."""
    low, high = config.ratio_bounds
    advantages, log_probs = inputs.advantages, inputs.log_probs
    columns = {
        "num_actions": torch.ones_like(ratio),
        "policy_loss": policy_losses,
        "kl_loss": kl_losses,
        "clip_fraction_low": (ratio < low) & (advantages < 0),
        "clip_fraction_high": (ratio > high) & (advantages > 0),
        "ratio_mean": ratio,
        "kl_old": kl_estimates(log_probs - inputs.old_log_probs, "k3"),
        "entropy": inputs.entropies,
        "advantage_mean": advantages,
        "advantage_squared": advantages**2,
        "advantage_zero": advantages == 0,
    }
    largest = {"ratio": ratio, "-ratio": -ratio, "advantage": advantages, "-advantage": -advantages}
    if inputs.base_log_probs is not None:
        columns["kl_base"] = kl_estimates(log_probs - inputs.base_log_probs, "k3")
    if inputs.engine_log_probs is not None:
        gap = inputs.engine_log_probs - inputs.old_log_probs
        columns["rollout_train_kl"] = kl_estimates(gap, "k3")
        largest["rollout_ratio"] = gap.abs().exp()
    if importance is not None and config.importance_cap is not None:
        columns["importance_mean"] = importance
        columns["importance_truncated"] = importance >= config.importance_cap
    return TraceLossMetrics.of(columns, largest, inputs.actions.steps_in_block, inputs.actions.block_indices)


# -- the value model ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ValueLossInputs:
    """The actions of one pack as the value model sees them."""

    actions: Actions
    values: Float[Tensor, " actions"]
    """V_j, with gradient."""
    old_values: Float[Tensor, " actions"]
    """V_j before the update."""
    returns: Float[Tensor, " actions"]
    """R_j."""
    trajectory_sizes: Int64[Tensor, " actions"]
    """Actions of the trajectory of each, all packs together."""


@dataclass(frozen=True, eq=False)
class ValueLossOutputs:
    """One pack's share of the loss, and what to watch."""

    loss: Float[Tensor, ""]
    trajectory_losses: Float[Tensor, " trajectories"]
    metrics: ValueLossMetrics


def value_loss(
    inputs: ValueLossInputs, totals: BatchTotals, clip_eps: float | None = 0.2
) -> ValueLossOutputs:
    """½ max((V - R)², (V_clip - R)²), V_clip within ε of the old value: the mean over the actions of each
    trajectory, then over trajectories; this pack's share. Without ε, ½ (V - R)².
    """
    error = (inputs.values - inputs.returns) ** 2
    chosen = error
    if clip_eps is not None:
        near = inputs.old_values + (inputs.values - inputs.old_values).clamp(-clip_eps, clip_eps)
        chosen = torch.maximum(error, (near - inputs.returns) ** 2)
    losses = 0.5 * chosen / (inputs.trajectory_sizes * totals.num_trajectories)
    per_trajectory = losses.new_zeros(totals.num_trajectories)
    with torch.no_grad():
        per_trajectory.index_add_(0, inputs.actions.trajectory_ids, losses.detach())
        metrics = ValueLossMetrics.of(losses, chosen > error, inputs.values, inputs.returns)
    return ValueLossOutputs(losses.sum(), per_trajectory, metrics)
