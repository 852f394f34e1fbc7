"""One update: what it learns, what it must not depend on, and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny_models import make_model
from trajectories import MASK, make_trajectory, random_trajectory, slow_log_probs
from tstar.errors import UserError
from tstar.lora import LoraConfig, add_lora
from tstar.loss import TraceLossConfig
from tstar.model.transformer import LanguageModel
from tstar.optimizer import NonFiniteGradientError, OptimizerConfig
from tstar.partition import Partition, PartitionRule
from tstar.replay import replay, score
from tstar.trainer import NonFiniteLossError, Rollout, Trainer, TrainerConfig, ValueConfig
from tstar.value import ValueModel, predict_values

RULE = PartitionRule(4)
LR = OptimizerConfig(learning_rate=1e-3, max_grad_norm=None)
NO_KL = TraceLossConfig(kl_beta=0.0)


def make_rollouts(
    num_prompts: int = 3, group_size: int = 4, rule: PartitionRule = RULE, seed: int = 0
) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    out = []
    for group in range(num_prompts):
        prompt = rng.integers(0, MASK, size=int(rng.integers(1, 9)))
        for number in range(group_size):
            partition = rule.cut(len(prompt), int(rng.integers(1, 14)))
            stop = int(rng.integers(partition.response_slices[-1].start, partition.response_length)) + 1
            trajectory = random_trajectory(rng, partition, stop, prompt_ids=prompt)
            out.append(Rollout(trajectory, float(number % 2), group, is_correct=number % 2 == 1))
    return out


def trained(config: TrainerConfig, rollouts: list[Rollout], rule: PartitionRule = RULE) -> list[Tensor]:
    """The weights after one update in float64, those of the value model too."""
    model = make_model("sdar", torch.float64, num_hidden_layers=2)
    trainer = Trainer(model, config)
    trainer.update(rollouts, rule)
    return [p.detach() for m in (model, trainer.value_model) if m is not None for p in m.parameters()]


def action_log_probs(model: LanguageModel, rollouts: list[Rollout], rule: PartitionRule = RULE) -> Tensor:
    (pack,) = replay([r.trajectory for r in rollouts], rule, MASK, 10**6)
    with torch.no_grad():
        return score(model, pack).log_probs


def log_prob(model: LanguageModel, rollout: Rollout, rule: PartitionRule = RULE) -> float:
    return float(action_log_probs(model, [rollout], rule).sum())


# -- the update itself --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [RULE, PartitionRule(4, offset=2), PartitionRule(8, origin="sequence")])
def test_one_update_is_a_step_of_adamw_on_a_literal_equation_3(rule: PartitionRule) -> None:
    """Group z-score, sum over steps of the mean over τ(t), mean over trajectories: written out."""
    rollouts = make_rollouts(2, 3)
    model = make_model("sdar", torch.float64, num_hidden_layers=2)
    expected = make_model("sdar", torch.float64, num_hidden_layers=2)
    adamw = torch.optim.AdamW(expected.parameters(), lr=1e-3, weight_decay=0.0)
    objective = torch.zeros(())
    for rollout in rollouts:
        rewards = np.array([r.reward for r in rollouts if r.group == rollout.group])
        advantage = (rollout.reward - rewards.mean()) / rewards.std()
        trajectory = rollout.trajectory
        partition = rule.cut(len(trajectory.prompt_ids), len(trajectory.response_ids))
        log_probs = slow_log_probs(expected, trajectory, rule)
        steps: dict[tuple[int, int], list[Tensor]] = {}
        for index in range(trajectory.stop_length):
            block = partition.block_id(partition.prompt_length + index)
            ratio = (log_probs[index] - log_probs[index].detach()).exp()
            key = (block, int(trajectory.unmask_step[index]))
            steps.setdefault(key, []).append(ratio * advantage)
        for surrogates in steps.values():
            objective = objective + torch.stack(surrogates).mean() / len(rollouts)
    (-objective).backward()
    adamw.step()

    Trainer(model, TrainerConfig(LR, NO_KL)).update(rollouts, rule)
    for (name, actual), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-8, msg=name)


@pytest.mark.parametrize("value", [None, ValueConfig(LR, gamma=0.9, lam=0.8)])
@pytest.mark.parametrize("objective", [NO_KL, TraceLossConfig(step_norm="length", average_over="rounds")])
def test_neither_packs_nor_order_nor_recomputation_change_the_update(
    value: ValueConfig | None, objective: TraceLossConfig
) -> None:
    """With a budget of one token, a trajectory's steps are spread over packs."""
    rollouts = [
        replace(r, token_rewards=np.linspace(-1, 1, len(r.trajectory.response_ids)) if value else None)
        for r in make_rollouts()
    ]
    common = TrainerConfig(LR, objective, value)
    expected = trained(common, rollouts)
    configs = [
        (replace(common, token_budget=1), rollouts),
        (replace(common, token_budget=150), rollouts[::-1]),
        (replace(common, recompute_activations=True), rollouts),
    ]
    for config, ordered in configs:
        for actual, wanted in zip(trained(config, ordered), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-8)


