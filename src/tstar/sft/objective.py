"""What SFT learns: from an example to the tokens of a forward, the positions read in it, and their weights.

Two objectives, one form. Both turn an example into a `TrainingSequence`; packs, forward and loss are the
same for both.

- `NextToken`: plain AR training. Blocks of one token, labels shifted by one.
- `BlockDiffusion`: Eq. 2. Every response block m gets a mask ratio t_m ~ U(0, 1), each of its response tokens
  is masked with probability t_m, and a masked position predicts its own token: labels are not shifted. The
  sequence goes through one forward as [clean | noisy]. A finished response goes on with EOS to the end of
  its last block, because there the sampler has to fill the block too.

The loss of a batch is Σ weight · cross-entropy over what was read, divided by the batch's number of response
tokens (the filled-in EOS included), masked or not. The divisor is known before any forward, so neither packs
nor their order nor gradient accumulation change the loss. With weight 1/t a token counts 1 in expectation,
and with the constant weight 1/E[t] too: the two differ in variance and emphasis, not in scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64, Int64

from tstar.model.layout import PackedLayout
from tstar.packing import pack
from tstar.partition import Partition, PartitionRule

Weighting = Literal["inverse_t", "constant"]


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt and the response to learn."""

    prompt_ids: Int64[np.ndarray, " prompt"]
    response_ids: Int64[np.ndarray, " response"]
    """Up to and including EOS. A response without one was cut off; nothing is filled in behind it."""

    def __post_init__(self) -> None:
        if len(self.response_ids) == 0:
            raise ValueError("response_ids: empty; an example has at least one token to learn")

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    """An example as it goes through one forward. Tokens from which nothing reaches the loss are left out."""

    token_ids: Int64[np.ndarray, " tokens"]
    positions: Int64[np.ndarray, " tokens"]
    block_ids: Int64[np.ndarray, " tokens"]
    copy_ids: Int64[np.ndarray, " tokens"]
    read: Int64[np.ndarray, " read"]
    """Indices of the tokens whose prediction is in the loss."""
    targets: Int64[np.ndarray, " read"]
    weights: Float64[np.ndarray, " read"]
    num_response_tokens: int
    """This sequence's part of the loss's divisor."""


@runtime_checkable
class Objective(Protocol):
    """A way to learn from examples."""

    @property
    def excluded_token_id(self) -> int | None:
        """The token that is never predicted, if there is one."""
        ...

    def draw(self, example: Example, generator: np.random.Generator) -> TrainingSequence:
        """One random training sequence of an example."""
        ...

    def max_tokens(self, example: Example) -> int:
        """The most tokens that a sequence drawn of it can have."""
        ...


@dataclass(frozen=True)
class NextToken:
    """Predict each response token from all before it; an empty prompt's first token has nothing before it."""

    @property
    def excluded_token_id(self) -> None:
        return None

    def draw(self, example: Example, generator: np.random.Generator) -> TrainingSequence:  # noqa: ARG002
        token_ids = np.concatenate([example.prompt_ids, example.response_ids])
        positions = np.arange(len(token_ids) - 1, dtype=np.int64)  # the last token predicts nothing
        read = positions[max(len(example.prompt_ids) - 1, 0) :]
        return TrainingSequence(
            token_ids=token_ids[:-1],
            positions=positions,
            block_ids=positions,
            copy_ids=np.zeros_like(positions),
            read=read,
            targets=token_ids[read + 1],
            weights=np.ones(len(read)),
            num_response_tokens=len(read),
        )

    def max_tokens(self, example: Example) -> int:
        return example.num_tokens


