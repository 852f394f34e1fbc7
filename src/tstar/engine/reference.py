"""The semantics of the engine in the plainest code there is, one sequence at a time.

`generate` is the oracle of the engine's tests: every step computes the whole sequence anew, without a
cache, and every choice is made by a loop that one can check against the definition by eye. It shares with
the engine only the keyed random numbers, never its arithmetic.

`plain_loop` is the loop that block-diffusion models are usually decoded by: batch 1, a KV cache, an extra
forward per block that commits its clean keys and values, logits and probabilities of every position of the
block. It decodes the same responses and is the baseline of `benchmarks/engine.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tstar.engine.randomness import keyed_uniforms
from tstar.engine.request import Request, SamplingParams, check_rule
from tstar.model.attention import prepare
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Block, Partition
from tstar.trajectory import ForwardCounts, Trajectory
from tstar.unmask import UnmaskPolicy

ReadLogits = Callable[["_Response", Block, list[int]], Tensor]
"""Logits that predict the tokens at the given positions of the sequence."""


@torch.no_grad()
def generate(model: LanguageModel, request: Request, weight_version: int = 0) -> Trajectory:
    """Decode one request without a cache: each step is one forward of everything so far."""
    check_rule(model.config, request)

    def read_logits(response: _Response, block: Block, positions: list[int]) -> Tensor:
        length = block.stop if model.config.is_diffusion else block.start
        token_ids = torch.tensor(response.text[:length], device=model.device)
        partition = response.partition.resized(block.stop - len(request.prompt_ids))
        layout = PackedLayout.clean([partition]) if length == block.stop else PackedLayout.causal([length])
        hidden = model(token_ids, prepare(layout, model.device))
        reads = positions if model.config.is_diffusion else [p - 1 for p in positions]
        return model.logits(hidden)[reads]

    return _decode(model, request, read_logits, lambda _response, _block: 0, weight_version)


@torch.no_grad()
def plain_loop(model: LanguageModel, request: Request) -> Trajectory:
    """Decode one request as it is usually done: a cache, a commit forward per block, full logits."""
    cache = _GrowingCache()

    def feed(response: _Response, start: int, stop: int, keep: bool) -> Tensor:
        token_ids = torch.tensor(response.text[start:stop], device=model.device)
        block_ids = torch.tensor(response.partition.block_ids[:stop], device=model.device)
        return model.logits(model(token_ids, cache.prepare(block_ids, start, keep)))

    def read_logits(response: _Response, block: Block, positions: list[int]) -> Tensor:
        if cache.length == 0 and block.start > 0:
            feed(response, 0, block.start, keep=True)
        logits = feed(response, block.start, block.stop, keep=False)
        torch.softmax(logits.float(), dim=-1)
        return logits[[p - block.start for p in positions]]

    def commit(response: _Response, block: Block) -> int:
        feed(response, block.start, block.stop, keep=True)
        return 1

    if not model.config.is_diffusion:
        raise ValueError("model: an AR model has no denoising loop; use a model with a mask token")
    return _decode(model, request, read_logits, commit, weight_version=0)


@dataclass
class _Response:
    """A response on its way."""

    partition: Partition
    text: list[int]
    """Prompt and response; what is not decided yet holds the mask token (or 0)."""
    unmask_step: dict[int, int] = field(default_factory=dict)
    log_probs: dict[int, float] = field(default_factory=dict)


def _decode(
    model: LanguageModel,
    request: Request,
    read_logits: ReadLogits,
    commit: Callable[[_Response, Block], int],
    weight_version: int,
) -> Trajectory:
    sampling, prompt_length = request.sampling, len(request.prompt_ids)
    mask_token = model.config.mask_token_id
    partition = request.rule.cut(prompt_length, sampling.max_tokens)
    response = _Response(
        partition,
        request.prompt_ids.tolist() + [0 if mask_token is None else mask_token] * sampling.max_tokens,
    )
    own_stops = () if sampling.ignore_eos else model.config.eos_token_ids
    stops = {*own_stops, *sampling.stop_token_ids}
    step, num_commits, stop_length, reason = 0, 0, sampling.max_tokens, "length"
    for block in partition.blocks:
        positions = [p for p in range(block.start, block.stop) if p >= prompt_length]
        for block_step in itertools.count():
            masked = [p for p in positions if p not in response.unmask_step]
            if not masked:
                break
            logits = read_logits(response, block, masked).double()
            _take_step(request, response, logits, masked, mask_token, step, block_step)
            step += 1
        found = [p for p in positions if response.text[p] in stops]
        text_stop = found[0] + 1 if found else block.stop
        ended = request.find_stop and request.find_stop(np.array(response.text[prompt_length:text_stop]))
        if found or ended:
            stop_length, reason = ended or text_stop - prompt_length, "stop"
            break
        if block.stop < len(response.text):
            num_commits += commit(response, block)
    length = block.stop - prompt_length
    decided = range(prompt_length, block.stop)
    return Trajectory(
        prompt_ids=request.prompt_ids,
        response_ids=np.array([response.text[p] for p in decided], dtype=np.int64),
        unmask_step=np.array([response.unmask_step[p] for p in decided], dtype=np.int64),
        log_probs=np.array([response.log_probs[p] for p in decided], dtype=np.float32),
        stop_length=stop_length,
        finish_reason="stop" if reason == "stop" else "length",
        partition=partition.resized(length),
        forwards=ForwardCounts(denoise=step, commit=num_commits),
        weight_version=weight_version,
        seed=request.seed,
        temperature=sampling.scoring_temperature,
    )


def _take_step(
    request: Request,
    response: _Response,
    logits: Float[Tensor, "masked vocab"],
    masked: list[int],
    mask_token: int | None,
    step: int,
    block_step: int,
) -> None:
    """Draw a token for every masked position, and keep those that the policy finalises."""
    sampling, prompt_length = request.sampling, len(request.prompt_ids)
    if mask_token is not None:
        logits[:, mask_token] = -torch.inf
    log_probs = torch.log_softmax(logits / sampling.scoring_temperature, dim=-1)
    places = [p - prompt_length for p in masked]
    tokens = [
        _draw(log_probs[i], sampling, _uniform("token", request.seed, step, place))
        for i, place in enumerate(places)
    ]
    entropies = [float(-(row.exp() * row.nan_to_num(neginf=0.0)).sum()) for row in log_probs]
    if sampling.unmask.confidence == "sampled":
        log_confidence = [float(log_probs[i, token]) for i, token in enumerate(tokens)]
    else:
        log_confidence = [float(row.max()) for row in log_probs]
    noise = [_uniform("order", request.seed, step, place) for place in places]
    for i in _choose(sampling.unmask, block_step, log_confidence, entropies, noise):
        response.text[masked[i]] = tokens[i]
        response.unmask_step[masked[i]] = step
        response.log_probs[masked[i]] = float(log_probs[i, tokens[i]])


def _draw(log_probs: Float[Tensor, " vocab"], sampling: SamplingParams, uniform: float) -> int:
    """The token whose share of [0, 1), in order of the vocabulary, holds the uniform number."""
    if sampling.temperature == 0:
        return int(log_probs.argmax())
    probabilities = log_probs.exp()
    if sampling.top_k is not None:
        least = probabilities.sort(descending=True).values[min(sampling.top_k, len(probabilities)) - 1]
        probabilities = probabilities * (probabilities >= least)
    if sampling.top_p < 1:
        falling = (probabilities / probabilities.sum()).sort(descending=True)
        last = int((falling.values.cumsum(0)[:-1] < sampling.top_p).sum())
        least = probabilities[falling.indices[last]]
        probabilities = probabilities * (probabilities >= least)
    probabilities = probabilities * (probabilities >= sampling.min_p * probabilities.max())
    cumulative = probabilities.cumsum(0)
    return int((cumulative <= uniform * cumulative[-1]).sum())


def _choose(
    policy: UnmaskPolicy,
    block_step: int,
    log_confidence: Sequence[float],
    entropies: Sequence[float],
    noise: Sequence[float],
) -> list[int]:
    """Which of the masked positions, given from left to right, are finalised now."""
    num_masked = len(log_confidence)
    budget = policy.tokens_per_step or 1
    if policy.steps_per_block is not None:
        budget = math.ceil(num_masked / max(policy.steps_per_block - block_step, 1))
    everyone = range(num_masked)
    match policy.kind:
        case "sequential":
            return list(everyone)[:budget]
        case "random":
            return sorted(everyone, key=lambda i: -noise[i])[:budget]
        case "entropy":
            assert policy.entropy_bound is not None
            rising = sorted(everyone, key=lambda i: entropies[i])
            num, total = 0, 0.0
            while num < num_masked and total <= policy.entropy_bound:
                total += entropies[rising[num]]
                num += 1
            return rising[: max(num, budget)]
        case "static":
            return sorted(everyone, key=lambda i: -log_confidence[i])[:budget]
        case "dynamic":
            assert policy.confidence_threshold is not None
            passing = [i for i in everyone if math.exp(log_confidence[i]) >= policy.confidence_threshold]
            return sorted(everyone, key=lambda i: -log_confidence[i])[: max(budget, len(passing))]


def _uniform(stream: Literal["token", "order"], seed: int, step: int, place: int) -> float:
    key = np.array([seed], dtype=np.uint64), np.array([step]), np.array([place])
    return float(keyed_uniforms(stream, *key)[0])


class _GrowingCache:
    """Keys and values of one sequence, concatenated forward by forward."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def prepare(self, block_ids: Int64[Tensor, " stop"], start: int, keep: bool) -> _GrowingAttention:
        """Tokens from `start` on, given the block ids of the sequence so far; `keep` appends them."""
        assert start == self.length
        own = block_ids[start:]
        if keep:
            self.length = len(block_ids)
        is_one_block = bool(own[0] == own[-1])
        return _GrowingAttention(
            layers=self._layers,
            positions=torch.arange(start, len(block_ids), device=block_ids.device),
            mask=None if is_one_block else own[:, None] >= block_ids,
            keep=keep,
        )


@dataclass
class _GrowingAttention:
    layers: dict[int, tuple[Tensor, Tensor]]
    positions: Int64[Tensor, " tokens"]
    mask: Bool[Tensor, "tokens context"] | None
    keep: bool

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self.layers:
            past = self.layers[layer]
            key, value = torch.cat([past[0], key]), torch.cat([past[1], value])
        if self.keep:
            self.layers[layer] = key, value
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=self.mask,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return mixed[0].transpose(0, 1)
