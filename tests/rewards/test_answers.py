"""Where the answer stands, for friendly and for hostile text."""

import time

import pytest

from tstar.rewards.answers import answer_phrase, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"\boxed{1} is wrong, so the answer is \boxed{2}", "2"),
        (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{ 7 }", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{1}", r"\{1"),  # an escaped brace opens nothing
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{x = \boxed{3}}", "3"),
        (r"$x = \boxed{1}$ or $x = \boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2} and \boxed{3}", "1, 2, 3"),
        (r"\boxed{4}" + "\n\n" + r"\boxed{4}", "4"),
        (r"\boxed{5}, and \boxed{6", "5"),  # cut inside a box: the last closed one
        (r"\boxed{6", None),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed 5", None),
        ("five", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_listing_every_candidate_is_one_answer() -> None:
    assert last_boxed(" ".join(rf"\boxed{{{i}}}" for i in range(5))) == "0, 1, 2, 3, 4"


@pytest.mark.parametrize(
    "text",
    [
        "{" * 10_000_000,
        "}" * 10_000_000,
        r"\boxed{" * 1_500_000,
        r"\boxed{" + "{" * 10_000_000,
        r"\boxed" * 1_700_000,
        r"\boxed{1}" * 1_000_000,
        r"\boxed{1}" + "x_1=" * 2_000_000 + r"\boxed{2}",
        "answer is " * 1_000_000,
        "answer" * 1_700_000,
    ],
)
def test_ten_megabytes_take_no_time(text: str) -> None:
    began = time.perf_counter()
    last_boxed(text)
    answer_phrase(text)
    assert time.perf_counter() - began < 1


def test_a_box_too_long_to_be_an_answer_is_none() -> None:
    assert last_boxed(r"\boxed{" + "1" * 1000 + "}") == "1" * 1000
    assert last_boxed(r"\boxed{" + "1" * 3000 + "}") is None


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("The answer is 5.", "5."),
        ("Answer: $x$\nSo it is.", "$x$"),
        ("the answer is:\n 7", "7"),
        ("answer is 1. No: the answer is 2", "2"),
        ("The answers are many", None),
    ],
)
def test_answer_phrase(text: str, phrase: str | None) -> None:
    assert answer_phrase(text) == phrase
