"""Items of known token cost into packs of at most a token budget: one forward each.

An item is a sequence with everything computed for it (its clean text, its noisy copies); it is never
split, so packs change nothing but the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int64


def pack(
    costs: Sequence[int] | Int64[np.ndarray, " items"],
    token_budget: int,
    oversized: Literal["refuse", "alone"] = "refuse",
) -> list[Int64[np.ndarray, " members"]]:
    """The items of each pack, rising; first fit, the largest items first.

    The same costs give the same packs, and at most 11/9 of the fewest possible (plus one).
    oversized: what becomes of an item above the budget. ``refuse`` names it; ``alone`` gives it a pack of
    its own, for items that exist already and have to be trained on.
    """
    sizes = np.asarray(costs, dtype=np.int64)
    _check(sizes, token_budget, oversized)
    pack_ids = np.empty(len(sizes), dtype=np.int64)
    room = np.full(len(sizes), token_budget, dtype=np.int64)  # as many packs as items at most
    num_packs = 0
    for item in np.argsort(-sizes, kind="stable"):
        size = min(int(sizes[item]), token_budget)
        chosen = int(np.argmax(room[: num_packs + 1] >= size))  # the next, empty pack always has room
        room[chosen] -= size
        pack_ids[item] = chosen
        num_packs = max(num_packs, chosen + 1)
    members = np.argsort(pack_ids, kind="stable")
    return np.split(members, np.cumsum(np.bincount(pack_ids, minlength=num_packs))[:-1]) if num_packs else []


def _check(sizes: Int64[np.ndarray, " items"], token_budget: int, oversized: str) -> None:
    if token_budget < 1:
        raise ValueError(f"token_budget: {token_budget} holds nothing; use 1 or more tokens")
    if (sizes < 1).any():
        item = int(np.argmax(sizes < 1))
        raise ValueError(f"costs[{item}]: {sizes[item]} tokens; an item has at least 1")
    if oversized == "refuse" and (sizes > token_budget).any():
        item = int(np.argmax(sizes > token_budget))
        raise ValueError(
            f"costs[{item}]: {sizes[item]} tokens do not fit into token_budget = {token_budget}; "
            "raise it, or leave the item out"
        )
