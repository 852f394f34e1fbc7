"""Rows of tokens against a KV store: prefill, denoising and commit as one operation, without gradient.

A row is a run of consecutive tokens of one sequence: blocks of a prompt, a block being denoised, or a
finished block (its commit) and the next one (its first denoising step) together. In every layer all rows
write their keys and values first; then each token attends, without a causal mask, to its sequence's first
`visible_stops[token]` positions. Nothing depends on the order of rows, so any mix of prefills, block sizes
and sequences is one forward; a row even sees what another row wrote for it in the same forward.

Keys and values lie in pages, head by head inside a page. One `index_select` of (page, head) pairs then
gives each row's context as the operand of a batched matmul, contiguous; rows of similar length and context
are computed together, padded, a cache's worth at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tstar.model.config import ModelConfig

PIECE_LENGTH = 128
"""Queries of one row that are computed together; longer rows (prefill) are cut, so that early pieces
gather short contexts."""
LEAST_PIECE_LENGTH = 8
"""Over very long contexts pieces are shorter, down to this, to keep their scores within the limit."""
CONTEXT_QUANTUM = 64
"""Contexts are padded to this, or to a quarter of their power of two, so that rows fall into few shapes."""


class GatherLimits(NamedTuple):
    """How rows are computed together."""

    gathered: int
    """Keys' numbers gathered at once; one row may need more."""
    scores: int
    """Scores at once."""
    group_cost: int
    """Padded keys' numbers that cost as much as one more group of rows."""


CPU_LIMITS = GatherLimits(gathered=1 << 21, scores=1 << 22, group_cost=1 << 18)
"""Keys, values and scores should stay in the last-level cache."""
GPU_LIMITS = GatherLimits(gathered=1 << 25, scores=1 << 26, group_cost=1 << 23)
"""A group is a dozen kernels a layer, so there should be few; not measured finely."""
LEAST_LIMIT = 1 << 14


