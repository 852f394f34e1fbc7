"""Chains of integer arithmetic, each result written down before it is used.

The question `7+6*3^3-8=` is worked out from left to right, modulo 10 because its first number has one
digit (`^3` cubes), and the response writes every running result, then the answer behind `#`:

    7+6=3;3*3=9;9^3=9;9-8=1;#1

A block of such text holds results that depend on each other, while its operators, operands and punctuation
can be read off the question. So a model that is near perfect one token at a time still errs when it
unmasks several dependent results at once: what parallel decoding costs, and what a better unmasking
order wins back, without a word of natural language.

A sum or a product may be written with its operands in either order, `6+7=3`. In some levels the reference
responses do, one time in four. Then a model is torn between two right texts wherever it has not begun one,
and tokens drawn side by side may belong to different ones: `6+6=3`, `7+7=3`. That is the other thing parallel
decoding costs, in any language: not what one forward cannot compute but what it cannot agree on. It is won
back by a policy that makes up its mind.

- Numbers are padded with zeros, so the question alone tells where each token stands.
- Every operation is a bijection of the running result (multipliers are units modulo 10, no operand is
  0), so a chain that once went wrong does not come right by luck. With operands 0, 2 and 5 allowed, 5
  to 23 % of wrong chains modulo 10 do.
- One operation is a table of ten digits, learnt in minutes. Several at once need not be: additions and
  multiplications alone compose to affine maps (40 of them modulo 10), so a few layers can learn to take
  many steps in one forward, and the cost of parallel decoding trains away. Cubing modulo 5 swaps 2 and 3,
  and with it the operations generate all of S_5: running results become its word problem, which no
  transformer of constant depth is known to solve for chains of any length.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Literal

from tstar.data import RAW_PROMPT, Problem, ProblemSet, PromptTemplate
from tstar.errors import UserError

Split = Literal["train", "validation", "test"]

UNITS = {"*": "379", "^": "3"}
"""What may follow these operators: anything else would merge running results."""

COMMUTATIVE = "+*"

_QUESTION = re.compile(r"([0-9]+)((?:[-+*^][0-9])+)=")


@dataclass(frozen=True)
class ChainLevel:
    """How hard a chain is."""

    num_digits: int
    """Digits of every running result: the modulus is 10 to their number."""
    operators: str
    """Drawn equally often."""
    min_operations: int
    max_operations: int
    summands: str = "123456789"
    """What may be added or subtracted. Each is a table of its own to learn: with nine of them, a small model
    that has long learnt to multiply still cannot add."""

    def operands(self, operator: str) -> str:
        """What may follow an operator."""
        return UNITS.get(operator, self.summands)

    either_order: str = ""
    """Operators whose operands the reference responses swap, one time in four: were it one in two, nothing
    would speak for either order, and agreeing on one would be reinforced in both directions alike."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest response, its EOS included."""
        return self.max_operations * (2 * self.num_digits + 4) + 1 + self.num_digits + 1


LEVELS: Mapping[int, ChainLevel] = MappingProxyType(
    {
        1: ChainLevel(1, "+-", 2, 2),
        2: ChainLevel(1, "+-*", 3, 5, "137"),
        3: ChainLevel(1, "+-*^", 3, 5, "137"),
        4: ChainLevel(1, "+-*^", 6, 9, "137"),
        5: ChainLevel(1, "+-*^", 10, 14, "137"),
        6: ChainLevel(2, "+-*", 3, 5),
        7: ChainLevel(2, "+-*", 6, 9),
        8: ChainLevel(2, "+-*", 10, 14),
        9: ChainLevel(1, "+-*", 2, 4, "137", either_order=COMMUTATIVE),
        10: ChainLevel(1, "+-*", 6, 9, "137", either_order=COMMUTATIVE),
        11: ChainLevel(1, "+-*", 10, 14, "137", either_order=COMMUTATIVE),
    }
)
"""Cubing is a bijection modulo 10, not modulo 100. 9 to 11 are written in either order."""


