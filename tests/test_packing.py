"""Packs: nothing lost, nothing split, nothing above the budget, few of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tstar.packing import pack


def slow_pack(costs: list[int], budget: int) -> list[list[int]]:
    """First fit, largest first, as one would do it by hand."""
    packs: list[list[int]] = []
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        for members in packs:
            if sum(costs[i] for i in members) + costs[item] <= budget:
                members.append(item)
                break
        else:
            packs.append([item])
    return [sorted(members) for members in packs]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_equals_the_slow_twin(costs: list[int], budget: int) -> None:
    packs = pack(costs, budget)
    assert [members.tolist() for members in packs] == slow_pack(costs, budget)
    assert sorted(i for members in packs for i in members) == list(range(len(costs)))


def test_few_packs() -> None:
    costs = np.random.default_rng(0).integers(20, 400, 2000)
    packs = pack(costs, 4096)
    assert len(packs) <= np.ceil(costs.sum() / 4096) + 1


def test_an_oversized_item_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"costs\[1\]: 9 tokens do not fit into token_budget = 8"):
        pack([3, 9, 4], 8)


def test_an_oversized_item_has_a_pack_of_its_own() -> None:
    assert [members.tolist() for members in pack([3, 9, 4], 8, "alone")] == [[1], [0, 2]]


def test_impossible_costs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"costs\[2\]: 0 tokens"):
        pack([1, 2, 0], 8)
    with pytest.raises(ValueError, match="token_budget: 0"):
        pack([1], 0)
