"""The curves of training: validation accuracy, and what tells early that a run goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Literal, TypeVar

from tstar.report.seeds import mean_interval
from tstar.report.sources import Interval, Notice, RunSource, TrainEvent

MAX_POINTS = 1000
"""Of one curve; longer ones are thinned."""

Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Arm:
    """Runs that differ by their seed alone; a run without such kin is alone in its own."""

    name: str
    method: int
    runs: tuple[int, ...]


@dataclass(frozen=True)
class ValidationPoint:
    """One validation."""

    update_step: int
    block_size: int
    accuracy: Interval
    is_best: bool


@dataclass(frozen=True)
class ValidationCurve:
    """One run. A roll-back begins a new segment."""

    run: int
    segments: tuple[tuple[ValidationPoint, ...], ...]


@dataclass(frozen=True)
class MeanCurve:
    """The mean of an arm's runs, where all of them have been validated."""

    arm: int
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
    means: tuple[MeanCurve, ...]
    """Of arms with several runs."""
    policies: tuple[str, ...]
    """Unmask policies of the validations."""
    bases: tuple[BaseLine, ...]
    bases_setting: str
    """Where the bases' lines come from; empty: from the runs' validations before their first update."""


@dataclass(frozen=True)
class HealthCurve:
    """One quantity of one run."""

    run: int
    segments: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True)
class HealthMean:
    """One quantity of an arm with several runs: their mean, as far as all of them go."""

    arm: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class HealthPanel:
    """One quantity of all runs."""

    name: str
    title: str
    note: str
    """How to read it, in one line."""
    kind: Literal["number", "share", "log"]
    curves: tuple[HealthCurve, ...]
    means: tuple[HealthMean, ...]


@dataclass(frozen=True)
class Health:
    """Small multiples over update steps."""

    panels: tuple[HealthPanel, ...]


def draw_validation(
    runs: Sequence[RunSource], arms: Sequence[Arm], bases: Mapping[int, Interval | None], bases_setting: str
) -> ValidationCurves:
    curves = []
    for number, run in enumerate(runs):
        points = [
            ValidationPoint(v.update_step, v.block_size, v.accuracy, v.is_best) for v in run.validations
        ]
        if points:
            segments = _segments(points, lambda point: point.update_step)
            curves.append(ValidationCurve(number, tuple(segments)))
    lines = tuple(
        BaseLine(size, accuracy) for size, accuracy in sorted(bases.items()) if accuracy is not None
    )
    means = [
        MeanCurve(number, found)
        for number, arm in enumerate(arms)
        if (found := _mean_segments([runs[i] for i in arm.runs]))
    ]
    policies = dict.fromkeys(v.policy for run in runs for v in run.validations if v.policy is not None)
    return ValidationCurves(tuple(curves), tuple(means), tuple(policies), lines, bases_setting)


def _mean_segments(runs: Sequence[RunSource]) -> tuple[tuple[ValidationPoint, ...], ...]:
    """One for each block size; where a roll-back validated twice, the last one counts. Empty for one run."""
    found = [{(v.block_size, v.update_step): v.accuracy for v in run.validations} for run in runs]
    if len(found) < 2:
        return ()
    shared = sorted(set(found[0]).intersection(*found[1:]))
    sizes = dict.fromkeys(size for size, _ in shared)
    return tuple(
        tuple(
            ValidationPoint(step, size, accuracy, is_best=False)
            for of, step in shared
            if of == size and (accuracy := mean_interval([f[of, step] for f in found], 1.0)) is not None
        )
        for size in sizes
    )


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
    trivial: float | None = None
    """Its value wherever a pass has one optimizer step only: then the curve says nothing."""


def _named(name: str) -> Callable[[Mapping[str, float]], float | None]:
    return lambda metrics: metrics.get(name)


def _truncated(metrics: Mapping[str, float]) -> float | None:
    num_rollouts = metrics.get("num_rollouts")
    if "num_truncated" in metrics and num_rollouts:
        return metrics["num_truncated"] / num_rollouts
    return metrics.get("truncated")


def _uniform(metrics: Mapping[str, float]) -> float | None:
    num_groups = metrics.get("num_groups")
    return (
        metrics["num_uniform_groups"] / num_groups if num_groups and "num_uniform_groups" in metrics else None
    )


QUANTITIES = (
    _Quantity("reward", "Reward", "Mean of the rollouts.", "number", _named("reward_mean")),
    _Quantity(
        "kl",
        "KL to the old policy",
        "Nats per action; the larger pass.",
        "log",
        _named("kl_old"),
        max,
        trivial=0.0,
    ),
    _Quantity(
        "kl_base", "KL to the base", "Nats per action; the larger pass.", "number", _named("kl_base"), max
    ),
    _Quantity(
        "ratio",
        "Largest ratio",
        "Of new to old probability.",
        "log",
        _named("ratio_max"),
        max,
        trivial=1.0,
    ),
    _Quantity(
        "rollout_kl",
        "Engine against trainer",
        "KL of their log-probs: rounding.",
        "log",
        _named("rollout_train_kl"),
        max,
    ),
    _Quantity("entropy", "Entropy", "Nats per action.", "number", _named("entropy")),
    _Quantity("grad_norm", "Gradient norm", "Before clipping.", "log", _named("grad_norm"), max),
    _Quantity("truncated", "Truncated", "Rollouts that ran out of tokens.", "share", _truncated),
    _Quantity(
        "tokens_per_forward", "Tokens per forward", "Of the rollouts.", "number", _named("tokens_per_forward")
    ),
    _Quantity(
        "uniform",
        "Groups without spread",
        "Their responses all earned the same.",
        "share",
        _uniform,
    ),
    _Quantity("local_strict", "LocalStrict", "1 is left to right.", "number", _named("local_strict")),
    _Quantity(
        "response_length", "Response length", "Tokens, of the rollouts.", "number", _named("response_length")
    ),
)


def draw_health(runs: Sequence[RunSource], arms: Sequence[Arm], notices: list[Notice]) -> Health:
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
            means = tuple(_health_means(curves, arms))
            seen = {y for curve in curves for segment in curve.segments for _, y in segment}
            is_trivial = seen == {quantity.trivial}
            note = f"Always {quantity.trivial:g}: one optimizer step a pass." if is_trivial else quantity.note
            panels.append(HealthPanel(quantity.name, quantity.title, note, kind, tuple(curves), means))
    longest = max((len(run.train) for run in runs), default=0)
    if longest > MAX_POINTS:
        notices.append(Notice("report", f"curves of more than {MAX_POINTS} updates are thinned"))
    return Health(tuple(panels))


def _health_means(curves: Sequence[HealthCurve], arms: Sequence[Arm]) -> Iterator[HealthMean]:
    known = {curve.run: {x: y for segment in curve.segments for x, y in segment} for curve in curves}
    for number, arm in enumerate(arms):
        own = [known[run] for run in arm.runs if run in known]
        if len(own) > 1 and len(own) == len(arm.runs):
            shared = sorted(set(own[0]).intersection(*own[1:]))
            yield HealthMean(number, tuple((x, float(f"{mean(o[x] for o in own):.6g}")) for x in shared))


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
