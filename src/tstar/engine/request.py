"""What goes into the engine, and what it says while it works: requests, settings, events."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64, Int64

from tstar.model.config import ModelConfig
from tstar.partition import PartitionRule
from tstar.trajectory import Trajectory
from tstar.unmask import UnmaskPolicy


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded."""

    max_tokens: int = 256
    """Length of a response that nothing stops; its last block ends there, in mid-block if need be."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token, and scores it at temperature 1."""
    top_k: int | None = None
    """Draw from the k likeliest tokens (and those tied with the last of them). None: from all."""
    top_p: float = 1.0
    """Then from the likeliest of those that together have this probability."""
    min_p: float = 0.0
    """Then from those with at least this share of the likeliest token's probability."""
    unmask: UnmaskPolicy = field(default_factory=UnmaskPolicy)
    stop_token_ids: tuple[int, ...] = ()
    """These end a response beside the model's own end tokens."""
    ignore_eos: bool = False
    """The model's own end tokens end nothing."""

    def __post_init__(self) -> None:
        _require(_is_whole(self.max_tokens, 1), "max_tokens", self.max_tokens, "use 1 or more tokens")
        is_usable = np.isfinite(self.temperature) and (self.temperature == 0 or self.temperature >= 1e-4)
        _require(is_usable, "temperature", self.temperature, "use 0, or a number of 1e-4 or more")
        _require(
            self.top_k is None or _is_whole(self.top_k, 1),
            "top_k",
            self.top_k,
            "use 1 or more, or leave it out",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "use 0 < top_p <= 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "use 0 <= min_p <= 1")
        for index, token in enumerate(self.stop_token_ids):
            _require(_is_whole(token, 0), f"stop_token_ids[{index}]", token, "use a token id")

    @property
    def scoring_temperature(self) -> float:
        """What logits are divided by before confidences and log-probs are read; greedy decoding: 1."""
        return self.temperature or 1.0


FindStop = Callable[[np.ndarray], int | None]
"""The response's ids up to the end of a block (or up to a stop token in it) -> how many of them are the
response, if it ends in this block; else None."""


@dataclass(frozen=True, eq=False)
class Request:
    """One response to decode."""

    prompt_ids: Int64[np.ndarray, " prompt"]
    rule: PartitionRule
    """How prompt and response are cut into blocks; an AR model has blocks of one token."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    """The same seed, prompt and settings give the same response, whatever else is in the batch."""
    find_stop: FindStop | None = None
    """Stops that are no single tokens, such as strings; asked beside the stop tokens."""

    def __post_init__(self) -> None:
        ids = np.array(self.prompt_ids, copy=True)
        if ids.ndim != 1:
            raise ValueError(f"prompt_ids: {ids.ndim} dimensions; one request has one row of ids")
        if len(ids) == 0:
            raise ValueError("prompt_ids: empty; a request needs at least one prompt token")
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt_ids: {ids.dtype} numbers are no token ids; use whole numbers")
        if (ids < 0).any():
            index = int(np.argmax(ids < 0))
            raise ValueError(f"prompt_ids[{index}]: {ids[index]} is no token id; use 0 or more")
        ids = ids.astype(np.int64)
        ids.flags.writeable = False
        object.__setattr__(self, "prompt_ids", ids)
        _require(_is_whole(self.seed, 0), "seed", self.seed, "use a whole number of 0 or more")
        _require(self.seed < 2**64, "seed", self.seed, "use less than 2**64")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine may use."""

    memory: int | float = 0.5
    """Keys, values, logits and activations together: bytes (int), or a fraction of the memory that is free
    when the engine takes it (float)."""
    max_requests: int = 256
    """Requests decoded at once; others wait."""
    max_forward_tokens: int = 8192
    """Tokens of one forward; longer prompts are read in several."""
    page_size: int = 16
    """Tokens per page of keys and values."""
    graphs: bool | None = None
    """Pad short forwards to few shapes; a GPU records each shape once, as a CUDA graph, and repeats it. On a
    CPU it only pads. None: on a GPU that can."""

    def __post_init__(self) -> None:
        is_fraction = isinstance(self.memory, float) and 0 < self.memory <= 1
        _require(
            is_fraction or _is_whole(self.memory, 1),
            "memory",
            self.memory,
            "use a number of bytes (int), or a fraction of free memory in (0, 1] (float)",
        )
        for name in ("max_requests", "max_forward_tokens", "page_size"):
            _require(_is_whole(getattr(self, name), 1), name, getattr(self, name), "use 1 or more")


def check_rule(config: ModelConfig, request: Request) -> None:
    """Refuse a partition rule that a model cannot be decoded by."""
    _require(
        config.is_diffusion or request.rule.block_size == 1,
        "rule.block_size",
        request.rule.block_size,
        "this model has no mask token and predicts the next token: use 1",
    )


@dataclass(frozen=True, eq=False, slots=True)
class TokensUnmasked:
    """A denoising step of one request, as it happens."""

    request_id: int
    step: int
    """Global, 0-based: `Trajectory.unmask_step`."""
    positions: Int64[np.ndarray, " tokens"]
    """Indices into the response."""
    token_ids: Int64[np.ndarray, " tokens"]
    confidence: Float64[np.ndarray, " tokens"]


@dataclass(frozen=True, eq=False, slots=True)
class RequestFinished:
    request_id: int
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The model gave this request no distribution to draw from; the others go on."""

    request_id: int
    reason: str


Event = TokensUnmasked | RequestFinished | RequestFailed


class RefusedError(ValueError):
    """A request that this engine could never serve: which one, and why."""


class GenerationError(RuntimeError):
    """Some requests of a `generate` failed; those that did not are in `finished`, by index."""

    def __init__(self, failed: Mapping[int, str], finished: Mapping[int, Trajectory]) -> None:
        self.failed, self.finished = failed, finished
        index, reason = min(failed.items())
        others = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
        super().__init__(f"requests[{index}]: {reason}{others}; the other {len(finished)} finished")


def _is_whole(value: object, lowest: int) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= lowest  # type: ignore[arg-type]  # what has no __index__ is the point
    except TypeError:
        return False


def _require(holds: object, name: str, value: object, fix: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {value!r} cannot be used; {fix}")