def test_old_log_probs_stay_those_from_before_the_update() -> None:
    """First step: ratio 1 everywhere. Later ones: ratios to the model before the update, not to the last."""
    rollouts = make_rollouts()
    model = make_model("sdar", torch.float64, num_hidden_layers=2)
    before = action_log_probs(model, rollouts[6:])
    trainer = Trainer(model, TrainerConfig(LR, NO_KL, num_minibatches=2, num_passes=2))
    metrics = trainer.update(rollouts, RULE)
    steps = [step.objective.summary() for step in metrics.steps]
    assert len(steps) == 4
    assert steps[0]["ratio_min"] == steps[0]["ratio_max"] == 1.0

    assert steps[2]["ratio_max"] > 1.0, "the second pass still compares with the model before the update"

    # The first six rollouts alone give the model that the second minibatch met: a z-score is ±1 in each half.
    after_first = make_model("sdar", torch.float64, num_hidden_layers=2)
    Trainer(after_first, TrainerConfig(LR, NO_KL)).update(rollouts[:6], RULE)
    ratio = (action_log_probs(after_first, rollouts[6:]) - before).exp()
    assert steps[1]["ratio_mean"] == pytest.approx(ratio.mean().item(), abs=1e-9)
    assert steps[1]["ratio_max"] == pytest.approx(ratio.max().item(), abs=1e-9)


@pytest.mark.parametrize("shift", [0, 2])
def test_one_update_raises_what_was_rewarded_and_lowers_what_was_punished(shift: int) -> None:
    rollouts = make_rollouts(2, 4)
    rule = PartitionRule(4, shift)
    model = make_model("sdar", num_hidden_layers=2)
    before = [log_prob(model, r, rule) for r in rollouts]
    metrics = Trainer(model, TrainerConfig(LR)).update(rollouts, rule)
    after = [log_prob(model, r, rule) for r in rollouts]
    assert metrics.summary()["grad_norm"] > 0
    for rollout, old, new in zip(rollouts, before, after, strict=True):
        assert (new > old) == (rollout.reward > 0)


def test_merged_steps_need_fewer_tokens() -> None:
    rollouts = make_rollouts()
    sizes = []
    for merge_steps in (1, 2, 99):
        model = make_model("sdar", num_hidden_layers=2)
        metrics = Trainer(model, TrainerConfig(LR, merge_steps=merge_steps)).update(rollouts, RULE)
        sizes.append(metrics.num_tokens)
        assert metrics.summary()["num_actions"] == sum(r.trajectory.stop_length for r in rollouts)
    assert sizes[0] > sizes[1] > sizes[2]


