"""The header's sentences: what the numbers say, and whether their intervals let them say it."""

from __future__ import annotations

from collections.abc import Iterator

from tstar.report.record import Claim, Report, Score
from tstar.report.seeds import paired_difference
from tstar.report.sources import Interval


def claims(report: Report) -> Iterator[Claim]:
    """One for each setting at the largest block size that several methods have; then the runs."""
    is_compared = False
    for setting in range(len(report.settings)):
        scores = _comparable(report, setting)
        if scores:
            is_compared = True
            yield _compare(report, scores)
    if not is_compared and report.scores:
        yield Claim(
            "No two methods were evaluated at the same block size and setting: there is nothing to compare."
        )
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


def _compare(report: Report, scores: list[Score]) -> Claim:
    """T*, if it is there, against the best of the others; else the best two."""
    names = {score.method: report.methods[score.method].name for score in scores}
    ours = next((s for s in scores if report.methods[s.method].slot == "tstar"), scores[0])
    other = next(s for s in scores if s is not ours)
    if any(_value(s.accuracy) for s in scores):
        claim = _difference(names[ours.method], names[other.method], ours, other)
    else:
        claim = "no method has solved a problem."
    counts = {s.num_evaluations for s in scores}
    several = counts.pop() if len(counts) == 1 else 0
    head = report.settings[ours.setting] + (f", means of {several} seeds" if several > 1 else "")
    listed = "; ".join(f"{names[s.method]} {_show(s, with_count=not several)}" for s in scores)
    where = f"B = {ours.block_size}"
    if len({s.setting for s in report.scores}) > 1:
        where = f"{report.settings[ours.setting]}, {where}"
        head = head.removeprefix(report.settings[ours.setting]).removeprefix(", ")
    numbers = f"{head}: {listed}." if head else f"{listed}."
    unfinished = sorted({run.method for run in report.runs if run.is_running and run.method in names})
    if unfinished:
        numbers += f" Not finished: {', '.join(names[m] for m in unfinished)}."
    return Claim(f"{where}: {claim}", numbers)


def _difference(name: str, other_name: str, ours: Score, other: Score) -> str:
    """Seeds that both have are compared one by one, which says more than two intervals side by side."""
    seeds = sorted(set(ours.by_seed) & set(other.by_seed))
    if len(seeds) > 1:
        found = paired_difference([ours.by_seed[s] for s in seeds], [other.by_seed[s] for s in seeds])
        bounds = sorted(b if found.value >= 0 else -b for b in (found.low or 0.0, found.high or 0.0))
        gap, support = found.value, f" over {len(seeds)} seeds"
        how_much = f"{100 * abs(gap):.1f} points [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"
        is_separate, doubt = bounds[0] > 0, "the interval holds 0"
    else:
        gap, support = _value(ours.accuracy) - _value(other.accuracy), ""
        how_much = f"{100 * abs(gap):.1f} points"
        is_separate, doubt = not _overlap(ours.accuracy, other.accuracy), "the intervals overlap"
    if gap == 0:
        return f"{name} and {other_name} are equal{support}."
    where = f"{name} is {how_much} {'ahead of' if gap > 0 else 'behind'} {other_name}{support}"
    if not is_separate:
        return f"{where}, but {doubt}: these data do not separate them."
    return f"{where}." if support else f"{where}; the intervals do not overlap."


def _show(score: Score, with_count: bool) -> str:
    several = f" (mean of {score.num_evaluations} seeds)" if with_count and score.num_evaluations > 1 else ""
    forwards = score.tokens_per_forward
    speed = "" if forwards is None else f" at TPF {forwards.value:.2f}"
    return f"{percent(score.accuracy)}{speed}{several}"


def _runs(report: Report) -> Iterator[Claim]:
    for number, run in enumerate(report.runs):
        if run.guards:
            actions = [g for g in run.guards if g.action != "warn"]
            first = (actions or run.guards)[0]
            done = {"roll_back": "rolled it back", "stop": "stopped it", "warn": "warned"}.get(
                first.action, first.action
            )
            more = f" ({len(run.guards)} alarms in all)" if len(run.guards) > 1 else ""
            yield Claim(f"{run.name}: the guard {done} at update {first.update_step}: {first.message}{more}.")
        curve = next((c for c in report.validation.curves if c.run == number), None)
        if curve is not None and not report.scores:
            points = [point for segment in curve.segments for point in segment]
            now = points[-1].block_size
            best = max((p for p in points if p.block_size == now), key=lambda p: p.accuracy.value)
            yield Claim(
                f"{run.name}: best validation accuracy at B = {now} {percent(best.accuracy)}, "
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
