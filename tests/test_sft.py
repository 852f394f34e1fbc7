"""SFT's data side and loss: masks, weights, EOS fill, packs; then the runs themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny_models import make_model
from tstar.errors import UserError
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition, PartitionRule
from tstar.sft.gradient import batch_loss, draw_sequences, examples_of_step
from tstar.sft.objective import BlockDiffusion, Example, NextToken, TrainingSequence, completed
from tstar.sft.options import SftOptions

MASK, EOS = 96, 1
RULES = [
    PartitionRule(4),
    PartitionRule(8, 3),
    PartitionRule(16),
    PartitionRule(4, 1, "sequence"),
]


def make_example(prompt_length: int, response_length: int, seed: int = 0, finished: bool = True) -> Example:
    ids = np.random.default_rng(seed).integers(2, 90, size=prompt_length + response_length)
    if finished:
        ids[-1] = EOS
    return Example(ids[:prompt_length], ids[prompt_length:])


def make_examples(count: int) -> list[Example]:
    generator = np.random.default_rng(0)
    return [
        make_example(*generator.integers(1, 15, size=2), seed=seed)  # type: ignore[misc]
        for seed in range(count)
    ]


def gradients_of(
    model: LanguageModel, objective: BlockDiffusion, sequences: Sequence[TrainingSequence], token_budget: int
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = batch_loss(model, objective, sequences, token_budget).loss
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -- blocks and EOS ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_finished_response_is_filled_with_eos_to_its_blocks_end(rule: PartitionRule) -> None:
    objective = BlockDiffusion(MASK, EOS, (rule,))
    for prompt_length in range(6):
        for length in range(1, 3 * rule.block_size):
            example = make_example(prompt_length, length)
            token_ids, partition = objective.complete(example, rule)
            assert partition == rule.cut(prompt_length, partition.length)
            assert (token_ids[prompt_length + length - 1 :] == EOS).all()
            # Its last block is the one that held the last token, and a longer response would not change it.
            open_ended = rule.cut(prompt_length, length + 2 * rule.block_size)
            last = open_ended.block(open_ended.block_id(prompt_length + length - 1))
            assert partition.blocks[-1] == last


def test_an_unfinished_response_is_left_as_it_is() -> None:
    rule = PartitionRule(8)
    example = make_example(3, 5, finished=False)
    token_ids, partition = BlockDiffusion(MASK, EOS, (rule,)).complete(example, rule)
    assert partition == rule.cut(3, 5)
    assert (token_ids == np.concatenate([example.prompt_ids, example.response_ids])).all()


def test_completed_is_idempotent() -> None:
    partition = completed(Partition(5, 9, 8, offset=3))
    assert partition.length == 11
    assert completed(partition) == partition


# -- masks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_sequence_is_clean_context_and_noisy_blocks_and_no_more(rule: PartitionRule) -> None:
    objective = BlockDiffusion(MASK, EOS, (rule,))
    for seed in range(50):
        example = make_example(seed % 7, 1 + seed % 23, seed)
        token_ids, partition = objective.complete(example, rule)
        sequence = objective.draw(example, np.random.default_rng(seed))
        assert sequence.num_response_tokens == partition.length
        if not len(sequence.read):
            assert len(sequence.token_ids) == 0
            continue
        is_masked = sequence.token_ids == MASK
        assert (np.flatnonzero(is_masked) == sequence.read).all()
        assert (sequence.positions[is_masked] >= partition.prompt_length).all()
        assert (sequence.targets == token_ids[sequence.positions[is_masked]]).all()
        assert (sequence.token_ids[~is_masked] == token_ids[sequence.positions[~is_masked]]).all()
        assert (sequence.block_ids == partition.block_ids[sequence.positions]).all()
        # Every noisy block is whole and has a mask; every clean block is before the last of them.
        noisy_blocks = np.unique(sequence.block_ids[sequence.copy_ids == 1])
        assert set(noisy_blocks) == set(sequence.block_ids[is_masked])
        for block in noisy_blocks.tolist():
            members = sequence.positions[(sequence.block_ids == block) & (sequence.copy_ids == 1)]
            assert list(members) == list(range(partition.block(block).start, partition.block(block).stop))
        clean = sequence.positions[sequence.copy_ids == 0]
        assert list(clean) == list(range(partition.block(int(noisy_blocks[-1])).start))
        assert len(sequence.token_ids) <= objective.max_tokens(example)


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_expected_number_of_masked_positions_is_tB(block_size: int) -> None:  # noqa: N802
    """Given its t, a block with a mask has tB / (1 - (1 - t)^B) of them in expectation; all blocks E[t] B."""
    objective = BlockDiffusion(MASK, EOS, (PartitionRule(block_size),), min_mask_ratio=0.05)
    example = make_example(3, 10 * block_size)
    excess, variance, counts = 0.0, 0.0, []
    for seed in range(400):
        sequence = objective.draw(example, np.random.default_rng(seed))
        _, first, num_masked = np.unique(
            sequence.block_ids[sequence.read], return_index=True, return_counts=True
        )
        t = 1 / sequence.weights[first]
        shown = 1 - (1 - t) ** block_size
        mean = t * block_size / shown
        second_moment = (t * (1 - t) * block_size + (t * block_size) ** 2) / shown
        excess += float((num_masked - mean).sum())
        variance += float((second_moment - mean**2).sum())
        counts.append(num_masked.sum() / 10)
    assert abs(excess) < 4 * math.sqrt(variance)
    mean_count = 0.525 * block_size  # E[t] = (0.05 + 1) / 2
    spread = np.std(counts) / math.sqrt(len(counts))
    assert abs(np.mean(counts) - mean_count) < 4 * spread
    assert spread < 0.02 * block_size  # so the bound above means something


@pytest.mark.parametrize("weighting", ["inverse_t", "constant"])
def test_a_response_token_counts_one_in_expectation(weighting: str) -> None:
    objective = BlockDiffusion(
        MASK,
        EOS,
        (PartitionRule(4),),
        weighting=weighting,
        min_mask_ratio=0.1,  # type: ignore[arg-type]
    )
    example = make_example(3, 40)
    sums = [objective.draw(example, np.random.default_rng(seed)).weights.sum() / 40 for seed in range(2000)]
    spread = np.std(sums) / math.sqrt(len(sums))
    assert abs(np.mean(sums) - 1) < 4 * spread < 0.04


def test_the_smallest_t_bounds_the_weight() -> None:
    objective = BlockDiffusion(MASK, EOS, (PartitionRule(1),), min_mask_ratio=0.25)
    weights = np.concatenate(
        [objective.draw(make_example(1, 50), np.random.default_rng(s)).weights for s in range(20)]
    )
    assert weights.min() >= 1
    assert 3 < weights.max() <= 4


def test_next_token_shifts_labels_and_reads_the_response_alone() -> None:
    example = Example(np.array([5, 6, 7]), np.array([8, 9, EOS]))
    sequence = NextToken().draw(example, np.random.default_rng(0))
    assert sequence.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert sequence.read.tolist() == [2, 3, 4]
    assert sequence.targets.tolist() == [8, 9, EOS]
    assert sequence.num_response_tokens == 3
    without_prompt = Example(np.array([], dtype=np.int64), np.array([8, 9]))
    assert NextToken().draw(without_prompt, np.random.default_rng(0)).targets.tolist() == [9]


# -- keys and packs ----------------------------------------------------------------------------


def test_what_is_masked_depends_on_seed_step_and_place_alone() -> None:
    objective = BlockDiffusion(MASK, EOS, (PartitionRule(4),))
    examples = make_examples(6)
    drawn = draw_sequences(objective, examples, (7, 3))
    others = [make_example(2, 2), *examples[1:]]
    again = draw_sequences(objective, others, (7, 3))
    for one, other in zip(drawn[1:], again[1:], strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.weights, other.weights)
    twins = draw_sequences(objective, [examples[0]] * 2, (7, 3))
    other_keys = [
        draw_sequences(objective, examples[:1], (7, 4)),
        draw_sequences(objective, examples[:1], (8, 3)),
        draw_sequences(objective, examples[:1], (7, 3), purpose="validation"),
        twins[1:],
    ]
    for other in other_keys:
        assert not np.array_equal(drawn[0].weights, other[0].weights)


@pytest.mark.parametrize(
    "objective",
    [BlockDiffusion(MASK, EOS, tuple(RULES)), BlockDiffusion(MASK, EOS, (PartitionRule(4),))],
    ids=["mixed", "one"],
)
def test_packs_and_their_order_change_nothing(objective: BlockDiffusion) -> None:
    model = make_model("sdar", torch.float64)
    sequences = draw_sequences(objective, make_examples(9), (0, 0))
    assert len({sequence.num_response_tokens for sequence in sequences}) > 1
    expected_loss, expected = gradients_of(model, objective, sequences, token_budget=10_000)
    order = np.random.default_rng(0).permutation(len(sequences))
    for other, budget in (([sequences[i] for i in order], 10_000), (sequences, 64)):
        loss, gradients = gradients_of(model, objective, other, budget)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_block_sizes_are_drawn_by_their_weights() -> None:
    rules = (PartitionRule(4), PartitionRule(8), PartitionRule(16))
    objective = BlockDiffusion(MASK, EOS, rules, rule_weights=(1.0, 3.0, 0.0))
    example = make_example(2, 3)  # one block: the fill tells which
    lengths = [
        sequence.num_response_tokens for sequence in draw_sequences(objective, [example] * 2000, (0, 0))
    ]
    counts = np.bincount(lengths, minlength=17)
    assert counts[[4, 8, 16]].sum() == 2000
    assert counts[16] == 0
    assert counts[4] == pytest.approx(500, abs=4 * math.sqrt(2000 * 0.25 * 0.75))


def test_a_batch_without_masks_has_loss_and_gradient_zero() -> None:
    objective = BlockDiffusion(MASK, EOS, (PartitionRule(4),))
    example = make_example(4, 4)
    token_ids, partition = objective.complete(example, PartitionRule(4))
    nothing = objective.denoise(token_ids, partition, np.zeros(4, dtype=np.bool_), np.ones(4))
    loss, gradients = gradients_of(make_model("sdar"), objective, [nothing], 100)
    assert loss == 0
    assert gradients
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_every_example_comes_once_before_any_comes_again() -> None:
    drawn = [i for step in range(10) for i in examples_of_step(7, 4, seed=1, step=step)]
    for turn in range(5):
        assert sorted(drawn[7 * turn : 7 * turn + 7]) == list(range(7))
    assert drawn[:7] != drawn[7:14]
    assert examples_of_step(7, 4, seed=1, step=3) == drawn[12:16]
    assert examples_of_step(3, 8, seed=1, step=0)[:3] == examples_of_step(3, 8, seed=1, step=0)[:3]


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_steps", {"num_steps": 0}),
        ("lora_rank", {"lora_rank": 0}),
        ("block_sizes", {"block_sizes": ()}),
        ("block_sizes", {"block_sizes": (4, 0)}),
        ("offsets", {"block_sizes": (8, 4), "offsets": (0, 4)}),
        ("block_size_weights", {"block_sizes": (8, 4), "block_size_weights": (1.0,)}),
        ("block_size_weights", {"block_size_weights": (0.0,)}),
        ("min_mask_ratio", {"min_mask_ratio": 1.0}),
        ("seed", {"seed": -1}),
        ("prompt", {"prompt": "maths"}),
    ],
)
def test_impossible_options_are_named(field: str, change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"^{field}: "):
        SftOptions(data="chain:1", **change)  # type: ignore[arg-type]
