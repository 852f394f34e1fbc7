"""How responses are decoded, as flags of `tstar generate`, `tstar chat` and the lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from tstar.errors import UserError

if TYPE_CHECKING:
    from tstar.model.config import ModelConfig
    from tstar.partition import PartitionRule
    from tstar.unmask import UnmaskPolicy

DEFAULT_BLOCK_SIZE = 4
"""Of a diffusion model whose config.json names none: what SDAR is first trained at."""
MAX_BLOCK_SIZE = 256

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class DecodingOptions:
    """How responses are decoded, as a command's flags."""

    block_size: int | None = None
    """B, 1 to 256. Default: the one the model was last trained at (config.json), else 4; 1 of an AR model."""
    offset: int = 0
    """Δ: how far the blocks are shifted, less than B."""
    origin: Literal["response", "sequence"] = "response"
    """Where blocks are counted from: the response's first token, or the sequence's (SDAR's generate.py)."""
    unmask: Literal["static", "dynamic", "sequential", "random", "entropy"] | None = None
    """Which masked positions a step finalises: static (a budget, by confidence), dynamic (all above a
    threshold), sequential, random, entropy. Default: dynamic with --confidence-threshold, entropy with
    --entropy-bound, else static."""
    tokens_per_step: int | None = None
    """Budget of every step, in tokens. Default: 1, unless --steps-per-block is given."""
    steps_per_block: int | None = None
    """Budget such that a block takes so many steps."""
    confidence_threshold: float | None = None
    """η of dynamic: finalise every position with at least this confidence."""
    entropy_bound: float | None = None
    """Of entropy, in nats: what all positions of a step but the last may sum to."""
    confidence: Literal["max", "sampled"] = "max"
    """Probability of the likeliest token (Eq. 1), or of the one that was drawn (SDAR)."""
    temperature: float | None = None
    """Divides the logits; 0 takes the likeliest token. Default: 0, or 1 for several samples of a prompt."""
    top_k: int | None = None
    """Draw from the k likeliest tokens."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability."""
    max_tokens: int | None = None
    """Longest response. Default: 512, or what the model's positions leave."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends a response and is not part of it; judged whenever a block is complete."""
    ignore_eos: bool = False
    """The model's own end tokens end nothing."""
    seed: int = 0
    """Of everything that is drawn; each response has its own stream, so the batch changes nothing."""

    def policy(self) -> UnmaskPolicy:
        from tstar.unmask import UnmaskPolicy

        kind = self.unmask
        if kind is None:
            has_threshold, has_bound = self.confidence_threshold is not None, self.entropy_bound is not None
            kind = "dynamic" if has_threshold else "entropy" if has_bound else "static"
        try:
            return UnmaskPolicy(
                kind,
                self.tokens_per_step,
                self.steps_per_block,
                self.confidence_threshold,
                self.entropy_bound,
                self.confidence,
            )
        except ValueError as error:
            raise UserError(str(error).removeprefix("unmask.")) from None

    def rule(self, config: ModelConfig) -> PartitionRule:
        from tstar.partition import PartitionRule

        block_size = self.block_size
        if block_size is None:
            block_size = (config.block_size or DEFAULT_BLOCK_SIZE) if config.is_diffusion else 1
        if block_size > MAX_BLOCK_SIZE:
            raise UserError(f"block_size: {block_size} is too large; use 1 to {MAX_BLOCK_SIZE}")
        try:
            return PartitionRule(block_size, self.offset, self.origin)
        except ValueError as error:
            raise UserError(str(error)) from None
