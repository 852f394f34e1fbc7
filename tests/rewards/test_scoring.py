"""Weighted sums: what counts, what is correct, what failed, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tstar.data import Problem
from tstar.errors import UserError
from tstar.rewards import FailedCall, Response, Rewards, RewardSpec, default_reward
from tstar.tasks import open_problem_set

OBEY = "misbehaving_rewards:obey"
PROBLEMS = [Problem("", "1"), Problem("", "2"), Problem("", "3")]


def test_weights_and_terms() -> None:
    specs = [
        RewardSpec("exact", 2.0),
        RewardSpec("numeric", 0.5),
        RewardSpec("length", 1.0, {"max_tokens": 10, "buffer": 10}),
    ]
    responses = [Response("1"), Response("the number 2", num_tokens=5), Response("7", num_tokens=10)]
    with Rewards(specs) as rewards:
        scores = rewards.score(PROBLEMS, responses)
    assert {name: term.tolist() for name, term in scores.terms.items()} == {
        "exact": [1, 0, 0],
        "numeric": [1, 1, 0],
        "length": [0, -0.5, -1],
    }
    assert scores.rewards.tolist() == [2.5, 0, -1]
    assert scores.is_correct.tolist() == [True, False, False]
    assert scores.failures == ()


def test_the_first_reward_decides_what_is_correct() -> None:
    for names, expected in ((("numeric", "exact"), [True]), (("exact", "numeric"), [False])):
        with Rewards([RewardSpec(name) for name in names]) as rewards:
            assert rewards.score(PROBLEMS[:1], ["it is 1"]).is_correct.tolist() == expected


def test_speed_without_a_right_answer_earns_nothing() -> None:
    fast = [Response(text, tokens_per_forward=4.0) for text in ("1", "7", "3")]
    target = {"target": 4.0}
    with Rewards([RewardSpec("exact"), RewardSpec("parallelism", 0.5, target)]) as rewards:
        scores = rewards.score(PROBLEMS, fast)
    assert scores.rewards.tolist() == [1.5, 0, 1.5]
    assert scores.terms["parallelism"].tolist() == [1, 1, 1]
    always = RewardSpec("parallelism", 0.5, target, only_if_correct=False)
    with Rewards([RewardSpec("exact"), always]) as rewards:
        assert rewards.score(PROBLEMS, fast).rewards.tolist() == [1.5, 0.5, 1.5]
    cautious = RewardSpec("numeric", 0.5, only_if_correct=True)
    with Rewards([RewardSpec("exact"), cautious]) as rewards:
        assert rewards.score(PROBLEMS[:2], ["1", "is 2"]).rewards.tolist() == [1.5, 0]


def test_ones_own_reward_runs_in_a_worker_and_its_failures_are_wrong_and_counted() -> None:
    specs = [RewardSpec("exact"), RewardSpec(OBEY, 10.0, {"bonus": 0.25})]
    texts = ["1", "exit 3", "raise no", "sleep 60", "allocate 3000000000", "5"]
    problems = [Problem("", text) for text in texts]
    with Rewards(specs, num_workers=2, time_limit=1.5, memory_limit=256 << 20) as rewards:
        scores = rewards.score(problems, texts)
        again = rewards.score(problems[:1], texts[:1])
    assert scores.rewards.tolist() == [13.5, 1, 1, 1, 1, 53.5]
    assert scores.is_correct.all()
    assert [(f.index, f.reward, f.cause) for f in scores.failures] == [
        (1, OBEY, "crash"),
        (2, OBEY, "error"),
        (3, OBEY, "timeout"),
        (4, OBEY, "memory"),
    ]
    assert scores.num_failures == {"timeout": 1, "memory": 1, "crash": 1, "error": 1}
    assert (again.failures, again.rewards.tolist()) == ((), [13.5])


def test_a_failed_deciding_reward_is_a_wrong_answer() -> None:
    with Rewards([RewardSpec(OBEY)], num_workers=1, time_limit=1.5) as rewards:
        scores = rewards.score(PROBLEMS[:2], ["exit 1", "1"])
    assert scores.is_correct.tolist() == [False, True]
    assert scores.rewards.tolist() == [0, 1]
    assert scores.failures == (FailedCall(0, OBEY, "crash", "exit code 1"),)


def test_the_response_crosses_whole_into_the_worker() -> None:
    problem = Problem("1+1", "2", 7, "a/b", "one", {"subject": "sums"})
    with Rewards([RewardSpec("misbehaving_rewards:knows_all")], num_workers=1) as rewards:
        response = Response("text", num_tokens=7, tokens_per_forward=2.5, finish_reason="length")
        assert rewards.score([problem], [response]).failures == ()


def test_a_reward_that_fails_on_everything_is_a_mistake_in_it() -> None:
    with (
        Rewards([RewardSpec("misbehaving_rewards:always_wrong")], num_workers=1) as rewards,
        pytest.raises(UserError, match=r"raised on all 3 answers \(KeyError: 'gold'\)"),
    ):
        rewards.score(PROBLEMS, ["1", "2", "3"])


def test_chains_are_scored_by_chain_and_answer() -> None:
    (problem,) = open_problem_set("chain:3", 1).problems
    assert problem.solution is not None
    wrong = problem.solution[:-1] + str((int(problem.solution[-1]) + 1) % 10)
    specs = [RewardSpec("chain"), RewardSpec("chain_answer"), RewardSpec("chain_steps")]
    with Rewards(specs) as rewards:
        scores = rewards.score([problem] * 3, [problem.solution, f"#{problem.answer}", wrong])
    assert [term.tolist() for term in scores.terms.values()] == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


def test_nothing_to_score() -> None:
    with Rewards([RewardSpec("math")], num_workers=1) as rewards:
        scores = rewards.score([], [])
    assert scores.rewards.shape == scores.terms["math"].shape == (0,)
    assert sum(scores.num_failures.values()) == 0


def test_as_many_responses_as_problems() -> None:
    with (
        Rewards([RewardSpec("exact")]) as rewards,
        pytest.raises(ValueError, match=r"^responses: 1 for 3 problems"),
    ):
        rewards.score(PROBLEMS, ["1"])


def test_the_reward_that_suits_a_source() -> None:
    assert [default_reward(s) for s in ("chain:3@test", "math500", "x.jsonl")] == ["chain", "math", "math"]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (list, "rewards: none given"),
        (lambda: [RewardSpec("maths")], "rewards: 'maths' is unknown; use one of math, exact"),
        (lambda: [RewardSpec("exact", float("nan"))], "rewards: exact: weight nan"),
        (lambda: [RewardSpec("exact"), RewardSpec("exact")], "rewards: 'exact' stands there 2 times"),
        (lambda: [RewardSpec("parallelism", 1.0, {"target": 2.0})], "'parallelism' counts for correct"),
        (lambda: [RewardSpec("exact", options={"slack": 1})], "options do not fit"),
        (lambda: [RewardSpec("length")], "options do not fit"),
    ],
)
def test_mistakes_are_named_before_anything_runs(specs: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Rewards(specs())


def test_scores_do_not_depend_on_the_number_of_workers() -> None:
    problems = [Problem("", str(i % 7)) for i in range(60)]
    texts = [rf"\boxed{{{i % 5}}}" for i in range(60)]
    expected = [i % 7 == i % 5 for i in range(60)]
    for num_workers in (1, 2):
        with Rewards([RewardSpec("math")], num_workers=num_workers) as rewards:
            assert np.array_equal(rewards.score(problems, texts).is_correct, expected)
