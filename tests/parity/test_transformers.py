"""Our transformer against transformers' own classes: same weights, same masks, same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import PEERS, make_model, make_peer
from tstar.model.attention import Backend, prepare
from tstar.model.checkpoint import load_model
from tstar.model.config import ModelConfig
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition


def who_sees_whom(layout: PackedLayout) -> Tensor:
    """SPEC's sentence, pair by pair: a clean token of block m sees every clean token of blocks <= m; a
    noisy copy of block m sees clean blocks < m and itself."""
    mask = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    columns = (layout.segment_ids, layout.copy_ids, layout.block_ids)
    tokens = list(zip(*(column.tolist() for column in columns), strict=True))
    for q, (q_segment, q_copy, q_block) in enumerate(tokens):
        for k, (k_segment, k_copy, k_block) in enumerate(tokens):
            if q_segment == k_segment:
                from_clean = k_copy == 0 and (k_block <= q_block if q_copy == 0 else k_block < q_block)
                mask[q, k] = from_clean or (k_copy == q_copy and k_block == q_block)
    return mask


def peer_logits(peer: Any, token_ids: Tensor, layout: PackedLayout) -> Tensor:
    hidden = torch.where(who_sees_whom(layout), 0.0, torch.finfo(torch.float32).min)
    positions = torch.from_numpy(layout.positions)[None]
    out = peer(
        input_ids=token_ids[None],
        position_ids=positions,
        attention_mask=hidden[None, None],
        use_cache=False,
    )
    logits: Tensor = out.logits[0]
    return logits


def ours_from(peer: Any, tmp_path: Path, dtype: torch.dtype | None = None) -> LanguageModel:
    peer.save_pretrained(tmp_path / "peer")
    return load_model(tmp_path / "peer", dtype)


LAYOUTS = {
    "causal": PackedLayout.causal([70]),
    "causal, packed": PackedLayout.causal([20, 1, 33]),
    "block-diffusion, B = 4": PackedLayout.clean([Partition(9, 40, 4)]),
    "block-diffusion, both origins, packed": PackedLayout.clean(
        [Partition(10, 30, 8, origin="sequence"), Partition(5, 21, 16, offset=8)]
    ),
    "[clean | noisy], packed": PackedLayout.clean_and_noisy(
        [Partition(7, 25, 4), Partition(11, 14, 8, offset=4, origin="sequence"), Partition(0, 9, 1)]
    ),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_logits_equal_transformers(name: str, layout: PackedLayout, tmp_path: Path) -> None:
    peer = make_peer(name)
    model = ours_from(peer, tmp_path)
    token_ids = torch.randint(97, (layout.num_tokens,))
    with torch.no_grad():
        expected = peer_logits(peer, token_ids, layout)
        assert expected.std() > 0.1, "logits near zero would agree whatever the code does"
        for backend in ("sdpa", "tiled"):
            logits = model.logits(model(token_ids, prepare(layout, backend=backend)))
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen2", "llama-bias"])
@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_gradients_equal_transformers(name: str, backend: Backend, tmp_path: Path) -> None:
    peer = make_peer(name)
    model = ours_from(peer, tmp_path)
    layout = LAYOUTS["[clean | noisy], packed"]
    token_ids = torch.randint(97, (layout.num_tokens,))
    upstream = torch.randn(layout.num_tokens, 97)
    (peer_logits(peer, token_ids, layout) * upstream).mean().backward()
    (model.logits(model(token_ids, prepare(layout, backend=backend))) * upstream).mean().backward()
    theirs = dict(peer.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        expected = theirs[parameter_name].grad
        scale = expected.abs().max().clamp(min=1e-6)
        torch.testing.assert_close(parameter.grad / scale, expected / scale, rtol=0, atol=1e-4)


def test_only_chosen_positions_reach_the_lm_head() -> None:
    model = make_model("sdar")
    layout = PackedLayout.clean([Partition(5, 12, 4)])
    hidden = model(torch.randint(97, (17,)), prepare(layout))
    chosen = torch.tensor([16, 3, 3])
    torch.testing.assert_close(model.logits(hidden[chosen]), model.logits(hidden)[chosen])


@pytest.mark.parametrize("model_type", ["sdar", "sdar_moe"])
def test_the_last_layer_finishes_only_what_is_read(model_type: str) -> None:
    model = make_model(model_type)
    attention = prepare(PackedLayout.clean([Partition(5, 12, 4)]))
    token_ids, chosen = torch.randint(97, (17,)), torch.tensor([16, 3, 3])
    finished: list[int] = []
    model.model.layers[-1].mlp.register_forward_hook(lambda _, args, __: finished.append(len(args[0])))
    torch.testing.assert_close(model(token_ids, attention, chosen), model(token_ids, attention)[chosen])
    assert finished == [3, 17]


def test_bf16_stays_near_transformers_bf16(tmp_path: Path) -> None:
    """Both round; ours may not be further from the fp32 truth than theirs."""
    exact = make_peer("qwen3")
    rounded = make_peer("qwen3", torch.bfloat16)
    model = ours_from(exact, tmp_path, torch.bfloat16)
    layout = LAYOUTS["causal"]
    token_ids = torch.randint(97, (70,))
    with torch.no_grad():
        truth = exact(input_ids=token_ids[None]).logits[0]
        theirs = (rounded(input_ids=token_ids[None]).logits[0].float() - truth).abs()
        ours = (model.logits(model(token_ids, prepare(layout))).float() - truth).abs()
    assert ours.mean() < 1.2 * theirs.mean()
    assert ours.max() < 1.5 * theirs.max()


def test_an_sdar_model_is_a_qwen3_model_with_another_name(tmp_path: Path) -> None:
    peer = make_peer("qwen3")
    model = ours_from(peer, tmp_path)
    twin = LanguageModel(model.config.as_diffusion(mask_token_id=96, block_size=4))
    twin.load_state_dict(model.state_dict())
    assert twin.config.model_type == "sdar"
    layout = LAYOUTS["[clean | noisy], packed"]
    token_ids = torch.randint(97, (layout.num_tokens,))
    attention = prepare(layout)
    assert torch.equal(model(token_ids, attention), twin(token_ids, attention))


def test_llama_3_positions_beyond_the_original_length(tmp_path: Path) -> None:
    """Where the scaling of RoPE matters most: past original_max_position_embeddings = 64."""
    peer = make_peer("llama-llama3")
    model = ours_from(peer, tmp_path)
    assert isinstance(model.config, ModelConfig)
    assert model.config.rope_scaling is not None
    layout = PackedLayout.causal([300])
    token_ids = torch.randint(97, (300,))
    with torch.no_grad():
        expected = peer(input_ids=token_ids[None]).logits[0]
        logits = model.logits(model(token_ids, prepare(layout)))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