def gather_limits(device: torch.device, most_numbers: int | None = None) -> GatherLimits:
    """A device's limits, halved until keys, values, scores and their softmax are at most so many numbers."""
    limits = CPU_LIMITS if device.type == "cpu" else GPU_LIMITS
    while most_numbers is not None and limits.gathered > LEAST_LIMIT and 2 * sum(limits[:2]) > most_numbers:
        limits = limits._replace(gathered=limits.gathered // 2, scores=limits.scores // 2)
    return limits


class KVStore:
    """Pages of keys and values for every layer; who owns which page is the caller's business."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        limits: GatherLimits | None = None,
    ) -> None:
        self.page_size = page_size
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scratch_page = num_pages
        """One page more, nobody's: where padding writes."""
        shape = (config.num_hidden_layers, num_pages + 1, self.num_kv_heads, page_size, self.head_dim)
        self.limits = limits or gather_limits(torch.device(device))
        self.keys = _zeros(shape, dtype, torch.device(device))
        self.values = _zeros(shape, dtype, torch.device(device))

    @staticmethod
    def num_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        per_layer = 2 * config.num_key_value_heads * config.head_dim
        return config.num_hidden_layers * per_layer * dtype.itemsize

    def prepare(self, rows: StoreRows) -> StoreAttention:
        """Make one forward's rows ready; tokens are fed in the order of the rows."""
        return StoreAttention(self, rows)

    def write(
        self,
        layer: int,
        slots: Int64[Tensor, " tokens_heads"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> tuple[
        Float[Tensor, "pages kv_heads page_size head_dim"], Float[Tensor, "pages kv_heads page_size head_dim"]
    ]:
        """Put a layer's keys and values into their slots; the layer's pages."""
        keys, values = self.keys[layer], self.values[layer]
        keys.view(-1, self.head_dim).index_copy_(0, slots, key.reshape(-1, self.head_dim))
        values.view(-1, self.head_dim).index_copy_(0, slots, value.reshape(-1, self.head_dim))
        return keys, values

    def copy_page(self, source: int, target: int) -> None:
        for pages in (self.keys, self.values):
            pages[:, target] = pages[:, source]

    def clear_pages(self, pages: list[int]) -> None:
        """Forget what a page held: a masked key counts nothing only as long as it is a number."""
        self.keys[:, pages] = 0
        self.values[:, pages] = 0


@dataclass(frozen=True, eq=False)
class StoreRows:
    """The rows of one forward."""

    starts: Int64[np.ndarray, " rows"]
    """Position of each row's first token in its sequence."""
    stops: Int64[np.ndarray, " rows"]
    """One past its last."""
    page_table: Int64[np.ndarray, "rows pages"]
    """Each row's pages in order: position p lies in page p // page_size; short lists may end in anything."""
    visible_stops: Int64[np.ndarray, " tokens"]
    """Each token sees its sequence's positions before this one."""
    mirrored_tokens: Int64[np.ndarray, " mirrored"] | None = None
    """Tokens of the forward whose keys and values are also written elsewhere ..."""
    mirror_slots: Int64[np.ndarray, " mirrored"] | None = None
    """... namely there: page * page_size + place in the page."""

    @classmethod
    def blocks(cls, starts: list[int], stops: list[int], pages: list[tuple[int, ...]]) -> StoreRows:
        """Rows of one block each: all tokens of a row see all of it."""
        lengths = np.subtract(stops, starts)
        table = np.zeros((len(pages), max(len(row) for row in pages)), dtype=np.int64)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = own
        return cls(np.array(starts), np.array(stops), table, np.repeat(np.array(stops), lengths))

    def __post_init__(self) -> None:
        if not (self.starts < self.stops).all() or (self.starts < 0).any():
            index = int(np.argmax((self.starts >= self.stops) | (self.starts < 0)))
            raise ValueError(
                f"rows[{index}]: a row needs at least one token, "
                f"not [{self.starts[index]}, {self.stops[index]})"
            )
        if len(self.visible_stops) != (self.stops - self.starts).sum():
            raise ValueError(
                f"visible_stops: {len(self.visible_stops)} entries for "
                f"{(self.stops - self.starts).sum()} tokens"
            )


class StoreAttention:
    def __init__(self, store: KVStore, rows: StoreRows) -> None:
        capacity = rows.page_table.shape[1] * store.page_size
        if rows.visible_stops.max() > capacity or rows.stops.max() > capacity:
            index = int(np.argmax(rows.stops))
            raise ValueError(
                f"rows[{index}].pages: {rows.page_table.shape[1]} pages of {store.page_size} hold "
                f"{capacity} positions; the row ends at {rows.stops[index]}"
            )
        device = store.keys.device
        self._store = store
        lengths = rows.stops - rows.starts
        first_tokens = np.cumsum(lengths) - lengths
        row_ids = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(row_ids)) - (first_tokens - rows.starts)[row_ids]
        self.positions = torch.from_numpy(positions).to(device)
        pages, places = np.divmod(positions, store.page_size)
        pages = rows.page_table[row_ids, pages]
        self._mirrored: Tensor | None = None
        if rows.mirrored_tokens is not None and rows.mirror_slots is not None:
            mirror_pages, mirror_places = np.divmod(rows.mirror_slots, store.page_size)
            pages, places = np.append(pages, mirror_pages), np.append(places, mirror_places)
            tokens = np.append(np.arange(len(row_ids)), rows.mirrored_tokens)
            self._mirrored = torch.from_numpy(tokens).to(device)
        heads = np.arange(store.num_kv_heads)
        slots = (pages[:, None] * store.num_kv_heads + heads) * store.page_size + places[:, None]
        self._slots = torch.from_numpy(slots.reshape(-1)).to(device)
        self._groups = _group_pieces(store, rows, lengths, first_tokens)
        self._back: Tensor | None = None
        if self._groups[0].tokens is not None:
            order = np.concatenate([group.kept_tokens for group in self._groups])
            is_in_order = bool((order == np.arange(len(order))).all())
            self._back = None if is_in_order else torch.from_numpy(np.argsort(order)).to(device)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        if self._mirrored is not None:
            key, value = key.index_select(0, self._mirrored), value.index_select(0, self._mirrored)
        keys, values = self._store.write(layer, self._slots, key, value)
        parts = [group.attend(query, keys, values) for group in self._groups]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed if self._back is None else mixed.index_select(0, self._back)


@dataclass(frozen=True, eq=False)
class _Group:
    """Pieces of rows, padded to the same number of queries and of keys."""

    kept_tokens: Int64[np.ndarray, " kept"]
    """The tokens of the forward that come out, in order."""
    tokens: Int64[Tensor, " queries"] | None
    """Tokens to compute, every piece padded with its own last one; None: all of them as they stand."""
    kept: Int64[Tensor, " kept"] | None
    """Which of them come out; None: all."""
    contexts: Int64[Tensor, " pieces_heads_pages"]
    """For each piece, head and page, where in the store its keys lie."""
    bias: Float[Tensor, "pieces lengths context"]
    """0 for visible keys, -inf for others; the second size is 1 where all queries of a piece see the same."""

    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "pages kv_heads page_size head_dim"],
        values: Float[Tensor, "pages kv_heads page_size head_dim"],
    ) -> Float[Tensor, "kept heads head_dim"]:
        picked = query if self.tokens is None else query.index_select(0, self.tokens)
        mixed = mix(picked, keys, values, self.contexts, self.bias)
        return mixed if self.kept is None else mixed.index_select(0, self.kept)


