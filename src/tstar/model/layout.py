"""Who sees whom in one packed forward, from block ids alone.

A packed forward is a flat run of tokens from many sequences. Each token carries its segment (sequence),
its block in that sequence, and its copy: 0 is the clean text, 1, 2, ... are noisy copies of blocks. One
rule covers SFT, replay and plain scoring:

    a token of block m sees the clean blocks < m of its sequence, and its own copy of block m.

A clean token of block m thus sees every clean token of blocks <= m; a noisy copy of block m sees the
clean blocks < m and itself. With blocks of one token and no noisy copy it is the causal rule of AR models.

Because clean tokens stand in order, what a token sees is at most three ranges of the pack (a shared
prompt, its own sequence's earlier clean blocks, its own row). All attention backends are built from these
ranges; nobody ever needs an L x L mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64

from tstar.partition import Partition

NO_PARENT = -1


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """The tokens of one packed forward: their positions and whom they see.

    Tokens of one (segment, copy, block) stand together and form a *row*. The clean rows of a segment
    stand together in rising block order, and segments with clean tokens in rising order; noisy rows may
    stand anywhere.
    """

    positions: Int64[np.ndarray, " tokens"]
    """Position in the sequence, what RoPE turns by: a noisy copy has the positions of its clean block."""
    segment_ids: Int64[np.ndarray, " tokens"]
    block_ids: Int64[np.ndarray, " tokens"]
    copy_ids: Int64[np.ndarray, " tokens"]
    """0: clean; c > 0: the segment's c-th noisy copy."""
    segment_parents: tuple[int, ...] | None = None
    """Per segment id, the segment that holds its prompt (several responses share one), or NO_PARENT."""

    def __post_init__(self) -> None:
        sizes = {
            name: len(getattr(self, name)) for name in ("positions", "segment_ids", "block_ids", "copy_ids")
        }
        if len(set(sizes.values())) > 1:
            raise ValueError(f"positions, segment_ids, block_ids, copy_ids differ in length: {sizes}")
        if self.num_tokens == 0:
            raise ValueError("positions: a packed forward needs at least one token")
        self._check_rows()
        self._check_clean_order()
        self._check_parents()

    # -- builders ------------------------------------------------------------------------------

    @classmethod
    def clean(cls, partitions: Sequence[Partition]) -> PackedLayout:
        """The clean text of several sequences."""
        return cls._join([(p, False) for p in partitions])

    @classmethod
    def causal(cls, lengths: Sequence[int]) -> PackedLayout:
        """Plain AR sequences: blocks of one token."""
        return cls.clean([Partition(0, length, 1) for length in lengths])

    @classmethod
    def clean_and_noisy(cls, partitions: Sequence[Partition]) -> PackedLayout:
        """Every sequence as [clean | noisy]: its clean text, then one noisy copy of its response blocks."""
        return cls._join([(p, True) for p in partitions])

    @classmethod
    def _join(cls, sequences: Sequence[tuple[Partition, bool]]) -> PackedLayout:
        positions, segments, blocks, copies = [], [], [], []
        for segment, (partition, with_noisy) in enumerate(sequences):
            length = partition.sequence_length
            parts = [np.arange(length, dtype=np.int64)]
            if with_noisy and partition.blocks:
                parts.append(np.arange(partition.blocks[0].start, length, dtype=np.int64))
            for copy, part in enumerate(parts):
                positions.append(part)
                segments.append(np.full_like(part, segment))
                blocks.append(partition.block_ids[part])
                copies.append(np.full_like(part, copy))
        if not positions:
            raise ValueError("partitions: a packed forward needs at least one sequence")
        return cls(
            positions=np.concatenate(positions),
            segment_ids=np.concatenate(segments),
            block_ids=np.concatenate(blocks),
            copy_ids=np.concatenate(copies),
        )

    # -- derived -------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @cached_property
    def row_starts(self) -> Int64[np.ndarray, " rows_plus_1"]:
        """Row r is the tokens ``row_starts[r]:row_starts[r + 1]``."""
        keys = np.stack([self.segment_ids, self.copy_ids, self.block_ids])
        is_start = np.ones(self.num_tokens, dtype=np.bool_)
        is_start[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        return np.append(np.flatnonzero(is_start), self.num_tokens).astype(np.int64)

    @cached_property
    def row_ranges(self) -> Int64[np.ndarray, "rows 3 2"]:
        """What each row sees, as half-open token ranges of the pack: the clean blocks before it in its
        parent, those in its own segment, and itself. They never overlap; an empty one has start = stop.
        """
        first = self.row_starts[:-1]
        segments, blocks = self.segment_ids[first], self.block_ids[first]
        own = self._clean_prefix(segments, blocks)
        if self.segment_parents is None:
            shared = np.zeros_like(own)
        else:
            shared = self._clean_prefix(np.asarray(self.segment_parents, dtype=np.int64)[segments], blocks)
        itself = np.stack([first, self.row_starts[1:]], axis=1)
        return np.stack([shared, own, itself], axis=1)

    @property
    def num_visible_pairs(self) -> int:
        """(query, key) pairs that attention has to compute; what a FLOP count should count."""
        keys_per_row = (self.row_ranges[..., 1] - self.row_ranges[..., 0]).sum(axis=1)
        return int((keys_per_row * np.diff(self.row_starts)).sum())

    def dense_mask(self) -> Bool[np.ndarray, "tokens tokens"]:
        """[query, key]: the whole mask. For the oracle and for small inputs: it is quadratic."""
        keys = np.arange(self.num_tokens)
        start, stop = self.row_ranges[:, :, :1], self.row_ranges[:, :, 1:]
        rows = ((keys >= start) & (keys < stop)).any(axis=1)
        return np.repeat(rows, np.diff(self.row_starts), axis=0)

    # -- private -------------------------------------------------------------------------------

    @cached_property
    def _clean_keys(self) -> Int64[np.ndarray, " clean_tokens"]:
        """Clean tokens as sortable numbers, (segment, block); rising, as `_check_clean_order` holds."""
        is_clean = self.copy_ids == 0
        return self._key(self.segment_ids[is_clean], self.block_ids[is_clean])

    def _key(
        self, segments: Int64[np.ndarray, " n"], blocks: Int64[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " n"]:
        keys: np.ndarray = segments * (int(self.block_ids.max()) + 2) + blocks
        return keys

    def _clean_prefix(
        self, segments: Int64[np.ndarray, " rows"], blocks: Int64[np.ndarray, " rows"]
    ) -> Int64[np.ndarray, "rows 2"]:
        """The range of the segments' clean tokens of blocks < the given ones ((0, 0) for NO_PARENT)."""
        start = np.searchsorted(self._clean_keys, self._key(segments, np.zeros_like(blocks)))
        stop = np.searchsorted(self._clean_keys, self._key(segments, blocks))
        length = np.where(segments == NO_PARENT, 0, stop - start)
        clean_positions = np.append(np.flatnonzero(self.copy_ids == 0), 0)
        first = np.where(length > 0, clean_positions[start], 0)
        return np.stack([first, first + length], axis=1)

    def _check_rows(self) -> None:
        for name in ("positions", "segment_ids", "block_ids", "copy_ids"):
            values = getattr(self, name)
            if (values < 0).any():
                index = int(np.flatnonzero(values < 0)[0])
                raise ValueError(f"{name}[{index}]: {values[index]} is negative")
        first = self.row_starts[:-1]
        segments_and_copies = self.segment_ids[first] * (int(self.copy_ids.max()) + 1) + self.copy_ids[first]
        keys = self._key(segments_and_copies, self.block_ids[first])
        order = np.argsort(keys, kind="stable")
        repeated = order[1:][np.diff(keys[order]) == 0]
        if len(repeated):
            at = int(first[repeated[0]])
            segment, copy, block = (int(ids[at]) for ids in (self.segment_ids, self.copy_ids, self.block_ids))
            raise ValueError(
                f"block_ids: block {block} of segment {segment}, copy {copy}, stands in two places; "
                "tokens of one block must stand together"
            )

    def _check_clean_order(self) -> None:
        is_clean = self.copy_ids == 0
        keys = self._clean_keys
        if (np.diff(keys) < 0).any():
            index = int(np.flatnonzero(is_clean)[np.flatnonzero(np.diff(keys) < 0)[0] + 1])
            raise ValueError(
                f"block_ids[{index}]: clean tokens must stand in rising order of segment and block"
            )
        clean_positions = np.flatnonzero(is_clean)
        same_segment = np.diff(self.segment_ids[is_clean]) == 0
        if (same_segment & (np.diff(clean_positions) != 1)).any():
            gap = int(np.flatnonzero(same_segment & (np.diff(clean_positions) != 1))[0])
            raise ValueError(
                f"copy_ids[{clean_positions[gap] + 1}]: a noisy token stands between the clean tokens of "
                f"segment {self.segment_ids[clean_positions[gap]]}"
            )

    def _check_parents(self) -> None:
        if self.segment_parents is None:
            return
        num_segments = int(self.segment_ids.max()) + 1
        if len(self.segment_parents) < num_segments:
            raise ValueError(
                f"segment_parents: {len(self.segment_parents)} entries for {num_segments} segments"
            )
        for segment, parent in enumerate(self.segment_parents):
            if parent == NO_PARENT:
                continue
            if not 0 <= parent < len(self.segment_parents) or parent == segment:
                raise ValueError(f"segment_parents[{segment}]: {parent} is no other segment")
            if self.segment_parents[parent] != NO_PARENT:
                raise ValueError(
                    f"segment_parents[{segment}]: {parent} has a parent itself; prompts do not nest"
                )
