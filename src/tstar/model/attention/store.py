"""Rows of blocks against a KV store: prefill, denoising and commit as one operation, without gradient.

A row is one block of one sequence. In every layer all rows write their keys and values first; then each
row attends, without a causal mask, to its sequence's first `context_length` positions, itself included.
Nothing depends on the order of rows, so any mix of prefills, block sizes and sequences is one forward; a
row even sees what another row of its sequence (its earlier block) wrote in the same forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tstar.model.attention.tiled import grouped_attention
from tstar.model.config import ModelConfig

LENGTH_QUANTUM = 64
"""Rows whose contexts round up to the same multiple are computed together."""


class KVStore:
    """Pages of keys and values for every layer; who owns which page is the caller's business."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size = page_size
        shape = (
            config.num_hidden_layers,
            num_pages,
            page_size,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def num_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        per_layer = 2 * config.num_key_value_heads * config.head_dim
        return config.num_hidden_layers * per_layer * dtype.itemsize

    def prepare(self, rows: Sequence[StoreRow]) -> StoreAttention:
        """Make one forward's rows ready; tokens are fed in the order of the rows."""
        return StoreAttention(self, rows)


@dataclass(frozen=True)
class StoreRow:
    """One block of one sequence, to be written and to attend."""

    start: int
    """Position of the row's first token in its sequence."""
    stop: int
    """One past its last; the row sees every position before it."""
    pages: tuple[int, ...]
    """The sequence's pages in order; position p lies in page p // page_size."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"start, stop: a row needs at least one token, not [{self.start}, {self.stop})")


class StoreAttention:
    def __init__(self, store: KVStore, rows: Sequence[StoreRow]) -> None:
        for index, row in enumerate(rows):
            if row.stop > len(row.pages) * store.page_size:
                raise ValueError(
                    f"rows[{index}].pages: {len(row.pages)} pages of {store.page_size} hold "
                    f"{len(row.pages) * store.page_size} positions; the row ends at {row.stop}"
                )
        device = store.keys.device
        self._store = store
        self._groups = [group.to(device) for group in _group_rows(rows, store.page_size)]
        positions = torch.cat([torch.arange(row.start, row.stop) for row in rows])
        self.positions = positions.to(device)
        slots = [
            torch.tensor(row.pages)[torch.arange(row.start, row.stop) // store.page_size] * store.page_size
            for row in rows
        ]
        self._slots = (torch.cat(slots) + positions % store.page_size).to(device)

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        keys, values = self._store.keys[layer], self._store.values[layer]
        keys.view(-1, *key.shape[1:]).index_copy_(0, self._slots, key.to(keys.dtype))
        values.view(-1, *value.shape[1:]).index_copy_(0, self._slots, value.to(values.dtype))
        out = torch.empty_like(query)
        for group in self._groups:
            context = [x.index_select(0, group.pages.view(-1)) for x in (keys, values)]
            by_row = [x.view(len(group.pages), -1, *x.shape[2:]).to(query.dtype) for x in context]
            out[group.tokens] = grouped_attention(query[group.tokens], by_row[0], by_row[1], group.is_visible)
        return out


@dataclass(frozen=True)
class _RowGroup:
    """Rows of equal length and of about equal context."""

    tokens: Int64[Tensor, "rows row_length"]
    pages: Int64[Tensor, "rows pages"]
    is_visible: Bool[Tensor, "rows context"]

    def to(self, device: torch.device) -> _RowGroup:
        return _RowGroup(self.tokens.to(device), self.pages.to(device), self.is_visible.to(device))


def _group_rows(rows: Sequence[StoreRow], page_size: int) -> list[_RowGroup]:
    by_shape: dict[tuple[int, int], list[tuple[int, StoreRow]]] = defaultdict(list)
    first_token = 0
    for row in rows:
        context = -(-row.stop // LENGTH_QUANTUM) * LENGTH_QUANTUM
        by_shape[row.stop - row.start, -(-context // page_size)].append((first_token, row))
        first_token += row.stop - row.start
    return [
        _RowGroup(
            tokens=torch.tensor([[first + i for i in range(length)] for first, _ in members]),
            # Short page lists are filled up with the row's own first page: it is masked there, and a
            # masked NaN still spoils a sum, so no row may touch another sequence's pages.
            pages=torch.tensor(
                [
                    (*row.pages[:num_pages], *[row.pages[0]] * (num_pages - len(row.pages)))
                    for _, row in members
                ]
            ),
            is_visible=torch.arange(num_pages * page_size)
            < torch.tensor([row.stop for _, row in members])[:, None],
        )
        for (length, num_pages), members in by_shape.items()
    ]
