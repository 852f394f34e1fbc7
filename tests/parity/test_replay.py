"""Replay against what the engine recorded, and against a plain loop that builds each noisy sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny_models import make_model
from trajectories import MASK, partition_rules, random_rollouts, random_trajectory, slow_log_probs
from tstar.engine import reference
from tstar.engine.request import Request, SamplingParams
from tstar.model.attention import Backend, prepare
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.replay import replay, score
from tstar.trajectory import Trajectory
from tstar.unmask import UnmaskPolicy


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model("sdar", torch.float64, num_hidden_layers=2)


def replayed_log_probs(
    model: LanguageModel,
    trajectories: list[Trajectory],
    rule: PartitionRule,
    token_budget: int = 10**6,
    backend: Backend | None = None,
    recompute: bool = False,
) -> list[Tensor]:
    """Each trajectory's log-probs by response index."""
    out = [torch.zeros(t.stop_length, dtype=model.dtype) for t in trajectories]
    for pack in replay(trajectories, rule, MASK, token_budget):
        attention = prepare(pack.layout, backend=backend)
        scores = score(model, pack, attention, recompute_activations=recompute)
        for member, number in enumerate(pack.trajectories):
            own = pack.actions.members == member
            out[number] = out[number].index_put(
                (torch.from_numpy(pack.actions.index[own]),), scores.log_probs[torch.from_numpy(own)]
            )
    return out


def gradients(model: LanguageModel, log_probs: list[Tensor]) -> list[Tensor]:
    """Of a sum in which every action has a weight of its own."""
    weights = [torch.linspace(-1, 2, len(p), dtype=p.dtype) + i for i, p in enumerate(log_probs)]
    total = torch.stack([(w * p).sum() for w, p in zip(weights, log_probs, strict=True)]).sum()
    return list(torch.autograd.grad(total, list(model.parameters())))


def assert_all_close(actual: list[Tensor], expected: list[Tensor], atol: float) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=atol)


@given(
    seed=st.integers(0, 2**32),
    decoded=partition_rules(),
    rule=partition_rules(),
    budget=st.sampled_from([30, 10**6]),
)
@settings(max_examples=25)
def test_log_probs_equal_the_plain_loop(
    model: LanguageModel, seed: int, decoded: PartitionRule, rule: PartitionRule, budget: int
) -> None:
    """Decoded under one partition, replayed under any."""
    trajectories = random_rollouts(seed, decoded, max_prompts=2)
    with torch.no_grad():
        actual = replayed_log_probs(model, trajectories, rule, budget)
        expected = [slow_log_probs(model, t, rule) for t in trajectories]
    assert_all_close(actual, expected, atol=1e-10)


@pytest.mark.parametrize("origin", ["response", "sequence"])
@pytest.mark.parametrize("offset", [0, 4])
def test_gradients_equal_the_plain_loop(model: LanguageModel, origin: str, offset: int) -> None:
    decoded, rule = PartitionRule(8, 0, origin), PartitionRule(8, offset, origin)  # type: ignore[arg-type]
    rng = np.random.default_rng(offset)
    prompt = rng.integers(0, MASK, size=11)
    group = [
        random_trajectory(rng, decoded.cut(11, n), n - 1, prompt_ids=prompt, temperature=1.0) for n in (3, 21)
    ]
    expected = gradients(model, [slow_log_probs(model, t, rule) for t in group])
    for recompute in (False, True):
        actual = gradients(model, replayed_log_probs(model, group, rule, recompute=recompute))
        assert_all_close(actual, expected, atol=1e-9)


def test_packs_order_and_shared_prompts_change_nothing(model: LanguageModel) -> None:
    rule = PartitionRule(4)
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, MASK, size=9)
    group = [random_trajectory(rng, rule.cut(9, n), n, prompt_ids=prompt) for n in (7, 30, 12, 4)]
    together = replayed_log_probs(model, group, rule)
    expected = gradients(model, together)
    for budget, order in ((1, [0, 1, 2, 3]), (120, [3, 1, 0, 2]), (10**6, [2, 3, 1, 0])):
        shuffled = replayed_log_probs(model, [group[i] for i in order], rule, budget)
        back: list[Tensor] = [shuffled[order.index(i)] for i in range(4)]
        assert_all_close(back, together, atol=1e-11)
        assert_all_close(gradients(model, back), expected, atol=1e-9)


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_backends_agree_on_long_replays(model: LanguageModel, backend: Backend) -> None:
    """Longer than a tile of queries, so that tiles cut through rows, prompts and copies."""
    rng = np.random.default_rng(5)
    for block_size in (4, 16, 32):
        rule = PartitionRule(block_size)
        prompt = rng.integers(0, MASK, size=50)
        group = [random_trajectory(rng, rule.cut(50, n), n, prompt_ids=prompt) for n in (70, 130)]
        with torch.no_grad():
            whole = replayed_log_probs(model, group, rule, backend=backend)
            alone = [slow_log_probs(model, t, rule)[-20:] for t in group[:1]]
        assert_all_close([whole[0][-20:]], alone, atol=1e-10)


# -- the engine ---------------------------------------------------------------------------------

POLICIES = (
    UnmaskPolicy("static", tokens_per_step=1),
    UnmaskPolicy("static", steps_per_block=3),
    UnmaskPolicy("dynamic", confidence_threshold=0.3),
    UnmaskPolicy("random", tokens_per_step=2),
)
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 5},
)


def decode(model: LanguageModel, rule: PartitionRule, prompt_length: int, seed: int) -> Trajectory:
    """One response; a sixth of the vocabulary stops it, so that it ends somewhere in a block."""
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(
        max_tokens=int(rng.integers(1, 24)),
        unmask=POLICIES[seed % 4],
        stop_token_ids=tuple(range(0, 96, 6)),
        **SETTINGS[seed // 4 % 4],
    )
    request = Request(rng.integers(0, MASK, size=prompt_length), rule, sampling, seed)
    return reference.generate(model, request)


@pytest.fixture(scope="module")
def single_model() -> LanguageModel:
    return make_model("sdar", torch.float32, num_hidden_layers=2)


@pytest.mark.parametrize("origin", ["response", "sequence"])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 4, 6, 8, 16, 32])
def test_log_probs_equal_those_that_the_engine_recorded(
    single_model: LanguageModel, origin: str, shifted: bool, block_size: int
) -> None:
    """Greedy and sampled, by every kind of schedule, after prompts of any length: to 1e-4 in fp32."""
    rule = PartitionRule(block_size, block_size // 2 if shifted else 0, origin)  # type: ignore[arg-type]
    group = [decode(single_model, rule, 1 + 5 * seed % 37, seed) for seed in range(16)]
    assert any(t.stop_length < len(t.response_ids) for t in group) or block_size == 1
    for pack in replay(group, rule, MASK, token_budget=400):
        with torch.no_grad():
            log_probs = score(single_model, pack).log_probs.numpy()
        gap = log_probs - pack.actions.engine_log_probs
        assert np.abs(gap).max() < 1e-4
        assert abs(gap.mean()) < 1e-5, "rounding has no direction"
