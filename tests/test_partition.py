"""Partition against the paper's Eqs. 5-7, written out 1-based and naively."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstar.partition import Partition, PartitionRule


def paper_standard(length: int, block_size: int) -> list[list[int]]:
    """Eq. 5, positions 1..L."""
    num_blocks = math.ceil(length / block_size)
    return [list(range(m * block_size + 1, min((m + 1) * block_size, length) + 1)) for m in range(num_blocks)]


def paper_shifted(length: int, block_size: int, delta: int) -> list[list[int]]:
    """Eqs. 6-7, positions 1..L."""
    last = max(0, math.ceil((length - delta) / block_size))
    first = list(range(1, min(delta, length) + 1))
    return [first] + [
        list(range((m - 1) * block_size + delta + 1, min(m * block_size + delta, length) + 1))
        for m in range(1, last + 1)
    ]


def paper_blocks(length: int, block_size: int, delta: int) -> list[list[int]]:
    if length == 0:
        return []  # the paper's I_0 would be the empty set
    return paper_shifted(length, block_size, delta) if delta else paper_standard(length, block_size)


def positions_1_based(partition: Partition, relative_to: int) -> list[list[int]]:
    return [[p - relative_to + 1 for p in range(b.start, b.stop)] for b in partition.blocks]


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    block_size = draw(st.integers(1, 40))
    return Partition(
        prompt_length=draw(st.integers(0, 100)),
        response_length=draw(st.integers(0, 150)),
        block_size=block_size,
        offset=draw(st.integers(0, block_size - 1)),
        origin=draw(st.sampled_from(["response", "sequence"])),
    )


def test_every_small_response_is_cut_as_the_paper_cuts_it() -> None:
    for block_size in range(1, 9):
        for delta in range(block_size):
            for length in range(3 * block_size + 2):
                for prompt_length in range(block_size + 1):
                    partition = Partition(prompt_length, length, block_size, delta)
                    expected = paper_blocks(length, block_size, delta)
                    assert positions_1_based(partition, relative_to=prompt_length) == expected


@given(
    block_size=st.integers(1, 256),
    data=st.data(),
    length=st.integers(0, 600),
    prompt_length=st.integers(0, 300),
)
def test_response_origin_equals_equations_5_to_7(
    block_size: int, data: st.DataObject, length: int, prompt_length: int
) -> None:
    delta = data.draw(st.integers(0, block_size - 1))
    partition = Partition(prompt_length, length, block_size, delta)
    assert positions_1_based(partition, prompt_length) == paper_blocks(length, block_size, delta)
    prompt = [[p + 1 for p in range(b.start, b.stop)] for b in partition.prompt_blocks]
    assert prompt == paper_standard(prompt_length, block_size), "the offset moves the response's blocks alone"


@given(
    block_size=st.integers(1, 64),
    data=st.data(),
    length=st.integers(0, 200),
    prompt_length=st.integers(0, 200),
)
def test_sequence_origin_cuts_prompt_and_response_as_one(
    block_size: int, data: st.DataObject, length: int, prompt_length: int
) -> None:
    delta = data.draw(st.integers(0, block_size - 1))
    partition = Partition(prompt_length, length, block_size, delta, origin="sequence")
    every_block = [
        [p + 1 for p in range(b.start, b.stop)] for b in partition.prompt_blocks + partition.blocks
    ]
    assert every_block == paper_blocks(prompt_length + length, block_size, delta)
    for block in partition.prompt_blocks:
        assert block.stop <= prompt_length
    for block in partition.blocks:
        assert block.stop > prompt_length


@given(partitions())
def test_blocks_ids_boundaries_and_slices_tell_the_same(partition: Partition) -> None:
    every_block = partition.prompt_blocks + partition.blocks
    assert len(every_block) == partition.num_blocks
    assert len(partition.prompt_blocks) == partition.num_prompt_blocks
    assert [b.index for b in every_block] == list(range(partition.num_blocks))

    # They tile the sequence: nothing missing, nothing twice, none empty, none longer than B.
    covered = [p for b in every_block for p in range(b.start, b.stop)]
    assert covered == list(range(partition.sequence_length))
    assert all(1 <= len(b) <= partition.block_size for b in every_block)

    ids = [b.index for b in every_block for _ in range(len(b))]
    assert partition.block_ids.tolist() == ids
    assert [partition.block_id(p) for p in range(partition.sequence_length)] == ids
    assert partition.boundaries.tolist() == [b.start for b in every_block] + [partition.sequence_length]
    sequence = np.arange(partition.sequence_length)
    for block in every_block:
        assert sequence[block.slice].tolist() == list(range(block.start, block.stop))
        assert partition.block(block.index) == block

    response = np.arange(partition.prompt_length, partition.sequence_length)
    cut = [response[s] for s in partition.response_slices]
    assert (np.concatenate(cut).tolist() if cut else []) == response.tolist()


@given(partitions(), st.integers(0, 200))
def test_a_longer_response_keeps_the_earlier_blocks(partition: Partition, more: int) -> None:
    longer = partition.resized(partition.response_length + more)
    assert longer.block_ids[: partition.sequence_length].tolist() == partition.block_ids.tolist()
    assert longer.blocks[: max(len(partition.blocks) - 1, 0)] == partition.blocks[:-1]


@given(partitions())
def test_half_shift_moves_every_later_boundary_by_half_a_block(partition: Partition) -> None:
    standard = Partition(
        partition.prompt_length,
        partition.response_length,
        2 * partition.block_size,
        origin=partition.origin,
    )
    shifted = standard.half_shifted()
    assert shifted.offset == partition.block_size
    start = 0 if partition.origin == "sequence" else partition.prompt_length
    grid = {start + k * 2 * partition.block_size + partition.block_size for k in range(-1, 300)}
    inner = [b.start for b in shifted.blocks[1:]]
    assert set(inner) <= grid


def test_the_docstring_example() -> None:
    def drawn(partition: Partition) -> str:
        kinds = "p" * partition.prompt_length + "r" * partition.response_length
        return "|".join(kinds[b.slice] for b in partition.prompt_blocks + partition.blocks)

    assert drawn(Partition(6, 7, 4)) == "pppp|pp|rrrr|rrr"
    assert drawn(Partition(6, 7, 4, offset=2)) == "pppp|pp|rr|rrrr|r"
    assert drawn(Partition(6, 7, 4, origin="sequence")) == "pppp|pprr|rrrr|r"
    assert Partition(6, 7, 4).length == 7


def test_sequence_origin_shares_a_block_between_prompt_tail_and_response_head() -> None:
    partition = Partition(prompt_length=6, response_length=7, block_size=4, origin="sequence")
    first = partition.blocks[0]
    assert (first.start, first.stop) == (4, 8)
    assert partition.num_prompt_blocks == 1
    assert partition.response_slices[0] == slice(0, 2)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size: 0 is too small"),
        ({"block_size": -4}, "block_size: -4 is too small"),
        ({"block_size": 4.0}, "block_size: 4.0 is not a whole number"),
        ({"block_size": True}, "block_size: True is not a whole number"),
        ({"prompt_length": -1}, "prompt_length: -1 is negative"),
        ({"response_length": -3}, "response_length: -3 is negative"),
        ({"offset": 4}, "offset: 4 does not fit block_size 4; use 0 <= offset < block_size"),
        ({"offset": -1}, "offset: -1 does not fit block_size 4"),
        ({"origin": "prompt"}, "origin: 'prompt' is unknown; use 'response' or 'sequence'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"prompt_length": 3, "response_length": 5, "block_size": 4}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Partition(**{**good, **arguments})  # type: ignore[arg-type]


def test_an_odd_block_has_no_half() -> None:
    with pytest.raises(
        ValueError, match="block_size: 5 is odd and has no half shift; use an even block_size"
    ):
        Partition(3, 5, 5).half_shifted()


@pytest.mark.parametrize("position", [-1, 8])
def test_positions_and_indices_outside_are_refused(position: int) -> None:
    partition = Partition(3, 5, 4)
    with pytest.raises(ValueError, match=f"position: {position} is outside a sequence of 8 tokens"):
        partition.block_id(position)
    with pytest.raises(ValueError, match=f"block index: {position} is outside a partition of 3 blocks"):
        partition.block(position)


def test_cached_arrays_cannot_be_written() -> None:
    partition = Partition(3, 5, 4)
    with pytest.raises(ValueError, match="read-only"):
        partition.block_ids[0] = 7
    with pytest.raises(ValueError, match="read-only"):
        partition.boundaries[0] = 7


@pytest.mark.usefixtures("types_unchecked")
def test_partitions_are_values() -> None:
    assert Partition(3, 5, 4) == Partition(np.int64(3), 5, 4)  # type: ignore[arg-type]
    assert hash(Partition(3, 5, 4)) == hash(Partition(3, 5, 4))
    assert Partition(3, 5, 4) != Partition(3, 5, 4, offset=2)


@given(st.integers(0, 20), st.integers(0, 40), st.integers(1, 9), st.sampled_from(["response", "sequence"]))
def test_a_rule_cuts_as_the_partition_does(prompt: int, length: int, block_size: int, origin: Any) -> None:
    rule = PartitionRule(2 * block_size, origin=origin)
    assert rule.cut(prompt, length) == Partition(prompt, length, 2 * block_size, origin=origin)
    assert rule.half_shifted().cut(prompt, length) == rule.cut(prompt, length).half_shifted()


def test_a_rule_is_refused_as_the_partition_is() -> None:
    with pytest.raises(ValueError, match="block_size: 0 is too small"):
        PartitionRule(0)
    with pytest.raises(ValueError, match="offset: 4 does not fit block_size 4"):
        PartitionRule(4, offset=4)
    with pytest.raises(ValueError, match="block_size: 3 is odd"):
        PartitionRule(3).half_shifted()
