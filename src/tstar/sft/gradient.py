"""Loss and gradient of a batch of examples, pack by pack; what one optimizer step is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tstar.model.attention import prepare
from tstar.model.head import target_log_probs
from tstar.model.transformer import LanguageModel
from tstar.sft.objective import Example, Objective, Pack, TrainingSequence, pack_sequences

_PURPOSES = ("train", "validation", "order", "held out")


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch, and what it was made of."""

    loss: float
    """Σ weight · cross-entropy / num_response_tokens: Eq. 2 a response token, in nats."""
    cross_entropy: float
    """Mean over the positions that were read, unweighted: less noisy than the loss, biased to large t."""
    num_response_tokens: int
    num_read: int
    num_tokens: int
    """Tokens that went through the model, clean and noisy."""


def batch_loss(
    model: LanguageModel,
    objective: Objective,
    sequences: Sequence[TrainingSequence],
    token_budget: int,
) -> BatchLoss:
    """The loss of one batch; where gradients are enabled they are added to the parameters' own.

    A batch of which nothing is read (few tokens, small t) has loss 0 and gradient 0.
    """
    device = model.device
    num_response_tokens = sum(s.num_response_tokens for s in sequences)
    packs = pack_sequences(sequences, token_budget)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for pack in packs:
        log_probs = pack_log_probs(model, pack, objective.excluded_token_id)
        weights = torch.from_numpy(pack.weights).to(device, log_probs.dtype)
        loss = -(weights * log_probs).sum() / num_response_tokens
        if torch.is_grad_enabled():
            loss.backward()  # type: ignore[no-untyped-call]
        totals += torch.stack([loss.detach(), -log_probs.detach().sum()])
    if not packs and torch.is_grad_enabled():
        _add_zero_gradients(model)
    loss_value, sum_cross_entropy = totals.tolist()
    num_read = sum(len(pack.read) for pack in packs)
    return BatchLoss(
        loss=loss_value,
        cross_entropy=sum_cross_entropy / max(num_read, 1),
        num_response_tokens=num_response_tokens,
        num_read=num_read,
        num_tokens=sum(len(pack.token_ids) for pack in packs),
    )


def pack_log_probs(model: LanguageModel, pack: Pack, excluded: int | None) -> Float[Tensor, " read"]:
    """log p_θ(x_0,ℓ | x_t) at every read position of a pack."""
    token_ids, read, targets = (
        torch.from_numpy(ids).to(model.device) for ids in (pack.token_ids, pack.read, pack.targets)
    )
    hidden = model(token_ids, prepare(pack.layout, model.device), read)
    return target_log_probs(hidden, model.output_weight, targets, excluded=excluded)


def draw_sequences(
    objective: Objective,
    examples: Sequence[Example],
    key: tuple[int, int],
    purpose: Literal["train", "validation"] = "train",
) -> list[TrainingSequence]:
    """A training sequence of each example, its randomness keyed by (seed, step) and its place alone.

    Neither packs nor the number of processes can change what is masked."""
    return [objective.draw(ex, generator_for(purpose, *key, place)) for place, ex in enumerate(examples)]


def generator_for(purpose: str, *key: int) -> np.random.Generator:
    """A generator of its own for everything that is drawn; equal keys draw equal numbers."""
    return np.random.default_rng((_PURPOSES.index(purpose), *key))


def examples_of_step(num_examples: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Which examples a step trains on: the data in a random order, all of it before any comes again."""
    draws = range(step * batch_size, (step + 1) * batch_size)
    orders = {
        turn: generator_for("order", seed, turn).permutation(num_examples)
        for turn in {draw // num_examples for draw in draws}
    }
    return [int(orders[draw // num_examples][draw % num_examples]) for draw in draws]


def _add_zero_gradients(model: LanguageModel) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