# -- problems ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainTask:
    """An endless, reproducible supply of chains.

    The splits are disjoint by construction: a hash of the question decides which one it belongs to,
    whatever level, seed or index drew it.
    """

    levels: tuple[int, ...]
    """Levels to draw from, equally often."""
    split: Split = "train"
    prompt: PromptTemplate = RAW_PROMPT

    def __post_init__(self) -> None:
        known = f"use some of {', '.join(map(str, LEVELS))}"
        if not self.levels:
            raise UserError(f"levels: none given; {known}")
        for level in self.levels:
            if level not in LEVELS:
                raise UserError(f"levels: there is no level {level} of chain; {known}")

    @property
    def name(self) -> str:
        return f"chain:{','.join(map(str, self.levels))}@{self.split}"

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest reference response, its EOS included."""
        return max(LEVELS[level].max_tokens for level in self.levels)

    def first(self, count: int, seed: int = 0) -> ProblemSet:
        """A finite set: problems 0 to ``count - 1`` of this seed."""
        if count < 1:
            raise UserError(f"limit: {count} problems are too few; use 1 or more")
        problems = tuple(self._problem(f"{seed}/{self.split}/{index}") for index in range(count))
        return ProblemSet(self.name, problems, prompt=self.prompt)

    def draw(self, seed: int, update_step: int, count: int) -> list[Problem]:
        """Fresh problems for one update, other ones than `first` has."""
        key = f"draw/{seed}/{self.split}/{update_step}"
        return [self._problem(f"{key}/{index}") for index in range(count)]

    def _problem(self, key: str) -> Problem:
        attempts = (self._question(f"{key}/{attempt}") for attempt in itertools.count())
        level, question = next(drawn for drawn in attempts if split_of(drawn[1]) == self.split)
        solution = solve(question, LEVELS[level].either_order, key)
        answer = solution.rpartition("#")[2]
        return Problem(question, answer, level, f"chain/{key}", solution)

    def _question(self, key: str) -> tuple[int, str]:
        """Its level too; by successive divisions of 512 bits that nothing else shares."""
        bits = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=64).digest(), "little")
        bits, index = divmod(bits, len(self.levels))
        number = self.levels[index]
        level = LEVELS[number]
        bits, num_more = divmod(bits, level.max_operations - level.min_operations + 1)
        bits, first = divmod(bits, 10**level.num_digits)
        question = f"{first:0{level.num_digits}d}"
        for _ in range(level.min_operations + num_more):
            bits, index = divmod(bits, len(level.operators))
            operator = level.operators[index]
            operands = level.operands(operator)
            bits, index = divmod(bits, len(operands))
            question += operator + operands[index]
        return number, question + "="


def split_of(question: str) -> Split:
    """The split that a question belongs to: 8 of 10 train, 1 validation, 1 test."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "little") % 10
    return "train" if bucket < 8 else "validation" if bucket == 8 else "test"


def solve(question: str, either_order: str = "", key: str = "") -> str:
    """The reference response to a question; the key says where operands change places, if they may."""
    running, operations, num_digits = _parse(question)
    coins = int.from_bytes(hashlib.blake2b(f"order/{key}".encode()).digest(), "little")
    steps = []
    for operation in operations:
        coins, coin = divmod(coins, 4)
        forms = _forms(running, operation, running := _apply(running, operation, num_digits))
        steps.append(forms[-1] if coin == 0 and operation[0] in either_order else forms[0])
    return ";".join(steps) + ";#" + running


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
    """Every step and the answer, and nothing besides."""


def check(question: str, response: str) -> ChainCheck:
    """Compare a response with its question, step by step.

    A step counts by itself: after one wrong result, a later step that continues from it correctly is
    right. Since every operation is a bijection, the answer of such a chain is still wrong.
    """
    first, operations, num_digits = _parse(question)
    answer = reduce(lambda running, operation: _apply(running, operation, num_digits), operations, first)
    written = response.split(";")
    before, num_right = first, 0
    for operation, step in zip(operations, written, strict=False):
        if _is_number(before, num_digits):
            num_right += step in _forms(before, operation, _apply(before, operation, num_digits))
        before = step.rpartition("=")[2]
    return ChainCheck(
        num_steps=len(operations),
        num_right_steps=num_right,
        is_answer_right=response.rpartition("#")[1:] == ("#", answer),
        is_chain_right=num_right == len(operations) and written[num_right:] == [f"#{answer}"],
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


def _forms(before: str, operation: str, after: str) -> tuple[str, ...]:
    """The right ways to write a step."""
    sign, operand = operation[0], operation[1:]
    as_asked = f"{before}{operation}={after}"
    return (as_asked, f"{operand}{sign}{before}={after}") if sign in COMMUTATIVE else (as_asked,)


def _parse(question: str) -> tuple[str, list[str], int]:
    """First number, operations such as `*3`, digits of every result."""
    matched = _QUESTION.fullmatch(question)
    if matched is None:
        raise UserError(f"question: {question[:60]!r} is no chain; write one like 7+6*3^3-8=")
    first, operations = matched.groups()
    return first, re.findall(r"[-+*^]\d", operations), len(first)


def _apply(running: str, operation: str, num_digits: int) -> str:
    value, operand = int(running), int(operation[1])
    match operation[0]:
        case "+":
            value += operand
        case "-":
            value -= operand
        case "*":
            value *= operand
        case _:
            value **= operand
    return f"{value % 10**num_digits:0{num_digits}d}"


def _is_number(text: str, num_digits: int) -> bool:
    return len(text) == num_digits and text.isascii() and text.isdigit()
