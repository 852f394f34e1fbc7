"""FlexAttention on CUDA: the layout's ranges as a mask function, and a BlockMask counted from them.

The BlockMask says for each tile of 128 queries which tiles of 128 keys nobody sees (skipped), all see
(computed without a mask) or some see (masked). It is counted from the rows' ranges, tile by tile; the
L x L mask that torch's own `create_block_mask` evaluates never exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tstar.model.layout import PackedLayout

TILE_SIZE = 128
"""FlexAttention's own granularity, for queries and keys."""


class FlexAttention:
    def __init__(self, layout: PackedLayout, device: torch.device | str) -> None:
        self.positions = torch.from_numpy(layout.positions).to(device)
        self._block_mask = make_block_mask(layout, device)
        # Without compilation FlexAttention materialises all scores: right for a test, not for work.
        is_compiled = torch.device(device).type == "cuda"
        self._kernel = _compiled() if is_compiled else _eager()

    def attend(
        self,
        layer: int,  # noqa: ARG002  (part of the signature; only a KV store needs it)
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        out = self._kernel(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            block_mask=self._block_mask,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _eager() -> Callable[..., Tensor]:
    eager: Callable[..., Tensor] = flex_attention
    return eager


@dataclass(frozen=True)
class TileMap:
    """Which tiles of keys each tile of queries sees."""

    is_partial: Bool[np.ndarray, "query_tiles key_tiles"]
    """Some query of the tile sees some key of the other."""
    is_full: Bool[np.ndarray, "query_tiles key_tiles"]
    """Every query sees every key."""


def map_tiles(layout: PackedLayout, tile_size: int = TILE_SIZE) -> TileMap:
    """Count, for each pair of tiles, the queries that see some and all of the keys.

    Each row's ranges add their number of queries over a run of key tiles: a step up where the run begins
    and a step down where it ends, summed up at the end. Cost: rows and tiles, never tokens squared.
    """
    num_tiles = -(-layout.num_tokens // tile_size)
    row, query_tile, num_queries = _rows_by_tile(layout, tile_size)
    start, stop = layout.row_ranges[row, :, 0], layout.row_ranges[row, :, 1]
    start, stop = _join_touching(start, stop)
    is_real = start < stop
    touched = _count_runs(
        query_tile, start // tile_size, -(-stop // tile_size), is_real, num_queries, num_tiles
    )
    # A range covers a tile when it holds all its keys; the pack's last tile may be short.
    first_whole, end_whole = -(-start // tile_size), stop // tile_size
    covered = _count_runs(
        query_tile,
        first_whole,
        end_whole,
        is_real & (first_whole < end_whole),
        num_queries,
        num_tiles,
    )
    queries_per_tile = np.bincount(query_tile, weights=num_queries, minlength=num_tiles)
    is_full = covered == queries_per_tile[:, None]
    return TileMap(is_partial=(touched > 0) & ~is_full, is_full=is_full)


def make_block_mask(layout: PackedLayout, device: torch.device | str) -> BlockMask:
    tiles = map_tiles(layout)
    num_queries = np.diff(layout.row_starts)
    ranges = torch.from_numpy(np.repeat(layout.row_ranges, num_queries, axis=0)).to(device)
    start, stop = ranges[..., 0].T.contiguous(), ranges[..., 1].T.contiguous()

    partial_counts, partial_indices = _ordered(tiles.is_partial, device)
    full_counts, full_indices = _ordered(tiles.is_full, device)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=TILE_SIZE,
        # A lambda, because torch traces it and must not meet the shape checks of pytest inside.
        mask_mod=lambda _batch, _head, query, key: (
            ((key >= start[0, query]) & (key < stop[0, query]))
            | ((key >= start[1, query]) & (key < stop[1, query]))
            | ((key >= start[2, query]) & (key < stop[2, query]))
        ),
        seq_lengths=(layout.num_tokens, layout.num_tokens),
    )


def _rows_by_tile(
    layout: PackedLayout, tile_size: int
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"]]:
    """Rows cut where a query tile ends: for each piece its row, its tile, its number of queries."""
    tile_starts = np.arange(0, layout.num_tokens, tile_size)
    starts = np.union1d(layout.row_starts[:-1], tile_starts)
    row = np.searchsorted(layout.row_starts, starts, side="right") - 1
    return row, starts // tile_size, np.diff(starts, append=layout.num_tokens)


def _join_touching(
    start: Int64[np.ndarray, "pieces 3"], stop: Int64[np.ndarray, "pieces 3"]
) -> tuple[Int64[np.ndarray, "pieces 3"], Int64[np.ndarray, "pieces 3"]]:
    """Where one range ends as the next begins they are one: a tile across the seam is covered too."""
    start, stop = start.copy(), stop.copy()
    for left, right in ((1, 2), (0, 1)):
        touch = (stop[:, left] == start[:, right]) & (start[:, left] < stop[:, left])
        stop[touch, left] = stop[touch, right]
        start[touch, right] = stop[touch, right]
    return start, stop


def _count_runs(
    query_tile: Int64[np.ndarray, " pieces"],
    first: Int64[np.ndarray, "pieces 3"],
    end: Int64[np.ndarray, "pieces 3"],
    is_real: Bool[np.ndarray, "pieces 3"],
    weight: Int64[np.ndarray, " pieces"],
    num_tiles: int,
) -> Int64[np.ndarray, "query_tiles key_tiles"]:
    """[query tile, key tile]: the summed weight of the runs [first, end) over each key tile."""
    steps = np.zeros((num_tiles, num_tiles + 1), dtype=np.int64)
    tiles = np.broadcast_to(query_tile[:, None], first.shape)[is_real]
    weights = np.broadcast_to(weight[:, None], first.shape)[is_real]
    np.add.at(steps, (tiles, first[is_real]), weights)
    np.add.at(steps, (tiles, end[is_real]), -weights)
    return steps.cumsum(axis=1)[:, :-1]


def _ordered(
    is_there: Bool[np.ndarray, "query_tiles key_tiles"], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """FlexAttention's form of a tile map: per query tile a count, and the key tiles, wanted ones first."""
    indices = np.argsort(~is_there, axis=1, kind="stable").astype(np.int32)
    counts = is_there.sum(axis=1, dtype=np.int32)
    return (
        torch.from_numpy(counts)[None, None].to(device),
        torch.from_numpy(indices)[None, None].to(device),
    )
