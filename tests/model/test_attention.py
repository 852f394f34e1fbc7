"""Every attention backend against a plain softmax over the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tstar.model.attention import Backend, choose_backend, flex, prepare, tiled
from tstar.model.layout import PackedLayout
from tstar.partition import Partition


def plain_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
    """Eq.-by-eq. softmax attention, one head at a time."""
    mask = torch.from_numpy(layout.dense_mask())
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // group].T / query.shape[2] ** 0.5
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
        heads.append(weights @ value[:, head // group])
    return torch.stack(heads, dim=1)


def random_qkv(
    num_tokens: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, head_dim: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [
        (num_tokens, heads, head_dim),
        (num_tokens, kv_heads, head_dim),
        (num_tokens, kv_heads, head_dim),
    ]
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_() for s in shapes]


def layouts() -> list[PackedLayout]:
    mixed = [
        Partition(37, 90, 4),
        Partition(5, 61, 16, offset=8),
        Partition(70, 200, 32, origin="sequence"),
        Partition(0, 3, 8),
    ]
    return [
        PackedLayout.causal([1]),
        PackedLayout.causal([300, 7, 129]),
        PackedLayout.clean(mixed),
        PackedLayout.clean_and_noisy(mixed),
        PackedLayout.clean_and_noisy([Partition(10, 300, 128)]),
    ]


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: f"{layout.num_tokens} tokens")
def test_outputs_and_gradients_equal_the_plain_softmax(backend: Backend, layout: PackedLayout) -> None:
    """In float64, so that nothing but a wrong mask or formula can make a difference."""
    inputs = random_qkv(layout.num_tokens, torch.float64)
    out = prepare(layout, backend=backend).attend(0, *inputs)
    expected = plain_attention(*inputs, layout)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, inputs, upstream)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


@given(
    specs=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(1, 20), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    noisy=st.booleans(),
    tile_size=st.sampled_from([1, 7, 32]),
    max_scores=st.sampled_from([1, 4000]),
    max_kept=st.sampled_from([0, 5000, 10**9]),
)
@settings(max_examples=40)
def test_tiles_of_any_size_give_the_same(
    specs: list[tuple[int, int, int, bool]], noisy: bool, tile_size: int, max_scores: int, max_kept: int
) -> None:
    cut = [Partition(p, r, b, origin="sequence" if s else "response") for p, r, b, s in specs]
    layout = PackedLayout.clean_and_noisy(cut) if noisy else PackedLayout.clean(cut)
    inputs = random_qkv(layout.num_tokens, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "TILE_SIZE", tile_size)
        patch.setattr(tiled, "MAX_SCORES", max_scores)
        patch.setattr(tiled, "MAX_KEPT_WEIGHTS", max_kept)
        out = prepare(layout, backend="tiled").attend(0, *inputs)
        grads = torch.autograd.grad(out.sin().sum(), inputs)
    expected = plain_attention(*inputs, layout)
    expected_grads = torch.autograd.grad(expected.sin().sum(), inputs)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


def test_tiles_compute_few_scores_that_nobody_sees() -> None:
    """Long sequences packed with their noisy copies: the dense mask is 5 % full, the tiles are not."""
    layout = PackedLayout.clean_and_noisy([Partition(64, 192, 8)] * 8)
    computed = sum(t.queries.numel() * t.keys.shape[1] for t in tiled.cut_tiles(layout))
    assert layout.num_visible_pairs < 0.06 * layout.num_tokens**2
    assert computed < 2.6 * layout.num_visible_pairs


def test_bf16_stays_near_fp32() -> None:
    layout = layouts()[3]
    inputs = [x.detach() for x in random_qkv(layout.num_tokens, torch.float32)]
    exact = prepare(layout).attend(0, *inputs)
    rounded = prepare(layout).attend(0, *(x.bfloat16() for x in inputs))
    assert rounded.dtype == torch.bfloat16
    error = (rounded.float() - exact).abs()
    assert error.max() < 0.05
    assert error.mean() < 0.004, "a drift of the mean would be a wrong formula, not rounding"


@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: f"{layout.num_tokens} tokens")
@pytest.mark.parametrize("tile_size", [8, 128])
def test_flex_tile_map_equals_the_dense_mask_cut_in_tiles(layout: PackedLayout, tile_size: int) -> None:
    tiles = flex.map_tiles(layout, tile_size)
    num_tiles = -(-layout.num_tokens // tile_size)
    padded = np.zeros((num_tiles * tile_size,) * 2, dtype=np.bool_)
    padded[: layout.num_tokens, : layout.num_tokens] = layout.dense_mask()
    by_tile = padded.reshape(num_tiles, tile_size, num_tiles, tile_size).transpose(0, 2, 1, 3)
    is_real_query = (np.arange(num_tiles * tile_size) < layout.num_tokens).reshape(num_tiles, 1, tile_size, 1)
    is_full = (by_tile | ~is_real_query).all(axis=(2, 3))
    np.testing.assert_array_equal(tiles.is_full, is_full)
    np.testing.assert_array_equal(tiles.is_partial, by_tile.any(axis=(2, 3)) & ~is_full)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: f"{layout.num_tokens} tokens")
def test_flex_forward_equals_the_plain_softmax(layout: PackedLayout) -> None:
    """Uncompiled on the CPU, where FlexAttention has no backward; the BlockMask is CUDA's."""
    inputs = [x.detach() for x in random_qkv(layout.num_tokens, torch.float32, head_dim=16)]
    out = prepare(layout, backend="flex").attend(0, *inputs)
    torch.testing.assert_close(out, plain_attention(*inputs, layout), rtol=0, atol=1e-5)


def test_flex_never_asks_for_the_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PackedLayout) -> None:
        raise AssertionError("the dense mask was built")

    monkeypatch.setattr(PackedLayout, "dense_mask", refuse)
    layout = PackedLayout.clean_and_noisy([Partition(1000, 20_000, 32)])
    mask = flex.make_block_mask(layout, "cpu")
    assert mask.kv_num_blocks.shape[-1] == -(-layout.num_tokens // 128)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "tiled"), ("cuda", "flex"), ("meta", "sdpa")])
def test_the_device_chooses_the_backend_and_says_why(device: str, backend: str) -> None:
    name, reason = choose_backend(device)
    assert name == backend
    assert len(reason) > 20
