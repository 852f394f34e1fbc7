"""SFT's packed loss against plain loops, and against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float64

from tiny_models import make_model, make_peer
from tstar.model.attention import prepare
from tstar.model.config import ModelConfig
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition, PartitionRule
from tstar.sft.gradient import batch_loss
from tstar.sft.objective import BlockDiffusion, Example, NextToken

MASK, EOS = 96, 1


def make_example(prompt_length: int, response_length: int, seed: int) -> Example:
    generator = np.random.default_rng(seed)
    ids = generator.integers(2, 90, size=prompt_length + response_length)
    ids[-1] = EOS
    return Example(ids[:prompt_length], ids[prompt_length:])


def slow_block_loss(
    model: LanguageModel,
    token_ids: torch.Tensor,
    partition: Partition,
    is_masked: Bool[np.ndarray, " response"],
    ratios: Float64[np.ndarray, " response"],
) -> torch.Tensor:
    """Eq. 2 as it is written, a forward for each block: clean text, then the block with masks in it."""
    total = torch.zeros((), dtype=torch.float64)
    for block in partition.blocks:
        corrupted = token_ids[: block.stop].clone()
        masked = [
            i
            for i in range(block.start, block.stop)
            if i >= partition.prompt_length and is_masked[i - partition.prompt_length]
        ]
        corrupted[masked] = MASK
        layout = PackedLayout(
            positions=np.arange(block.stop),
            segment_ids=np.zeros(block.stop, dtype=np.int64),
            block_ids=partition.block_ids[: block.stop],
            copy_ids=np.zeros(block.stop, dtype=np.int64),
        )
        logits = model.logits(model(corrupted, prepare(layout, backend="sdpa")))
        logits[:, MASK] = -torch.inf
        for i in masked:
            total = (
                total
                - torch.log_softmax(logits[i], dim=-1)[token_ids[i]] / ratios[i - partition.prompt_length]
            )
    return total


@pytest.mark.parametrize(
    "rule",
    [
        PartitionRule(1),
        PartitionRule(4),
        PartitionRule(4, 2),
        PartitionRule(5, 3),
        PartitionRule(32),
        PartitionRule(4, 0, "sequence"),
        PartitionRule(8, 3, "sequence"),
    ],
    ids=str,
)
def test_value_and_gradient_of_equation_2_equal_a_loop_over_blocks(rule: PartitionRule) -> None:
    model = make_model("sdar", torch.float64)
    objective = BlockDiffusion(MASK, EOS, (rule,), weighting="inverse_t")
    generator = np.random.default_rng(3)
    shapes = [(6, 11), (3, 8), (0, 5), (9, 1)]
    sequences, expected, num_tokens = [], torch.zeros((), dtype=torch.float64), 0
    for seed, (prompt_length, response_length) in enumerate(shapes):
        token_ids, partition = objective.complete(make_example(prompt_length, response_length, seed), rule)
        block_of = partition.block_ids[prompt_length:]
        ratios = generator.uniform(0.1, 1, size=block_of.max() + 1)[block_of]
        is_masked = generator.random(partition.length) < ratios
        sequences.append(objective.denoise(token_ids, partition, is_masked, objective.weights(ratios)))
        expected = expected + slow_block_loss(
            model, torch.from_numpy(token_ids), partition, is_masked, ratios
        )
        num_tokens += partition.length
    (expected / num_tokens).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    batch = batch_loss(model, objective, sequences, token_budget=60)
    assert batch.loss == pytest.approx(float(expected.detach()) / num_tokens, rel=1e-12)
    assert batch.num_response_tokens == num_tokens
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_next_token_loss_equals_transformers(name: str) -> None:
    """One padded batch with -100 on prompts there, packs of clean text here."""
    peer = make_peer(name, torch.float64)
    with torch.device("meta"):
        model = LanguageModel(ModelConfig.from_hub(peer.config.to_dict()))
    model.load_state_dict({k: v.clone() for k, v in peer.state_dict().items()}, assign=True, strict=False)
    model.requires_grad_(True)
    examples = [make_example(*shape, seed) for seed, shape in enumerate([(7, 9), (2, 14), (12, 3), (0, 6)])]

    width = max(example.num_tokens for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        ids[row, : example.num_tokens] = torch.from_numpy(
            np.concatenate([example.prompt_ids, example.response_ids])
        )
        first = len(example.prompt_ids)
        labels[row, first : example.num_tokens] = ids[row, first : example.num_tokens]
    loss = peer(input_ids=ids, labels=labels).loss
    loss.backward()

    objective = NextToken()
    generator = np.random.default_rng(0)
    sequences = [objective.draw(example, generator) for example in examples]
    assert batch_loss(model, objective, sequences, token_budget=32).loss == pytest.approx(
        float(loss.detach()),
        rel=1e-6,  # transformers takes the cross-entropy in float32
    )
    for parameter_name, parameter in peer.named_parameters():
        ours = model.get_parameter(parameter_name).grad
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)
