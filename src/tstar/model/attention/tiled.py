"""Attention over tiles: a few dozen queries at a time against just the keys that one of them sees.

The pack is cut into tiles of consecutive queries. For each tile the keys are sorted into those that every
query sees (no mask needed) and those that only some see (an additive mask), found by index arithmetic on
the layout's ranges; all other keys are never touched. Tiles of equal shape are computed together, two
batched matmuls around one softmax. The backward pass recomputes the scores, so memory does not grow with
the square of the length.

Why not torch's own CPU kernel: it takes a dense mask and visits all of it, and in bf16 it runs at a tenth
of the matmul peak where these matmuls reach a third (`benchmarks/model.py` prints both).
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

TILE_SIZE = 64
"""Queries per tile: large enough for matmuls, small enough that few masked scores are computed."""
KEY_QUANTUM = 32
"""Numbers of keys are rounded to this, so that tiles fall into few shapes."""
MAX_SCORES = 1 << 22
"""Scores computed at once; they should stay in the last-level cache."""


class TiledAttention:
    def __init__(self, layout: PackedLayout, device: torch.device | str) -> None:
        self.positions = torch.from_numpy(layout.positions).to(device)
        self._tiles = [tiles.to(device) for tiles in cut_tiles(layout)]

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        self._tiles = [tiles.to(query.dtype) for tiles in self._tiles]
        out: Tensor = _TiledAttention.apply(query, key, value, self._tiles)
        return out


class _TiledAttention(torch.autograd.Function):
    """One layer's attention over all tiles, with a backward pass that recomputes the scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, all_tiles: list[Tiles]) -> Tensor:
        out = torch.empty_like(query)
        for tiles in all_tiles:
            for part in tiles.portions(query.shape[1]):
                q, k, v = part.operands(query, key, value)
                weights = attention_weights(q, k, part.bias)
                part.put(torch.bmm(weights, v), out)
        ctx.save_for_backward(query, key, value)
        ctx.all_tiles = all_tiles
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        accumulate = torch.promote_types(key.dtype, torch.float32)  # a key is seen from many tiles
        grad_key = torch.zeros_like(key, dtype=accumulate)
        grad_value = torch.zeros_like(value, dtype=accumulate)
        scale = query.shape[-1] ** -0.5
        for tiles in ctx.all_tiles:
            for part in tiles.portions(query.shape[1]):
                q, k, v = part.operands(query, key, value)
                grad = _rows(grad_out, part.queries, key.shape[1])
                weights = attention_weights(q, k, part.bias)
                grad_weights = torch.bmm(grad, v.transpose(1, 2))
                grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
                part.put(torch.bmm(grad_scores, k).mul_(scale), grad_query)
                part.add_to_keys(torch.bmm(grad_scores.transpose(1, 2), q).mul_(scale), grad_key)
                part.add_to_keys(torch.bmm(weights.transpose(1, 2), grad), grad_value)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None


@dataclass(frozen=True)
class Tiles:
    """Tiles of one shape."""

    queries: Int64[Tensor, "tiles tile_size"]
    """Indices into the pack."""
    keys: Int64[Tensor, "tiles keys"]
    """Indices into the pack: first the keys that all of a tile's queries see, then the others."""
    bias: Float[Tensor, "tiles 1 tile_size 1 partial_keys"]
    """Added to the scores of the last keys: 0 where the query sees the key, -inf where not."""

    def to(self, target: torch.device | str | torch.dtype) -> Tiles:
        if isinstance(target, torch.dtype):
            return self if self.bias.dtype == target else replace(self, bias=self.bias.to(target))
        return Tiles(self.queries.to(target), self.keys.to(target), self.bias.to(target))

    def portions(self, num_heads: int) -> Iterator[Tiles]:
        """The same tiles, at most MAX_SCORES scores at a time."""
        scores_per_tile = num_heads * self.queries.shape[1] * self.keys.shape[1]
        step = max(1, MAX_SCORES // scores_per_tile)
        for start in range(0, len(self.queries), step):
            part = slice(start, start + step)
            yield Tiles(self.queries[part], self.keys[part], self.bias[part])

    def operands(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Batched matmul operands, batch = tiles x key/value heads."""
        kv_heads = key.shape[1]
        return (
            _rows(query, self.queries, kv_heads),
            _rows(key, self.keys, kv_heads),
            _rows(value, self.keys, kv_heads),
        )

    def put(self, values: Float[Tensor, "batch rows head_dim"], target: Tensor) -> None:
        """Write what was computed for the queries back to their places in the pack."""
        num_tiles, tile_size = self.queries.shape
        by_token = values.view(num_tiles, -1, tile_size, values.shape[1] // tile_size, values.shape[2])
        target[self.queries] = by_token.transpose(1, 2).reshape(num_tiles, tile_size, *target.shape[1:])

    def add_to_keys(self, values: Float[Tensor, "batch keys head_dim"], target: Tensor) -> None:
        """Add gradients of the keys to their places in the pack; a key may stand in several tiles."""
        num_tiles, num_keys = self.keys.shape
        by_token = values.view(num_tiles, -1, num_keys, values.shape[2]).transpose(1, 2)
        target.index_add_(0, self.keys.view(-1), by_token.reshape(-1, *target.shape[1:]).to(target.dtype))


def _rows(
    tokens: Float[Tensor, "tokens heads head_dim"], indices: Int64[Tensor, "tiles n"], kv_heads: int
) -> Float[Tensor, "batch rows head_dim"]:
    """Gather tokens and lay them out by key/value head: rows = n x heads per key/value head."""
    num_tiles, n = indices.shape
    picked = tokens.index_select(0, indices.reshape(-1))
    by_head = picked.view(num_tiles, n, kv_heads, -1, tokens.shape[2]).permute(0, 2, 1, 3, 4)
    return by_head.reshape(num_tiles * kv_heads, -1, tokens.shape[2])


def attention_weights(
    query: Float[Tensor, "batch rows head_dim"],
    key: Float[Tensor, "batch keys head_dim"],
    bias: Float[Tensor, "tiles 1 tile_size 1 partial_keys"],
) -> Float[Tensor, "batch rows keys"]:
    """softmax(q k / sqrt(d) + bias), the bias on the last keys alone."""
    num_tiles, _, tile_size, _, num_partial = bias.shape
    scores = torch.bmm(query * query.shape[-1] ** -0.5, key.transpose(1, 2))
    if num_partial:
        by_query = scores.view(num_tiles, -1, tile_size, query.shape[1] // tile_size, key.shape[1])
        by_query[..., key.shape[1] - num_partial :].add_(bias)
    return torch.softmax(scores, dim=-1)


# -- planning ----------------------------------------------------------------------------------


def cut_tiles(layout: PackedLayout) -> list[Tiles]:
    """Cut a pack into tiles and gather those of equal shape."""
    by_shape: dict[tuple[int, int, int], list[_Tile]] = defaultdict(list)
    for start in range(0, layout.num_tokens, TILE_SIZE):
        tile = _plan_tile(layout, start, min(start + TILE_SIZE, layout.num_tokens))
        by_shape[tile.visible.shape[0], len(tile.keys), tile.visible.shape[1]].append(tile)
    return [
        Tiles(
            queries=torch.from_numpy(np.stack([np.arange(t.start, t.start + size) for t in tiles])),
            keys=torch.from_numpy(np.stack([t.keys for t in tiles])),
            bias=torch.zeros(len(tiles), 1, size, 1, num_partial).masked_fill_(
                torch.from_numpy(~np.stack([t.visible for t in tiles]))[:, None, :, None], -torch.inf
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
