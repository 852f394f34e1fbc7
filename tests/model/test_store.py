"""Rows of blocks against the KV store give what the packed forward gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tiny_models import make_config, make_model
from tstar.model.attention import prepare
from tstar.model.attention.store import GatherLimits, KVStore, StoreRows
from tstar.model.layout import PackedLayout
from tstar.partition import Block, Partition

TOLERANCE = {"rtol": 0, "atol": 2e-5}


def scattered_pages(num_sequences: int, pages_each: int) -> list[tuple[int, ...]]:
    """Pages of each sequence, neither contiguous nor in order."""
    shuffled = torch.randperm(num_sequences * pages_each).tolist()
    return [tuple(shuffled[i::num_sequences]) for i in range(num_sequences)]


def rows_of(blocks: Sequence[Block], pages: list[tuple[int, ...]]) -> StoreRows:
    return StoreRows.blocks([b.start for b in blocks], [b.stop for b in blocks], pages)


@pytest.mark.parametrize("model_type", ["sdar", "sdar_moe", "llama"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_block_by_block_equals_the_packed_forward(model_type: str, page_size: int) -> None:
    """Several sequences, block sizes, origins and offsets, one block of each per forward."""
    model = make_model(model_type)
    partitions = [
        Partition(11, 30, 4),
        Partition(6, 33, 8, offset=4),
        Partition(13, 20, 16, origin="sequence"),
        Partition(0, 41, 32),
        Partition(9, 5, 1),
    ]
    layout = PackedLayout.clean(partitions)
    token_ids = torch.randint(97, (layout.num_tokens,))
    expected = model(token_ids, prepare(layout)).split([p.sequence_length for p in partitions])
    texts = token_ids.split([p.sequence_length for p in partitions])

    store = KVStore(model.config, num_pages=5 * 50, page_size=page_size)
    pages = scattered_pages(5, 50)
    for index in range(max(p.num_blocks for p in partitions)):
        active = [i for i, p in enumerate(partitions) if index < p.num_blocks]
        blocks = [partitions[i].block(index) for i in active]
        rows = rows_of(blocks, [pages[i] for i in active])
        fed = torch.cat([texts[i][b.slice] for i, b in zip(active, blocks, strict=True)])
        with torch.no_grad():
            hidden = model(fed, store.prepare(rows)).split([len(b) for b in blocks])
        for i, block, got in zip(active, blocks, hidden, strict=True):
            torch.testing.assert_close(got, expected[i][block.slice], **TOLERANCE)


def test_prefill_commit_and_denoising_are_one_forward() -> None:
    """All blocks of a prompt, the commit of block m and the first denoising step of block m + 1, fed
    together and in any order, equal the packed [clean | noisy] forward."""
    model = make_model("sdar")
    partition = Partition(10, 12, 4)
    layout = PackedLayout.clean_and_noisy([partition])
    clean = torch.randint(96, (22,))
    noisy = torch.full((12,), 96)
    with torch.no_grad():
        packed = model(torch.cat([clean, noisy]), prepare(layout))
    second = partition.blocks[1]
    blocks = [*partition.prompt_blocks, partition.blocks[0]]
    store = KVStore(model.config, num_pages=30, page_size=4)
    rows = rows_of([second, *reversed(blocks)], [tuple(range(7, 20))] * (len(blocks) + 1))
    fed = torch.cat([noisy[:4], *(clean[b.slice] for b in reversed(blocks))])
    with torch.no_grad():
        hidden = model(fed, store.prepare(rows))
    first_noisy_position = 22 + second.start - partition.prompt_length
    expected = packed[first_noisy_position : first_noisy_position + 4]
    torch.testing.assert_close(hidden[:4], expected, **TOLERANCE)


def test_sequences_can_share_the_pages_of_their_prompt() -> None:
    model = make_model("sdar")
    prompt, responses = torch.randint(96, (8,)), torch.randint(96, (2, 4))
    store = KVStore(model.config, num_pages=8, page_size=4)
    with torch.no_grad():
        model(prompt, store.prepare(StoreRows.blocks([0, 4], [4, 8], [(5, 2), (5, 2)])))
        rows = StoreRows.blocks([8, 8], [12, 12], [(5, 2, 0), (5, 2, 7)])
        hidden = model(responses.flatten(), store.prepare(rows)).view(2, 4, -1)
        for response, got in zip(responses, hidden, strict=True):
            layout = PackedLayout.clean([Partition(8, 4, 4)])
            expected = model(torch.cat([prompt, response]), prepare(layout))[8:]
            torch.testing.assert_close(got, expected, **TOLERANCE)


def test_what_happens_to_one_sequence_does_not_reach_another() -> None:
    """NaN in one sequence's pages stays there, though short rows are computed beside long ones."""
    model = make_model("sdar")
    store = KVStore(model.config, num_pages=100, page_size=2)
    store.keys[:, 0], store.values[:, 0] = torch.nan, torch.nan
    rows = StoreRows.blocks([0, 0, 0], [4, 4, 2], [(0, 1), (2, 3), (4,)])
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = torch.nan
        token_ids = torch.tensor([0, 0, 0, 0, 5, 6, 7, 8, 9, 10])
        hidden = model(token_ids, store.prepare(rows))
    assert hidden[:4].isnan().all()
    assert hidden[4:].isfinite().all()


