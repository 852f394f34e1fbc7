"""Runs that differ by their seed alone: which belong together, and what is known of their mean.

A seed shows in the names of directories: `seed0/tstar` and `seed1/tstar`, or `tstar-seed0` and `tstar-s1`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import mean, stdev

from tstar.report.sources import Interval

_SEED = re.compile(r"(?:^|(?<=[/_.-]))s(?:eed)?[=_-]?(\d+)(?=$|[/_.-])", re.IGNORECASE)
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided 95 %, from 1 degree of freedom."""
_Z95 = 1.959964


def split_seed(name: str) -> tuple[str, str | None]:
    """The name without its seed, and the seed: "seed1/tstar" is "tstar" of seed "1"."""
    found = _SEED.search(name)
    if found is None:
        return name, None
    before, after = name[: found.start()], name[found.end() :]
    separator = "/" if before.endswith("/") or after.startswith("/") else "-"
    parts = (before.rstrip("/_.-"), after.lstrip("/_.-"))
    return separator.join(part for part in parts if part), found[1]


def student_t(degrees: int) -> float:
    """Quantile of 97.5 %; beyond the table by its expansion, good to two decimals."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, n = _Z95, degrees
    return z + z * (z * z + 1) / (4 * n) + z * (5 * z * z * z * z + 16 * z * z + 3) / (96 * n * n)


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of the mean of two numbers or more."""
    return student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def mean_interval(intervals: Sequence[Interval | None], top: float | None = None) -> Interval | None:
    """The mean over seeds, with Student's interval.

    All seeds answer the same problems, so that more seeds say no more of other problems: the interval is
    never narrower than those of single evaluations are on average. Few seeds that agree by luck then claim
    nothing either. `top`: what no value can exceed.
    """
    known = [i for i in intervals if i is not None]
    if len(known) <= 1:
        return known[0] if known else None
    values = [i.value for i in known]
    middle, over_seeds = mean(values), half_width(values)
    below = mean(0.0 if i.low is None else i.value - i.low for i in known)
    above = mean(0.0 if i.high is None else i.high - i.value for i in known)
    high = middle + max(over_seeds, above)
    return Interval(
        middle, max(0.0, middle - max(over_seeds, below)), high if top is None else min(top, high)
    )


def paired_difference(ours: Sequence[Interval], theirs: Sequence[Interval]) -> Interval:
    """Mean of the differences, seed by seed, with Student's interval; two seeds or more.

    Differences that are alike by luck claim no more than so many pairs of independent evaluations could.
    """
    pairs = list(zip(ours, theirs, strict=True))
    differences = [one.value - other.value for one, other in pairs]
    squares = [_half(one) ** 2 + _half(other) ** 2 for one, other in pairs]
    middle, half = mean(differences), max(half_width(differences), math.sqrt(sum(squares)) / len(pairs))
    return Interval(middle, middle - half, middle + half)


def _half(interval: Interval) -> float:
    return 0.0 if interval.low is None or interval.high is None else (interval.high - interval.low) / 2
