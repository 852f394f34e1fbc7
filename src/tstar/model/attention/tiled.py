"""Attention over tiles: a few dozen queries at a time against just the keys that one of them sees.

The pack is cut into tiles of consecutive queries. For each tile the keys are sorted into those that every
query sees (no mask needed) and those that only some see (an additive mask), found by index arithmetic on
the layout's ranges; all other keys are never touched. Tiles of equal shape are computed together, two
batched matmuls around one softmax. The softmaxes of short packs are kept for the backward pass; those of
longer ones are recomputed there, so memory does not grow with the square of the length.

Why not torch's own CPU kernel: it takes a dense mask and visits all of it, and in bf16 one causal layer of
2048 tokens takes it 33 ms where these matmuls need 13 (docs/log.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tstar.model.layout import PackedLayout

TILE_SIZE = 96
"""Queries per tile: large enough for matmuls, small enough that few masked scores are computed."""
KEY_QUANTUM = 32
"""Numbers of keys are rounded to this, so that tiles fall into few shapes."""
MAX_KEPT_WEIGHTS = 1 << 25
"""Attention weights that a layer keeps for its backward pass (64 MiB in bf16, 128 MiB in fp32)."""
MAX_SCORES = 1 << 22
"""Scores computed at once; they should stay in the last-level cache."""


class TiledAttention:
    def __init__(self, layout: PackedLayout, device: torch.device | str) -> None:
        self.positions = torch.from_numpy(layout.positions).to(device)
        self._tiles = [tiles.to(device) for tiles in cut_tiles(layout)]

    def attend(
        self,
        layer: int,  # noqa: ARG002  (part of the signature; only a KV store needs it)
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        self._tiles = [tiles.to(query.dtype) for tiles in self._tiles]
        will_train = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        max_kept = MAX_KEPT_WEIGHTS if will_train else 0
        out: Tensor = _TiledAttention.apply(query, key, value, self._tiles, max_kept)  # type: ignore[no-untyped-call]
        return out


class _TiledAttention(torch.autograd.Function):
    """One layer's attention over all tiles; what it does not keep, its backward pass computes again.

    Inside, tensors are head-major: [key/value heads, tokens, heads per key/value head, head_dim], so that
    a run of tokens is a batched matmul's operand as it lies.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, all_tiles: list[Tiles], max_kept: int
    ) -> Tensor:
        q, k, v = _head_major(query, key, value)
        k_columns = k.transpose(1, 3).contiguous()
        out = torch.empty_like(q)
        kept, num_kept = [], 0
        for tiles in _portions(all_tiles, query.shape[1]):
            weights = _weights(tiles.pick_queries(q), tiles.pick_key_columns(k, k_columns), tiles.bias)
            tiles.put_queries(torch.bmm(weights, tiles.pick_keys(v)), out)
            num_kept += weights.numel()
            if num_kept <= max_kept:
                kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)  # all of it, so that checkpointing can drop it
        ctx.all_tiles = all_tiles
        return _token_major(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, *kept = ctx.saved_tensors
        q, k, v = _head_major(query, key, value)
        k_columns, v_columns = (x.transpose(1, 3).contiguous() for x in (k, v))
        grad = grad_out.reshape(len(grad_out), len(k), -1, grad_out.shape[-1]).transpose(0, 1).contiguous()
        accumulate = torch.promote_types(key.dtype, torch.float32)  # a key is seen from many tiles
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (
            torch.zeros_like(k, dtype=accumulate),
            torch.zeros_like(v, dtype=accumulate),
        )
        for portion, tiles in enumerate(_portions(ctx.all_tiles, query.shape[1])):
            q_tile, grad_tile = tiles.pick_queries(q), tiles.pick_queries(grad)
            if portion < len(kept):
                weights = kept[portion]
            else:
                weights = _weights(q_tile, tiles.pick_key_columns(k, k_columns), tiles.bias)
            tiles.add_to_keys(torch.bmm(weights.transpose(1, 2), grad_tile), grad_v)
            grad_weights = torch.bmm(grad_tile, tiles.pick_key_columns(v, v_columns))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            tiles.put_queries(torch.bmm(grad_scores, tiles.pick_keys(k)), grad_q)
            tiles.add_to_keys(torch.bmm(grad_scores.transpose(1, 2), q_tile), grad_k)
        grad_query = _token_major(grad_q.mul_(_scale(query)))
        grad_key, grad_value = (_token_major(x.to(key.dtype)) for x in (grad_k, grad_v))
        return grad_query, grad_key, grad_value, None, None


def _scale(query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5)


def _head_major(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens, heads, d] -> [kv_heads, tokens, heads per kv head, d]; the query scaled by 1 / sqrt(d)."""
    kv_heads = key.shape[1]
    q, k, v = (
        x.reshape(len(x), kv_heads, -1, x.shape[2]).transpose(0, 1).contiguous() for x in (query, key, value)
    )
    return q.mul_(_scale(query)) if q.data_ptr() != query.data_ptr() else q * _scale(query), k, v


def _token_major(by_head: Tensor) -> Tensor:
    return by_head.transpose(0, 1).flatten(1, 2)


def _weights(
    query: Float[Tensor, "batch rows head_dim"],
    key_columns: Float[Tensor, "batch head_dim keys"],
    bias: Float[Tensor, "tiles tile_size 1 partial_keys"],
) -> Float[Tensor, "batch rows keys"]:
    """softmax(q k + bias), the bias on the last keys alone; batch = key/value heads x tiles."""
    scores = torch.bmm(query, key_columns)
    num_tiles, tile_size, _, num_partial = bias.shape
    if num_partial:
        by_query = scores.view(-1, num_tiles, tile_size, query.shape[1] // tile_size, scores.shape[2])
        by_query[..., scores.shape[2] - num_partial :].add_(bias)
    return torch.softmax(scores, dim=-1)


@dataclass(frozen=True)
class Tiles:
    """Tiles of one shape."""

    queries: Int64[Tensor, "tiles tile_size"]
    """Indices into the pack."""
    keys: Int64[Tensor, "tiles keys"]
    """Indices into the pack: first the keys that all of a tile's queries see, then the others."""
    bias: Float[Tensor, "tiles tile_size 1 partial_keys"]
    """Added to the scores of the last keys: 0 where the query sees the key, -inf where not."""
    query_slice: slice | None
    """The queries as one run of the pack, where they are one: nothing has to be copied then."""
    key_slice: slice | None

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, bias: Tensor) -> Tiles:
        return cls(queries, keys, bias, _as_slice(queries), _as_slice(keys))

    def to(self, target: torch.device | str | torch.dtype) -> Tiles:
        if isinstance(target, torch.dtype):
            return self if self.bias.dtype == target else replace(self, bias=self.bias.to(target))
        queries, keys, bias = (x.to(target) for x in (self.queries, self.keys, self.bias))
        return Tiles(queries, keys, bias, self.query_slice, self.key_slice)

    def pick_queries(self, by_head: Tensor) -> Float[Tensor, "batch rows head_dim"]:
        return self._pick(by_head, self.queries, self.query_slice)

    def pick_keys(self, by_head: Tensor) -> Float[Tensor, "batch keys head_dim"]:
        return self._pick(by_head, self.keys, self.key_slice)

    def pick_key_columns(self, by_head: Tensor, columns: Tensor) -> Float[Tensor, "batch head_dim keys"]:
        """The keys as columns, from the form (rows, or [kv_heads, head_dim, 1, tokens]) that needs no
        copy."""
        if self.key_slice is not None and len(self.keys) == 1:
            return columns[:, :, 0, self.key_slice]
        return self.pick_keys(by_head).transpose(1, 2)

    def put_queries(self, values: Float[Tensor, "batch rows head_dim"], target: Tensor) -> None:
        """Write what was computed for the queries to their places."""
        by_token = values.view(len(target), -1, *target.shape[2:])
        if self.query_slice is not None:
            target[:, self.query_slice] = by_token
        else:
            target.index_copy_(1, self.queries.view(-1), by_token)

    def add_to_keys(self, values: Float[Tensor, "batch keys head_dim"], target: Tensor) -> None:
        """Add gradients of the keys to their places; a key may stand in several tiles."""
        by_token = values.view(len(target), -1, *target.shape[2:])
        if self.key_slice is not None:
            target[:, self.key_slice] += by_token
        else:
            target.index_add_(1, self.keys.view(-1), by_token.to(target.dtype))

    def _pick(self, by_head: Tensor, indices: Tensor, run: slice | None) -> Tensor:
        picked = by_head[:, run] if run is not None else by_head.index_select(1, indices.view(-1))
        num_tiles, n = indices.shape
        return picked.reshape(len(by_head) * num_tiles, n * by_head.shape[2], by_head.shape[3])


