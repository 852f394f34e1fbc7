"""Rewards that cost microseconds and cannot hang: computed where they are called."""

from __future__ import annotations

import math
import re

from tstar.data import Problem
from tstar.errors import UserError
from tstar.rewards.answers import MAX_ANSWER_LENGTH, last_boxed
from tstar.rewards.response import Response

_NUMBER = re.compile(
    r"(?:(?<!\w)[-+−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d{1,3})?", re.ASCII
)


def exact(problem: Problem, response: Response) -> float:
    """1 if the boxed answer, or without a box the whole response, is the gold answer letter for letter."""
    answer = last_boxed(response)
    return float((response if answer is None else answer).strip() == problem.answer.strip() != "")


def numeric(problem: Problem, response: Response, *, tolerance: float = 1e-6) -> float:
    """1 if the last number (of the box, where there is one) is the gold one, up to a relative tolerance."""
    gold = last_number(problem.answer)
    if gold is None:
        raise ValueError(f"answer: {problem.answer!r} of problem {problem.id!r} holds no number")
    answer = last_number(last_boxed(response) or response)
    return float(answer is not None and math.isclose(answer, gold, rel_tol=tolerance))


def format(problem: Problem, response: Response) -> float:  # noqa: A001, ARG001  (the name users write)
    """1 if the response came to its end and has an answer in a box."""
    return float(response.finish_reason == "stop" and last_boxed(response) is not None)


def length(problem: Problem, response: Response, *, max_tokens: int, buffer: int) -> float:  # noqa: ARG001
    """0, and from ``max_tokens - buffer`` tokens on linearly down to -1 at ``max_tokens``.

    DAPO's soft punishment of overlong responses (Yu et al. 2025, Eq. 13).
    """
    if not 0 < buffer <= max_tokens:
        raise UserError(f"rewards: length: buffer: {buffer} does not fit; use 1 to max_tokens = {max_tokens}")
    return -min(max((response.num_tokens - (max_tokens - buffer)) / buffer, 0.0), 1.0)


def parallelism(problem: Problem, response: Response, *, target: float) -> float:  # noqa: ARG001
    """How far tokens per forward got on the way from 1 to ``target``, between 0 and 1."""
    if not target > 1:
        raise UserError(f"rewards: parallelism: target: {target} is too low; use more than 1 token a forward")
    return min(max((response.tokens_per_forward - 1) / (target - 1), 0.0), 1.0)


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separated by commas or not."""
    numbers = [found for found in _NUMBER.findall(text[-MAX_ANSWER_LENGTH:]) if found]
    if not numbers:
        return None
    number = float(numbers[-1].replace(",", "").replace("−", "-"))
    return number if math.isfinite(number) else None
