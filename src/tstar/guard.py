"""Does training still go well? A pure function of a stage's history, so that it can be tried on any run's.

Direct RL at a large block size collapses within a few updates (in the paper from 56 to 40 %, to 30 %).
Validation accuracy says so for certain, but late; KL, ratios, entropy, gradients and truncation say so
earlier and less surely. Every limit is a number of the configuration; None switches it off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tstar.errors import UserError

Action = Literal["warn", "stop", "roll_back"]


@dataclass(frozen=True)
class Health:
    """What one update step showed; None where it was not measured."""

    update_step: int
    """Updates done by then."""
    kl: float | None = None
    """From the policy that the update began with, mean over actions; the larger of the two passes."""
    ratio_max: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    """The largest of the update, before clipping."""
    truncated: float | None = None
    """Share of the responses that ran out of tokens."""
    accuracy: float | None = None
    """On the validation set."""

    def merged(self, other: Health) -> Health:
        """One record of two: the worse of what both measured."""

        names = ("kl", "ratio_max", "entropy", "grad_norm", "truncated", "accuracy")
        worse = {name: _worse(name, getattr(self, name), getattr(other, name)) for name in names}
        return Health(max(self.update_step, other.update_step), **worse)


@dataclass(frozen=True)
class GuardConfig:
    """What counts as a collapse, and what to do then."""

    action: Action = "roll_back"
    """warn: say so and go on. stop: save and end the run. roll_back: return to the best checkpoint of the
    stage with a lower learning rate."""
    max_accuracy_drop: float | None = 0.1
    """Validation accuracy so far below the stage's best, as a share of all problems (0.1 = ten points)."""
    max_kl: float | None = 0.5
    """KL from the policy before the update, in nats per action."""
    max_ratio: float | None = 1e3
    """Largest probability ratio of an action."""
    min_entropy_share: float | None = 0.1
    """Entropy below this share of what the stage began with."""
    max_entropy_factor: float | None = 4.0
    """Entropy above this multiple of what the stage began with."""
    max_grad_norm_factor: float | None = 20.0
    """Gradient norm above this multiple of the stage's median."""
    max_truncated_rise: float | None = 0.3
    """Share of truncated responses so far above what the stage began with."""
    patience: int = 3
    """Update steps in a row that must be beyond a limit, accuracy apart: one evaluation is enough for it."""
    learning_rate_factor: float = 0.5
    """What a roll-back multiplies the learning rate by, for the rest of the stage."""
    max_roll_backs: int = 3
    """In one stage; the next collapse stops the run."""

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("max_accuracy_drop", 0.0, 1.0),
            ("max_kl", 0.0, math.inf),
            ("max_ratio", 1.0, math.inf),
            ("min_entropy_share", 0.0, 1.0),
            ("max_entropy_factor", 1.0, math.inf),
            ("max_grad_norm_factor", 1.0, math.inf),
            ("max_truncated_rise", 0.0, 1.0),
            ("patience", 1, math.inf),
            ("learning_rate_factor", 0.0, 1.0),
            ("max_roll_backs", 0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                wanted = f"{lowest:g} to {highest:g}" if highest < math.inf else f"{lowest:g} or more"
                raise UserError(f"{name}: {value} is out of range; use {wanted}")


@dataclass(frozen=True)
class Alarm:
    """One limit that was passed."""

    signal: str
    message: str


def judge(history: Sequence[Health], config: GuardConfig) -> tuple[Alarm, ...]:
    """The alarms after the last record of a stage's history; none if all is well.

    The history begins with the stage, or with its best checkpoint after a roll-back.
    """
    return (*_judge_accuracy(history, config), *_judge_updates(history, config))


def _judge_accuracy(history: Sequence[Health], config: GuardConfig) -> Iterator[Alarm]:
    limit = config.max_accuracy_drop
    if limit is None or not history or history[-1].accuracy is None:
        return
    best = max(h.accuracy for h in history if h.accuracy is not None)
    drop = best - history[-1].accuracy
    if drop > limit:
        now = history[-1].accuracy
        yield Alarm(
            "accuracy",
            f"validation accuracy {now:.3f} is {drop:.3f} below the stage's best (limit {limit:g})",
        )


def _judge_updates(history: Sequence[Health], config: GuardConfig) -> Iterator[Alarm]:
    entropy, truncated = _first(history, "entropy"), _first(history, "truncated")
    norms = [h.grad_norm for h in history if h.grad_norm is not None and math.isfinite(h.grad_norm)]
    norm = median(norms) if norms else 0.0
    for signal, limit, sign, scale, origin in (
        ("kl", config.max_kl, 1, 1.0, 0.0),
        ("ratio_max", config.max_ratio, 1, 1.0, 0.0),
        ("entropy", config.min_entropy_share, -1, entropy, 0.0),
        ("entropy", config.max_entropy_factor, 1, entropy, 0.0),
        ("grad_norm", config.max_grad_norm_factor, 1, norm, 0.0),
        ("truncated", config.max_truncated_rise, 1, 1.0, truncated),
    ):
        if limit is not None:
            yield from _beyond(history, config.patience, signal, sign, origin + scale * limit)


def _beyond(
    history: Sequence[Health], patience: int, signal: str, sign: int, bound: float
) -> Iterator[Alarm]:
    """An alarm if the last `patience` measurements are all above the bound (sign 1) or below it (-1); NaN is
    beyond every bound."""
    measured: list[float] = [v for h in history if (v := getattr(h, signal)) is not None][-patience:]
    if len(measured) == patience and not any(sign * v <= sign * bound for v in measured):
        side = "above" if sign > 0 else "below"
        yield Alarm(signal, f"{signal} {measured[-1]:.4g} is {side} {bound:.4g}, {patience} updates in a row")


def _worse(signal: str, one: float | None, other: float | None) -> float | None:
    """The more alarming value of those that were measured: for entropy the lower one."""
    if one is None or other is None:
        return other if one is None else one
    if math.isnan(one) or math.isnan(other):
        return math.nan
    return min(one, other) if signal == "entropy" else max(one, other)


def _first(history: Sequence[Health], signal: str) -> float:
    """What the stage began with; 0 if it was never measured."""
    return next((v for h in history if (v := getattr(h, signal)) is not None), 0.0)
