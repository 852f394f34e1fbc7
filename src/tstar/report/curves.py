"""The curves of training: validation accuracy, and what tells early that a run goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Literal, TypeVar

from tstar.report.sources import Interval, Notice, RunSource, TrainEvent

MAX_POINTS = 1000
"""Of one curve; longer ones are thinned."""

Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class ValidationPoint:
    """One validation."""

    update_step: int
    accuracy: Interval
    is_best: bool


@dataclass(frozen=True)
class ValidationCurve:
    """One run. A roll-back begins a new segment."""

    run: int
    segments: tuple[tuple[ValidationPoint, ...], ...]


@dataclass(frozen=True)
class BaseLine:
    """A base's accuracy at its block size."""

    block_size: int
    accuracy: Interval


@dataclass(frozen=True)
class ValidationCurves:
    """The paper's first figure."""

    curves: tuple[ValidationCurve, ...]
    bases: tuple[BaseLine, ...]
    bases_setting: str
    """Where the bases' lines come from."""


@dataclass(frozen=True)
class HealthCurve:
    """One quantity of one run."""

    run: int
    segments: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True)
class HealthPanel:
    """One quantity of all runs."""

    name: str
    title: str
    note: str
    """How to read it, in one line."""
    kind: Literal["number", "share", "log"]
    curves: tuple[HealthCurve, ...]


@dataclass(frozen=True)
class Health:
    """Small multiples over update steps."""

    panels: tuple[HealthPanel, ...]


def draw_validation(
    runs: Sequence[RunSource], bases: Mapping[int, Interval], bases_setting: str
) -> ValidationCurves:
    curves = []
    for number, run in enumerate(runs):
        points = [ValidationPoint(v.update_step, v.accuracy, v.is_best) for v in run.validations]
        if points:
            segments = _segments(points, lambda point: point.update_step)
            curves.append(ValidationCurve(number, tuple(segments)))
    lines = tuple(BaseLine(block_size, accuracy) for block_size, accuracy in sorted(bases.items()))
    return ValidationCurves(tuple(curves), lines, bases_setting)


@dataclass(frozen=True)
class _Quantity:
    """How a panel is made of events."""

    name: str
    title: str
    note: str
    kind: Literal["number", "share", "log"]
    of: Callable[[Mapping[str, float]], float | None]
    over_passes: Callable[[Sequence[float]], float] = mean
    """The worst pass of an update is what a guard looks at; the mean is what a reader does."""


def _named(name: str) -> Callable[[Mapping[str, float]], float | None]:
    return lambda metrics: metrics.get(name)


def _truncated(metrics: Mapping[str, float]) -> float | None:
    num_rollouts = metrics.get("num_rollouts")
    if "num_truncated" in metrics and num_rollouts:
        return metrics["num_truncated"] / num_rollouts
    return metrics.get("truncated")


QUANTITIES = (
    _Quantity("reward", "Reward", "Mean of the rollouts.", "number", _named("reward_mean")),
    _Quantity(
        "kl", "KL to the old policy", "Nats per action; the larger pass.", "log", _named("kl_old"), max
    ),
    _Quantity("ratio", "Largest ratio", "Of new to old probability.", "log", _named("ratio_max"), max),
    _Quantity("entropy", "Entropy", "Nats per action.", "number", _named("entropy")),
    _Quantity("grad_norm", "Gradient norm", "Before clipping.", "log", _named("grad_norm"), max),
    _Quantity("truncated", "Truncated", "Rollouts that ran out of tokens.", "share", _truncated),
    _Quantity(
        "tokens_per_forward", "Tokens per forward", "Of the rollouts.", "number", _named("tokens_per_forward")
    ),
    _Quantity("local_strict", "LocalStrict", "1 is left to right.", "number", _named("local_strict")),
    _Quantity(
        "response_length", "Response length", "Tokens, of the rollouts.", "number", _named("response_length")
    ),
)


def draw_health(runs: Sequence[RunSource], notices: list[Notice]) -> Health:
    for run in runs:
        names = dict.fromkeys(name for event in run.train for name in event.not_finite)
        if names:
            first = next(event.update_step for event in run.train if event.not_finite)
            text = f"{', '.join(names)} not finite (first at update {first}): gaps in the curves"
            notices.append(Notice(run.name, text))
        refused = [event for event in run.train if event.refused is not None]
        if refused:
            text = f"{len(refused)} passes were not trained on (first at update {refused[0].update_step}): "
            notices.append(Notice(run.name, f"{text}{refused[0].refused}"))
    panels = []
    for quantity in QUANTITIES:
        curves = []
        for number, run in enumerate(runs):
            segments = tuple(
                _thin(segment)
                for segment in _segments(list(_points(run.train, quantity)), lambda point: point[0])
            )
            if segments:
                curves.append(HealthCurve(number, segments))
        if curves:
            # A KL of exactly 0 is common, and has no logarithm.
            has_log = all(y > 0 for curve in curves for segment in curve.segments for _, y in segment)
            kind = "number" if quantity.kind == "log" and not has_log else quantity.kind
            panels.append(HealthPanel(quantity.name, quantity.title, quantity.note, kind, tuple(curves)))
    longest = max((len(run.train) for run in runs), default=0)
    if longest > MAX_POINTS:
        notices.append(Notice("report", f"curves of more than {MAX_POINTS} updates are thinned"))
    return Health(tuple(panels))


def _points(events: Sequence[TrainEvent], quantity: _Quantity) -> Iterator[Point]:
    """One for each update: its passes stand one after the other."""
    values: list[float] = []
    for number, event in enumerate(events):
        value = quantity.of(event.metrics)
        if value is not None:
            values.append(value)
        is_last = number + 1 == len(events) or events[number + 1].update_step != event.update_step
        if is_last:
            if values:
                yield (float(event.update_step), float(f"{quantity.over_passes(values):.6g}"))
            values = []


def _segments(points: Sequence[T], at: Callable[[T], float]) -> Iterator[tuple[T, ...]]:
    """Cut where a roll-back took the run to an earlier update."""
    cuts = [i + 1 for i, (one, next_one) in enumerate(pairwise(points)) if at(next_one) <= at(one)]
    bounds = [0, *cuts, len(points)]
    return (tuple(points[start:stop]) for start, stop in pairwise(bounds) if stop > start)


def _thin(points: tuple[Point, ...]) -> tuple[Point, ...]:
    stride = -(-len(points) // MAX_POINTS)
    return points if stride <= 1 else (*points[:-1:stride], points[-1])
