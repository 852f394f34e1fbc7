"""Losses and gradient norms of tiny runs, written down.

They move when arithmetic, randomness or data move, whatever the tests of the parts say. Where a change is
meant to move them, run the test and write the new numbers down, and say why in the commit.
The tolerances allow for other kernels (AVX2, none) than those that they were written down with.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny_models import make_model
from trajectories import random_trajectory
from tstar.loss import TraceLossConfig
from tstar.optimizer import OptimizerConfig
from tstar.partition import PartitionRule
from tstar.sft.options import SftOptions
from tstar.sft.training import SftRun
from tstar.trainer import Rollout, Trainer, TrainerConfig, ValueConfig

SFT = SftOptions(
    data="chain:1",
    block_sizes=(4, 8),
    hidden_size=32,
    num_layers=2,
    num_examples=40,
    num_validation=4,
    num_steps=4,
    batch_size=4,
    token_budget=128,
    learning_rate=1e-2,
    warmup_steps=0,
)


@pytest.mark.parametrize(
    ("objective", "losses", "grad_norms"),
    [
        ("ar", [3.40181, 3.10503, 2.94794, 2.82022], [3.12153, 2.09688, 1.88487, 1.6574]),
        ("diffusion", [2.84938, 2.78702, 2.93601, 2.74578], [10.8734, 3.59325, 4.32777, 2.974]),
    ],
)
def test_sft(tmp_path: Path, objective: str, losses: list[float], grad_norms: list[float]) -> None:
    run = SftRun.start(SftOptions(**{**vars(SFT), "objective": objective}), tmp_path / "run")
    assert run.train(lambda _: None)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert [line["grad_norm"] for line in lines] == pytest.approx(grad_norms, rel=1e-4)


def test_tracerl() -> None:
    """Two updates under the standard and the shifted blocks, two optimizer steps each, with a value model."""
    rng = np.random.default_rng(0)
    rollouts = []
    for number in range(8):
        trajectory = random_trajectory(rng, PartitionRule(4).cut(5 + number // 4, 11), stop_length=10)
        rollouts.append(Rollout(trajectory, float(number % 3 == 0), number // 4, is_correct=number % 3 == 0))
    optimizer = OptimizerConfig(learning_rate=1e-3)
    config = TrainerConfig(
        optimizer, TraceLossConfig(kl_beta=0.1), ValueConfig(optimizer, gamma=0.9, lam=0.8), num_passes=2
    )
    trainer = Trainer(make_model("sdar", torch.float64, num_hidden_layers=2), config)
    seen = [trainer.update(rollouts, PartitionRule(4, offset)).summary() for offset in (0, 2)]
    for name, expected in {
        "loss": [-1.157840, -1.157362],
        "kl_loss": [0.006624607, 0.002376141],
        "ratio_max": [2.384685, 1.651605],
        "grad_norm": [3.291350, 3.798392],
        "value_loss": [0.1293664, 0.1152696],
        "value_grad_norm": [0.9153295, 0.9074829],
    }.items():
        assert [metrics[name] for metrics in seen] == pytest.approx(expected, rel=1e-5), name
