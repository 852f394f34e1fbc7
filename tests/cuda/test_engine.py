"""The engine on a GPU: the CPU's responses, whatever the batch, and memory within the budget."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from engine_requests import MASK, make_engine, make_request
from tiny_models import make_config, make_model, randomise
from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.trajectory import Trajectory
from tstar.unmask import UnmaskPolicy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pair(model_type: str = "sdar") -> tuple[LanguageModel, LanguageModel]:
    """The same weights in fp32 on the CPU and on the GPU."""
    on_cpu = make_model(model_type, num_hidden_layers=2, max_position_embeddings=2048)
    return on_cpu, copy.deepcopy(on_cpu).to("cuda")


def share_of_equals(got: list[Trajectory], expected: list[Trajectory]) -> float:
    """A GPU rounds otherwise, and one draw that falls otherwise changes all that follow."""
    same = [
        len(a.response_ids) == len(b.response_ids)
        and bool((a.response_ids == b.response_ids).all())
        and bool((a.unmask_step == b.unmask_step).all())
        for a, b in zip(got, expected, strict=True)
    ]
    for a, b, is_same in zip(got, expected, same, strict=True):
        if is_same:
            np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=0, atol=1e-3)
    return sum(same) / len(same)


def test_decodes_as_on_the_cpu() -> None:
    """Every policy and way to draw, block sizes 1 to 256, both origins, shifted, in one batch; few pages,
    prompts in pieces."""
    on_cpu, on_gpu = pair()
    rules = [
        PartitionRule(size, offset, origin)
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for offset in {0, size // 2}
        for origin in ("response", "sequence")
    ]
    rng = np.random.default_rng(0)
    requests = [
        make_request(rule, int(rng.integers(1, 150)), i, max_tokens=1 + i % 40)
        for i, rule in enumerate(rules)
    ]
    settings = {"num_pages": 400, "max_requests": 13, "max_forward_tokens": 512}
    expected = make_engine(on_cpu, **settings).generate(requests)
    got = make_engine(on_gpu, **settings).generate(requests)
    assert share_of_equals(got, expected) >= 0.9


def test_an_ar_model_decodes_as_on_the_cpu() -> None:
    on_cpu, on_gpu = pair("qwen3")
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    requests = [
        Request(np.random.default_rng(n).integers(0, MASK, size=n), PartitionRule(1), sampling)
        for n in range(1, 20)
    ]
    expected, got = make_engine(on_cpu).generate(requests), make_engine(on_gpu).generate(requests)
    assert share_of_equals(got, expected) >= 0.9


@pytest.mark.parametrize("block_size", [4, 32, 256])
def test_bf16_stays_within_its_budget(block_size: int) -> None:
    """64 requests at once, more than the budget has room for; every response is complete."""
    config = make_config(
        "sdar",
        vocab_size=32_000,
        mask_token_id=31_999,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
    )
    model = LanguageModel(config)
    randomise(model)
    model = model.to("cuda", torch.bfloat16)
    budget = 1 << 30
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = Engine(model, EngineConfig(memory=budget))
    sampling = SamplingParams(
        max_tokens=300,
        top_p=0.9,
        unmask=UnmaskPolicy("static", steps_per_block=max(1, block_size // 8)),
        ignore_eos=True,
    )
    prompt = np.arange(900)
    requests = [
        Request((prompt + seed) % 31_000, PartitionRule(block_size), sampling, seed) for seed in range(64)
    ]
    trajectories = engine.generate(requests)
    assert torch.cuda.max_memory_allocated() - before < budget
    assert all(len(t.response_ids) == 300 and 31_999 not in t.response_ids for t in trajectories)
    assert all(np.isfinite(t.log_probs).all() for t in trajectories)


def test_weights_of_a_trainer_on_the_device_are_shared() -> None:
    _, on_gpu = pair()
    engine = make_engine(on_gpu)
    trained = copy.deepcopy(on_gpu)
    randomise(trained, seed=3)
    engine.load_weights(trained.named_parameters(), version=2)
    assert on_gpu.output_weight.data_ptr() == trained.output_weight.data_ptr()
    request = make_request(PartitionRule(4), 9, 0, max_tokens=12)
    (got,) = engine.generate([request])
    (expected,) = make_engine(copy.deepcopy(trained).cpu()).generate([request])
    assert share_of_equals([got], [expected]) == 1.0


def test_sleeping_gives_the_memory_back() -> None:
    _, on_gpu = pair()
    before = torch.cuda.memory_allocated()
    engine = Engine(on_gpu, EngineConfig(memory=1 << 31))
    awake = torch.cuda.memory_allocated()
    engine.sleep()
    assert awake - before > 1 << 20
    assert torch.cuda.memory_allocated() - before < (awake - before) / 100
    engine.wake()
    assert torch.cuda.memory_allocated() == awake
