"""Log-probabilities of chosen tokens without ever holding tokens x vocabulary numbers.

The LM head is applied to a portion of the chosen hidden states at a time. The first portions keep their
logits for the backward pass, up to a fixed number; the others compute them again there. Peak memory is
that number, whatever the vocabulary and the number of tokens.

The distribution is the one that the engine samples from before top-k and top-p: logits over a
temperature, without a token that is never drawn (the mask token).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class LogitLimits(NamedTuple):
    """How many logits may stand in memory at once."""

    portion: int
    """Of one portion: large enough for full matmul speed."""
    kept: int
    """For the backward pass: small inputs pay no second LM head."""
    softmax: int
    """Whose probabilities and log-probs, in fp32, stand beside them."""


CPU_LIMITS = LogitLimits(portion=1 << 23, kept=1 << 26, softmax=1 << 20)
"""A portion of 32 MiB in fp32, 256 MiB kept; softmaxes that stay in the last-level cache."""
GPU_LIMITS = LogitLimits(portion=1 << 27, kept=1 << 30, softmax=1 << 27)
"""0.25 and 2 GiB in bf16. With the CPU's, SDAR-1.7B's head is 8 times slower on an H200 (docs/log.md)."""


class TargetScores(NamedTuple):
    """What is read of the distribution at each chosen position."""

    log_probs: Float[Tensor, " chosen"]
    """Of the targets."""
    entropies: Float[Tensor, " chosen"]
    """Of the whole distribution, in nats."""


def target_log_probs(
    hidden: Float[Tensor, "chosen hidden"],
    output_weight: Float[Tensor, "vocab hidden"],
    targets: Int64[Tensor, " chosen"],
    temperature: float | Float[Tensor, " chosen"] = 1.0,
    excluded: int | None = None,
) -> Float[Tensor, " chosen"]:
    """log softmax(hidden · weightᵀ / temperature)[target] for each chosen position, in fp32 (or better).

    `excluded` is taken out of the vocabulary: its probability is 0, the others' sum is 1.
    """
    distribution = _Distribution(temperature, excluded)
    return _score(hidden, output_weight, targets, distribution, wants_entropy=False).log_probs


def target_scores(
    hidden: Float[Tensor, "chosen hidden"],
    output_weight: Float[Tensor, "vocab hidden"],
    targets: Int64[Tensor, " chosen"],
    temperature: float | Float[Tensor, " chosen"] = 1.0,
    excluded: int | None = None,
) -> TargetScores:
    """`target_log_probs` and the entropy of the same distribution, from the same logits."""
    distribution = _Distribution(temperature, excluded)
    return _score(hidden, output_weight, targets, distribution, wants_entropy=True)


@dataclass(frozen=True)
class _Distribution:
    """How logits become a distribution."""

    temperature: float | Tensor
    excluded: int | None

    def scale(self, logits: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """Logits to take a softmax of. The excluded column is overwritten in place, which a second call
        on kept logits may repeat; a temperature makes new ones, in `dtype`.
        """
        if self.excluded is not None:
            logits[:, self.excluded] = -torch.inf
        if isinstance(self.temperature, float) and self.temperature == 1.0:
            return logits
        return logits.to(dtype) / self._column(rows)

    def unscale(self, grad: Tensor, rows: slice) -> Tensor:
        """The gradient of scaled logits, a row's factor at a time, as one of the raw logits."""
        return grad / self._column(rows)

    def hide_infinity(self, log_probs: Tensor) -> None:
        """0 for the excluded token's log-prob, in place: 0 · log 0 is 0 in an entropy, and not NaN."""
        if self.excluded is not None:
            log_probs[:, self.excluded] = 0.0

    def _column(self, rows: slice) -> float | Tensor:
        if isinstance(self.temperature, Tensor):
            return self.temperature[rows, None]
        return self.temperature