@dataclass(frozen=True)
class BlockDiffusion:
    """Eq. 2 under one partition rule, or under one drawn for each sequence."""

    mask_token_id: int
    eos_token_id: int
    """What a finished response is filled up with to the end of its last block."""
    rules: tuple[PartitionRule, ...]
    rule_weights: tuple[float, ...] | None = None
    """How often each rule is drawn, relative to the others (None: all alike)."""
    weighting: Weighting = "inverse_t"
    """1/t as in Eq. 2, or the constant 1/E[t]."""
    min_mask_ratio: float = 1e-3
    """t is drawn from U(min_mask_ratio, 1): no weight is above 1/min_mask_ratio, and the expected weight of a
    token is 1 all the same."""

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("rules: none are given; use one or more")
        if not 0 <= self.min_mask_ratio < 1:
            raise ValueError(f"min_mask_ratio: {self.min_mask_ratio} cannot be used; use 0 <= ratio < 1")
        weights = self.rule_weights
        if weights is not None and len(weights) != len(self.rules):
            raise ValueError(f"rule_weights: {len(weights)} for {len(self.rules)} rules")

    @property
    def excluded_token_id(self) -> int:
        return self.mask_token_id

    def draw(self, example: Example, generator: np.random.Generator) -> TrainingSequence:
        token_ids, partition = self.complete(example, self._draw_rule(generator))
        block_of = partition.block_ids[partition.prompt_length :] - partition.num_prompt_blocks
        ratios = generator.uniform(self.min_mask_ratio, 1.0, size=int(block_of[-1]) + 1)[block_of]
        is_masked = generator.random(partition.length) < ratios
        return self.denoise(token_ids, partition, is_masked, self.weights(ratios))

    def complete(
        self, example: Example, rule: PartitionRule
    ) -> tuple[Int64[np.ndarray, " sequence"], Partition]:
        """The example's tokens, with EOS up to the end of the last block if it is finished."""
        partition = rule.cut(len(example.prompt_ids), len(example.response_ids))
        parts = [example.prompt_ids, example.response_ids]
        if example.response_ids[-1] == self.eos_token_id:
            partition = completed(partition)
            num_filled = partition.length - len(example.response_ids)
            parts.append(np.full(num_filled, self.eos_token_id, dtype=np.int64))
        return np.concatenate(parts), partition

    def weights(self, ratios: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """What a masked position counts at the mask ratio of its block."""
        if self.weighting == "constant":
            return np.full(len(ratios), 2 / (1 + self.min_mask_ratio))
        return 1 / ratios

    def denoise(
        self,
        token_ids: Int64[np.ndarray, " sequence"],
        partition: Partition,
        is_masked: Bool[np.ndarray, " response"],
        weights: Float64[np.ndarray, " response"],
    ) -> TrainingSequence:
        """[clean | noisy] with these response tokens masked.

        A noisy block without a masked token is not read, and the clean text of the last masked block and
        of those behind it is seen by nobody: both are left out.
        """
        block_ids, prompt_length = partition.block_ids, partition.prompt_length
        masked = np.flatnonzero(is_masked) + prompt_length
        is_denoised = np.zeros(partition.num_blocks, dtype=np.bool_)
        is_denoised[block_ids[masked]] = True
        noisy = np.flatnonzero(is_denoised[block_ids])
        num_clean = int(np.searchsorted(block_ids, block_ids[masked[-1]])) if len(masked) else 0
        positions = np.concatenate([np.arange(num_clean), noisy])
        inputs = token_ids[positions]
        read = num_clean + np.searchsorted(noisy, masked)
        inputs[read] = self.mask_token_id
        return TrainingSequence(
            token_ids=inputs,
            positions=positions,
            block_ids=block_ids[positions],
            copy_ids=(np.arange(len(positions)) >= num_clean).astype(np.int64),
            read=read,
            targets=token_ids[masked],
            weights=weights[is_masked],
            num_response_tokens=partition.length,
        )

    def max_tokens(self, example: Example) -> int:
        largest = max(rule.block_size for rule in self.rules)
        return example.num_tokens + len(example.response_ids) + 3 * largest

    def _draw_rule(self, generator: np.random.Generator) -> PartitionRule:
        if len(self.rules) == 1:
            return self.rules[0]
        weights = np.ones(len(self.rules)) if self.rule_weights is None else np.asarray(self.rule_weights)
        return self.rules[generator.choice(len(self.rules), p=weights / weights.sum())]


def completed(partition: Partition) -> Partition:
    """The same cut with a response that reaches the end of its last block."""
    longer = partition.resized(partition.length + partition.block_size)
    last = longer.block(longer.block_id(partition.sequence_length - 1))
    return partition.resized(last.stop - partition.prompt_length)


@dataclass(frozen=True, eq=False)
class Pack:
    """Several training sequences in one forward."""

    token_ids: Int64[np.ndarray, " tokens"]
    layout: PackedLayout
    read: Int64[np.ndarray, " read"]
    targets: Int64[np.ndarray, " read"]
    weights: Float64[np.ndarray, " read"]

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence]) -> Pack:
        lengths = np.array([len(s.token_ids) for s in sequences])
        first_tokens = np.cumsum(lengths) - lengths
        num_read = [len(s.read) for s in sequences]
        return cls(
            token_ids=np.concatenate([s.token_ids for s in sequences]),
            layout=PackedLayout(
                positions=np.concatenate([s.positions for s in sequences]),
                segment_ids=np.repeat(np.arange(len(sequences)), lengths),
                block_ids=np.concatenate([s.block_ids for s in sequences]),
                copy_ids=np.concatenate([s.copy_ids for s in sequences]),
            ),
            read=np.concatenate([s.read for s in sequences]) + np.repeat(first_tokens, num_read),
            targets=np.concatenate([s.targets for s in sequences]),
            weights=np.concatenate([s.weights for s in sequences]),
        )


def pack_sequences(sequences: Sequence[TrainingSequence], token_budget: int) -> list[Pack]:
    """Packs of at most token_budget tokens; sequences of which nothing is read are in none of them."""
    read = [s for s in sequences if len(s.read)]
    packs = pack([len(s.token_ids) for s in read], token_budget)
    return [Pack.of([read[member] for member in members]) for members in packs]
