"""From hidden states to drawn tokens: one pass over the logits, a portion at a time.

Every position asks three things of its distribution (logits over its temperature, without the mask
token): how sure is it, which token is drawn, with what log-probability. All three follow from the
exponentials of logits minus their maximum, written over the logits; nothing is divided by their sum, and
no portion is larger than the engine's budget for logits.

A token is drawn by inverse distribution function from one uniform number, so it depends on that number
alone, whatever else is computed beside it. The vocabulary is summed up in runs: a run is chosen by the
sums, then a token inside it. In both searches the found sum exceeds the one before it, so what is drawn
has a probability above 0: a token that was filtered out, and the mask token, cannot come out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tstar.model.linear import linear

RUN_LENGTH = 128
"""Tokens of the vocabulary summed up together."""
NUCLEUS_SIZES = (256, 4096)
"""Largest weights looked at for top-p before all of them are sorted, which takes ten times as long."""
FEW_LOGITS = 1 << 14
"""So many are searched for their maximum faster at once than run by run."""
_BELOW_1 = 1.0 - 2.0**-53


@dataclass(frozen=True, eq=False)
class Draws:
    """How to read each position; numbers that no position needs are None, and their work is left out."""

    uniforms: Float64[Tensor, " reads"] | None
    """None: every position takes the likeliest token."""
    is_greedy: Int64[Tensor, " reads"] | None
    """None: all or none of them, as `uniforms` says."""
    temperatures: Float64[Tensor, " reads"] | None
    """None: 1 everywhere."""
    top_k: Int64[Tensor, " reads"] | None
    most_top_k: int
    """The largest of them, known without asking the device."""
    top_p: Float64[Tensor, " reads"] | None
    min_p: Float64[Tensor, " reads"] | None
    wants_entropy: bool

    @classmethod
    def of(
        cls,
        device: torch.device,
        uniforms: Float64[np.ndarray, " reads"],
        temperatures: Float64[np.ndarray, " reads"],
        top_k: Int64[np.ndarray, " reads"],
        top_p: Float64[np.ndarray, " reads"],
        min_p: Float64[np.ndarray, " reads"],
        wants_entropy: bool,
    ) -> Draws:
        """A temperature of 0 is greedy; a top_k of 0 is none."""
        is_greedy = temperatures == 0
        if is_greedy.all():
            return cls(None, None, None, None, 0, None, None, wants_entropy)

        def sent(values: np.ndarray, is_needed: bool) -> Tensor | None:
            return torch.from_numpy(values).to(device) if is_needed else None

        return cls(
            uniforms=sent(uniforms, True),
            is_greedy=sent(is_greedy.astype(np.int64), bool(is_greedy.any())),
            temperatures=sent(
                np.where(is_greedy, 1.0, temperatures), bool((temperatures[~is_greedy] != 1).any())
            ),
            top_k=sent(top_k, bool(top_k.any())),
            most_top_k=int(top_k.max(initial=0)),
            top_p=sent(top_p, bool((top_p < 1).any())),
            min_p=sent(min_p, bool((min_p > 0).any())),
            wants_entropy=wants_entropy,
        )

    def part(self, reads: slice) -> Draws:
        if self.uniforms is None and self.temperatures is None:
            return self

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[reads]

        return Draws(
            cut(self.uniforms),
            cut(self.is_greedy),
            cut(self.temperatures),
            cut(self.top_k),
            self.most_top_k,
            cut(self.top_p),
            cut(self.min_p),
            self.wants_entropy,
        )


def read_distribution(
    hidden: Float[Tensor, "reads hidden"],
    output_weight: Float[Tensor, "vocab hidden"],
    draws: Draws,
    excluded: int | None,
    max_logits: int,
) -> Float64[Tensor, "reads 4"]:
    """Per position: the drawn token, its log-prob, the likeliest token's log-prob, the entropy (0 where
    nobody wants it). Log-probs and entropy are those of the whole distribution, before any filter."""
    out = torch.empty(len(hidden), 4, dtype=torch.float64, device=hidden.device)
    step = max(1, max_logits // len(output_weight))
    for start in range(0, len(hidden), step):
        reads = slice(start, start + step)
        logits = linear(hidden[reads], output_weight)
        if excluded is not None:
            logits[:, excluded] = -torch.inf
        _read_portion(logits, draws.part(reads), out[reads])
    return out


def _read_portion(
    logits: Float[Tensor, "reads vocab"], draws: Draws, out: Float64[Tensor, "reads 4"]
) -> None:
    """`read_distribution` of one portion; writes over the logits."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # everything below is several times slower in 16 bits on a CPU
    of_runs = _run_reduce(logits, "max")
    likeliest = _likeliest(logits, of_runs)
    weights = logits.sub_(of_runs.amax(-1, keepdim=True))
    if draws.temperatures is not None:
        weights *= (1.0 / draws.temperatures)[:, None].to(weights.dtype)
    weights.exp_()  # over their sum: probabilities; the likeliest token's is 1
    sums = _run_reduce(weights, "sum").double()
    log_total = sums.sum(-1).log()
    out[:, 2] = -log_total
    out[:, 3] = _entropy(weights, log_total) if draws.wants_entropy else 0.0

    tokens = likeliest if draws.uniforms is None else _draw(weights, sums, draws)
    if draws.is_greedy is not None:
        tokens = torch.where(draws.is_greedy > 0, likeliest, tokens)
    out[:, 0] = tokens
    out[:, 1] = weights.gather(1, tokens[:, None])[:, 0].double().log() - log_total


