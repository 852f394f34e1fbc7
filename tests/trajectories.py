"""Trajectories without an engine: any prompt, any order of steps, and a slow replay to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tstar.model.attention import prepare
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition, PartitionRule
from tstar.trajectory import ForwardCounts, Trajectory

MASK = 96


def make_trajectory(
    partition: Partition,
    unmask_step: list[int] | np.ndarray,
    stop_length: int | None = None,
    **changes: Any,
) -> Trajectory:
    """Ids 1, 2, 3, ... unless given."""
    steps = np.asarray(unmask_step, dtype=np.int64)
    ids = np.arange(1, partition.sequence_length + 1, dtype=np.int64)
    fields: dict[str, Any] = {
        "prompt_ids": ids[: partition.prompt_length],
        "response_ids": ids[partition.prompt_length :],
        "unmask_step": steps,
        "log_probs": np.full(len(steps), -1.0, dtype=np.float32),
        "stop_length": len(steps) if stop_length is None else stop_length,
        "finish_reason": "stop",
        "partition": partition,
        "forwards": ForwardCounts(int(steps.max()) + 1),
        "weight_version": 0,
        "seed": 0,
    }
    return Trajectory(**{**fields, **changes})


def random_trajectory(
    rng: np.random.Generator,
    partition: Partition,
    stop_length: int,
    max_tokens_per_step: int = 3,
    **changes: Any,
) -> Trajectory:
    """Each block in a random order, a random number of tokens a step."""
    steps = np.empty(partition.response_length, dtype=np.int64)
    step = -1
    for block in partition.response_slices:
        for count, place in enumerate(rng.permutation(np.arange(block.start, block.stop))):
            step += count == 0 or int(rng.integers(max_tokens_per_step)) == 0
            steps[place] = step
    ids = rng.integers(0, MASK, size=partition.sequence_length)
    fields = {
        "prompt_ids": ids[: partition.prompt_length],
        "response_ids": ids[partition.prompt_length :],
        "temperature": float(rng.choice([0.7, 1.0, 1.3])),
    }
    return make_trajectory(partition, steps, stop_length, **{**fields, **changes})


@st.composite
def partition_rules(draw: st.DrawFn, max_block_size: int = 9) -> PartitionRule:
    block_size = draw(st.integers(1, max_block_size))
    return PartitionRule(
        block_size, draw(st.integers(0, block_size - 1)), draw(st.sampled_from(["response", "sequence"]))
    )


def random_rollouts(seed: int, rule: PartitionRule, max_prompts: int = 3) -> list[Trajectory]:
    """Groups of responses to shared prompts, decoded under the rule, stopping anywhere in the last block."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(int(rng.integers(max_prompts)) + 1):
        prompt = rng.integers(0, MASK, size=int(rng.integers(0, 12)))
        for _ in range(int(rng.integers(1, 4))):
            partition = rule.cut(len(prompt), int(rng.integers(1, 20)))
            terminal = partition.response_slices[-1]
            stop = int(rng.integers(terminal.start, terminal.stop)) + 1
            out.append(random_trajectory(rng, partition, stop, prompt_ids=prompt))
    return out


def slow_log_probs(model: LanguageModel, trajectory: Trajectory, rule: PartitionRule) -> Tensor:
    """Each action's log-prob: one forward per (block, step), over the text before the block and the block
    as it stood, nothing else; the whole vocabulary, the softmax written out."""
    partition = rule.cut(len(trajectory.prompt_ids), len(trajectory.response_ids))
    prompt_length = partition.prompt_length
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    out: list[Any] = [None] * trajectory.stop_length
    for block in partition.blocks:
        positions = [p for p in range(block.start, block.stop) if p >= prompt_length]
        for step in sorted({int(trajectory.unmask_step[p - prompt_length]) for p in positions}):
            noisy = ids[: block.stop].copy()
            for p in positions:
                if trajectory.unmask_step[p - prompt_length] >= step:
                    noisy[p] = MASK
            layout = PackedLayout(
                positions=np.arange(block.stop, dtype=np.int64),
                segment_ids=np.zeros(block.stop, dtype=np.int64),
                block_ids=partition.block_ids[: block.stop],
                copy_ids=np.zeros(block.stop, dtype=np.int64),
            )
            hidden = model(torch.from_numpy(noisy), prepare(layout, backend="sdpa"))
            for p in positions:
                index = p - prompt_length
                if trajectory.unmask_step[index] == step and index < trajectory.stop_length:
                    logits = model.logits(hidden[p : p + 1])[0] / trajectory.temperature
                    logits = torch.cat([logits[:MASK], logits[MASK + 1 :]])
                    out[index] = logits[ids[p]] - torch.logsumexp(logits, 0)
    return torch.stack(out)
