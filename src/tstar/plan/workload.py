"""What one stage does in an update, in numbers that cost follows from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tstar.errors import UserError
from tstar.model.config import ModelConfig
from tstar.plan.device import Amount

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Workload:
    """One stage: its rollouts and its updates. Lengths are means unless they say otherwise."""

    model: ModelConfig
    block_size: int
    tokens_per_forward: Amount
    """TPF: static k has k, or less where responses stop in mid-block; dynamic has what was measured."""
    num_problems: int = 128
    """Per update."""
    num_samples: int = 16
    """Responses per problem."""
    num_updates: int = 1
    prompt_length: int = 150
    response_length: int = 700
    max_response_length: int = 2048
    dtype: Dtype = "bfloat16"
    """Of the weights that are computed with; masters, moments and gradients are fp32."""
    token_budget: int = 16_384
    """Tokens of a training forward."""
    num_optimizer_steps: int = 2
    """Per update: both passes of Algorithm 1, and their minibatches."""
    num_passes: int = 1
    """Passes over the same rollouts."""
    needs_old_forward: bool = False
    """Old log-probs by a forward of their own: more than one optimizer step for the same rollouts."""
    merge_steps: int = 1
    has_base: bool = False
    """A frozen base model for the KL, and a forward of it."""
    has_value: bool = False
    is_lora: bool = False
    """Only adapters are trained; they weigh nothing beside the model."""
    recompute_activations: bool = False
    max_requests: int = 256
    """Decoded at once on one device."""
    num_evaluated: Amount = 0.0
    """Responses evaluated per update, on average."""

    def __post_init__(self) -> None:
        counts = (
            *("block_size", "num_problems", "num_samples", "num_updates", "prompt_length"),
            *("response_length", "token_budget", "num_optimizer_steps", "num_passes", "max_requests"),
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} cannot be used; use 1 or more")
        if not 0 < self.tokens_per_forward <= self.block_size:
            raise UserError(
                f"tokens_per_forward: {self.tokens_per_forward} is impossible at block_size = "
                f"{self.block_size}; use more than 0 and at most the block size"
            )
        if self.max_response_length < self.response_length:
            raise UserError(
                f"max_response_length: {self.max_response_length} is below the mean, response_length = "
                f"{self.response_length}"
            )

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def num_responses(self) -> int:
        return self.num_problems * self.num_samples

    @property
    def steps_per_block(self) -> Amount:
        """Denoising steps."""
        return max(1.0, self.block_size / self.tokens_per_forward)

    # -- replay: [shared prompt | clean text | a noisy copy of the block for each of its steps] -------

    @property
    def noisy_tokens(self) -> Amount:
        """Of one response."""
        copies_per_block = max(1.0, self.steps_per_block / self.merge_steps)
        return self.response_length * copies_per_block

    @property
    def replay_tokens(self) -> Amount:
        """Of one response; its prompt is shared with the others of its problem."""
        clean = max(0, self.response_length - self.block_size)  # the last block's clean text is left out
        return self.prompt_length / self.num_samples + clean + self.noisy_tokens

    @property
    def pack_tokens(self) -> Amount:
        """Of the largest training forward: the budget, also where a response has more and is spread over
        several; but beside all clean text that copies can see, there is room for as many of these."""
        return max(float(self.token_budget), self.prompt_length + 2.0 * self.max_response_length)

    @property
    def action_share(self) -> Amount:
        """Of replayed tokens: those whose log-probs are read."""
        return self.response_length / self.replay_tokens

    @property
    def replay_pairs(self) -> Amount:
        """(query, key) pairs that attention computes for one response."""
        half = self.response_length / 2
        clean = self.response_length * (self.prompt_length + half)
        noisy = self.noisy_tokens * (self.prompt_length + half + self.block_size / 2)
        prompt = self.prompt_length**2 / 2 / self.num_samples
        return clean + noisy + prompt

    def lengths(self, count: int) -> list[Amount]:
        """That many response lengths from 0 to the longest with the right mean, longest first: a power
        law in the rank, as nothing else is known of them."""
        power = self.max_response_length / self.response_length - 1
        return [self.max_response_length * ((count - i - 0.5) / count) ** power for i in range(count)]
