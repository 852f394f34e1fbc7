"""The engine against its slow twin, against transformers, and against the trainer that replays it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers

from engine_requests import MASK, assert_all_same, make_engine, make_request
from tiny_models import make_model, make_peer
from tstar.engine import Request, SamplingParams, reference
from tstar.model.checkpoint import load_model
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.replay import replay, score
from tstar.unmask import UnmaskPolicy

Origin = Literal["response", "sequence"]
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RULES = [
    PartitionRule(size, offset, origin)
    for size in BLOCK_SIZES
    for offset in ((0, size // 2) if size > 1 else (0,))
    for origin in ("response", "sequence")
]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model("sdar", num_hidden_layers=2, max_position_embeddings=2048)


def name_of(rule: PartitionRule) -> str:
    return f"B={rule.block_size},Δ={rule.offset},{rule.origin}"


# -- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_equals_the_reference_token_for_token_and_step_for_step(
    model: LanguageModel, rule: PartitionRule
) -> None:
    """Every policy and way to draw in one batch, after prompts of different lengths."""
    size = rule.block_size
    lengths = range(1, 13) if size <= 8 else [1, 5, size // 2, size - 1, size, size + 1]
    requests = [make_request(rule, length, 7 * i + rule.offset) for i, length in enumerate(lengths)]
    got = make_engine(model).generate(requests)
    assert_all_same(got, [reference.generate(model, request) for request in requests])


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_prompts_of_every_length_modulo_a_large_b(model: LanguageModel, block_size: int) -> None:
    num_steps = 2 if block_size < 100 else 1  # the slow twin is slow
    requests = [
        make_request(
            PartitionRule(block_size, length % 3, "response" if length % 5 == 0 else "sequence"),
            length,
            length,
            max_tokens=1 + length % 4,
            unmask=UnmaskPolicy("static", steps_per_block=num_steps),
        )
        for length in range(1, block_size + 1)
    ]
    got = make_engine(model).generate(requests)
    assert_all_same(got, [reference.generate(model, request) for request in requests])


def test_one_batch_of_everything(model: LanguageModel) -> None:
    """Every block size, offset and origin at once, in too few slots and pages and forwards too short for
    the longest prompts, so that requests come, wait and read their prompts in pieces."""
    rng = np.random.default_rng(1)
    stops = tuple(range(0, 96, 9))
    numbers = rng.permutation(2 * len(RULES)).tolist()
    requests = [
        make_request(
            RULES[i % len(RULES)], int(rng.integers(1, 150)), i, max_tokens=1 + i % 30, stop_token_ids=stops
        )
        for i in numbers
    ]
    engine = make_engine(model, num_pages=400, max_requests=13, max_forward_tokens=512)
    got = engine.generate(requests)
    assert_all_same(got, [reference.generate(model, request) for request in requests])
    assert any(t.forwards.prefill > 0 for t in got)
    assert {t.finish_reason for t in got} == {"stop", "length"}
    stops_inside = [t.stop_length < len(t.response_ids) for t in got]
    assert 3 < sum(stops_inside) < len(got) - 3


# -- the trainer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_the_trainer_replays_the_log_probs_that_the_engine_recorded(
    model: LanguageModel, rule: PartitionRule
) -> None:
    """Greedy and sampled at any temperature, by every kind of schedule: to 1e-4 in fp32, without drift."""
    rng = np.random.default_rng(0)
    prompt_lengths = rng.integers(1, min(rule.block_size, 40) + 9, size=12 if rule.block_size > 16 else 18)
    requests = [make_request(rule, int(length), i) for i, length in enumerate(prompt_lengths)]
    trajectories = make_engine(model).generate(requests)
    gaps = []
    for pack in replay(trajectories, rule, MASK, token_budget=2000):
        with torch.no_grad():
            log_probs = score(model, pack).log_probs.numpy()
        gaps.append(log_probs - pack.actions.engine_log_probs)
    gap = np.concatenate(gaps)
    assert len(gap) == sum(t.stop_length for t in trajectories)
    assert np.abs(gap).max() < 1e-4
    assert abs(gap.mean()) < 1e-5, "rounding has no direction"


# -- AR models ------------------------------------------------------------------------------------


def greedy_of_transformers(peer: Any, prompt: np.ndarray, max_tokens: int, stops: list[int]) -> list[int]:
    settings = transformers.GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=stops or None, pad_token_id=0
    )
    ids = torch.from_numpy(prompt)[None]
    with torch.no_grad():
        out = peer.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen3_moe", "qwen2", "llama", "llama-llama3"])
def test_an_ar_model_decodes_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """Through its directory on disk; a forward a token, several prompts in a batch, stops and none."""
    peer = make_peer(kind)
    peer.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert not ours.config.is_diffusion
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, size=n) for n in (1, 2, 5, 16, 17, 33)]
    for stops in ((), tuple(range(0, 97, 12))):
        sampling = SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=stops, ignore_eos=True)
        got = make_engine(ours).generate([Request(p, PartitionRule(1), sampling) for p in prompts])
        for prompt, trajectory in zip(prompts, got, strict=True):
            expected = greedy_of_transformers(peer, prompt, 30, list(stops))
            assert trajectory.response_ids.tolist() == expected
            assert trajectory.forwards.denoise == len(expected)
            assert trajectory.forwards.prefill == trajectory.forwards.commit == 0
            assert trajectory.finish_reason == ("stop" if expected[-1] in stops else "length")


@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_a_real_model_decodes_as_transformers_does(shared: Path, name: str) -> None:
    directory = shared / "models" / name
    if not directory.is_dir():
        pytest.skip(f"{directory} is absent")
    peer = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ours = load_model(directory, dtype=torch.float32)
    prompts = [np.array(ids) for ids in ([1], [1, 403, 407, 261, 378], list(range(3, 40)))]
    sampling = SamplingParams(max_tokens=60, temperature=0.0)
    got = make_engine(ours, page_size=16).generate([Request(p, PartitionRule(1), sampling) for p in prompts])
    for prompt, trajectory in zip(prompts, got, strict=True):
        expected = greedy_of_transformers(peer, prompt, 60, list(ours.config.eos_token_ids))
        assert trajectory.response_ids[: trajectory.stop_length].tolist() == expected
        assert trajectory.forwards.denoise == len(trajectory.response_ids)


def test_an_ar_model_equals_the_reference_in_every_way_to_draw() -> None:
    model = make_model("qwen3", num_hidden_layers=2)
    requests = [
        make_request(PartitionRule(1), 1 + i % 9, i, max_tokens=12, unmask=UnmaskPolicy()) for i in range(24)
    ]
    got = make_engine(model, num_pages=40).generate(requests)
    assert_all_same(got, [reference.generate(model, request) for request in requests])
