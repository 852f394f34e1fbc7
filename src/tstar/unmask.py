"""Which masked positions of a block are finalised in this denoising step (the paper's U^(s)).

A batch is rows of blocks of any size, each with a policy of its own; what comes in is what one forward
said about every masked position, what goes out is a choice among them. Pure arithmetic on small arrays:
no model, no device, no state.

| kind | finalises |
|---|---|
| ``static`` | its budget, by confidence |
| ``dynamic`` | every position with confidence >= η, at least the budget, by confidence |
| ``sequential`` | its budget, from the left |
| ``random`` | its budget, in random order |
| ``entropy`` | by rising entropy, as long as those before sum to at most a bound; at least the budget |

The budget of a step is `tokens_per_step`, or what is still masked divided over what is left of
`steps_per_block` steps, rounded up, so that the remainder comes first and no mask outlives the last step.
Ties go to the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64, Int64

Kind = Literal["static", "dynamic", "sequential", "random", "entropy"]
Confidence = Literal["max", "sampled"]
KINDS: tuple[str, ...] = get_args(Kind)
_STATIC, _DYNAMIC, _SEQUENTIAL, _RANDOM, _ENTROPY = range(5)


@dataclass(frozen=True, slots=True)
class UnmaskPolicy:
    """How one request chooses; without a budget of its own it finalises at least one token a step."""

    kind: Kind = "static"
    """static: a budget, by confidence. dynamic: all above a confidence. sequential: a budget, from the left.
    random: a budget, at random. entropy: by rising entropy, up to a bound."""
    tokens_per_step: int | None = None
    """k: the budget of every step."""
    steps_per_block: int | None = None
    """S: the budget is such that a block takes S steps, or as many as it has tokens."""
    confidence_threshold: float | None = None
    """η of ``dynamic``."""
    entropy_bound: float | None = None
    """Of ``entropy``, in nats: what all finalised positions but the last may sum to."""
    confidence: Confidence = "max"
    """What ``static`` and ``dynamic`` go by: the probability of the likeliest token (Eq. 1) or of the one
    that was drawn (SDAR)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unmask.kind: {self.kind!r} is unknown; use one of {', '.join(KINDS)}")
        if self.confidence not in get_args(Confidence):
            raise ValueError(f"unmask.confidence: {self.confidence!r} is unknown; use 'max' or 'sampled'")
        for name in ("tokens_per_step", "steps_per_block"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"unmask.{name}: {value!r} is no budget; use a whole number of 1 or more")
        if self.tokens_per_step is not None and self.steps_per_block is not None:
            raise ValueError(
                f"unmask.steps_per_block: {self.steps_per_block} beside tokens_per_step = "
                f"{self.tokens_per_step}; give one of the two"
            )
        self._check_own("dynamic", "confidence_threshold", 1.0, "use 0 to 1")
        self._check_own("entropy", "entropy_bound", np.inf, "use 0 or more nats")
        if self.confidence == "sampled" and self.kind not in ("static", "dynamic"):
            raise ValueError(f"unmask.confidence: 'sampled' changes nothing under {self.kind!r}; use 'max'")

    def _check_own(self, kind: Kind, name: str, highest: float, fix: str) -> None:
        """A number that one kind needs and no other may be given."""
        value = getattr(self, name)
        if self.kind != kind:
            if value is not None:
                raise ValueError(f"unmask.{name}: {value} changes nothing under {self.kind!r}; leave it out")
        elif value is None:
            raise ValueError(f"unmask.{name}: missing; kind {kind!r} needs it: {fix}")
        elif not 0 <= value <= highest:
            raise ValueError(f"unmask.{name}: {value} is out of range; {fix}")


