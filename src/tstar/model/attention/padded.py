"""Rows against a KV store, padded to a shape: a forward whose sizes are all known before it is asked for.

A shape is so many rows of so many tokens with so many pages of context. Everything that differs between two
forwards of one shape is numbers in one vector, `pad_rows`; what follows from them is computed on the
device, without a look back at the host. So a GPU can record such a forward once and repeat it.

A row shorter than its shape repeats its last token, and a row that is not there is a token that sees
itself; what these would write goes to the store's scratch page, and nobody reads what comes of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tstar.model.attention.store import GatherLimits, KVStore, StoreRows, mix

LEAST_CONTEXT = 256
"""Positions of context that every shape has, so that short sequences need few of them."""
FREE_TOKENS = 256
"""A GPU reads its weights in the time of so many tokens: up to there padding costs next to nothing, beyond
it at most half of a forward is padding."""
PADDED_LIMITS = GatherLimits(gathered=1 << 24, scores=1 << 23, group_cost=1)
"""The memory of recorded forwards is theirs alone, so it is less than others'; more groups cost a recorded
forward little."""


class PaddedShape(NamedTuple):
    num_rows: int
    length: int
    """Tokens of each row."""
    num_pages: int
    """Of each row's context."""

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.length

    @property
    def num_inputs(self) -> int:
        """Of four numbers a token, and the page table."""
        return 4 * self.num_tokens + self.num_rows * self.num_pages


def padded_limits(limits: GatherLimits) -> GatherLimits:
    return GatherLimits(
        min(limits.gathered, PADDED_LIMITS.gathered), min(limits.scores, PADDED_LIMITS.scores), 1
    )


def choose_shape(store: KVStore, rows: StoreRows, max_tokens: int) -> PaddedShape | None:
    """The shape that these rows are padded to; None where a forward of their own sizes serves better."""
    if rows.mirrored_tokens is not None:
        return None
    num_rows = len(rows.starts)
    context = max(int(rows.visible_stops.max()), LEAST_CONTEXT)
    shape = PaddedShape(
        _round_up(num_rows),
        _round_up(int((rows.stops - rows.starts).max())),
        _round_up(-(-context // store.page_size)),
    )
    limits, num_keys = padded_limits(store.limits), shape.num_pages * store.page_size
    fits = (
        shape.num_tokens <= max_tokens
        and shape.num_tokens * num_keys <= limits.scores
        and store.num_heads * shape.length * num_keys <= limits.scores
        and store.num_kv_heads * store.head_dim * num_keys <= limits.gathered
    )
    is_cheap = shape.num_tokens <= max(FREE_TOKENS, 2 * len(rows.visible_stops))
    return shape if fits and is_cheap else None


def _round_up(count: int) -> int:
    """The next power of two, or one and a half of one: a third of it is padding at most."""
    power = 1 << (count - 1).bit_length()
    return power // 4 * 3 if count <= power // 4 * 3 else power


def pad_rows(
    store: KVStore, rows: StoreRows, token_ids: Int64[np.ndarray, " tokens"], shape: PaddedShape
) -> tuple[Int64[np.ndarray, " inputs"], Int64[np.ndarray, " tokens"]]:
    """The numbers that make a forward of this shape compute these rows, and where in it each token is."""
    page_size, length = store.page_size, shape.length
    num_rows, lengths = len(rows.starts), rows.stops - rows.starts
    first_tokens = np.cumsum(lengths) - lengths
    steps = np.arange(length)
    inside = np.minimum(steps, lengths[:, None] - 1)
    tokens = first_tokens[:, None] + inside
    positions = rows.starts[:, None] + inside
    visible = rows.visible_stops[tokens]
    pages, places = np.divmod(positions, page_size)
    row_of = np.arange(num_rows)[:, None]
    pages = rows.page_table[row_of, pages]
    pages[steps >= lengths[:, None]] = store.scratch_page

    inputs = np.zeros(shape.num_inputs, dtype=np.int64)
    columns = inputs[: 4 * shape.num_tokens].reshape(4, shape.num_rows, length)
    columns[2, num_rows:] = store.scratch_page * store.num_kv_heads * page_size
    columns[3, num_rows:] = 1
    columns[:, :num_rows] = token_ids[tokens], positions, _slots(store, pages, places), visible
    table = inputs[4 * shape.num_tokens :].reshape(shape.num_rows, shape.num_pages)
    table[num_rows:] = store.scratch_page
    # Behind its own pages a row repeats its first one, as ever: a masked NaN of others would spoil its sums.
    width = min(rows.page_table.shape[1], shape.num_pages)
    own = np.arange(width) < -(-visible.max(axis=1) // page_size)[:, None]
    table[:num_rows] = rows.page_table[:, :1]
    table[:num_rows, :width] = np.where(own, rows.page_table[:, :width], rows.page_table[:, :1])
    shifts = np.arange(num_rows) * length - first_tokens
    return inputs, np.arange(len(token_ids)) + np.repeat(shifts, lengths)


def _slots(
    store: KVStore, pages: Int64[np.ndarray, "rows length"], places: Int64[np.ndarray, "rows length"]
) -> Int64[np.ndarray, "rows length"]:
    """Where in the store a token's first head lies; the others follow a page's length apart."""
    slots: np.ndarray = pages * (store.num_kv_heads * store.page_size) + places
    return slots


class PaddedAttention:
    """The rows that a vector of `pad_rows` describes; made and used on the device alone."""

    def __init__(self, store: KVStore, shape: PaddedShape, inputs: Int64[Tensor, " inputs"]) -> None:
        device, dtype = store.keys.device, store.keys.dtype
        self._store, self._shape = store, shape
        columns = inputs[: 4 * shape.num_tokens].view(4, shape.num_tokens)
        self.token_ids, self.positions = columns[0], columns[1]
        heads = torch.arange(store.num_kv_heads, device=device)
        self._slots = (columns[2][:, None] + heads * store.page_size).reshape(-1)
        pages = inputs[4 * shape.num_tokens :].view(shape.num_rows, 1, shape.num_pages)
        self._contexts = (pages * store.num_kv_heads + heads[:, None]).reshape(shape.num_rows, -1)
        num_keys = shape.num_pages * store.page_size
        hidden = torch.arange(num_keys, device=device) >= columns[3].view(shape.num_rows, -1, 1)
        self._bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        limits, width = padded_limits(store.limits), store.num_kv_heads * store.head_dim
        per_row = store.num_heads * shape.length * num_keys
        self._rows_at_once = max(1, min(limits.gathered // (width * num_keys), limits.scores // per_row))

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        keys, values = self._store.write(layer, self._slots, key, value)
        length, parts = self._shape.length, []
        for start in range(0, self._shape.num_rows, self._rows_at_once):
            rows = slice(start, start + self._rows_at_once)
            tokens = slice(start * length, (start + self._rows_at_once) * length)
            parts.append(mix(query[tokens], keys, values, self._contexts[rows].view(-1), self._bias[rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