def test_the_importance_weight_is_that_of_the_engines_own_log_probs() -> None:
    """An action that the engine drew with half the trainer's probability counts twice, as far as the cap."""
    model = make_model("sdar", torch.float64, num_hidden_layers=2)
    rollouts = []
    for rollout, factor in zip(make_rollouts(1, 2), (0.5, 1 / 3), strict=True):
        (pack,) = replay([rollout.trajectory], RULE, MASK, 10**6)
        with torch.no_grad():
            own = score(model, pack).log_probs.numpy()
        recorded = np.full(len(rollout.trajectory.response_ids), -1.0, dtype=np.float32)
        recorded[pack.actions.index] = own + np.log(factor)
        rollouts.append(replace(rollout, trajectory=replace(rollout.trajectory, log_probs=recorded)))
    plain, capped = (
        Trainer(
            make_model("sdar", torch.float64, num_hidden_layers=2),
            TrainerConfig(LR, TraceLossConfig(kl_beta=0.0, importance_cap=cap)),
        ).update(rollouts, RULE)
        for cap in (None, 2.5)
    )
    assert capped.summary()["importance_truncated"] == pytest.approx(
        rollouts[1].trajectory.stop_length / sum(r.trajectory.stop_length for r in rollouts)
    )
    # Advantages are -1 and 1, the ratio is 1: a trajectory's loss is its number of steps times its weight.
    num_steps = [
        float(len(np.unique(r.trajectory.unmask_step[: r.trajectory.stop_length]))) for r in rollouts
    ]
    assert plain.summary()["loss"] == pytest.approx((num_steps[0] - num_steps[1]) / 2)
    assert capped.summary()["loss"] == pytest.approx((2 * num_steps[0] - 2.5 * num_steps[1]) / 2, rel=1e-5)


# -- the value model ----------------------------------------------------------------------------