def _draw(
    weights: Float[Tensor, "reads vocab"], sums: Float64[Tensor, "reads runs"], draws: Draws
) -> Int64[Tensor, " reads"]:
    least = _least_weight(weights, draws)
    if least is not None:
        weights = torch.where(weights >= least[:, None], weights, 0)
        sums = _run_reduce(weights, "sum").double()
    assert draws.uniforms is not None
    run, rest = _search(sums, draws.uniforms)
    inside = run[:, None] * RUN_LENGTH + torch.arange(RUN_LENGTH, device=weights.device)
    shares = weights.gather(1, inside.clamp(max=weights.shape[1] - 1)).double()
    shares *= inside < weights.shape[1]
    token, _ = _search(shares, rest)
    drawn: Tensor = run * RUN_LENGTH + token
    return drawn.clamp(max=weights.shape[1] - 1)  # NaN finds nothing; its request fails by its log-prob


def _search(
    shares: Float64[Tensor, "reads shares"], uniforms: Float64[Tensor, " reads"]
) -> tuple[Int64[Tensor, " reads"], Float64[Tensor, " reads"]]:
    """The first share up to which the sum exceeds the uniform's part of the whole, and how far into it the
    uniform lies, in [0, 1)."""
    cumulative = shares.cumsum(-1)
    wanted = (uniforms * cumulative[:, -1])[:, None]
    found = (cumulative <= wanted).sum(-1, keepdim=True).clamp(max=shares.shape[1] - 1)
    share = shares.gather(1, found)
    rest = (wanted - (cumulative.gather(1, found) - share)) / share
    return found[:, 0], rest[:, 0].clamp(0.0, _BELOW_1)


def _least_weight(weights: Float[Tensor, "reads vocab"], draws: Draws) -> Float[Tensor, " reads"] | None:
    """The weight that a token must have to be drawn: top-k, then top-p of what is left, then min-p; a
    position that wants none of these gets 0."""
    least: Tensor | None = None
    if draws.top_k is not None:
        falling = weights.topk(min(draws.most_top_k, weights.shape[1])).values
        last = draws.top_k.clamp(1, falling.shape[1]) - 1
        least = torch.where(draws.top_k > 0, falling.gather(1, last[:, None])[:, 0], 0)
    if draws.top_p is not None:
        kept = weights if least is None else torch.where(weights >= least[:, None], weights, 0)
        by_mass = torch.where(draws.top_p < 1, _nucleus(kept, draws.top_p), 0)
        least = by_mass if least is None else torch.maximum(least, by_mass)
    if draws.min_p is not None:
        by_share = draws.min_p.to(weights.dtype)  # of the likeliest token's weight, which is 1
        least = by_share if least is None else torch.maximum(least, by_share)
    return least


def _nucleus(
    weights: Float[Tensor, "reads vocab"], top_p: Float64[Tensor, " reads"]
) -> Float[Tensor, " reads"]:
    """The least of the largest weights that together have the share top_p of all."""
    enough = (top_p * weights.sum(-1, dtype=torch.float64))[:, None]
    for count in (*NUCLEUS_SIZES, weights.shape[1]):
        falling = weights.topk(min(count, weights.shape[1])).values
        cumulative = falling.cumsum(-1, dtype=torch.float64)
        if count >= weights.shape[1] or bool(((cumulative[:, -1:] >= enough)[:, 0] | (top_p >= 1)).all()):
            break
    last = (cumulative[:, :-1] < enough).sum(-1, keepdim=True)
    least: Tensor = falling.gather(1, last)[:, 0]
    return least


def _likeliest(
    logits: Float[Tensor, "reads vocab"], of_runs: Float[Tensor, "reads runs"]
) -> Int64[Tensor, " reads"]:
    """argmax, the left one of equals: first the run by its maximum, then the token in it."""
    if logits.numel() <= FEW_LOGITS:
        return logits.argmax(-1)
    inside = of_runs.argmax(-1)[:, None] * RUN_LENGTH + torch.arange(RUN_LENGTH, device=logits.device)
    inside = inside.clamp(max=logits.shape[1] - 1)
    return inside.gather(1, logits.gather(1, inside).argmax(-1, keepdim=True))[:, 0]


def _run_reduce(values: Float[Tensor, "reads vocab"], how: str) -> Float[Tensor, "reads runs"]:
    """The maximum or the sum of every run of the vocabulary; the last may be short."""
    num_whole = values.shape[1] // RUN_LENGTH
    whole = values[:, : num_whole * RUN_LENGTH].view(len(values), num_whole, RUN_LENGTH)
    rest = values[:, num_whole * RUN_LENGTH :]
    reduced = whole.amax(-1) if how == "max" else whole.sum(-1)
    if rest.shape[1] > 0:
        last = rest.amax(-1, keepdim=True) if how == "max" else rest.sum(-1, keepdim=True)
        reduced = torch.cat([reduced, last], dim=1)
    return reduced


def _entropy(
    weights: Float[Tensor, "reads vocab"], log_total: Float64[Tensor, " reads"]
) -> Float64[Tensor, " reads"]:
    """-Σ p log p with p = weight / total, in nats."""
    return log_total - torch.xlogy(weights, weights).sum(-1).double() / log_total.exp()
