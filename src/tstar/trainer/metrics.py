"""What one update saw and did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from tstar.loss_metrics import Breakdown, TraceLossMetrics, ValueLossMetrics
from tstar.optimizer import OptimizerStep


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """One optimizer step."""

    objective: TraceLossMetrics
    policy: OptimizerStep
    value: tuple[ValueLossMetrics, OptimizerStep] | None = None
    """With a value model: its loss and its own step."""


@dataclass(frozen=True, eq=False)
class UpdateMetrics:
    """One update."""

    num_rollouts: int
    num_trained: int
    """Without those outside the accuracy band. 0: there was nothing to train on, no step was taken."""
    num_truncated: int
    num_groups: int
    """Prompts among the rollouts that were trained on."""
    num_uniform_groups: int
    """Those whose rewards were all equal, so that over groups they have no advantage and no gradient."""
    reward_mean: float
    accuracy: float
    steps: tuple[StepMetrics, ...]
    num_tokens: int
    """Of one pass over the rollouts, clean and noisy."""
    num_packs: int
    prepare_seconds: float
    """Replay, old and base log-probs, values."""
    train_seconds: float

    def by_step(self, at_most: int | None = None) -> tuple[Breakdown, ...]:
        """The objective by step within a block; with `at_most`, neighbours together in so many rows."""
        return reduce(add, (s.objective for s in self.steps)).by_step(at_most) if self.steps else ()

    def by_block(self, at_most: int | None = None) -> tuple[Breakdown, ...]:
        """The objective by block of the response, likewise."""
        return reduce(add, (s.objective for s in self.steps)).by_block(at_most) if self.steps else ()

    def summary(self) -> dict[str, float]:
        """By name, for a log. Losses are means over the optimizer steps. The two durations are left out:
        everything here is the same when the update is repeated."""
        counts = ("num_rollouts", "num_trained", "num_truncated", "num_groups", "num_uniform_groups")
        rest = ("reward_mean", "accuracy", "num_tokens", "num_packs")
        found = {name: float(getattr(self, name)) for name in (*counts, *rest)}
        found["num_optimizer_steps"] = float(len(self.steps))
        if self.steps:
            found |= _mean_losses(reduce(add, (s.objective for s in self.steps)).summary(), len(self.steps))
            found |= _describe("", [s.policy for s in self.steps])
        with_value = [s.value for s in self.steps if s.value is not None]
        if with_value:
            total = reduce(add, (metrics for metrics, _ in with_value))
            found |= _mean_losses(total.summary(), len(self.steps))
            found |= _describe("value_", [step for _, step in with_value])
        return found


def _mean_losses(total: dict[str, float], num_steps: int) -> dict[str, float]:
    """Losses add up over the packs of one optimizer step; over several, their mean says more."""
    return {k: v / num_steps if k == "loss" or k.endswith("_loss") else v for k, v in total.items()}


def _describe(prefix: str, steps: Sequence[OptimizerStep]) -> dict[str, float]:
    return {
        f"{prefix}learning_rate": steps[-1].learning_rate,
        f"{prefix}grad_norm": sum(s.grad_norm for s in steps) / len(steps),
        f"{prefix}grad_norm_max": max(s.grad_norm for s in steps),
    }
