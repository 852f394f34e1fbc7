"""Engine and trainer as one loop: a task of luck becomes one of knowledge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiny_models import make_config
from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.model.transformer import LanguageModel
from tstar.optimizer import OptimizerConfig
from tstar.partition import PartitionRule
from tstar.trainer import Rollout, Trainer, TrainerConfig, ValueConfig
from tstar.trajectory import Trajectory
from tstar.unmask import UnmaskPolicy

NUM_ARMS = 5
MASK = NUM_ARMS
NUM_PROMPTS = 2
GROUP_SIZE = 8
RESPONSE_LENGTH = 4
RULE = PartitionRule(2)


def pulls_the_arm_of_its_prompt(trajectory: Trajectory) -> float:
    """One arm of five is the right one, which one says the prompt; the other tokens are free."""
    return float(trajectory.response_ids[2] == (trajectory.prompt_ids[0] + 3) % NUM_ARMS)


def new_model() -> LanguageModel:
    config = make_config(
        "sdar", vocab_size=NUM_ARMS + 1, mask_token_id=MASK, num_hidden_layers=1, initializer_range=0.2
    )
    model = LanguageModel(config)
    model.initialise(torch.Generator().manual_seed(0))
    return model


def decode(engine: Engine, update_step: int) -> list[Rollout]:
    """Two groups for each prompt, one token a step."""
    sampling = SamplingParams(RESPONSE_LENGTH, unmask=UnmaskPolicy("static", tokens_per_step=1))
    groups = np.repeat(np.arange(2 * NUM_PROMPTS), GROUP_SIZE)
    requests = [
        Request(np.array([group % NUM_PROMPTS]), RULE, sampling, seed=update_step * len(groups) + number)
        for number, group in enumerate(groups)
    ]
    earned = [(t, pulls_the_arm_of_its_prompt(t)) for t in engine.generate(requests)]
    return [Rollout(t, r, int(g), is_correct=r == 1) for g, (t, r) in zip(groups, earned, strict=True)]


def learn(config: TrainerConfig, num_updates: int) -> list[float]:
    """Mean reward of each update's rollouts: one group of each prompt is trained on under the standard
    blocks, then the other under the shifted ones (Alg. 1)."""
    model = new_model()
    engine = Engine(model, EngineConfig(memory=1 << 26))
    trainer = Trainer(model, config)
    rewards = []
    for update_step in range(num_updates):
        rollouts = decode(engine, update_step)
        d1, d2 = rollouts[: len(rollouts) // 2], rollouts[len(rollouts) // 2 :]
        standard = trainer.update(d1, RULE).summary()
        assert standard["rollout_ratio_max"] == pytest.approx(1.0, abs=1e-3), "one policy draws and learns"
        trainer.update(d2, RULE.half_shifted())
        engine.load_weights(model.named_parameters(), update_step + 1)
        rewards.append(float(np.mean([r.reward for r in rollouts])))
    return rewards


NUM_UPDATES = 24
FALLING = OptimizerConfig(learning_rate=5e-3, lr_schedule="linear", num_steps=2 * NUM_UPDATES)


@pytest.mark.parametrize("value", [None, ValueConfig(FALLING)], ids=["group", "value"])
def test_reward_goes_from_chance_to_certainty(value: ValueConfig | None) -> None:
    rewards = learn(TrainerConfig(FALLING, value=value), NUM_UPDATES)
    assert np.mean(rewards[:2]) < 0.35, "chance is 1 in 5"
    assert np.mean(rewards[-5:]) > 0.95
