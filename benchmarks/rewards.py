"""How long the mathematical reward takes for the responses of one update.

    python benchmarks/rewards.py [--workers 2] [--hostile 4] [--data math500:DIR]

The paper's update has 128 problems and 16 responses to each. A response here is 6000 characters of text with
formulas in it and an answer at its end: half of them right, in one of several forms, the others wrong in
ways that have to be parsed and compared; a tenth has no box, so its last sentence is searched. Problems are
made up (numbers, fractions, roots, polynomials, sets, intervals, matrices, words) unless --data names real
ones. "hostile" adds responses that run into the time limit.

Workers are started before the clock: a run starts them once.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from tstar.data import Problem, load_problems
from tstar.rewards import Rewards, RewardSpec

GOAL = 10.0
"""Seconds for 2048 honest responses on two cores."""
REASONING = "We have $x^2 + 3x = \\frac{a}{b}$, hence \\(x = 7\\) or so, and the sum is $12 + 30 = 42$. "


def make_problems(count: int, generator: np.random.Generator) -> list[Problem]:
    return [Problem("", make_answer(generator, kind=i % 8)) for i in range(count)]


def make_answer(generator: np.random.Generator, kind: int) -> str:
    a, b, c = (int(number) for number in generator.integers(2, 99, size=3))
    return [
        f"{a * b * c}",
        rf"\frac{{{a}}}{{{b}}}",
        rf"{a}\sqrt{{{b}}}",
        f"{a}x^2 + {b}x - {c}",
        rf"\{{{a}, {b + 100}, {c + 200}\}}",
        rf"(-\infty, {-a}] \cup ({b}, \infty)",
        rf"\begin{{pmatrix}} {a} & {b} \\ {c} & 1 \end{{pmatrix}}",
        rf"\text{{{'Monday' if a > b else 'Tuesday'}}}",
    ][kind]


def make_response(problem: Problem, other: Problem, generator: np.random.Generator) -> str:
    """The problem's answer, its neighbour's, or nearly the right one, at the end of a long text."""
    gold = problem.answer
    near = gold.translate(str.maketrans("123456789", "234567891"))
    answer = gold if generator.random() < 0.5 else str(generator.choice([other.answer, near, gold + " + 1"]))
    forms = [
        rf"So the answer is $\boxed{{{answer}}}$.",
        rf"\[ \boxed{{ {answer} }} \]",
        rf"**Answer:** \boxed{{{answer.replace('frac', 'dfrac')}}}",
        rf"Hence \boxed{{x = {answer}}}.",
        f"So the answer is ${answer}$.",
    ]
    form = str(generator.choice(forms, p=[0.225, 0.225, 0.225, 0.225, 0.1]))
    return REASONING * (6000 // len(REASONING)) + form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hostile", type=int, default=4)
    parser.add_argument("--time-limit", type=float, default=5.0)
    parser.add_argument("--data", help="a source of real problems")
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    if arguments.data is None:
        problems = make_problems(arguments.problems, generator)
    else:
        problems = load_problems(arguments.data).draw(seed=0, update_step=0, count=arguments.problems)
    neighbours = [*problems[1:], problems[0]]
    pairs = [pair for pair in zip(problems, neighbours, strict=True) for _ in range(arguments.samples)]
    asked = [problem for problem, _ in pairs]
    responses = [make_response(problem, other, generator) for problem, other in pairs]
    with Rewards(
        [RewardSpec("math")], num_workers=arguments.workers, time_limit=arguments.time_limit
    ) as rewards:
        rewards.score(asked[:1] * arguments.workers, [r"\boxed{1}"] * arguments.workers)
        for title, num_hostile in (("honest", 0), (f"{arguments.hostile} hostile", arguments.hostile)):
            for place in generator.choice(len(responses), num_hostile, replace=False):
                responses[place] = r"\boxed{9**9**9**9}"
            began = time.perf_counter()
            scores = rewards.score(asked, responses)
            seconds = time.perf_counter() - began
            is_judged = num_hostile == 0 and len(asked) == 2048 and arguments.workers == 2
            verdict = f"  goal {GOAL:.0f} s {'met' if seconds < GOAL else 'MISSED'}" if is_judged else ""
            print(
                f"{len(responses)} responses, {title:<10} {arguments.workers} workers  {seconds:6.2f} s  "
                f"{scores.is_correct.mean():4.0%} correct  {len(scores.failures)} failed{verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