def test_the_store_says_what_a_token_costs() -> None:
    config = make_config("sdar")
    store = KVStore(config, num_pages=3, page_size=5, dtype=torch.bfloat16)
    total = sum(x.numel() * x.element_size() for x in (store.keys, store.values))
    assert total == (3 + 1) * 5 * KVStore.num_bytes_per_token(config, torch.bfloat16), "with the scratch page"


def test_rows_that_do_not_fit_are_refused() -> None:
    store = KVStore(make_config("sdar"), num_pages=4, page_size=4)
    with pytest.raises(
        ValueError, match=r"rows\[1\].pages: 2 pages of 4 hold 8 positions; the row ends at 9"
    ):
        store.prepare(StoreRows.blocks([0, 5], [4, 9], [(0,), (1, 2)]))
    with pytest.raises(ValueError, match=r"rows\[0\]: .* not \[3, 3\)"):
        StoreRows.blocks([3], [3], [(0,)])


def test_how_rows_are_cut_and_grouped_changes_nothing() -> None:
    """Limits so small that every piece is a group of its own, 8 queries long, and so large that all rows
    of one length are one; a group's scores stay within the limit."""
    model = make_model("sdar")
    partitions = [Partition(n, 20, 4) for n in (3, 40, 150, 151, 4)]
    pages = scattered_pages(5, 50)
    token_ids = torch.randint(97, (sum(p.sequence_length for p in partitions),))
    starts, stops = [0] * 5, [p.sequence_length for p in partitions]
    visible = np.concatenate([p.boundaries[1:][p.block_ids] for p in partitions])
    rows = StoreRows(np.array(starts), np.array(stops), np.array(pages), visible)
    results, num_groups = [], []
    for limits in (
        GatherLimits(1, 1, 1),
        GatherLimits(1 << 13, 1 << 15, 1 << 6),
        GatherLimits(1 << 30, 1 << 30, 1),
    ):
        store = KVStore(model.config, num_pages=250, page_size=4)
        store.limits = limits
        attention = store.prepare(rows)
        num_groups.append(len(attention._groups))
        for group in attention._groups:
            num_pieces, num_keys = group.bias.shape[0], group.bias.shape[-1]
            length = len(group.kept_tokens if group.tokens is None else group.tokens) // num_pieces
            is_least = num_pieces == 1 and length <= 8
            assert num_pieces * num_keys * length * 6 <= limits.scores or is_least
        with torch.no_grad():
            results.append(model(token_ids, attention))
    assert num_groups[0] > num_groups[1] > num_groups[2]
    torch.testing.assert_close(results[0], results[2], **TOLERANCE)
    torch.testing.assert_close(results[1], results[2], **TOLERANCE)
