"""Randomness that belongs to a request: every draw follows from (seed, stream, step, position) alone.

What else is in the batch, how many forwards came before and on which device they ran cannot change it.
A counter-based generator needs no state: the key is hashed (splitmix64's finaliser, once per word).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SALTS = {"token": np.uint64(0x243F6A8885A308D3), "order": np.uint64(0x13198A2E03707344)}  # digits of π


def keyed_uniforms(
    stream: Literal["token", "order"],
    seeds: UInt64[np.ndarray, " draws"],
    steps: Int64[np.ndarray, " draws"],
    positions: Int64[np.ndarray, " draws"],
) -> Float64[np.ndarray, " draws"]:
    """Uniform numbers in [0, 1): one per draw, with 53 random bits.

    ``token`` is what a token is drawn by, ``order`` the order of the random unmask policy.
    """
    state = _mix(seeds ^ _SALTS[stream])
    state = _mix(state + _GOLDEN * steps.astype(np.uint64))
    state = _mix(state + _GOLDEN * positions.astype(np.uint64))
    uniforms: np.ndarray = (state >> np.uint64(11)) * 2.0**-53
    return uniforms


def _mix(x: UInt64[np.ndarray, " draws"]) -> UInt64[np.ndarray, " draws"]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
