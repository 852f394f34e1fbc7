r"""The reward for mathematics: math-verify on the boxed answer, else on the last expression.

math-verify and SymPy may take for ever and any amount of memory on what a policy writes, so this runs in
`tstar.rewards.workers` only. math-verify's own time limit is off: it is an alarm signal, which Python
delivers between two bytecodes, never inside one long multiplication of integers. The worker's is a kill.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from tstar.data import Problem
from tstar.rewards.answers import MAX_ANSWER_LENGTH, answer_phrase, has_box, last_boxed

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its time limit is off

_IMAGINARY = re.compile(r"(?<=[\d}])i(?![a-zA-Z])")
_OUTER_SPACE = re.compile(r"^(?:\\[,;:! ]|\s|~)+|(?:\\[,;:! ]|(?<!\\)\\$|\s|~)+$")
_WHOLE = re.compile(r"(?P<minus>-)?(?P<digits>\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?", re.ASCII)
_TEXT = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_ENDS_IN_MATHS = re.compile(r"(?:(?<!\\)\$\$?|\\[(\[])((?:\\\$|[^$\n])+?)(?:\$\$?|\\[)\]])[\s.*]*$")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,\\!|\\[, ]|~|\{,\})\d{3})+(?!\d)", re.ASCII)
_GAP = re.compile(r"(\\(?:text\w*|mathrm|mathbf|mbox)) +(?=\{)")
_PERCENT = re.compile(r"\s*\\?%$")
_BASED = re.compile(r"(\w+)_(?:\{?(\d+)\}?|\{\s*\\text\s?\{\s*(\d+)\s*\}\s*\})", re.ASCII)
_NAMED = re.compile(r"^[a-zA-Z](?:_\{?\w\}?|\([a-z]\))?\s*=\s*(?=[^=]+$)")


def math(problem: Problem, response: str) -> float:
    """1 if the answer equals the gold one: numbers, fractions, sets, intervals, matrices, text; units and
    thousands separators apart. No answer is never equal to anything.

    The answer is the last box; without one, what a sentence gives as the answer, or the formula at the
    very end, or else what math-verify finds in the last lines. A box that is empty or never closed is no
    answer, whatever stands around it.
    """
    gold = problem.answer
    boxed = last_boxed(response)
    if boxed is not None:
        return float(are_equal(gold, boxed))
    if has_box(response):
        return 0.0
    tail = response[-MAX_ANSWER_LENGTH:]
    spoken = answer_phrase(tail)
    phrase = _without_delimiters(spoken or "")
    if phrase and _WORD.search(_TEXT.sub("", phrase)) is None:
        return float(are_equal(gold, phrase))
    if phrase and _words(phrase) == _words(gold):
        return 1.0
    formula = _ENDS_IN_MATHS.search(tail) if spoken is None else None
    if formula is not None:
        return float(are_equal(gold, formula[1]))
    return float(verify(_parse_gold(gold), _parse(tail), timeout_seconds=None))


@lru_cache(maxsize=65_536)
def are_equal(gold: str, answer: str) -> bool:
    """Whether an answer (the inside of a box) equals the gold one. Cached: samples often agree."""
    gold, answer = _alike(_tidy(gold), _tidy(answer))
    wholes = _WHOLE.fullmatch(gold), _WHOLE.fullmatch(answer)
    if wholes[0] and wholes[1]:  # most of them, and a hundred times as fast
        return _as_digits(wholes[0]) == _as_digits(wholes[1])
    expected = _parse_gold(gold)
    if not answer or _letters(answer) == _letters(gold):
        return bool(answer)
    based = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if based[0] and based[1]:  # math-verify drops the base
        return _digits_and_base(based[0]) == _digits_and_base(based[1])
    return bool(verify(expected, _parse(f"\\boxed{{{answer}}}"), timeout_seconds=None))


def _alike(gold: str, answer: str) -> tuple[str, str]:
    """Both without what the other does not say: the percent sign of the gold one, a name for the answer."""
    if _PERCENT.search(gold):  # 7.2 is an answer to 7.2 %, and 0.072 is none
        gold, answer = (_PERCENT.sub("", text) for text in (gold, answer))
    return gold, answer if "=" in gold else _NAMED.sub("", answer)


def _digits_and_base(based: re.Match[str]) -> tuple[str, int]:
    digits, plain, text = based.groups()
    return digits, int(plain or text)


def _as_digits(whole: re.Match[str]) -> tuple[str, bool]:
    """A whole number without leading zeros, and whether it is negative."""
    digits = whole["digits"].replace(",", "").lstrip("0")
    return digits, bool(whole["minus"] and digits)


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    parsed = _parse(f"\\boxed{{{_tidy(gold)}}}")
    if not parsed:
        raise ValueError(f"answer: {gold!r} is no expression; leave the problem out")
    return parsed


def _parse(text: str) -> list[Any]:
    # math-verify takes a lone i for the imaginary unit, but the i of 5i for a variable.
    return list(parse(_IMAGINARY.sub(" i", text), parsing_timeout=None))


def _tidy(answer: str) -> str:
    """Without the punctuation and the space around it, which math-verify takes for mathematics, and without
    the spaces that group digits, which it takes for the ends of numbers."""
    answer = _OUTER_SPACE.sub("", _GAP.sub(r"\1", answer)).rstrip(".,;:").strip()
    return _GROUPED.sub(lambda grouped: "".join(re.findall(r"\d", grouped[0])), answer)


def _letters(answer: str) -> str:
    """What is printed, spaces apart."""
    return "".join(_TEXT.sub(r"\1", answer).split())


def _without_delimiters(phrase: str) -> str:
    """A phrase without its full stop, emphasis and dollars."""
    phrase = phrase.replace("\\$", "").strip("* \t\r").rstrip("*. ")
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(phrase) > len(opening + closing) and phrase.startswith(opening) and phrase.endswith(closing):
            phrase = phrase[len(opening) : -len(closing)].rstrip("*. ")
    return phrase if "$" not in phrase else ""


def _words(text: str) -> str | None:
    """The words of a text that has nothing else in it, letter case apart."""
    words = " ".join(_TEXT.sub(r" \1 ", text).split()).casefold().strip("(). ")
    return words if words.replace(" ", "").isalpha() else None
