"""One update on the device: the same numbers as on the CPU, through FlexAttention over replay packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiny_models import make_config, randomise
from trajectories import random_trajectory
from tstar.loss import TraceLossConfig
from tstar.model.transformer import LanguageModel
from tstar.optimizer import OptimizerConfig
from tstar.partition import PartitionRule
from tstar.replay import replay, score
from tstar.trainer import Rollout, Trainer, TrainerConfig, UpdateMetrics, ValueConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MASK = 96
RULE = PartitionRule(8)


def new_model(device: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Sizes that the GPU's kernels take."""
    model = LanguageModel(
        make_config("sdar", hidden_size=64, intermediate_size=96, head_dim=32, num_hidden_layers=2)
    )
    randomise(model)
    return model.to(device, dtype)


def make_rollouts(num_prompts: int = 3, group_size: int = 4) -> list[Rollout]:
    rng = np.random.default_rng(0)
    out = []
    for group in range(num_prompts):
        prompt = rng.integers(0, MASK, size=int(rng.integers(5, 60)))
        for number in range(group_size):
            length = int(rng.integers(20, 150))
            trajectory = random_trajectory(rng, RULE.cut(len(prompt), length), length, prompt_ids=prompt)
            out.append(Rollout(trajectory, float(number % 2), group, is_correct=number % 2 == 1))
    return out


def log_probs_of(model: LanguageModel, rollouts: list[Rollout], rule: PartitionRule) -> torch.Tensor:
    (pack,) = replay([r.trajectory for r in rollouts], rule, MASK, 10**6)
    with torch.no_grad():
        return score(model, pack).log_probs.cpu()


def update(model: LanguageModel, config: TrainerConfig, rule: PartitionRule) -> UpdateMetrics:
    return Trainer(model, config).update(make_rollouts(), rule)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("value", [None, ValueConfig()], ids=["group", "value"])
def test_one_update_equals_the_cpus(shift: int, value: ValueConfig | None) -> None:
    """Small and large packs, activations kept and recomputed."""
    rule = PartitionRule(8, offset=shift)
    optimizer = OptimizerConfig(learning_rate=1e-3)
    on_cpu = new_model("cpu")
    expected = update(on_cpu, TrainerConfig(optimizer, value=value), rule).summary()
    for token_budget, recompute in ((16_384, False), (700, True)):
        on_gpu = new_model("cuda")
        config = TrainerConfig(
            optimizer, value=value, token_budget=token_budget, recompute_activations=recompute
        )
        got = update(on_gpu, config, rule).summary()
        for name in ("loss", "entropy", "grad_norm", "advantage_std", "num_actions"):
            assert got[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-3), name
        gap = log_probs_of(on_gpu, make_rollouts(), rule) - log_probs_of(on_cpu, make_rollouts(), rule)
        assert gap.abs().max() < 0.1, "AdamW's first step is the gradient's sign: near 0 it may differ"
        assert gap.abs().mean() < 5e-3


def test_bf16_learns_and_its_masters_collect_what_it_cannot_hold() -> None:
    model = new_model("cuda", torch.bfloat16)
    rollouts = make_rollouts()
    objective = TraceLossConfig(kl_reference="base", kl_beta=0.01)
    trainer = Trainer(
        model,
        TrainerConfig(OptimizerConfig(learning_rate=1e-3), objective, num_minibatches=2, num_passes=2),
        base=new_model("cuda", torch.bfloat16),
    )
    good = [r for r in rollouts if r.reward]
    before = log_probs_of(model, good, RULE).sum()
    summary = trainer.update(rollouts, RULE).summary()
    assert log_probs_of(model, good, RULE).sum() > before
    assert summary["num_optimizer_steps"] == 4
    assert all(np.isfinite(value) for value in summary.values())
    for name, master in trainer.state_dict().items():
        if name.startswith("optimizer.master."):
            weight = model.get_parameter(name.removeprefix("optimizer.master."))
            assert master.dtype == torch.float32
            assert torch.equal(weight, master.to(torch.bfloat16))


def test_a_trajectory_above_the_budget_needs_no_more_memory_than_the_budget() -> None:
    """B = 32, one token a step: 4096 response tokens are 130k noisy ones."""
    rng = np.random.default_rng(0)
    rule = PartitionRule(32)
    trajectories = [
        random_trajectory(rng, rule.cut(40, 4096), 4096, max_tokens_per_step=1, temperature=1.0)
        for _ in range(2)
    ]
    rollouts = [Rollout(t, float(i), 0, is_correct=bool(i)) for i, t in enumerate(trajectories)]
    model = new_model("cuda", torch.bfloat16)
    trainer = Trainer(model, TrainerConfig(OptimizerConfig(), token_budget=16_384))
    torch.cuda.reset_peak_memory_stats()
    metrics = trainer.update(rollouts, rule)
    assert metrics.num_tokens > 250_000
    assert metrics.num_packs > 15
    assert torch.cuda.max_memory_allocated() < 1.5e9
