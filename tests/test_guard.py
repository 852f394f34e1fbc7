"""The guard: every limit both ways, and nothing said of a healthy run."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from tstar.errors import UserError
from tstar.guard import GuardConfig, Health, judge

HEALTHY = {"kl": 0.01, "ratio_max": 2.0, "entropy": 0.5, "grad_norm": 1.0, "truncated": 0.1}


def make_history(num_updates: int = 10, **last: float) -> list[Health]:
    """Healthy updates, then three with the given values."""
    ill = {**HEALTHY, **last}
    return [Health(i, **HEALTHY) for i in range(num_updates)] + [
        Health(num_updates + i, **ill) for i in range(3)
    ]


def signals(history: list[Health], **changes: Any) -> list[str]:
    return [alarm.signal for alarm in judge(history, GuardConfig(**changes))]


def test_a_healthy_run_is_left_alone() -> None:
    assert judge(make_history(), GuardConfig()) == ()
    assert judge([], GuardConfig()) == ()
    assert judge([Health(0, accuracy=0.5)], GuardConfig()) == ()


@pytest.mark.parametrize(
    ("signal", "fine", "beyond"),
    [
        ("kl", 0.5, 0.51),
        ("ratio_max", 1e3, 1.001e3),
        ("entropy", 0.05, 0.049),
        ("entropy", 2.0, 2.01),
        ("grad_norm", 20.0, 20.1),
        ("truncated", 0.4, 0.41),
    ],
)
def test_each_limit(signal: str, fine: float, beyond: float) -> None:
    assert signals(make_history(**{signal: fine})) == []
    assert signals(make_history(**{signal: beyond})) == [signal]
    assert signals(make_history(**{signal: math.nan})) in ([signal], [signal] * 2)
    assert signals([*make_history(**{signal: beyond}), Health(13, **HEALTHY)]) == [], "it has recovered"
    assert signals(make_history(**{signal: beyond}), patience=4) == []


def test_limits_can_be_switched_off() -> None:
    limits = [f.name for f in fields(GuardConfig) if f.name.startswith(("max_", "min_")) and f.default]
    limits.remove("max_roll_backs")
    history = [
        *make_history(**dict.fromkeys(HEALTHY, math.nan)),
        Health(20, accuracy=0.5),
        Health(21, accuracy=0.0),
    ]
    assert signals(history) != []
    assert signals(history, **dict.fromkeys(limits)) == []


def test_accuracy_is_measured_against_the_best() -> None:
    accuracies = [0.50, 0.56, 0.47, 0.40]
    history = [Health(i, accuracy=a) for i, a in enumerate(accuracies)]
    assert signals(history[:3]) == []
    (alarm,) = judge(history, GuardConfig())
    assert alarm.message == "validation accuracy 0.400 is 0.160 below the stage's best (limit 0.1)"
    assert signals([*history, Health(4, **HEALTHY)]) == [], "only an evaluation says something new"


def test_two_passes_are_one_update() -> None:
    merged = Health(3, kl=0.1, entropy=0.4, grad_norm=math.nan).merged(
        Health(3, kl=0.2, entropy=0.3, grad_norm=1.0, truncated=0.1)
    )
    assert (merged.kl, merged.entropy, merged.truncated) == (0.2, 0.3, 0.1)
    assert merged.grad_norm is not None
    assert math.isnan(merged.grad_norm)


@pytest.mark.parametrize(
    "change", [{"max_accuracy_drop": 1.5}, {"patience": 0}, {"learning_rate_factor": 2.0}, {"max_ratio": 0.5}]
)
def test_impossible_limits_are_named(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(UserError, match=f"^{name}: "):
        GuardConfig(**change)
