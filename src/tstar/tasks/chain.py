"""Chains of integer arithmetic, each result written down before it is used.

The question `46+7*3-9=` is worked out from left to right, modulo 100 because its first number has two
digits, and the response writes every running result, then the answer behind `#`:

    46+7=53;53*3=59;59-9=50;#50

A block of such text holds results that depend on each other, while its operators, operands and
punctuation can be read off the question. So a model that is near perfect one token at a time still errs
when it unmasks several dependent results at once: what parallel decoding costs, and what a better
unmasking order wins back, without a word of natural language.

Numbers are padded with zeros to the modulus's digits, so the question alone tells where each token
stands. Multipliers are units modulo 10 and no operand is 0: every operation is a bijection of the running
result, so a chain that once went wrong does not come right by luck. (With operands 0, 2 and 5 allowed,
5 to 23 % of wrong chains modulo 10 do.)
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from tstar.data import Problem
from tstar.errors import UserError

Split = Literal["train", "validation", "test"]

OPERANDS = {"+": "123456789", "-": "123456789", "*": "379"}
"""The operators and what may follow each."""

_QUESTION = re.compile(r"(\d+)((?:[-+*]\d)+)=")


@dataclass(frozen=True)
class ChainLevel:
    """How hard a chain is."""

    num_digits: int
    """Digits of every running result: the modulus is 10 to their number."""
    min_operations: int
    max_operations: int

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest response, its EOS included."""
        return self.max_operations * (2 * self.num_digits + 4) + 1 + self.num_digits + 1


LEVELS: dict[int, ChainLevel] = {
    1: ChainLevel(1, 2, 2),
    2: ChainLevel(1, 3, 5),
    3: ChainLevel(1, 6, 9),
    4: ChainLevel(2, 3, 5),
    5: ChainLevel(2, 6, 9),
    6: ChainLevel(2, 10, 14),
    7: ChainLevel(3, 6, 9),
    8: ChainLevel(3, 10, 14),
}


# -- problems ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainTask:
    """An endless, reproducible list of chains: problem i is a function of (seed, split, i).

    The splits are disjoint by construction: a hash of the question decides which one it belongs to,
    whatever level, seed or index drew it.
    """

    levels: tuple[int, ...]
    """Levels to draw from, equally often."""
    split: Split = "train"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.levels:
            raise UserError(f"levels: none given; use some of {_known_levels()}")
        for level in self.levels:
            if level not in LEVELS:
                raise UserError(f"levels: there is no level {level}; use some of {_known_levels()}")
        if self.split not in ("train", "validation", "test"):
            raise UserError(f"split: {self.split!r} is unknown; use train, validation or test")

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest reference response, its EOS included."""
        return max(LEVELS[level].max_tokens for level in self.levels)

    def problem(self, index: int) -> Problem:
        """Problem ``index`` of this split."""
        attempt = 0
        while True:
            level, question = self._draw(index, attempt)
            if split_of(question) == self.split:
                break
            attempt += 1
        solution = solve(question)
        return Problem(
            question=question,
            answer=solution.rpartition("#")[2],
            level=level,
            id=f"chain/{self.seed}/{self.split}/{index}",
            solution=solution,
        )

    def problems(self, count: int, start: int = 0) -> list[Problem]:
        """``count`` problems from index ``start`` on."""
        return [self.problem(index) for index in range(start, start + count)]

    def _draw(self, index: int, attempt: int) -> tuple[int, str]:
        """A level and a question, by successive divisions of 512 bits that nothing else shares."""
        key = f"{self.seed}/{self.split}/{index}/{attempt}"
        bits = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=64).digest(), "little")

        def below(bound: int) -> int:
            nonlocal bits
            bits, drawn = divmod(bits, bound)
            return drawn

        number = self.levels[below(len(self.levels))]
        level = LEVELS[number]
        num_operations = level.min_operations + below(level.max_operations - level.min_operations + 1)
        parts = [f"{below(10**level.num_digits):0{level.num_digits}d}"]
        for _ in range(num_operations):
            operator = "+-*"[below(3)]
            operands = OPERANDS[operator]
            parts.append(operator + operands[below(len(operands))])
        return number, "".join(parts) + "="


def split_of(question: str) -> Split:
    """The split that a question belongs to: 8 of 10 train, 1 validation, 1 test."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "little") % 10
    return "train" if bucket < 8 else "validation" if bucket == 8 else "test"


def solve(question: str) -> str:
    """The reference response to a question."""
    steps = _expected_steps(question)
    return ";".join(steps) + ";#" + steps[-1].rpartition("=")[2]


def _known_levels() -> str:
    return ", ".join(str(level) for level in LEVELS)


# -- checking ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainCheck:
    """What is right about a response."""

    num_steps: int
    """Steps that the question asks for."""
    num_right_steps: int
    """Steps that apply the question's operation to the result written before, and do so correctly."""
    is_answer_right: bool
    is_chain_right: bool
    """The response is the reference, token for token."""


def check(question: str, response: str) -> ChainCheck:
    """Compare a response with its question, step by step.

    A step counts by itself: after one wrong result, a later step that continues from it correctly is
    right. Since every operation is a bijection, the answer of such a chain is still wrong.
    """
    expected = _expected_steps(question)
    written = response.split(";")
    first, operations, num_digits = _parse(question)
    before, num_right = first, 0
    for operation, step in zip(operations, written, strict=False):
        after = _apply(before, operation, num_digits) if _is_number(before, num_digits) else None
        num_right += after is not None and step == f"{before}{operation}={after}"
        before = step.rpartition("=")[2]
    answer = expected[-1].rpartition("=")[2]
    return ChainCheck(
        num_steps=len(expected),
        num_right_steps=num_right,
        is_answer_right=response.rpartition("#")[1:] == ("#", answer),
        is_chain_right=response == solve(question),
    )


def chain_reward(problem: Problem, response: str) -> float:
    """1 if the whole chain is right, its answer included, else 0."""
    return float(check(problem.question, response).is_chain_right)


def chain_answer_reward(problem: Problem, response: str) -> float:
    """1 if the answer behind # is right, whatever stands before it, else 0."""
    return float(check(problem.question, response).is_answer_right)


def chain_steps_reward(problem: Problem, response: str) -> float:
    """The share of right steps."""
    checked = check(problem.question, response)
    return checked.num_right_steps / checked.num_steps


def _expected_steps(question: str) -> list[str]:
    running, operations, num_digits = _parse(question)
    steps = []
    for operation in operations:
        after = _apply(running, operation, num_digits)
        steps.append(f"{running}{operation}={after}")
        running = after
    return steps


def _parse(question: str) -> tuple[str, list[str], int]:
    """First number, operations such as `*3`, digits of every result."""
    matched = _QUESTION.fullmatch(question)
    if matched is None:
        raise UserError(f"question: {question[:60]!r} is no chain; write one like 46+7*3-9=")
    first, operations = matched.groups()
    return first, re.findall(r"[-+*]\d", operations), len(first)


def _apply(running: str, operation: str, num_digits: int) -> str:
    value, operand = int(running), int(operation[1])
    match operation[0]:
        case "+":
            value += operand
        case "-":
            value -= operand
        case _:
            value *= operand
    return f"{value % 10**num_digits:0{num_digits}d}"


def _is_number(text: str, num_digits: int) -> bool:
    return len(text) == num_digits and text.isascii() and text.isdigit()
