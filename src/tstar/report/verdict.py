"""The header's sentences: what the numbers say, and whether the intervals let them say it."""

from __future__ import annotations

from collections.abc import Iterator

from tstar.report.record import Report, Score
from tstar.report.sources import Interval


def sentences(report: Report) -> Iterator[str]:
    """One for each setting at the largest block size that several methods have; then the runs."""
    is_compared = False
    for setting in range(len(report.settings)):
        scores = _comparable(report, setting)
        if scores:
            is_compared = True
            yield _compare(report, scores)
    if not is_compared and report.scores:
        yield "No two methods were evaluated at the same block size and setting: there is nothing to compare."
    yield from _runs(report)


def _comparable(report: Report, setting: int) -> list[Score]:
    """The scores at the largest block size with several methods, best first; AR models have none."""
    by_size: dict[int, list[Score]] = {}
    for score in report.scores:
        is_ar = report.methods[score.method].slot == "ar"
        if score.setting == setting and score.accuracy is not None and not is_ar:
            by_size.setdefault(score.block_size, []).append(score)
    sizes = [size for size, scores in by_size.items() if len(scores) > 1]
    return sorted(by_size[max(sizes)], key=lambda s: -_value(s.accuracy)) if sizes else []


def _compare(report: Report, scores: list[Score]) -> str:
    best, second = scores[0], scores[1]
    names = [report.methods[score.method].name for score in scores]
    listed = "; ".join(f"{name} {percent(score.accuracy)}" for name, score in zip(names, scores, strict=True))
    gap = 100 * (_value(best.accuracy) - _value(second.accuracy))
    if gap == 0:
        verdict = "Equal."
    elif _overlap(best.accuracy, second.accuracy):
        verdict = (
            f"{names[0]} is {gap:.1f} points ahead of {names[1]}, but the intervals overlap: "
            "these data do not separate them."
        )
    else:
        verdict = f"{names[0]} is {gap:.1f} points ahead of {names[1]}; the intervals do not overlap."
    head = f"{report.settings[best.setting]}, B = {best.block_size}"
    return f"{head}: {listed}. {verdict}"


def _runs(report: Report) -> Iterator[str]:
    for number, run in enumerate(report.runs):
        if run.guards:
            actions = [g for g in run.guards if g.action != "warn"]
            first = (actions or run.guards)[0]
            done = {"roll_back": "rolled it back", "stop": "stopped it", "warn": "warned"}.get(
                first.action, first.action
            )
            more = f" ({len(run.guards)} alarms in all)" if len(run.guards) > 1 else ""
            yield f"{run.name}: the guard {done} at update {first.update_step}: {first.message}{more}."
        curve = next((c for c in report.validation.curves if c.run == number), None)
        if curve is not None and not report.scores:
            points = [point for segment in curve.segments for point in segment]
            best = max(points, key=lambda p: p.accuracy.value)
            yield (
                f"{run.name}: best validation accuracy {percent(best.accuracy)} "
                f"after {best.update_step} updates."
            )


def percent(interval: Interval | None) -> str:
    """As in "71.2 % [68.0, 74.1]"."""
    if interval is None:
        return "–"
    text = f"{100 * interval.value:.1f} %"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _value(interval: Interval | None) -> float:
    return -1.0 if interval is None else interval.value


def _overlap(one: Interval | None, other: Interval | None) -> bool:
    """Intervals that are not known count as overlapping: nothing is claimed from them."""
    bounds = [b for i in (one, other) for b in ((i.low, i.high) if i is not None else (None, None))]
    low, high, other_low, other_high = bounds
    if low is None or high is None or other_low is None or other_high is None:
        return True
    return low <= other_high and other_low <= high
