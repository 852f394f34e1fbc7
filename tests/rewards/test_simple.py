"""Rewards that read a text and a few numbers, and where a response's last number stands."""

from __future__ import annotations

from typing import Any

import pytest

from tstar.data import Problem
from tstar.errors import UserError
from tstar.rewards import Response
from tstar.rewards.simple import exact, format, last_number, length, numeric, parallelism  # noqa: A004


def problem(answer: str) -> Problem:
    return Problem("", answer)


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("Paris", "Paris", 1),
        ("Paris", " Paris\n", 1),
        ("Paris", r"It is \boxed{Paris}.", 1),
        ("Paris", r"Paris? No: \boxed{Rome}", 0),
        ("Paris", "paris", 0),
        ("Paris", "It is Paris", 0),
        ("", "", 0),
    ],
)
def test_exact(gold: str, text: str, reward: float) -> None:
    assert exact(problem(gold), Response(text)) == reward


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("1234", r"\boxed{1,234}", 1),
        ("1234", "first 7, then 1234.0 apples", 1),
        ("1234", r"\boxed{7} apples, not 1234", 0),
        ("0.5", ".5", 1),
        ("-3", "it is −3", 1),
        ("3", "x-3", 1),  # behind a word the sign is an operator
        ("1000000", "1e6", 1),
        ("1000000", "1000000.5", 1),
        ("1000000", "1000002", 0),
        ("5", "none", 0),
        ("5", "", 0),
    ],
)
def test_numeric(gold: str, text: str, reward: float) -> None:
    assert numeric(problem(gold), Response(text)) == reward


def test_numeric_has_a_tolerance_and_needs_a_number() -> None:
    assert numeric(problem("3.14159"), Response("3.14"), tolerance=0.01) == 1
    assert numeric(problem("3.14159"), Response("3.14")) == 0
    with pytest.raises(ValueError, match=r"'none' of problem .* holds no number"):
        numeric(problem("none"), Response("3"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,000,000", 1e6),
        ("1,2", 2),  # no thousands: two numbers
        ("1,00", 0),
        ("12.5%", 12.5),
        ("1.", 1),
        ("7" * 400, None),  # not finite
        ("3.5e2", 350),
        ("", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_format_wants_an_end_and_a_box() -> None:
    gold = problem("1")
    assert format(gold, Response(r"\boxed{7}")) == 1
    assert format(gold, Response(r"\boxed{7}", finish_reason="length")) == 0
    assert format(gold, Response("7")) == 0
    assert format(gold, Response(r"\boxed{7")) == 0


@pytest.mark.parametrize(
    ("num_tokens", "reward"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (500, -1)]
)
def test_length_punishes_the_last_tokens(num_tokens: int, reward: float) -> None:
    response = Response("", num_tokens=num_tokens)
    assert length(problem("1"), response, max_tokens=100, buffer=20) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("tokens_per_forward", "reward"), [(0.5, 0), (1.0, 0), (2.5, 0.5), (4.0, 1), (9.0, 1)]
)
def test_parallelism_rises_to_its_target(tokens_per_forward: float, reward: float) -> None:
    response = Response("", tokens_per_forward=tokens_per_forward)
    assert parallelism(problem("1"), response, target=4.0) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (length, {"max_tokens": 10, "buffer": 0}, "rewards: length: buffer: 0"),
        (length, {"max_tokens": 10, "buffer": 11}, "rewards: length: buffer: 11"),
        (parallelism, {"target": 1.0}, "rewards: parallelism: target: 1.0"),
    ],
)
def test_impossible_options_are_named(function: Any, options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        function(problem("1"), Response(""), **options)