def _score(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    distribution: _Distribution,
    wants_entropy: bool,
) -> TargetScores:
    will_train = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    num_kept = min(_limits(hidden).kept // len(weight), len(targets)) if will_train else 0
    return TargetScores(
        *_TargetScores.apply(hidden, weight, targets, distribution, num_kept, wants_entropy)  # type: ignore[no-untyped-call]
    )


class _TargetScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        distribution: _Distribution,
        num_kept: int,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        out = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        entropies = torch.empty(len(targets) if wants_entropy else 0, dtype=dtype, device=hidden.device)
        ctx.kept = hidden.new_empty(num_kept, len(weight))
        for rows in _portions(hidden, len(ctx.kept), len(weight)):
            if rows.stop <= len(ctx.kept):
                logits = torch.mm(hidden[rows], weight.T, out=ctx.kept[rows])
            else:
                logits = hidden[rows] @ weight.T
            for part, own in _parts(rows, len(weight), hidden):
                scaled = distribution.scale(logits[own], part, dtype)
                log_probs = torch.log_softmax(scaled, dim=-1, dtype=dtype)
                out[part] = log_probs.gather(1, targets[part, None])[:, 0]
                if wants_entropy:
                    probabilities = log_probs.exp()
                    distribution.hide_infinity(log_probs)
                    entropies[part] = -torch.linalg.vecdot(probabilities, log_probs)
        ctx.save_for_backward(hidden, weight, targets, entropies)
        ctx.distribution = distribution
        ctx.set_materialize_grads(False)
        return out, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropies = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(entropies)
        gradient = _LogitGradient(ctx.distribution, targets, grad, grad_entropy, entropies)
        kept, ctx.kept = (
            ctx.kept,
            hidden.new_empty(0, len(weight)),
        )  # overwritten below: good for one use
        grad_hidden = torch.empty_like(hidden)
        # Later portions are summed in fp32: in bf16 they would vanish beside the sum so far.
        wants_weight = ctx.needs_input_grad[1]  # not so where adapters alone are trained
        is_split = wants_weight and len(kept) < len(targets)
        recomputed = torch.zeros_like(weight, dtype=grad.dtype) if is_split else None
        for rows in _portions(hidden, len(kept), len(weight)):
            is_kept = rows.stop <= len(kept)
            logits = kept[rows] if is_kept else hidden[rows] @ weight.T
            for part, own in _parts(rows, len(weight), hidden):
                logits[own] = gradient.of(logits[own], part)
            grad_hidden[rows] = logits @ weight
            if recomputed is not None and not is_kept:
                recomputed += logits.T @ hidden[rows]
        grad_weight = kept.T @ hidden[: len(kept)] if wants_weight else None
        if grad_weight is not None and recomputed is not None:
            grad_weight = (recomputed + grad_weight).to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


@dataclass(frozen=True)
class _LogitGradient:
    """From the gradients of log-probs and entropies to that of the logits."""

    distribution: _Distribution
    targets: Tensor
    grad: Tensor
    grad_entropy: Tensor | None
    entropies: Tensor

    def of(self, logits: Tensor, rows: slice) -> Tensor:
        """d log p(target) / d logits = onehot(target) - p;  d entropy / d logits = -p (log p + entropy)."""
        scaled = self.distribution.scale(logits, rows, self.grad.dtype)
        own = self.distribution.unscale(self.grad[rows, None], rows)
        if self.grad_entropy is None:
            grad_logits = torch.softmax(scaled, dim=-1).to(logits.dtype).mul_(-own.to(logits.dtype))
        else:
            own_entropy = self.distribution.unscale(self.grad_entropy[rows, None], rows)
            log_probs = torch.log_softmax(scaled, dim=-1, dtype=self.grad.dtype)
            probabilities = log_probs.exp()
            self.distribution.hide_infinity(log_probs)
            pull = log_probs.add_(self.entropies[rows, None]).mul_(-own_entropy).sub_(own)
            grad_logits = probabilities.mul_(pull).to(logits.dtype)
        return grad_logits.scatter_add_(1, self.targets[rows, None], own.to(logits.dtype))


def _limits(hidden: Tensor) -> LogitLimits:
    return CPU_LIMITS if hidden.device.type == "cpu" else GPU_LIMITS


def _parts(rows: slice, vocab_size: int, hidden: Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows of a portion a softmax at a time: among all rows, and within the portion."""
    step = max(1, _limits(hidden).softmax // vocab_size)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        yield slice(start, stop), slice(start - rows.start, stop - rows.start)


def _portions(hidden: Tensor, num_kept: int, vocab_size: int) -> Iterator[slice]:
    """Rows a portion at a time; no portion lies across the end of the kept ones."""
    step = max(1, _limits(hidden).portion // vocab_size)
    step = step // 64 * 64 or step  # whole tiles of the matmul kernels
    for first, last in ((0, num_kept), (num_kept, len(hidden))):
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))