def test_advantages_by_a_value_model_are_gae_written_out() -> None:
    """A value model that is not zero; process rewards besides the outcome; both models' steps, literally."""
    gamma, lam, clip = 0.9, 0.7, 0.2
    rollouts = [
        replace(r, token_rewards=np.cos(np.arange(len(r.trajectory.response_ids))))
        for r in make_rollouts(2, 2)
    ]
    model = make_model("sdar", torch.float64, num_hidden_layers=2)
    value_model = ValueModel.from_policy(make_model("sdar", torch.float64, num_hidden_layers=2))
    with torch.no_grad():
        value_model.value_head.weight.normal_(0, 0.3)
        value_model.value_head.bias.fill_(0.4)
    policy_twin, value_twin = copy.deepcopy(model), copy.deepcopy(value_model)

    policy_loss, value_loss = torch.zeros(()), torch.zeros(())
    for rollout in rollouts:
        (pack,) = replay([rollout.trajectory], RULE, MASK, 10**6)
        log_probs, values = score(policy_twin, pack).log_probs, predict_values(value_twin, pack)
        actions = pack.actions
        assert rollout.token_rewards is not None
        taus = [np.flatnonzero(actions.steps == t) for t in range(actions.steps.max() + 1)]
        rewards = {j: rollout.token_rewards[actions.index[j]] for tau in taus for j in tau}
        for j in taus[-1]:
            rewards[j] += rollout.reward
        next_value = next_return = next_advantage = 0.0
        for tau in reversed(taus):
            step_reward = float(np.mean([rewards[j] for j in tau]))
            step_value = values[tau].mean().item()
            for j in tau:
                value = values[j].item()
                advantage = rewards[j] - value + gamma * next_value + gamma * lam * next_advantage
                ratio = (log_probs[j] - log_probs[j].detach()).exp()
                policy_loss = policy_loss - ratio * advantage / len(tau) / len(rollouts)
                wanted = rewards[j] + gamma * next_return
                value_loss = value_loss + 0.5 * (values[j] - wanted) ** 2 / len(actions) / len(rollouts)
            delta = step_reward + gamma * next_value - step_value
            next_advantage = delta + gamma * lam * next_advantage
            next_return = step_reward + gamma * next_return
            next_value = step_value
    for loss, twin in ((policy_loss, policy_twin), (value_loss, value_twin)):
        adamw = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.0)
        loss.backward()
        adamw.step()

    value_config = ValueConfig(LR, clip, gamma, lam)
    Trainer(model, TrainerConfig(LR, NO_KL, value_config), value_model=value_model).update(rollouts, RULE)
    for actual, wanted in ((model, policy_twin), (value_model, value_twin)):
        for (name, a), w in zip(actual.named_parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(a, w, rtol=0, atol=1e-8, msg=name)


def test_a_value_model_learns_what_responses_earn() -> None:
    rollouts = make_rollouts(2, 4)
    trainer = Trainer(
        make_model("sdar", num_hidden_layers=2),
        TrainerConfig(OptimizerConfig(1e-6), value=ValueConfig(OptimizerConfig(3e-3), clip_eps=None)),
    )
    first, *_, last = [trainer.update(rollouts, RULE).summary() for _ in range(12)]
    assert first["value_mean"] == 0.0, "it starts from a head of zeros"
    assert first["advantage_mean"] == pytest.approx(first["return_mean"]), (
        "so the first advantages are returns"
    )
    assert last["value_loss"] < 0.3 * first["value_loss"]
    assert last["explained_variance"] > 0.7
    assert last["value_learning_rate"] == 3e-3


# -- metrics ------------------------------------------------------------------------------------


def test_metrics_say_what_the_update_saw() -> None:
    rollouts = make_rollouts()
    rollouts[0] = replace(rollouts[0], trajectory=replace(rollouts[0].trajectory, finish_reason="length"))
    model = make_model("sdar", num_hidden_layers=2)
    metrics = Trainer(model, TrainerConfig(LR), base=make_model("sdar", num_hidden_layers=2)).update(
        rollouts, RULE
    )
    summary = metrics.summary()
    assert summary["num_rollouts"] == summary["num_trained"] == 12
    assert summary["num_truncated"] == 1
    assert summary["accuracy"] == summary["reward_mean"] == 0.5
    assert summary["num_groups"] == 3
    assert summary["kl_base"] == pytest.approx(0.0, abs=1e-6)
    assert summary["entropy"] > 0
    assert summary["learning_rate"] == 1e-3
    assert metrics.train_seconds > 0
    assert not any("seconds" in name for name in summary), "what the clock says is no result"
    assert sum(b.num_actions for b in metrics.by_block()) == summary["num_actions"]
    assert sum(b.num_actions for b in metrics.by_step()) == summary["num_actions"]


def test_the_gap_to_the_engine_is_measured_where_the_blocks_are_its_own() -> None:
    model = make_model("sdar", num_hidden_layers=2)
    rollouts = []
    for rollout in make_rollouts():
        (pack,) = replay([rollout.trajectory], RULE, MASK, 10**6)
        with torch.no_grad():
            own = score(model, pack).log_probs.numpy()
        recorded = np.full(len(rollout.trajectory.response_ids), -1.0, dtype=np.float32)
        recorded[pack.actions.index] = own
        rollouts.append(replace(rollout, trajectory=replace(rollout.trajectory, log_probs=recorded)))
    summary = Trainer(model, TrainerConfig(LR)).update(rollouts, RULE).summary()
    assert abs(summary["rollout_train_kl"]) < 1e-6
    assert summary["rollout_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    summary = Trainer(model, TrainerConfig(LR)).update(rollouts, RULE).summary()
    assert summary["rollout_train_kl"] > 1e-4, "the model has moved on, the records have not"
    for other in (TrainerConfig(LR), TrainerConfig(LR, merge_steps=2)):
        rule = RULE if other.merge_steps > 1 else PartitionRule(4, offset=2)
        assert "rollout_train_kl" not in Trainer(model, other).update(rollouts, rule).summary()


# -- degenerate input ---------------------------------------------------------------------------


def test_equal_rewards_give_no_gradient_and_the_metrics_say_so() -> None:
    rollouts = [replace(r, reward=1.0) for r in make_rollouts()]
    model = make_model("sdar", num_hidden_layers=2)
    before = [p.detach().clone() for p in model.parameters()]
    summary = Trainer(model, TrainerConfig(LR)).update(rollouts, RULE).summary()
    assert summary["num_uniform_groups"] == summary["num_groups"] == 3
    assert summary["grad_norm"] == 0.0
    assert summary["advantage_zero"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("band", [(0.6, 0.8), (0.4, 0.6)])
def test_groups_outside_the_accuracy_band_are_left_out(band: tuple[float, float]) -> None:
    rollouts = make_rollouts()
    rollouts += [replace(r, group=9, is_correct=True) for r in make_rollouts(1)]
    model = make_model("sdar", num_hidden_layers=2)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(model, TrainerConfig(LR, accuracy_band=band))
    metrics = trainer.update(rollouts, RULE)
    is_empty = band[0] > 0.5
    assert metrics.num_trained == (0 if is_empty else 12)
    assert metrics.summary()["num_optimizer_steps"] == (0 if is_empty else 1)
    assert trainer.optimizer.num_steps_done == (0 if is_empty else 1)
    assert is_empty == all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_no_rollouts_are_no_step() -> None:
    trainer = Trainer(make_model("sdar", num_hidden_layers=2), TrainerConfig(LR, num_passes=3))
    metrics = trainer.update([], RULE)
    assert metrics.summary()["num_optimizer_steps"] == 0
    assert metrics.by_step() == metrics.by_block() == ()


def test_truncated_responses_can_count_as_wrong() -> None:
    rollouts = make_rollouts(1)
    cut_off = replace(rollouts[1].trajectory, finish_reason="length")
    rollouts[1] = replace(rollouts[1], trajectory=cut_off)
    for is_wrong, accuracy in ((False, 0.5), (True, 0.25)):
        trainer = Trainer(
            make_model("sdar", num_hidden_layers=2), TrainerConfig(LR, truncated_is_wrong=is_wrong)
        )
        metrics = trainer.update(rollouts, RULE)
        assert metrics.accuracy == metrics.reward_mean == accuracy


@pytest.mark.parametrize("block_size", [4, 64])
def test_responses_of_one_token_and_of_nothing_but_eos(block_size: int) -> None:
    """One token with nothing behind it; EOS first, and the rest of its block behind it; B > L."""
    rule = PartitionRule(block_size)
    one = make_trajectory(rule.cut(3, 1), [0])
    eos = make_trajectory(rule.cut(3, 4), [1, 0, 0, 1], stop_length=1)
    longer = make_trajectory(rule.cut(3, 9), list(range(9)) if block_size > 9 else [0] * 4 + [1] * 4 + [2])
    rollouts = [Rollout(t, float(i), 0, is_correct=True) for i, t in enumerate((one, eos, longer))]
    model = make_model("sdar", num_hidden_layers=2)
    before = [log_prob(model, r, rule) for r in rollouts]
    summary = Trainer(model, TrainerConfig(LR)).update(rollouts, rule).summary()
    assert summary["num_actions"] == 1 + 1 + 9
    assert log_prob(model, rollouts[0], rule) < before[0]
    assert log_prob(model, rollouts[2], rule) > before[2]


def test_a_step_map_with_a_hole_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unmask_step: no token has step 1 of 3"):
        make_trajectory(Partition(2, 4, 4), [0, 0, 2, 2])


# -- numbers that are none ----------------------------------------------------------------------


def test_a_reward_that_is_no_number_is_refused() -> None:
    rollouts = make_rollouts()
    rollouts[3] = replace(rollouts[3], reward=float("nan"))
    with pytest.raises(ValueError, match=r"rewards\[3\]: nan"):
        Trainer(make_model("sdar", num_hidden_layers=2), TrainerConfig(LR)).update(rollouts, RULE)


def poisoned_model() -> LanguageModel:
    """Finite until token 7 is read: its embedding overflows in the first layer."""
    model = make_model("sdar", num_hidden_layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("inf")
    return model


def without_token_7(rollouts: list[Rollout], poisoned: int) -> list[Rollout]:
    out = []
    for place, rollout in enumerate(rollouts):
        t = rollout.trajectory
        prompt, response = (np.where(ids == 7, 8, ids) for ids in (t.prompt_ids, t.response_ids))
        if place == poisoned:
            prompt = np.full_like(prompt, 7)
        out.append(replace(rollout, trajectory=replace(t, prompt_ids=prompt, response_ids=response, seed=31)))
    return out


def test_a_loss_that_is_not_finite_names_its_rollout_and_trains_nothing() -> None:
    rollouts = without_token_7(make_rollouts(), poisoned=5)
    model = poisoned_model()
    trainer = Trainer(model, TrainerConfig(LR, token_budget=60))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteLossError, match=r"rollouts\[5\] \(seed 31, .*: its loss is nan; no step"):
        trainer.update(rollouts, RULE)
    assert trainer.optimizer.num_steps_done == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_names_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finite forward whose backward pass overflows: an embedding near the smallest number, normalised."""
    rollouts = without_token_7(make_rollouts(), poisoned=6)
    model = make_model("sdar", num_hidden_layers=2, rms_norm_eps=1e-45)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = 1e-44
    trainer = Trainer(model, TrainerConfig(LR))
    with pytest.raises(NonFiniteGradientError, match=r"rollouts\[6\] \(seed 31"):
        trainer.update(rollouts, RULE)
    assert trainer.optimizer.num_steps_done == 0
    assert all(p.grad is None for p in model.parameters())


# -- precision, adapters, state -----------------------------------------------------------------


def test_bf16_collects_updates_below_its_own_precision_in_masters() -> None:
    tiny = OptimizerConfig(learning_rate=1e-6)
    model = make_model("sdar", torch.bfloat16, num_hidden_layers=2)
    trainer = Trainer(model, TrainerConfig(tiny))
    trainer.update(make_rollouts(), RULE)
    state = trainer.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (
        state[f"optimizer.master.{name}"]
        - make_model("sdar", torch.bfloat16, num_hidden_layers=2).get_parameter(name).float()
    )
    assert 0 < moved.abs().max() < 2e-6


def test_lora_trains_adapters_alone_and_has_its_base_inside() -> None:
    pytest.importorskip("peft")
    config = TrainerConfig(LR, TraceLossConfig(kl_reference="base", kl_beta=0.1), num_passes=2)
    model, plain = make_model("sdar", num_hidden_layers=2), make_model("sdar", num_hidden_layers=2)
    add_lora(model, LoraConfig(rank=4), seed=0)
    rollouts = make_rollouts()
    trainer = Trainer(model, config)
    first = trainer.update(rollouts, RULE).summary()
    second = trainer.update(rollouts, RULE).summary()
    assert second["kl_base"] > first["kl_base"] > 0
    frozen = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, frozen[name.replace(".base_layer", "")])


def test_the_value_model_of_an_adapted_policy_is_trained_whole() -> None:
    pytest.importorskip("peft")
    model = make_model("sdar", num_hidden_layers=2)
    add_lora(model, LoraConfig(rank=4), seed=0)
    trainer = Trainer(model, TrainerConfig(LR, value=ValueConfig(LR)))
    assert trainer.value_model is not None
    before = {name: p.detach().clone() for name, p in trainer.value_model.named_parameters()}
    for _ in range(2):  # at first the head is 0 and the trunk has no gradient
        trainer.update(make_rollouts(), RULE)
    assert not any(torch.equal(p, before[name]) for name, p in trainer.value_model.named_parameters())


def test_the_optimizer_lives_on_from_update_to_update() -> None:
    """Three updates are three steps of one AdamW: the second and third see the moments of the ones before."""
    model, expected = (make_model("sdar", torch.float64, num_hidden_layers=2) for _ in range(2))
    adamw = torch.optim.AdamW(expected.parameters(), lr=1e-3, weight_decay=0.0)
    trainer = Trainer(model, TrainerConfig(LR, NO_KL))
    for seed in range(3):
        rollouts = make_rollouts(1, 2, seed=seed)
        trainer.update(rollouts, RULE)
        (pack,) = replay([r.trajectory for r in rollouts], RULE, MASK, 10**6)
        actions = pack.actions
        sizes = np.bincount(actions.steps)[actions.steps]
        sign = np.where(pack.trajectories[actions.members] == 1, 1.0, -1.0)  # the second was rewarded
        loss = -(score(expected, pack).log_probs * torch.from_numpy(sign / sizes)).sum() / 2
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-8)
    assert trainer.optimizer.num_steps_done == 3


@pytest.mark.parametrize("value", [None, ValueConfig(LR)])
def test_a_trainer_resumes_to_the_same_weights(value: ValueConfig | None) -> None:
    config = TrainerConfig(LR, value=value, num_minibatches=2)
    first, second = make_rollouts(seed=1), make_rollouts(seed=2)
    model = make_model("sdar", num_hidden_layers=2)
    trainer = Trainer(model, config)
    trainer.update(first, RULE)
    state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer.update(second, RULE)

    resumed_model = make_model("sdar", num_hidden_layers=2)
    resumed_model.load_state_dict(weights)
    resumed = Trainer(resumed_model, config)
    resumed.load_state_dict(state)
    resumed.update(second, RULE)
    for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_state_of_a_trainer_of_another_kind_is_refused() -> None:
    plain = Trainer(make_model("sdar", num_hidden_layers=2), TrainerConfig(LR))
    with_values = Trainer(make_model("sdar", num_hidden_layers=2), TrainerConfig(LR, value=ValueConfig(LR)))
    with pytest.raises(ValueError, match=r"'value_model.model.embed_tokens.weight' has no place here"):
        plain.load_state_dict(with_values.state_dict())
    with pytest.raises(ValueError, match="state: value_model is missing"):
        with_values.load_state_dict(plain.state_dict())


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["token_budget", "num_minibatches", "num_passes", "merge_steps"])
def test_counts_of_nothing_are_refused(name: str) -> None:
    changes: dict[str, Any] = {name: 0}
    with pytest.raises(UserError, match=f"{name}: 0 cannot be used"):
        TrainerConfig(**changes)


def test_what_the_objective_needs_must_be_there() -> None:
    with pytest.raises(UserError, match="no mask_token_id"):
        Trainer(make_model("qwen3"), TrainerConfig())
    to_base = TrainerConfig(LR, TraceLossConfig(kl_reference="base"))
    with pytest.raises(UserError, match="kl_reference: 'base' needs the base model"):
        Trainer(make_model("sdar"), to_base)
    capped = TrainerConfig(LR, TraceLossConfig(importance_cap=2.0))
    with pytest.raises(UserError, match=r"importance_cap: 2.0 weighs by the engine's log-probs"):
        Trainer(make_model("sdar"), capped).update(make_rollouts(), PartitionRule(4, offset=2))


def test_process_rewards_that_nobody_would_hear_are_refused() -> None:
    rollouts = make_rollouts(1)
    num_tokens = len(rollouts[2].trajectory.response_ids)
    rollouts[2] = replace(rollouts[2], token_rewards=np.ones(num_tokens))
    model = make_model("sdar", num_hidden_layers=2)
    with pytest.raises(UserError, match=r"rollouts\[2\].token_rewards: given, but advantages are taken over"):
        Trainer(model, TrainerConfig(LR)).update(rollouts, RULE)
    rollouts[2] = replace(rollouts[2], token_rewards=np.ones(num_tokens + 1))
    with pytest.raises(ValueError, match=rf"token_rewards: {num_tokens + 1} for {num_tokens} tokens"):
        Trainer(model, TrainerConfig(LR, value=ValueConfig(LR))).update(rollouts, RULE)
