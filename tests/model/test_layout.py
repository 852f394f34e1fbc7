"""PackedLayout against SPEC's sentence about who sees whom, token pair by token pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstar.model.layout import NO_PARENT, PackedLayout
from tstar.partition import Partition


def brute_force_mask(layout: PackedLayout) -> np.ndarray:
    """A clean token of block m sees every clean token of blocks <= m of its sequence (and of the prompt
    that it shares); a noisy copy of block m sees the clean blocks < m and itself."""
    parents = layout.segment_parents
    mask = np.zeros((layout.num_tokens, layout.num_tokens), dtype=np.bool_)
    for q in range(layout.num_tokens):
        for k in range(layout.num_tokens):
            q_segment, k_segment = int(layout.segment_ids[q]), int(layout.segment_ids[k])
            q_block, k_block = layout.block_ids[q], layout.block_ids[k]
            key_is_clean = layout.copy_ids[k] == 0
            if parents is not None and k_segment != q_segment and parents[q_segment] == k_segment:
                mask[q, k] = key_is_clean and k_block < q_block
            elif q_segment != k_segment:
                mask[q, k] = False
            elif layout.copy_ids[q] == 0:
                mask[q, k] = key_is_clean and k_block <= q_block
            else:
                is_own_copy = layout.copy_ids[k] == layout.copy_ids[q] and k_block == q_block
                mask[q, k] = (key_is_clean and k_block < q_block) or is_own_copy
    return mask


@st.composite
def partitions(draw: st.DrawFn, max_length: int = 14) -> Partition:
    block_size = draw(st.integers(1, 9))
    prompt_length = draw(st.integers(0, max_length))
    return Partition(
        prompt_length,
        draw(st.integers(0 if prompt_length else 1, max_length)),
        block_size,
        offset=draw(st.integers(0, block_size - 1)),
        origin=draw(st.sampled_from(["response", "sequence"])),
    )


def replayed_layout(
    block_size: int, prompt_length: int, responses: list[tuple[int, list[int]]]
) -> PackedLayout:
    """Responses (length, blocks to copy) that share a prompt, each block copied more than once: replay."""
    tokens: list[tuple[int, int, int, int]] = []  # (position, segment, block, copy)

    def add(partition: Partition, block: int, segment: int, copy: int) -> None:
        members = partition.block(block)
        tokens.extend((p, segment, block, copy) for p in range(members.start, members.stop))

    prompt = Partition(prompt_length, 0, block_size)
    for block in range(prompt.num_blocks):
        add(prompt, block, 0, 0)
    for segment, (length, copied) in enumerate(responses, start=1):
        whole = Partition(prompt_length, length, block_size)
        for own in whole.blocks:
            add(whole, own.index, segment, 0)
        for copy, which in enumerate(copied, start=1):
            add(whole, whole.blocks[which % len(whole.blocks)].index, segment, copy)
    positions, segments, blocks, copies = np.array(tokens, dtype=np.int64).T
    return PackedLayout(positions, segments, blocks, copies, (NO_PARENT, *[0] * len(responses)))


@given(st.lists(partitions(), min_size=1, max_size=3))
def test_clean_text_sees_what_the_sentence_says(several: list[Partition]) -> None:
    layout = PackedLayout.clean(several)
    np.testing.assert_array_equal(layout.dense_mask(), brute_force_mask(layout))
    assert layout.num_tokens == sum(p.sequence_length for p in several)
    assert layout.positions.tolist() == [i for p in several for i in range(p.sequence_length)]


@given(st.lists(partitions(), min_size=1, max_size=3))
def test_clean_and_noisy_see_what_the_sentence_says(several: list[Partition]) -> None:
    layout = PackedLayout.clean_and_noisy(several)
    np.testing.assert_array_equal(layout.dense_mask(), brute_force_mask(layout))
    assert layout.num_visible_pairs == layout.dense_mask().sum()


@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 10), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=3),
)
def test_shared_prompts_and_many_copies_see_what_the_sentence_says(
    block_size: int, prompt_length: int, responses: list[tuple[int, list[int]]]
) -> None:
    layout = replayed_layout(block_size, prompt_length, responses)
    np.testing.assert_array_equal(layout.dense_mask(), brute_force_mask(layout))


def test_blocks_of_one_token_are_the_causal_mask() -> None:
    layout = PackedLayout.causal([5, 3])
    expected = np.zeros((8, 8), dtype=np.bool_)
    expected[:5, :5] = np.tril(np.ones((5, 5)))
    expected[5:, 5:] = np.tril(np.ones((3, 3)))
    np.testing.assert_array_equal(layout.dense_mask(), expected)


def test_the_noisy_copy_of_a_shared_block_has_the_prompt_tail_too() -> None:
    """Under origin `sequence` the first response block begins inside the prompt; so does its noisy copy."""
    partition = Partition(prompt_length=6, response_length=5, block_size=4, origin="sequence")
    layout = PackedLayout.clean_and_noisy([partition])
    assert layout.positions[layout.copy_ids == 1].tolist() == list(range(4, 11))


def layout_of(**changes: list[int] | tuple[int, ...]) -> PackedLayout:
    good = {"positions": [0, 1, 2], "segment_ids": [0, 0, 0], "block_ids": [0, 0, 1], "copy_ids": [0, 0, 0]}
    arrays = {name: np.array(changes.get(name, values), dtype=np.int64) for name, values in good.items()}
    return PackedLayout(**arrays, segment_parents=changes.get("segment_parents"))  # type: ignore[arg-type]


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": [0, 1]}, "differ in length"),
        ({"positions": [], "segment_ids": [], "block_ids": [], "copy_ids": []}, "at least one token"),
        ({"block_ids": [0, -1, 1]}, r"block_ids\[1\]: -1 is negative"),
        ({"block_ids": [0, 1, 0]}, "block 0 of segment 0, copy 0, stands in two places"),
        ({"block_ids": [1, 0, 0]}, r"block_ids\[1\]: clean tokens must stand in rising order"),
        ({"segment_ids": [1, 0, 0]}, r"block_ids\[1\]: clean tokens must stand in rising order"),
        (
            {"copy_ids": [0, 1, 0]},
            r"copy_ids\[1\]: a noisy token stands between the clean tokens of segment 0",
        ),
        ({"segment_ids": [0, 1, 1], "segment_parents": (-1,)}, "1 entries for 2 segments"),
        ({"segment_parents": (0,)}, r"segment_parents\[0\]: 0 is no other segment"),
        (
            {"segment_ids": [0, 1, 2], "segment_parents": (-1, 0, 1)},
            r"segment_parents\[2\]: 1 has a parent itself",
        ),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(changes: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(**changes)


def test_an_empty_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one sequence"):
        PackedLayout.clean([])
