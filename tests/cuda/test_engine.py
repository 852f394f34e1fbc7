"""The engine on a GPU: the CPU's responses, whatever the batch, and memory within the budget."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from engine_requests import MASK, make_engine, make_request
from tiny_models import make_config, make_model, randomise
from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.errors import UserError
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


def large_enough(model_type: str, dtype: torch.dtype) -> LanguageModel:
    """Sizes that the GPU's kernels take."""
    config = make_config(
        model_type,
        hidden_size=64,
        intermediate_size=96,
        head_dim=32,
        moe_intermediate_size=32,
        max_position_embeddings=2048,
    )
    model = LanguageModel(config)
    randomise(model)
    return model.to("cuda", dtype)


def requests_in_step(block_size: int, count: int = 12) -> list[Request]:
    """Prompts of several lengths, two tokens a step: rows of a block, and of two where a commit rides."""
    sampling = SamplingParams(max_tokens=64, unmask=UnmaskPolicy("static", tokens_per_step=2))
    rule, rng = PartitionRule(block_size), np.random.default_rng(0)
    return [Request(rng.integers(0, MASK, size=9 + n % 5), rule, sampling, n) for n in range(count)]


@pytest.mark.parametrize("block_size", [4, 16])
def test_recorded_forwards_give_what_others_give(block_size: int) -> None:
    """Recorded in the first run, repeated in the second, and most forwards are."""
    model, requests = large_enough("sdar", torch.float32), requests_in_step(block_size)
    expected = make_engine(model, graphs=False).generate(requests)
    engine = make_engine(model, graphs=True)
    for _ in range(2):
        assert share_of_equals(engine.generate(requests), expected) >= 0.9
    padded = engine._padded
    assert padded is not None
    assert padded.num_runs > engine.num_forwards / 2
    assert 0 < padded.num_shapes < 20
    assert padded.num_bytes <= engine._memory.graph_bytes


@pytest.mark.parametrize(
    ("model_type", "dtype", "largest_error"),
    [
        ("sdar", torch.float32, 1e-5),
        ("sdar", torch.bfloat16, 0.01),
        # Experts' sums are added up in any order, and a router may pick another where two are all but equal.
        ("sdar_moe", torch.bfloat16, 0.35),
    ],
)
def test_a_graph_repeats_the_forward_that_it_was_made_of(
    model_type: str, dtype: torch.dtype, largest_error: float
) -> None:
    """Every recorded shape once more, called and replayed: every row is its first token, in page 0."""
    engine = make_engine(large_enough(model_type, dtype), graphs=True)
    engine.generate(requests_in_step(8))
    padded = engine._padded
    assert padded is not None
    assert padded.num_shapes > 0
    with torch.inference_mode():
        for shape, graph in padded._graphs.items():
            assert graph is not None
            padded._inputs.zero_()
            padded._inputs[3 * shape.num_tokens : 4 * shape.num_tokens] = 1
            padded._compute(shape)
            called = padded._hidden[: shape.num_tokens].float()
            padded._hidden.zero_()
            graph.replay()
            replayed = padded._hidden[: shape.num_tokens].float()
            assert called.isfinite().all()
            assert called.any()
            assert (replayed - called).abs().mean() <= largest_error


def test_grouped_matmuls_that_cannot_be_recorded_are_not() -> None:
    model = large_enough("sdar_moe", torch.float32)
    assert make_engine(model)._padded is None
    with pytest.raises(UserError, match="graphs: mixtures of experts in float32 cannot be recorded"):
        make_engine(model, graphs=True)


def test_graphs_see_weights_that_change_in_place_and_none_that_moved() -> None:
    model = large_enough("sdar", torch.float32)
    trained = copy.deepcopy(model)
    engine, requests = make_engine(model, graphs=True), requests_in_step(4)
    engine.generate(requests)
    padded = engine._padded
    assert padded is not None
    for version in (1, 2):
        randomise(trained.cpu(), seed=version)
        trained = trained.to("cuda")
        engine.load_weights(trained.named_parameters(), version)
        assert padded.num_shapes == 0, "the weights came from elsewhere"
        expected = make_engine(copy.deepcopy(trained), graphs=False).generate(requests)
        assert share_of_equals(engine.generate(requests), expected) >= 0.9
    num_shapes = padded.num_shapes
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(0.9)
    engine.load_weights(trained.named_parameters(), 3)
    assert padded.num_shapes == num_shapes > 0
    expected = make_engine(copy.deepcopy(trained), graphs=False).generate(requests)
    assert share_of_equals(engine.generate(requests), expected) >= 0.9


def test_weights_of_a_trainer_on_the_device_are_shared() -> None:
    on_cpu, on_gpu = pair()
    engine = make_engine(on_gpu)
    trained = copy.deepcopy(on_cpu)
    randomise(trained, seed=3)
    trained = trained.to(on_gpu.device)
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