def _as_slice(indices: Tensor) -> slice | None:
    flat = indices.view(-1)
    if len(flat) and bool((flat.diff() == 1).all()):
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return None


def _portions(all_tiles: list[Tiles], num_heads: int) -> Iterator[Tiles]:
    """The same tiles, at most MAX_SCORES scores at a time."""
    for tiles in all_tiles:
        scores_per_tile = num_heads * tiles.queries.shape[1] * tiles.keys.shape[1]
        step = max(1, MAX_SCORES // scores_per_tile)
        if step >= len(tiles.queries):
            yield tiles
            continue
        for start in range(0, len(tiles.queries), step):
            part = slice(start, start + step)
            yield Tiles.of(tiles.queries[part], tiles.keys[part], tiles.bias[part])


def grouped_attention(
    query: Float[Tensor, "rows row_length heads head_dim"],
    key: Float[Tensor, "rows context kv_heads head_dim"],
    value: Float[Tensor, "rows context kv_heads head_dim"],
    is_visible: Bool[Tensor, "rows context"],
) -> Float[Tensor, "rows row_length heads head_dim"]:
    """Rows against contexts of their own, all tokens of a row seeing the same keys; no gradient."""
    num_rows, row_length, _, head_dim = query.shape
    kv_heads = key.shape[2]
    q = query.view(num_rows, row_length, kv_heads, -1, head_dim).transpose(1, 2)
    q = q.reshape(num_rows * kv_heads, -1, head_dim)
    k, v = (x.transpose(1, 2).reshape(num_rows * kv_heads, -1, head_dim) for x in (key, value))
    scores = torch.bmm(q * _scale(query), k.transpose(1, 2))
    scores.view(num_rows, -1, scores.shape[2]).masked_fill_(~is_visible[:, None], -torch.inf)
    mixed = torch.bmm(torch.softmax(scores, dim=-1), v)
    return mixed.view(num_rows, kv_heads, row_length, -1, head_dim).transpose(1, 2).flatten(2, 3)


# -- planning ----------------------------------------------------------------------------------


def cut_tiles(layout: PackedLayout) -> list[Tiles]:
    """Cut a pack into tiles and gather those of equal shape."""
    by_shape: dict[tuple[int, int, int], list[_Tile]] = defaultdict(list)
    for start in range(0, layout.num_tokens, TILE_SIZE):
        tile = _plan_tile(layout, start, min(start + TILE_SIZE, layout.num_tokens))
        by_shape[tile.visible.shape[0], len(tile.keys), tile.visible.shape[1]].append(tile)
    return [
        Tiles.of(
            queries=torch.from_numpy(np.stack([np.arange(t.start, t.start + size) for t in tiles])),
            keys=torch.from_numpy(np.stack([t.keys for t in tiles])),
            bias=torch.zeros(len(tiles), size, 1, num_partial).masked_fill_(
                torch.from_numpy(~np.stack([t.visible for t in tiles]))[:, :, None], -torch.inf
            ),
        )
        for (size, _, num_partial), tiles in by_shape.items()
    ]


@dataclass(frozen=True)
class _Tile:
    start: int
    keys: Int64[np.ndarray, " keys"]
    visible: Bool[np.ndarray, "tile_size partial_keys"]


def _plan_tile(layout: PackedLayout, start: int, stop: int) -> _Tile:
    """The keys of the queries [start, stop): first those all of them see, then those some see."""
    first_row, last_row = np.searchsorted(layout.row_starts, [start, stop - 1], side="right") - 1
    rows = slice(first_row, last_row + 1)
    ranges = layout.row_ranges[rows]
    row_starts = np.clip(layout.row_starts[first_row : last_row + 2], start, stop)
    queries_per_row = np.diff(row_starts)

    # Over the keys the tile can reach, count the queries that see each: a sum of steps up and down.
    reach = ranges[ranges[..., 0] < ranges[..., 1]]
    lowest, highest = int(reach[:, 0].min()), int(reach[:, 1].max())
    steps = np.zeros(highest - lowest + 1, dtype=np.int64)
    for edge, sign in ((0, 1), (1, -1)):
        at = np.clip(ranges[..., edge], lowest, highest) - lowest
        np.add.at(steps, at, sign * queries_per_row[:, None])
    num_seeing = np.cumsum(steps[:-1])
    full = np.flatnonzero(num_seeing == stop - start) + lowest
    partial = np.flatnonzero((num_seeing > 0) & (num_seeing < stop - start)) + lowest

    # Round both numbers so that shapes repeat: spare full keys are treated as partial ones, and
    # partial ones are filled up with a key that nobody sees.
    num_full = len(full) // KEY_QUANTUM * KEY_QUANTUM
    partial = np.concatenate([full[num_full:], partial])
    is_real = np.arange(-(-len(partial) // KEY_QUANTUM) * KEY_QUANTUM) < len(partial)
    padded = np.zeros(len(is_real), dtype=np.int64)
    padded[: len(partial)] = partial
    inside = (padded >= ranges[:, :, :1]) & (padded < ranges[:, :, 1:])
    visible = np.repeat(inside.any(axis=1) & is_real, queries_per_row, axis=0)
    return _Tile(start, np.concatenate([full[:num_full], padded]), visible)
