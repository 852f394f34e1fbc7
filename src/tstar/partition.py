"""How a sequence is cut into diffusion blocks: the paper's P_B^(Δ) (Eqs. 5-7), 0-based.

A sequence is a prompt followed by a response. Every position belongs to exactly one block, block ids
rise from left to right, and attention follows these ids alone. Where the blocks begin is one decision,
taken here; sampling, replay, SFT and evaluation are handed the same object and cannot disagree.

Two origins:

- ``response`` (the paper): the response's blocks are counted from its first token. With an offset Δ the
  first one has min(Δ, L) tokens and every later boundary lies Δ further right. The prompt's own blocks
  run from position 0 in steps of B; the last one may be short.
- ``sequence`` (SDAR's generate.py, JetEngine, LMDeploy, SGLang): boundaries lie at absolute multiples of
  B, moved right by the offset, so the prompt's tail can share a block with the response's head.

With B = 4, a prompt of 6 tokens (p) and a response of 7 (r)::

    origin="response"            pppp|pp|rrrr|rrr
    origin="response", offset=2  pppp|pp|rr|rrrr|r
    origin="sequence"            pppp|pprr|rrrr|r
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Int64

Origin = Literal["response", "sequence"]


@dataclass(frozen=True, slots=True)
class Block:
    """One diffusion block: positions [start, stop) of the sequence, prompt included."""

    index: int
    """Block id in the sequence; the prompt's blocks are counted too."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Partition:
    """The blocks of one sequence of ``prompt_length + response_length`` tokens."""

    prompt_length: int
    response_length: int
    """L. A partition of a longer response starts with the same blocks (the last one apart)."""
    block_size: int
    """B."""
    offset: int = 0
    """Δ, 0 <= Δ < B."""
    origin: Origin = "response"

    def __post_init__(self) -> None:
        for name in ("prompt_length", "response_length", "block_size", "offset"):
            object.__setattr__(self, name, _as_int(name, getattr(self, name)))
        for name in ("prompt_length", "response_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative; use 0 or more tokens")
        if self.block_size < 1:
            raise ValueError(f"block_size: {self.block_size} is too small; a block has at least 1 token")
        if not 0 <= self.offset < self.block_size:
            raise ValueError(
                f"offset: {self.offset} does not fit block_size {self.block_size}; "
                "use 0 <= offset < block_size"
            )
        if self.origin not in ("response", "sequence"):
            raise ValueError(f"origin: {self.origin!r} is unknown; use 'response' or 'sequence'")

    # -- sizes ---------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """L, the response's length, under the paper's name."""
        return self.response_length

    @property
    def sequence_length(self) -> int:
        return self.prompt_length + self.response_length

    @property
    def num_blocks(self) -> int:
        """All blocks of the sequence, the prompt's included."""
        if self.origin == "sequence":
            return _num_blocks(self.sequence_length, self.block_size, self.offset)
        return self._num_own_prompt_blocks + _num_blocks(self.response_length, self.block_size, self.offset)

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks that hold no response token: fixed context, never denoised."""
        if self.response_length == 0:
            return self.num_blocks
        return self.block_id(self.prompt_length)

    # -- blocks --------------------------------------------------------------------------------

    def block_id(self, position: int) -> int:
        """The block that a position belongs to."""
        if not 0 <= position < self.sequence_length:
            raise ValueError(f"position: {position} is outside a sequence of {self.sequence_length} tokens")
        if self.origin == "sequence":
            return (position + self._lead) // self.block_size
        if position < self.prompt_length:
            return position // self.block_size
        return self._num_own_prompt_blocks + (position - self.prompt_length + self._lead) // self.block_size

    def block(self, index: int) -> Block:
        """The block with this id; the last one ends with the sequence."""
        if not 0 <= index < self.num_blocks:
            raise ValueError(f"block index: {index} is outside a partition of {self.num_blocks} blocks")
        grid_start, grid_stop, lead = 0, self.sequence_length, self._lead
        grid_index = index
        if self.origin == "response":
            if index < self._num_own_prompt_blocks:
                grid_stop, lead = self.prompt_length, 0
            else:
                grid_start, grid_index = self.prompt_length, index - self._num_own_prompt_blocks
        start = grid_start + grid_index * self.block_size - lead
        return Block(index, max(start, grid_start), min(start + self.block_size, grid_stop))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The response's blocks I_0, I_1, ...: all that hold a response token.

        Under ``origin="sequence"`` the first of them may begin with the prompt's tail.
        """
        first = self.num_prompt_blocks
        bounds = self.boundaries[first:].tolist()
        return tuple(
            Block(index, start, stop)
            for index, (start, stop) in enumerate(itertools.pairwise(bounds), start=first)
        )

    @cached_property
    def prompt_blocks(self) -> tuple[Block, ...]:
        """The blocks that hold prompt tokens only."""
        return tuple(self.block(index) for index in range(self.num_prompt_blocks))

    @cached_property
    def block_ids(self) -> Int64[np.ndarray, " sequence_length"]:
        """The block id of every position."""
        positions = np.arange(self.sequence_length, dtype=np.int64)
        if self.origin == "sequence":
            ids = (positions + self._lead) // self.block_size
        else:
            in_response = positions - self.prompt_length
            ids = np.where(
                in_response < 0,
                positions // self.block_size,
                self._num_own_prompt_blocks + (in_response + self._lead) // self.block_size,
            )
        ids.flags.writeable = False  # cached: a caller that wrote into it would move everybody's blocks
        return ids

    @cached_property
    def boundaries(self) -> Int64[np.ndarray, " num_blocks_plus_1"]:
        """Where blocks begin, and the sequence's end: block m is ``boundaries[m]:boundaries[m + 1]``."""
        starts = np.flatnonzero(np.diff(self.block_ids, prepend=-1))
        boundaries = np.append(starts, self.sequence_length).astype(np.int64)
        boundaries.flags.writeable = False
        return boundaries

    @cached_property
    def response_slices(self) -> tuple[slice, ...]:
        """Each response block as a slice of the response alone (a prompt tail is left out)."""
        bounds = (self.boundaries[self.num_prompt_blocks :] - self.prompt_length).clip(0)
        return tuple(slice(start, stop) for start, stop in itertools.pairwise(bounds.tolist()))

    # -- relatives -----------------------------------------------------------------------------

    def half_shifted(self) -> Partition:
        """P_B^(B/2), the shifted partition of Alg. 1."""
        if self.block_size % 2:
            raise ValueError(
                f"block_size: {self.block_size} is odd and has no half shift; use an even block_size"
            )
        return replace(self, offset=self.block_size // 2)

    def resized(self, response_length: int) -> Partition:
        """The same rule for a response of another length."""
        return replace(self, response_length=response_length)

    # -- private -------------------------------------------------------------------------------

    @property
    def _lead(self) -> int:
        """Tokens that the first block of a grid lacks: with them it would have all B."""
        return -self.offset % self.block_size

    @property
    def _num_own_prompt_blocks(self) -> int:
        """Blocks of the prompt counted alone, as ``origin="response"`` cuts it."""
        return _num_blocks(self.prompt_length, self.block_size, 0)


@dataclass(frozen=True)
class PartitionRule:
    """How to cut sequences whose lengths are not known yet: what a sampler, a trainer and an evaluation
    are given, and agree on by being given the same."""

    block_size: int
    offset: int = 0
    origin: Origin = "response"

    def __post_init__(self) -> None:
        rule = self.cut(0, 0)  # refused here, by the same words as there
        object.__setattr__(self, "block_size", rule.block_size)
        object.__setattr__(self, "offset", rule.offset)

    def cut(self, prompt_length: int, response_length: int) -> Partition:
        return Partition(prompt_length, response_length, self.block_size, self.offset, self.origin)

    def half_shifted(self) -> PartitionRule:
        """The same rule for P_B^(B/2), the shifted partition of Alg. 1."""
        return replace(self, offset=self.cut(0, 0).half_shifted().offset)


def _num_blocks(length: int, block_size: int, offset: int) -> int:
    return (length + (-offset % block_size) + block_size - 1) // block_size if length else 0


def _as_int(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name}: {value!r} is not a whole number")
    try:
        return operator.index(value)  # type: ignore[arg-type]  # anything without __index__ is the error
    except TypeError:
        raise ValueError(f"{name}: {value!r} is not a whole number") from None