def mix(
    query: Float[Tensor, "queries heads head_dim"],
    keys: Float[Tensor, "pages kv_heads page_size head_dim"],
    values: Float[Tensor, "pages kv_heads page_size head_dim"],
    contexts: Int64[Tensor, " pieces_heads_pages"],
    bias: Float[Tensor, "pieces lengths context"],
) -> Float[Tensor, "queries heads head_dim"]:
    """Softmax attention of pieces of one shape, each to the pages that are its context (see `_Group`)."""
    num_pieces, num_lengths, num_keys = bias.shape
    kv_heads, page_size, head_dim = keys.shape[1:]
    q = query.view(num_pieces, -1, kv_heads, query.shape[1] // kv_heads, head_dim).transpose(1, 2)
    length, num_shared = q.shape[2:4]
    q = (q * head_dim**-0.5).reshape(num_pieces * kv_heads, -1, head_dim)
    k, v = (
        x.view(-1, page_size * head_dim).index_select(0, contexts).view(len(q), num_keys, head_dim)
        for x in (keys, values)
    )
    scores = torch.bmm(q, k.transpose(1, 2))
    if num_lengths == 1:
        scores.view(num_pieces, -1, num_keys).add_(bias)
    else:
        scores.view(num_pieces, kv_heads, length, num_shared, num_keys).add_(bias[:, None, :, None])
    mixed = torch.bmm(torch.softmax(scores, dim=-1), v)
    mixed = mixed.view(num_pieces, kv_heads, length, num_shared, head_dim).transpose(1, 2)
    return mixed.reshape(num_pieces * length, -1, head_dim)


# -- planning ----------------------------------------------------------------------------------


def _group_pieces(
    store: KVStore,
    rows: StoreRows,
    lengths: Int64[np.ndarray, " rows"],
    first_tokens: Int64[np.ndarray, " rows"],
) -> list[_Group]:
    """Cut rows into pieces, sort these by shape, and pad neighbours to one shape where that costs less
    than another group would."""
    row, first, length = _cut_rows(store, rows, lengths, first_tokens)
    context = rows.visible_stops[first + length - 1]
    padded = _round_up(context)
    if (length == length[0]).all() and (padded == padded[0]).all():
        order = np.arange(len(length))
    else:
        order = np.lexsort((padded, length))
        length, padded = length[order], padded[order]

    groups, start = [], 0
    for stop in _run_ends(store, length, padded):
        members = order[start:stop]
        num_keys = int(padded[start:stop].max())
        groups.append(_make_group(store, rows, row[members], first[members], length[start:stop], num_keys))
        start = stop
    return groups


def _cut_rows(
    store: KVStore,
    rows: StoreRows,
    lengths: Int64[np.ndarray, " rows"],
    first_tokens: Int64[np.ndarray, " rows"],
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"]]:
    """The pieces of all rows: each one's row, its first token in the forward and its length."""
    row = np.arange(len(lengths))
    if lengths.max() <= LEAST_PIECE_LENGTH:
        return row, first_tokens, lengths
    longest = store.limits.scores // (store.num_heads * _round_up(rows.stops))
    longest = np.clip(longest, LEAST_PIECE_LENGTH, PIECE_LENGTH)
    if (lengths <= longest).all():
        return row, first_tokens, lengths
    num_pieces = -(-lengths // longest)
    row = np.repeat(row, num_pieces)
    index_in_row = np.arange(len(row)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = index_in_row * longest[row]
    return row, first_tokens[row] + start, np.minimum(lengths[row] - start, longest[row])


def _round_up(context: Int64[np.ndarray, " pieces"]) -> Int64[np.ndarray, " pieces"]:
    power = np.left_shift(1, np.frexp(context - 1)[1])  # the next power of two
    quantum = np.maximum(CONTEXT_QUANTUM, power // 4)
    rounded: np.ndarray = -(-context // quantum) * quantum
    return rounded


def _run_ends(
    store: KVStore, length: Int64[np.ndarray, " pieces"], context: Int64[np.ndarray, " pieces"]
) -> list[int]:
    """Where the groups end in pieces sorted by shape: runs of equal shape, joined while padding is cheap
    and cut where they outgrow the limits."""
    width, limits = store.num_kv_heads * store.head_dim, store.limits
    is_new = (length[1:] != length[:-1]) | (context[1:] != context[:-1])
    ends = [*(np.flatnonzero(is_new) + 1).tolist(), len(length)]
    joined: list[int] = []
    start, waste = 0, 0.0
    for end, next_end in zip(ends, [*ends[1:], None], strict=True):
        if next_end is not None:
            # The smaller shapes of the two runs would be computed as the larger ones.
            growth = context[next_end - 1] - context[end - 1]
            growth = growth * (end - start) if growth > 0 else -growth * (next_end - end)
            stretch = (length[next_end - 1] - length[end - 1]) / PIECE_LENGTH * context[start:end].sum() * 2
            waste += float(growth + stretch)
            if waste * width <= limits.group_cost and length[next_end - 1] <= 2 * length[start]:
                continue
        num_keys, num_queries = int(context[start:end].max()), int(length[end - 1]) * store.num_heads
        step = max(1, min(limits.gathered // width, limits.scores // num_queries) // num_keys)
        joined += [*range(start + step, end, step), end]
        start, waste = end, 0.0
    return joined


def _make_group(
    store: KVStore,
    rows: StoreRows,
    row: Int64[np.ndarray, " pieces"],
    first: Int64[np.ndarray, " pieces"],
    length: Int64[np.ndarray, " pieces"],
    num_keys: int,
) -> _Group:
    """lengths: rising; num_keys: at least what each of them sees."""
    device, dtype = store.keys.device, store.keys.dtype
    steps, is_whole = np.arange(length[-1]), bool(length[0] == length[-1])
    tokens = first[:, None] + (steps if is_whole else np.minimum(steps, length[:, None] - 1))
    visible = rows.visible_stops[tokens]  # rising along a row
    num_pages = -(-num_keys // store.page_size)
    # Past its own pages a row repeats its first one: it is masked there, and a masked NaN still spoils a
    # sum, so no row may touch another sequence's pages.
    places = np.arange(num_pages)
    places = np.where(places < -(-visible[:, -1:] // store.page_size), places, 0)
    pages = rows.page_table[row[:, None], places]
    contexts = pages[:, None] * store.num_kv_heads + np.arange(store.num_kv_heads)[:, None]
    if (visible[:, 0] == visible[:, -1]).all():
        visible = visible[:, :1]
    hidden = torch.from_numpy(np.arange(num_pages * store.page_size) >= visible[..., None])
    flat, is_kept = tokens.reshape(-1), None if is_whole else steps < length[:, None]
    is_all = is_whole and len(flat) == len(rows.visible_stops) and bool((flat == np.arange(len(flat))).all())
    return _Group(
        kept_tokens=flat if is_kept is None else tokens[is_kept],
        tokens=None if is_all else torch.from_numpy(flat).to(device),
        kept=None if is_kept is None else torch.from_numpy(np.flatnonzero(is_kept)).to(device),
        contexts=torch.from_numpy(contexts.reshape(-1)).to(device),
        bias=torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are the kernel's: a page of memory is taken when it is first written, so a generous
    # budget costs nothing until it is used. torch would write all of them.
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
