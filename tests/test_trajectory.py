"""A trajectory holds together, or says by field and index where it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstar.partition import Partition
from tstar.trajectory import ForwardCounts, Trajectory


def make_trajectory(partition: Partition, seed: int = 0) -> Trajectory:
    """Random ids, and in every block a random order with random ties."""
    rng = np.random.default_rng(seed)
    steps, first = [], 0
    for block in partition.response_slices:
        size = block.stop - block.start
        raw = rng.integers(0, size, size)
        steps.append(first + np.unique(raw, return_inverse=True)[1].astype(np.int64))
        first = int(steps[-1].max()) + 1
    return Trajectory(
        prompt_ids=rng.integers(0, 90, partition.prompt_length),
        response_ids=rng.integers(0, 90, partition.response_length),
        unmask_step=np.concatenate(steps),
        log_probs=-rng.exponential(size=partition.response_length).astype(np.float32),
        stop_length=int(rng.integers(1, partition.response_length + 1)),
        finish_reason="stop",
        partition=partition,
        forwards=ForwardCounts(denoise=first),
        weight_version=7,
        seed=seed,
    )


@given(
    st.integers(0, 20),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(["response", "sequence"]),
    st.integers(0, 1000),
)
def test_json_gives_the_same_trajectory_back(
    prompt_length: int, response_length: int, block_size: int, origin: Any, seed: int
) -> None:
    whole = make_trajectory(Partition(prompt_length, response_length, block_size, origin=origin), seed)
    again = Trajectory.from_json(whole.to_json())
    for name in ("prompt_ids", "response_ids", "unmask_step", "log_probs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
        assert getattr(again, name).dtype == getattr(whole, name).dtype
    assert (again.stop_length, again.partition, again.forwards) == (
        whole.stop_length,
        whole.partition,
        whole.forwards,
    )
    assert "\n" not in whole.to_json()


def test_steps_and_tokens_per_forward_by_hand() -> None:
    trajectory = replace(
        make_trajectory(Partition(3, 8, 4)),
        unmask_step=np.array([0, 1, 0, 2, 3, 3, 3, 3]),
        stop_length=6,
        forwards=ForwardCounts(denoise=4, commit=1),
    )
    assert trajectory.num_steps == 4
    assert trajectory.tokens_per_forward == 1.5


GOOD = replace(
    make_trajectory(Partition(3, 8, 4)),
    unmask_step=np.array([0, 1, 0, 2, 3, 3, 4, 3]),
    forwards=ForwardCounts(denoise=5),
    stop_length=8,
)


def with_entry(name: str, index: int, value: float) -> dict[str, Any]:
    changed = getattr(GOOD, name).copy()
    changed[index] = value
    return {name: changed}


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unmask_step": np.zeros(7, dtype=np.int64)}, "unmask_step: 7 entries for 8 response_ids"),
        ({"log_probs": np.zeros(9, dtype=np.float32)}, "log_probs: 9 entries for 8 response_ids"),
        ({"partition": Partition(3, 9, 4)}, "partition.response_length: 9 where there are 8 tokens"),
        ({"partition": Partition(2, 8, 4)}, "partition.prompt_length: 2 where there are 3 tokens"),
        ({"stop_length": 0}, "stop_length: 0 is not within 1 to 8"),
        ({"stop_length": 9}, "stop_length: 9 is not within 1 to 8"),
        (with_entry("unmask_step", 2, -1), r"unmask_step\[2\]: never unmasked"),
        (with_entry("unmask_step", 1, 0), "unmask_step: no token has step 1 of 5"),
        (with_entry("unmask_step", 5, 2), r"unmask_step\[5\]: step 2 is not after step 2, the last of the"),
        ({"forwards": ForwardCounts(denoise=6)}, "forwards.denoise: 6 where unmask_step has 5 steps"),
        (with_entry("response_ids", 4, -5), r"response_ids\[4\]: -5 is no id"),
        (with_entry("log_probs", 6, np.nan), r"log_probs\[6\]: nan is no log-probability"),
        (with_entry("log_probs", 6, -np.inf), r"log_probs\[6\]: -inf is no log-probability"),
        (with_entry("log_probs", 0, 0.5), r"log_probs\[0\]: 0.5 is no log-probability"),
        ({"finish_reason": "eos"}, "finish_reason: 'eos' is unknown"),
    ],
)
def test_what_contradicts_itself_is_refused_by_field_and_index(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **changes)


def test_an_empty_response_is_refused() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    no_log_probs = np.zeros(0, dtype=np.float32)
    with pytest.raises(ValueError, match="response_ids: empty"):
        replace(
            GOOD,
            response_ids=nothing,
            unmask_step=nothing,
            log_probs=no_log_probs,
            partition=Partition(3, 0, 4),
        )


def test_another_version_is_refused() -> None:
    record = {**json.loads(GOOD.to_json()), "version": 99}
    with pytest.raises(ValueError, match="version: 99 is not this program's 1"):
        Trajectory.from_json(json.dumps(record))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_that_divides_no_logits_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature: {temperature} divides no logits"):
        replace(GOOD, temperature=temperature)
