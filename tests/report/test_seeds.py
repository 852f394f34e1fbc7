"""What belongs together but for its seed, and what the mean over seeds is known to."""

from __future__ import annotations

import pytest

from tstar.report.seeds import half_width, mean_interval, paired_difference, split_seed, student_t
from tstar.report.sources import Interval


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("seed0/tstar", ("tstar", "0")),
        ("runs/seed1/eval/tstar-b16/dynamic-0.9", ("runs/eval/tstar-b16/dynamic-0.9", "1")),
        ("tstar-seed12", ("tstar", "12")),
        ("tstar-s3", ("tstar", "3")),
        ("b4-s0-inverse", ("b4-inverse", "0")),
        ("Seed_2/x", ("x", "2")),
        ("x/seed=1", ("x", "1")),
        ("seed7", ("", "7")),
        ("tstar", ("tstar", None)),
        ("bs16/class4", ("bs16/class4", None)),
        ("static-4", ("static-4", None)),
        ("seeds/tstar", ("seeds/tstar", None)),
    ],
)
def test_seeds_are_read_from_names(name: str, parts: tuple[str, str | None]) -> None:
    assert split_seed(name) == parts


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (2, 4.303), (9, 2.262), (10, 2.228), (30, 2.042)])
def test_student_t_is_that_of_the_tables(degrees: int, t: float) -> None:
    assert student_t(degrees) == pytest.approx(t, abs=5e-3)


def test_half_width_by_hand() -> None:
    # Standard deviation 1, standard error 1 / sqrt(3).
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)


def test_the_mean_of_seeds() -> None:
    one = Interval(0.5, 0.4, 0.55)
    assert mean_interval([None, one]) == one
    assert mean_interval([None]) is None
    same = mean_interval([one, one])
    assert same is not None
    assert (same.value, same.low, same.high) == pytest.approx((0.5, 0.4, 0.55))
    far = mean_interval([Interval(0.9), Interval(1.0)], top=1.0)
    assert far is not None
    assert (far.value, far.low, far.high) == pytest.approx((0.95, 0.95 - 12.706 * 0.05, 1.0))


def test_differences_are_taken_seed_by_seed() -> None:
    # Differences 0.1, 0.2, 0.3.
    found = paired_difference([Interval(v) for v in (0.5, 0.7, 0.9)], [Interval(v) for v in (0.4, 0.5, 0.6)])
    half = 4.303 * 0.1 / 3**0.5
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    with pytest.raises(ValueError, match="zip"):
        paired_difference([Interval(0.5), Interval(0.7)], [Interval(0.4)])


def test_equal_differences_are_no_proof() -> None:
    ours, theirs = ([Interval(v, v - 0.04, v + 0.04) for v in values] for values in ((0.5, 0.7), (0.4, 0.6)))
    found = paired_difference(ours, theirs)
    half = (0.04**2 + 0.04**2) ** 0.5 / 2**0.5
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1 - half, 0.1 + half))