@dataclass(frozen=True, eq=False, slots=True)
class PolicyColumns:
    """The policies of a batch's rows, number by number."""

    kind: Int64[np.ndarray, " rows"]
    tokens_per_step: Int64[np.ndarray, " rows"]
    """0 where the budget follows from `steps_per_block`."""
    steps_per_block: Int64[np.ndarray, " rows"]
    log_threshold: Float64[np.ndarray, " rows"]
    entropy_bound: Float64[np.ndarray, " rows"]

    @classmethod
    def of(cls, policies: Sequence[UnmaskPolicy]) -> PolicyColumns:
        with np.errstate(divide="ignore"):
            thresholds = np.log(np.array([p.confidence_threshold or 0.0 for p in policies], dtype=np.float64))
        default = [1 if p.steps_per_block is None else 0 for p in policies]
        return cls(
            kind=np.array([KINDS.index(p.kind) for p in policies], dtype=np.int64),
            tokens_per_step=np.array(
                [p.tokens_per_step or k for p, k in zip(policies, default, strict=True)], dtype=np.int64
            ),
            steps_per_block=np.array([p.steps_per_block or 0 for p in policies], dtype=np.int64),
            log_threshold=thresholds,
            entropy_bound=np.array([p.entropy_bound or 0.0 for p in policies], dtype=np.float64),
        )

    def put(self, row: int, policy: UnmaskPolicy) -> None:
        """Give a row another policy."""
        new = PolicyColumns.of([policy])
        for name in ("kind", "tokens_per_step", "steps_per_block", "log_threshold", "entropy_bound"):
            getattr(self, name)[row] = getattr(new, name)[0]

    def at(self, rows: Int64[np.ndarray, " chosen"]) -> PolicyColumns:
        return PolicyColumns(
            self.kind[rows],
            self.tokens_per_step[rows],
            self.steps_per_block[rows],
            self.log_threshold[rows],
            self.entropy_bound[rows],
        )


def step_budget(
    policies: PolicyColumns,
    num_masked: Int64[np.ndarray, " rows"],
    block_step: Int64[np.ndarray, " rows"],
) -> Int64[np.ndarray, " rows"]:
    """Positions that a row finalises at least in the step after `block_step` others of its block."""
    steps_left = np.maximum(policies.steps_per_block - block_step, 1)
    spread = -(-num_masked // steps_left)
    fixed = policies.tokens_per_step
    budget: np.ndarray = np.minimum(np.where(fixed > 0, fixed, spread), num_masked)
    return budget


def choose(
    policies: PolicyColumns,
    is_masked: Bool[np.ndarray, "rows width"],
    block_step: Int64[np.ndarray, " rows"],
    log_confidence: Float64[np.ndarray, "rows width"],
    entropy: Float64[np.ndarray, "rows width"],
    noise: Float64[np.ndarray, "rows width"],
) -> Bool[np.ndarray, "rows width"]:
    """U^(s) of every row: at least one masked position where there is one, and never another.

    Rows may be shorter than the width; what is not masked may hold anything. `noise` is read for
    ``random`` and `entropy` for ``entropy``.
    """
    num_masked = is_masked.sum(axis=1)
    budget = step_budget(policies, num_masked, block_step)
    if (budget >= num_masked).all():
        return is_masked.copy()
    kind, kinds = policies.kind[:, None], set(policies.kind.tolist())
    urgency = log_confidence
    if _SEQUENTIAL in kinds:
        urgency = np.where(kind == _SEQUENTIAL, 0.0, urgency)
    if _RANDOM in kinds:
        urgency = np.where(kind == _RANDOM, noise, urgency)
    if _ENTROPY in kinds:
        urgency = np.where(kind == _ENTROPY, -entropy, urgency)
    order = np.argsort(np.where(is_masked, -urgency, np.inf), axis=1, kind="stable")  # ties: the left first

    count = budget
    if _DYNAMIC in kinds:
        passes = is_masked & (log_confidence >= policies.log_threshold[:, None])
        count = np.where(policies.kind == _DYNAMIC, np.maximum(passes.sum(axis=1), count), count)
    if _ENTROPY in kinds:
        rising = np.take_along_axis(np.where(is_masked, entropy, np.inf), order, axis=1)
        before = np.zeros_like(rising)
        before[:, 1:] = np.cumsum(rising[:, :-1], axis=1)
        within = np.isfinite(rising) & (before <= policies.entropy_bound[:, None])
        count = np.where(policies.kind == _ENTROPY, np.maximum(within.sum(axis=1), count), count)
    chosen = np.zeros_like(is_masked)
    np.put_along_axis(chosen, order, np.arange(is_masked.shape[1]) < count[:, None], axis=1)
    chosen &= is_masked
    return chosen
