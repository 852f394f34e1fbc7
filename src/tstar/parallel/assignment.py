"""Who does what: pure functions of costs, the same in every process."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

Reduction = Literal["ordered", "sum"]
"""ordered: gradients are added in the order of the packs, bit for bit what one process does. sum: each
process adds up its own, and one all-reduce adds these: faster, and equal up to rounding."""


def owners_of(costs: Sequence[int], world_size: int, reduction: Reduction) -> list[int]:
    """The rank that computes each item.

    ordered: in turn, so that the first `world_size` items are computed at the same time, then the next. sum:
    the costliest first, each to whoever has least."""
    if reduction == "ordered":
        return [number % world_size for number in range(len(costs))]
    owners = [0] * len(costs)
    loads = [(0, rank) for rank in range(world_size)]
    for number in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + costs[number], rank))
    return owners
