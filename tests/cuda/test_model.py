"""The kernels that only a GPU runs: FlexAttention compiled, grouped matmuls, the KV store on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiny_models import make_config, randomise
from tstar.model.attention import prepare
from tstar.model.attention.store import KVStore, StoreRows
from tstar.model.head import target_scores
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIXED = [
    Partition(37, 90, 4),
    Partition(5, 61, 16, offset=8),
    Partition(70, 200, 32, origin="sequence"),
    Partition(0, 3, 8),
]


def layouts() -> list[PackedLayout]:
    return [
        PackedLayout.causal([300, 7, 129]),
        PackedLayout.clean(MIXED),
        PackedLayout.clean_and_noisy(MIXED),
        PackedLayout.clean_and_noisy([Partition(10, 300, 128)]),
    ]


def loss_and_gradients(
    model: LanguageModel, token_ids: Tensor, layout: PackedLayout, device: str
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    ids = token_ids.to(device)
    hidden = model(ids, prepare(layout, device))
    scores = target_scores(hidden, model.output_weight, ids, excluded=96)
    ((scores.log_probs + 0.1 * scores.entropies)[ids != 96].mean()).backward()
    log_probs = scores.log_probs.detach().cpu()
    return log_probs, {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def model_pair(model_type: str, dtype: torch.dtype) -> tuple[LanguageModel, LanguageModel]:
    """The same weights in fp32 on the CPU and in `dtype` on the GPU; sizes that the GPU's kernels take."""
    config = make_config(
        model_type, hidden_size=64, intermediate_size=96, head_dim=32, moe_intermediate_size=32
    )
    models = LanguageModel(config), LanguageModel(config)
    for model in models:
        randomise(model)
    return models[0], models[1].to("cuda", dtype)


@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: f"{layout.num_tokens} tokens")
def test_flex_equals_the_cpu_in_log_probs_and_gradients(layout: PackedLayout) -> None:
    on_cpu, on_gpu = model_pair("sdar", torch.float32)
    token_ids = torch.randint(96, (layout.num_tokens,))
    expected, expected_grads = loss_and_gradients(on_cpu, token_ids, layout, "cpu")
    got, grads = loss_and_gradients(on_gpu, token_ids, layout, "cuda")
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-3)
    assert (got - expected).abs().mean() < 5e-4
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).norm() < 0.01 * grad.norm() + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmuls_equal_the_loop_over_experts(dtype: torch.dtype) -> None:
    """In bf16 a router may pick another expert where two are equal but for rounding: the mean is held."""
    on_cpu, on_gpu = model_pair("sdar_moe", dtype)
    layout = layouts()[2]
    token_ids = torch.randint(96, (layout.num_tokens,))
    expected, expected_grads = loss_and_gradients(on_cpu, token_ids, layout, "cpu")
    got, grads = loss_and_gradients(on_gpu, token_ids, layout, "cuda")
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-3)
        for name, grad in expected_grads.items():
            assert (grads[name] - grad).norm() < 0.02 * grad.norm() + 1e-6, name
    assert (got - expected).abs().mean() < (5e-4 if dtype == torch.float32 else 0.35)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_against_the_store_equal_the_packed_forward(dtype: torch.dtype) -> None:
    _, model = model_pair("sdar", dtype)
    partition = Partition(11, 30, 8)
    layout = PackedLayout.clean([partition])
    token_ids = torch.randint(96, (layout.num_tokens,), device="cuda")
    store = KVStore(model.config, num_pages=50, page_size=5, dtype=dtype, device="cuda")
    pages = tuple(torch.randperm(50).tolist())
    with torch.no_grad():
        expected = model(token_ids, prepare(layout, "cuda"))
        blocks = [partition.block(i) for i in range(partition.num_blocks)]
        got = [
            model(token_ids[b.slice], store.prepare(StoreRows.blocks([b.start], [b.stop], [pages])))
            for b in blocks
        ]
    error = (torch.cat(got) - expected).float().abs()
    assert error.mean() < (1e-3 if dtype == torch.float32 else 0.05)
    assert error.max() < (2e-2 if dtype == torch.float32 else 0.5)


def test_a_long_pack_needs_no_quadratic_memory() -> None:
    """40k tokens: a dense mask alone would be 1.6 GB, scores in bf16 of one head 3.2 GB."""
    layout = PackedLayout.clean_and_noisy([Partition(200, 4800, 32)] * 4)
    _, model = model_pair("sdar", torch.bfloat16)
    token_ids = torch.randint(96, (layout.num_tokens,))
    loss_and_gradients(model, token_ids, layout, "cuda")
    torch.cuda.reset_peak_memory_stats()
    loss_and_gradients(model, token_ids, layout, "cuda")
    assert torch.cuda.max_memory_allocated() < 1.2e9
