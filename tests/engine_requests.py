"""Requests of every kind for the engine's tests, and what "the same trajectory" means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.engine.memory import MemoryPlan
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.trajectory import Trajectory
from tstar.unmask import UnmaskPolicy

MASK = 96
STOPS = (5, 50)
"""One in fifty tokens or so: responses end anywhere in a block, and prompts hold them too."""

POLICIES = (
    UnmaskPolicy("static", tokens_per_step=2),
    UnmaskPolicy("dynamic", confidence_threshold=0.3),
    UnmaskPolicy("static", steps_per_block=3),
    UnmaskPolicy("random", steps_per_block=4),
    UnmaskPolicy("entropy", entropy_bound=3.0),
    UnmaskPolicy("sequential", tokens_per_step=3),
    UnmaskPolicy("static", steps_per_block=2, confidence="sampled"),
    UnmaskPolicy("dynamic", confidence_threshold=0.2, steps_per_block=5, confidence="sampled"),
    UnmaskPolicy("entropy", entropy_bound=0.5, tokens_per_step=4),
)
WAYS_TO_DRAW: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.1, "min_p": 0.1},
)


def make_request(
    rule: PartitionRule, prompt_length: int, number: int, max_tokens: int | None = None, **changes: Any
) -> Request:
    """The number chooses policy, way to draw, prompt and seed; neighbours differ in all of them."""
    rng = np.random.default_rng(number)
    policy = POLICIES[number % len(POLICIES)]
    if rule.block_size > 16:  # a token a step would take the slow twin minutes
        policy = replace(policy, tokens_per_step=None, steps_per_block=2 + number % 4)
    longest = rule.block_size + 3 if rule.block_size > 16 else 2 * rule.block_size + 5
    settings: dict[str, Any] = {
        "max_tokens": max_tokens or int(rng.integers(1, longest)),
        "stop_token_ids": STOPS,
        "unmask": policy,
        **WAYS_TO_DRAW[number % len(WAYS_TO_DRAW)],
        **changes,
    }
    return Request(rng.integers(0, MASK, size=prompt_length), rule, SamplingParams(**settings), seed=number)


class _SmallEngine(Engine):
    """One whose budget gives a number of pages and everything else in plenty."""

    num_pages: int

    def _plan_memory(self) -> MemoryPlan:
        return replace(super()._plan_memory(), num_pages=self.num_pages)


def make_engine(model: LanguageModel, num_pages: int | None = None, **settings: Any) -> Engine:
    """An engine with this many pages, or with as many as it can use."""
    config = EngineConfig(**{"memory": 1 << 28, "page_size": 4, **settings})
    if num_pages is None:
        return Engine(model, config)
    return type("SmallEngine", (_SmallEngine,), {"num_pages": num_pages})(model, config)


def assert_same(got: Trajectory, expected: Trajectory, atol: float = 1e-4) -> None:
    """Token for token and step for step; log-probs to rounding in fp32."""
    np.testing.assert_array_equal(got.response_ids, expected.response_ids)
    np.testing.assert_array_equal(got.unmask_step, expected.unmask_step)
    np.testing.assert_array_equal(got.prompt_ids, expected.prompt_ids)
    np.testing.assert_allclose(got.log_probs, expected.log_probs, rtol=0, atol=atol)
    assert got.log_probs.dtype == expected.log_probs.dtype
    for name in ("stop_length", "finish_reason", "partition", "seed", "temperature", "weight_version"):
        assert getattr(got, name) == getattr(expected, name), name
    assert got.forwards.denoise == expected.forwards.denoise
    assert got.forwards.commit == 0


def assert_all_same(got: Iterable[Trajectory], expected: Iterable[Trajectory]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert_same(ours, theirs)
