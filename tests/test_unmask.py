"""The unmask policies, by the paper's words and against loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstar.engine.reference import _choose as choose_by_hand
from tstar.unmask import PolicyColumns, UnmaskPolicy, choose, step_budget


def choice(
    policy: UnmaskPolicy,
    confidence: list[float],
    is_masked: list[bool] | None = None,
    block_step: int = 0,
    entropy: list[float] | None = None,
    noise: list[float] | None = None,
) -> list[int]:
    """Which positions of one block are finalised."""
    width = len(confidence)
    chosen = choose(
        PolicyColumns.of([policy]),
        np.array([is_masked or [True] * width]),
        np.array([block_step]),
        np.log(np.array([confidence])),
        np.array([entropy or [0.0] * width]),
        np.array([noise or [0.0] * width]),
    )
    found: list[int] = np.flatnonzero(chosen[0]).tolist()
    return found


def test_static_takes_its_budget_by_confidence_and_ties_to_the_left() -> None:
    policy = UnmaskPolicy("static", tokens_per_step=2)
    assert choice(policy, [0.1, 0.8, 0.3, 0.9]) == [1, 3]
    assert choice(policy, [0.5, 0.5, 0.5, 0.5]) == [0, 1]
    assert choice(policy, [0.1, 0.9, 0.2, 0.3], [True, False, True, True]) == [2, 3]


@pytest.mark.parametrize(
    ("size", "steps", "expected"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 8, [1, 1, 1]), (7, 1, [7]), (16, 5, [4, 3, 3, 3, 3])],
)
def test_steps_per_block_divides_the_block_remainder_first(
    size: int, steps: int, expected: list[int]
) -> None:
    policies = PolicyColumns.of([UnmaskPolicy("static", steps_per_block=steps)])
    taken, left = [], size
    while left:
        taken.append(int(step_budget(policies, np.array([left]), np.array([len(taken)]))[0]))
        left -= taken[-1]
    assert taken == expected


def test_a_block_with_a_prompt_in_it_still_ends_in_time() -> None:
    """6 of 8 positions are masked: never more steps than given, and none takes a prompt token."""
    policy = UnmaskPolicy("static", steps_per_block=4)
    is_masked = np.array([False, False, True, True, True, True, True, True])
    for step in range(4):
        for place in choice(policy, [0.5] * 8, is_masked.tolist(), step):
            assert is_masked[place]
            is_masked[place] = False
    assert not is_masked.any()


def test_dynamic_takes_all_that_pass_and_at_least_its_budget_by_confidence() -> None:
    policy = UnmaskPolicy("dynamic", confidence_threshold=0.75)
    assert choice(policy, [0.75, 0.1, 0.9, 0.8]) == [0, 2, 3]
    assert choice(policy, [0.1, 0.3, 0.2, 0.1]) == [1], "the surest, not the leftmost"
    at_least_two = UnmaskPolicy("dynamic", confidence_threshold=0.75, tokens_per_step=2)
    assert choice(at_least_two, [0.1, 0.3, 0.2, 0.8]) == [1, 3]
    assert choice(UnmaskPolicy("dynamic", confidence_threshold=0.0), [0.1, 0.2]) == [0, 1]


def test_entropy_takes_the_surest_as_long_as_those_before_sum_to_the_bound() -> None:
    policy = UnmaskPolicy("entropy", entropy_bound=0.45)
    confidence = [0.5] * 4
    assert choice(policy, confidence, entropy=[0.4, 0.2, 0.3, 2.0]) == [1, 2]
    assert choice(policy, confidence, entropy=[0.4, 0.1, 0.3, 2.0]) == [0, 1, 2]
    assert choice(policy, confidence, entropy=[3.0, 2.0, 4.0, 5.0]) == [1]
    assert choice(UnmaskPolicy("entropy", entropy_bound=np.inf), confidence, entropy=[1.0] * 4) == [
        0,
        1,
        2,
        3,
    ]


def test_sequential_goes_from_the_left_and_random_by_noise() -> None:
    confidence = [0.1, 0.2, 0.9, 0.8]
    assert choice(UnmaskPolicy("sequential", tokens_per_step=2), confidence) == [0, 1]
    assert choice(UnmaskPolicy("random", tokens_per_step=2), confidence, noise=[0.3, 0.1, 0.2, 0.9]) == [0, 3]


@st.composite
def policies(draw: st.DrawFn) -> UnmaskPolicy:
    kind = draw(st.sampled_from(["static", "dynamic", "sequential", "random", "entropy"]))
    budget = draw(
        st.sampled_from([{}, {"tokens_per_step": 3}, {"steps_per_block": 2}, {"steps_per_block": 7}])
    )
    own: dict[str, Any] = {}
    if kind == "dynamic":
        own["confidence_threshold"] = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    if kind == "entropy":
        own["entropy_bound"] = draw(st.sampled_from([0.0, 0.5, 2.0]))
    return UnmaskPolicy(kind, **budget, **own)


@given(seed=st.integers(0, 2**32 - 1), batch=st.lists(policies(), min_size=1, max_size=8))
def test_a_batch_equals_the_loop_over_its_rows(seed: int, batch: list[UnmaskPolicy]) -> None:
    """Blocks of different lengths and policies; numbers from a few values, so that there are ties. What is
    not masked holds NaN."""
    rng = np.random.default_rng(seed)
    shape = len(batch), int(rng.integers(1, 12))
    is_masked = rng.random(shape) < 0.7
    is_masked[:, 0] |= ~is_masked.any(axis=1)
    log_confidence = np.log(rng.choice([0.25, 0.5, 0.9, 1.0], size=shape))
    entropy, noise = rng.choice([0.0, 0.25, 0.5, 3.0], size=shape), rng.random(shape)
    block_step = rng.integers(0, 9, size=len(batch))
    inputs = [np.where(is_masked, x, np.nan) for x in (log_confidence, entropy, noise)]
    chosen = choose(PolicyColumns.of(batch), is_masked, block_step, *inputs)
    assert not (chosen & ~is_masked).any(), "only masked positions may change"
    assert chosen.any(axis=1).all(), "every step finalises something"
    for row, policy in enumerate(batch):
        places = np.flatnonzero(is_masked[row])
        columns = (x[row, places].tolist() for x in (log_confidence, entropy, noise))
        expected = choose_by_hand(policy, int(block_step[row]), *columns)
        assert np.flatnonzero(chosen[row]).tolist() == sorted(places[expected].tolist())


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "greedy"}, "unmask.kind: 'greedy' is unknown; use one of static, dynamic"),
        ({"confidence": "mean"}, "unmask.confidence: 'mean' is unknown"),
        ({"tokens_per_step": 0}, "unmask.tokens_per_step: 0 is no budget"),
        ({"steps_per_block": 1.5}, "unmask.steps_per_block: 1.5 is no budget"),
        ({"tokens_per_step": 2, "steps_per_block": 2}, "give one of the two"),
        ({"kind": "dynamic"}, "unmask.confidence_threshold: missing"),
        (
            {"kind": "dynamic", "confidence_threshold": 1.1},
            "unmask.confidence_threshold: 1.1 is out of range",
        ),
        ({"confidence_threshold": 0.5}, "changes nothing under 'static'"),
        ({"kind": "entropy"}, "unmask.entropy_bound: missing"),
        ({"kind": "entropy", "entropy_bound": -1.0}, "unmask.entropy_bound: -1.0 is out of range"),
        ({"kind": "random", "confidence": "sampled"}, "'sampled' changes nothing under 'random'"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UnmaskPolicy(**fields)
