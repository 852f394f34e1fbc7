"""What counts as the same answer, on real gold answers and by pairs; and text written to do harm."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tstar.data import Problem, load_problems
from tstar.rewards import Rewards, RewardSpec, Scores

TIME_LIMIT = 5.0
HOSTILE_TIME_LIMIT = 1.5


@pytest.fixture(scope="module")
def rewards() -> Iterator[Rewards]:
    with Rewards([RewardSpec("math")], num_workers=2, time_limit=TIME_LIMIT) as rewards:
        yield rewards


def score(rewards: Rewards, *pairs: tuple[str, str]) -> Scores:
    """Responses to problems with these gold answers."""
    return rewards.score([Problem("", gold) for gold, _ in pairs], [text for _, text in pairs])


# -- real gold answers -------------------------------------------------------------------------


def _if_whole(answer: str, otherwise: Callable[[int], str]) -> str:
    return otherwise(int(answer)) if re.fullmatch(r"-?\d+", answer) else answer


FORMS: dict[str, Callable[[str], str]] = {
    "box": lambda gold: rf"We get \boxed{{{gold}}}.",
    "display": lambda gold: rf"\[ \boxed{{ {gold} }} \]",
    "after a wrong one": lambda gold: rf"At first \boxed{{171717}}. That is wrong: it is $\boxed{{{gold}}}$.",
    "sentence": lambda gold: f"So the answer is {gold}.",
    "sentence with dollars": lambda gold: f"**Final answer:** ${gold}$",
    "formula at the end": lambda gold: f"Putting it together, we find ${gold}$.",
    "other fractions": lambda gold: rf"\boxed{{{gold}}}".replace(r"\frac", r"\dfrac"),
    "thousands": lambda gold: rf"\boxed{{{_if_whole(gold, lambda n: f'{n:,}')}}}",
    "decimals": lambda gold: rf"\boxed{{{_if_whole(gold, lambda n: f'{n}.00')}}}",
    "dollars in the box": lambda gold: rf"\boxed{{${gold}$}}",
}


@pytest.mark.parametrize(("source", "count"), [("math500", 500), ("gsm8k", 1319), ("aime24", 30)])
def test_every_gold_answer_is_right_in_every_form(
    rewards: Rewards, shared: Path, source: str, count: int
) -> None:
    problems = load_problems(f"{source}:{shared / 'data'}").problems
    assert len(problems) == count
    for name, form in FORMS.items():
        scores = rewards.score(problems, [form(problem.answer) for problem in problems])
        wrong = [p.answer for p, is_right in zip(problems, scores.is_correct, strict=True) if not is_right]
        assert (wrong, scores.failures) == ([], ()), name


@pytest.mark.parametrize(
    ("source", "num_equal"),
    # Neighbours in the file that do have one answer: 5, 7 and 3 in MATH500 (one of them written x=5).
    [("math500", 3), ("gsm8k", 15), ("aime24", 0)],
)
def test_the_next_problems_answer_is_wrong(
    rewards: Rewards, shared: Path, source: str, num_equal: int
) -> None:
    problems = load_problems(f"{source}:{shared / 'data'}").problems
    others = [*problems[1:], problems[0]]
    scores = rewards.score(problems, [rf"\boxed{{{other.answer}}}" for other in others])
    same = [(p.answer, o.answer) for p, o, c in zip(problems, others, scores.is_correct, strict=True) if c]
    assert len(same) == num_equal
    assert all(one.removeprefix("x=") == other.removeprefix("x=") for one, other in same)


def test_no_answer_is_never_right(rewards: Rewards, shared: Path) -> None:
    problems = load_problems(f"math500:{shared / 'data'}").problems
    for text in ("", "I do not know.", r"\boxed{}", r"\boxed{?}"):
        assert not rewards.score(problems, [text] * 500).is_correct.any()
    cut = [rf"So it is \boxed{{{p.answer}" for p in problems]
    listed = [rf"\boxed{{{p.answer}}} or \boxed{{919191}}" for p in problems]
    for texts in (cut, listed):
        assert not rewards.score(problems, texts).is_correct.any()


# -- pairs -------------------------------------------------------------------------------------

SAME = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", r"\frac12"),
    ("50", r"50\%"),
    (r"90^\circ", "90"),
    (r"\$18.90", "18.90"),
    (r"5 \text{ cm}^2", "5"),
    ("10,080", "10080"),
    ("10080", r"10{,}080"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("1,2,3", "3, 1, 2"),
    (r"(-\infty,3)\cup(4,\infty)", r"(4,\infty)\cup(-\infty,3)"),
    ("[0,1]", r"\left[0,1\right]"),
    ("(1,2)", r"\left(1, 2\right)"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "C"),
    (r"\sqrt{8}", r"2\sqrt2"),
    ("x^2+2x+1", "(x+1)^2"),
    ("6 - 5i", "-5i+6"),
    ("y=2x+1", "2x+1"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"1\pm\sqrt2", r"1+\sqrt2, 1-\sqrt2"),
    ("5", r"\,5\,"),
    ("5", "x=5"),
    ("025", "25.0"),
    ("0", "-0"),
    ("-1234", "-1,234"),
    ("-1", "−1"),  # the minus of typography
]
DIFFERENT = [
    ("5", "-5"),
    ("10", "1"),
    ("1000000000000000000001", "1000000000000000000000"),
    ("5", "0.5"),
    ("5", "5x"),
    ("5", "5, 6"),
    ("5", "5 or 6"),
    ("5", "<5"),
    ("100000", "100001"),
    (r"\frac13", "0.33"),
    (r"\pi", "3.14159"),
    (r"\sqrt2", "1.414"),
    ("(1,2)", "(2,1)"),
    ("[0,1]", "(0,1)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("12", "1,2"),
    ("x+1", "y+1"),
    ("x<5", "x>5"),
    (r"x\le5", "x<5"),
    (r"\text{Evelyn}", r"\text{Debra}"),
    (r"\text{(C)}", r"\text{(D)}"),
    ("1", "True"),
    ("0", r"\emptyset"),
    ("1000", "1,00"),
    # Look-alikes: fullwidth one, Cyrillic x, mathematical bold five.
    ("1", "１"),
    ("x", "х"),
    ("5", "𝟓"),
]


def test_the_same_in_other_words(rewards: Rewards) -> None:
    scores = score(rewards, *[(gold, rf"\boxed{{{answer}}}") for gold, answer in SAME])
    assert [pair for pair, is_right in zip(SAME, scores.is_correct, strict=True) if not is_right] == []


def test_not_the_same(rewards: Rewards) -> None:
    scores = score(rewards, *[(gold, rf"\boxed{{{answer}}}") for gold, answer in DIFFERENT])
    assert [pair for pair, is_right in zip(DIFFERENT, scores.is_correct, strict=True) if is_right] == []
    assert scores.failures == ()


@pytest.mark.xfail(reason="known false positives of math-verify, docs/rewards.md", strict=True)
@pytest.mark.parametrize(
    ("gold", "answer"), [("50\\%", "0.5"), ("(3,4)", "3,4"), ("5", "6=5"), ("e", "2.718281828")]
)
def test_known_false_positives(rewards: Rewards, gold: str, answer: str) -> None:
    assert not score(rewards, (gold, rf"\boxed{{{answer}}}")).is_correct.any()


@pytest.mark.xfail(reason="known false negatives of math-verify, docs/rewards.md", strict=True)
@pytest.mark.parametrize(("gold", "answer"), [("1500", "1.5e3"), ("10", r"\binom52"), ("5", "five")])
def test_known_false_negatives(rewards: Rewards, gold: str, answer: str) -> None:
    assert score(rewards, (gold, rf"\boxed{{{answer}}}")).is_correct.all()


def test_a_gold_answer_that_is_none_is_the_datas_mistake(rewards: Rewards) -> None:
    scores = score(rewards, ("", r"\boxed{5}"), ("5", r"\boxed{5}"))
    assert scores.is_correct.tolist() == [False, True]
    (failure,) = scores.failures
    assert failure.cause == "error"
    assert "is no expression" in failure.detail


# -- harm --------------------------------------------------------------------------------------

HOSTILE = {
    "tower": r"\boxed{9**9**9**9}",
    "tower of LaTeX": r"\boxed{9^{9^{9^{9}}}}",
    "factorial tower": r"\boxed{9!!!!!!!!!}",
    "factorial": r"\boxed{99999999999!}",
    "braces": "{" * 10_000_000,
    "boxed braces": r"\boxed{" + "{" * 10_000_000,
    "closed braces": r"\boxed{" + "{" * 5_000_000 + "}" * 5_000_000 + "}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 10_000 + "2" + "}" * 10_001,
    "nested fractions that fit": r"\boxed{" + r"\frac{1}{" * 190 + "2" + "}" * 191,
    "nested roots, no box": "the answer is $" + r"\sqrt{" * 250 + "2" + "}" * 250 + "$",
    "endless simplification": r"\boxed{"
    + "+".join(rf"\sin(x^{{{i}}})^{{\cos({i}x)}}" for i in range(60))
    + "}",
    "a sum without end": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^{\pi}}}",
    "an integral": r"\boxed{\int_0^{10^9} \frac{e^{x^x}}{\Gamma(x!)} dx}",
    "a polynomial": r"\boxed{(a+b+c+d+e+f)^{9999}}",
    "look-alikes": r"\boxed{" + "５٥५𝟓" * 300 + "}",
    "digits": r"\boxed{" + "7" * 1990 + "}",
    "digits, no box": "7" * 5_000_000,
    "parentheses": r"\boxed{" + "(" * 900 + "5" + ")" * 900 + "}",
    "minus signs": r"\boxed{" + "-" * 1900 + "5}",
    "set builder": r"\boxed{\{" + ",".join(map(str, range(450))) + r"\}}",
    "nul and surrogates": "\\boxed{5\x00\ud800\udfff}",
    "python": r"\boxed{__import__('os').system('touch /tmp/tstar-was-here')}",
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Rewards]:
    with Rewards([RewardSpec("math")], num_workers=2, time_limit=HOSTILE_TIME_LIMIT) as rewards:
        yield rewards


def test_no_answer_harms_the_run(impatient: Rewards) -> None:
    """Each is followed by an innocent answer; all of them are judged, in bounded time."""
    texts = [text for hostile in HOSTILE.values() for text in (hostile, r"\boxed{12}")]
    began = time.monotonic()
    scores = score(impatient, *[("12", text) for text in texts])
    seconds = time.monotonic() - began
    assert scores.is_correct.tolist() == [False, True] * len(HOSTILE)
    assert seconds < (HOSTILE_TIME_LIMIT + 10) * len(HOSTILE)  # not one of them waited for, starts included
    assert not Path("/tmp/tstar-was-here").exists()  # noqa: S108
    assert {failure.index % 2 for failure in scores.failures} <= {0}
    assert score(impatient, ("12", r"\boxed{12}")).is_correct.all()


def test_a_hostile_gold_answer_is_bounded_too(impatient: Rewards) -> None:
    scores = score(impatient, ("9**9**9**9", r"\boxed{5}"), ("12", r"\boxed{12}"))
    assert scores.is_correct.tolist() == [False, True]
