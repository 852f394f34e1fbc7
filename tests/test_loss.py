"""The objective equals Eq. 3 written out loop by loop, and the public code's formula; whatever the packs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tstar.loss import (
    Actions,
    BatchTotals,
    TraceLossConfig,
    TraceLossInputs,
    ValueLossInputs,
    trace_loss,
    value_loss,
)

POLICIES = ("new", "old", "base", "engine")
DLLM_RL = TraceLossConfig(step_norm="length", average_over="rounds", log_ratio_clamp=10.0)


@dataclass(frozen=True)
class Action:
    """One token, with what each policy gives it."""

    new: float
    old: float
    base: float
    engine: float
    advantage: float
    entropy: float
    block: int
    step: int
    """Within its block."""


Trajectory = list[list[Action]]
"""τ(1), τ(2), ...: the actions of each step."""


def draw_trajectory(rng: np.random.Generator, scale: float = 0.3) -> Trajectory:
    """Some blocks of some steps of some actions. A larger scale takes ratios further from 1."""
    steps: Trajectory = []
    for block in range(rng.integers(1, 4)):
        for step in range(rng.integers(1, 4)):
            actions = []
            for _ in range(rng.integers(1, 5)):
                old = -rng.exponential()
                near = {name: old + scale * rng.normal() for name in ("new", "base", "engine")}
                advantage = rng.choice([0.0, rng.normal()], p=[0.1, 0.9])
                actions.append(
                    Action(
                        old=old,
                        **near,
                        advantage=advantage,
                        entropy=rng.exponential(),
                        block=block,
                        step=step,
                    )
                )
            steps.append(actions)
    return steps


def draw_batch(seed: int, num: int = 4, scale: float = 0.3) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    return [draw_trajectory(rng, scale) for _ in range(num)]


def flatten(
    trajectories: Sequence[Trajectory], seed: int = 0, numbers: Sequence[int] | None = None
) -> TraceLossInputs:
    """As one pack, its actions in any order, log_probs a leaf with gradient. Trajectories are numbered from
    0 unless their numbers are given."""
    rows: list[tuple[int, int, Action]] = []
    first = 0
    for number, trajectory in zip(numbers or range(len(trajectories)), trajectories, strict=True):
        rows += [(number, first + t, action) for t, step in enumerate(trajectory) for action in step]
        first += len(trajectory)
    np.random.default_rng(seed).shuffle(rows)  # type: ignore[arg-type]
    ids = torch.tensor([(t, number, a.block, a.step) for number, t, a in rows]).T.contiguous()
    numbers = {
        name: torch.tensor([getattr(a, name) for _, _, a in rows], dtype=torch.float64)
        for name in (*POLICIES, "advantage", "entropy")
    }
    return TraceLossInputs(
        actions=Actions(ids[0], ids[1], ids[2], ids[3]),
        log_probs=numbers["new"].requires_grad_(),
        old_log_probs=numbers["old"],
        advantages=numbers["advantage"],
        entropies=numbers["entropy"],
        engine_log_probs=numbers["engine"],
        base_log_probs=numbers["base"],
    )


def totals_of(trajectories: Sequence[Trajectory]) -> BatchTotals:
    return BatchTotals.of([flatten(trajectories).actions], [17] * (len(trajectories) - 1) + [40])


# -- the slow twins ----------------------------------------------------------------------------


def equation_3(trajectories: Sequence[Trajectory], config: TraceLossConfig) -> float:
    """J, symbol by symbol."""
    low, high = config.clip_eps, config.clip_eps_high or config.clip_eps
    j = 0.0
    for trajectory in trajectories:
        for tau_t in trajectory:
            for o in tau_t:
                rho = math.exp(o.new - o.old)
                clipped = min(max(rho, 1 - low), 1 + high)
                surrogate = min(rho * o.advantage, clipped * o.advantage)
                reference = o.old if config.kl_reference == "old" else o.base
                if config.kl_estimator == "k1":
                    kl = o.new - reference
                else:
                    kl = math.exp(reference - o.new) - 1 - (reference - o.new)
                if config.importance_cap is not None:
                    surrogate *= min(math.exp(o.old - o.engine), config.importance_cap)
                j += (surrogate - config.kl_beta * kl) / len(tau_t)
    return j / len(trajectories)


def public_loss(trajectories: Sequence[Trajectory], padded_length: int, eps: float, beta: float) -> float:
    """As dLLM-RL has it: a row of padded_length places for each round of each response; a round takes the
    r-th step of every block. Sum over a row, divide by its length, mean over rows."""
    row_losses = []
    for trajectory in trajectories:
        actions = [action for step in trajectory for action in step]
        for round_ in range(max(action.step for action in actions) + 1):
            row = [0.0] * padded_length
            for place, action in enumerate(actions):
                if action.step != round_:
                    continue
                ratio = math.exp(min(max(action.new - action.old, -10.0), 10.0))
                clipped = min(max(ratio, 1 - eps), 1 + eps)
                back = action.old - action.new
                kl = math.exp(min(max(back, -10.0), 10.0)) - 1.0 - back
                row[place] = -min(ratio * action.advantage, clipped * action.advantage) + beta * kl
            row_losses.append(sum(row) / padded_length)
    return sum(row_losses) / len(row_losses)


def numerical_gradient(
    trajectories: list[Trajectory], loss: Callable[[list[Trajectory]], float], step: float = 1e-6
) -> list[list[list[float]]]:
    """Of the loss by each action's new log-prob, by central differences."""

    def moved(n: int, t: int, k: int, by: float) -> float:
        changed = [[list(tau_t) for tau_t in trajectory] for trajectory in trajectories]
        changed[n][t][k] = replace(changed[n][t][k], new=changed[n][t][k].new + by)
        return loss(changed)

    return [
        [
            [(moved(n, t, k, step) - moved(n, t, k, -step)) / (2 * step) for k in range(len(tau_t))]
            for t, tau_t in enumerate(trajectory)
        ]
        for n, trajectory in enumerate(trajectories)
    ]


def gradient(inputs: TraceLossInputs, loss: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, inputs.log_probs)
    return grad


def sorted_flat(nested: list[list[list[float]]], inputs: TraceLossInputs, trajectories: Any) -> Tensor:
    """The nested numbers in the order of the flattened actions."""
    by_value = {
        action.new: value
        for trajectory, values in zip(trajectories, nested, strict=True)
        for tau_t, step_values in zip(trajectory, values, strict=True)
        for action, value in zip(tau_t, step_values, strict=True)
    }
    return torch.tensor([by_value[new] for new in inputs.log_probs.tolist()], dtype=torch.float64)


# -- Eq. 3 -------------------------------------------------------------------------------------

configs = st.builds(
    TraceLossConfig,
    clip_eps=st.sampled_from([0.1, 0.2, 0.5]),
    clip_eps_high=st.sampled_from([None, 0.28, 2.0]),
    kl_beta=st.sampled_from([0.0, 0.01, 1.0]),
    kl_estimator=st.sampled_from(["k1", "k3"]),
    kl_reference=st.sampled_from(["old", "base"]),
    importance_cap=st.sampled_from([None, 1.0, 2.0]),
)


@given(configs, st.integers(0, 10_000), st.integers(1, 5))
def test_loss_equals_equation_3(config: TraceLossConfig, seed: int, num: int) -> None:
    batch = draw_batch(seed, num)
    loss = trace_loss(flatten(batch, seed), totals_of(batch), config).loss
    assert loss.item() == pytest.approx(-equation_3(batch, config), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("reference", ["old", "base"])
@pytest.mark.parametrize("importance_cap", [None, 1.1])
def test_gradient_equals_finite_differences_of_equation_3(
    estimator: Any, reference: Any, importance_cap: float | None
) -> None:
    config = TraceLossConfig(
        kl_beta=0.3, kl_estimator=estimator, kl_reference=reference, importance_cap=importance_cap
    )
    batch = draw_batch(1, num=3)
    inputs = flatten(batch)
    grad = gradient(inputs, trace_loss(inputs, totals_of(batch), config).loss)
    slow = numerical_gradient(batch, lambda b: -equation_3(b, config))
    torch.testing.assert_close(grad, sorted_flat(slow, inputs, batch), rtol=1e-6, atol=1e-8)
    assert (grad == 0).sum() < len(grad) / 2


def test_a_good_action_becomes_likelier_and_a_bad_one_less_likely() -> None:
    batch = draw_batch(2, scale=0.0)
    inputs = flatten(batch)
    grad = gradient(inputs, trace_loss(inputs, totals_of(batch), TraceLossConfig()).loss)
    descent = torch.sign(-grad)
    torch.testing.assert_close(descent, torch.sign(inputs.advantages))


def test_the_mean_is_taken_in_a_step_and_the_sum_over_steps() -> None:
    def at(step: int, num: int) -> list[Action]:
        return [Action(-1.0, -1.0, -1.0, -1.0, advantage=1.0, entropy=0.0, block=0, step=step)] * num

    one_by_one = [[at(step, 1)[0]] for step in range(6)]
    at_once = [at(0, 6)]
    for batch, j in (([one_by_one], 6.0), ([at_once], 1.0), ([one_by_one, at_once], 3.5)):
        assert trace_loss(flatten(batch), totals_of(batch), TraceLossConfig()).loss.item() == pytest.approx(
            -j
        )
    by_length = TraceLossConfig(step_norm="length")
    for batch in ([one_by_one], [at_once], [one_by_one, at_once]):
        loss = trace_loss(flatten(batch), totals_of(batch), by_length).loss
        assert loss.item() == pytest.approx(-6 / 40)


# -- the public code's -------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.3, 8.0]))
def test_three_options_make_it_dllm_rls_loss(seed: int, scale: float) -> None:
    batch = draw_batch(seed, scale=scale)
    totals = totals_of(batch)
    assert totals.padded_length == 40
    loss = trace_loss(flatten(batch), totals, DLLM_RL).loss
    assert loss.item() == pytest.approx(public_loss(batch, 40, 0.2, 0.01), rel=1e-12, abs=1e-14)


def test_outside_the_clamp_there_is_no_gradient() -> None:
    far = Action(-1.0, -21.0, -1.0, -1.0, advantage=-1.0, entropy=0.0, block=0, step=0)
    free = TraceLossConfig(kl_beta=0.0)
    inputs = flatten([[[far]]])
    loss = trace_loss(inputs, totals_of([[[far]]]), free).loss
    clamped = trace_loss(inputs, totals_of([[[far]]]), replace(free, log_ratio_clamp=10.0)).loss
    assert (loss.item(), gradient(inputs, loss).item()) == pytest.approx((math.exp(20), math.exp(20)))
    assert (clamped.item(), gradient(inputs, clamped).item()) == pytest.approx((math.exp(10), 0.0))


def test_rounds_are_counted_as_the_public_replay_needs_rows() -> None:
    def row(block: int, step: int) -> list[Action]:
        return [Action(-1.0, -1.0, -1.0, -1.0, advantage=1.0, entropy=0.0, block=block, step=step)]

    batch = [[row(0, 0), row(0, 1), row(1, 0)], [row(0, 0)], [row(0, 0), row(1, 0), row(1, 1), row(1, 2)]]
    assert totals_of(batch).num_rounds == 2 + 1 + 3


# -- packs -------------------------------------------------------------------------------------


@given(configs, st.sampled_from([TraceLossConfig(), DLLM_RL]), st.integers(0, 10_000), st.data())
def test_packs_add_up(config: TraceLossConfig, norm: TraceLossConfig, seed: int, data: Any) -> None:
    """Cut between any two steps, so that a trajectory may be spread over packs."""
    config = replace(
        config,
        step_norm=norm.step_norm,
        average_over=norm.average_over,
        log_ratio_clamp=norm.log_ratio_clamp,
    )
    batch = draw_batch(seed, num=6)
    steps = [(number, step) for number, trajectory in enumerate(batch) for step in trajectory]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(steps) - 1), max_size=5)))
    inputs = []
    for i, j in zip([0, *cuts], [*cuts, len(steps)], strict=True):
        pack: dict[int, Trajectory] = {}
        for number, step in steps[i:j]:
            pack.setdefault(number, []).append(step)
        inputs.append(flatten(list(pack.values()), seed, list(pack)))
    totals = totals_of(batch)
    assert BatchTotals.of([i.actions for i in inputs], [40, 1, 1, 1, 1, 1]) == totals

    whole_inputs = flatten(batch)
    whole = trace_loss(whole_inputs, totals, config)
    parts = [trace_loss(i, totals, config) for i in inputs]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(
        torch.stack([part.trajectory_losses for part in parts]).sum(0),
        whole.trajectory_losses,
        rtol=1e-12,
        atol=1e-14,
    )
    grads = torch.cat([gradient(i, part.loss) for i, part in zip(inputs, parts, strict=True)])
    order = torch.argsort(torch.cat([i.log_probs.detach() for i in inputs]))
    torch.testing.assert_close(
        grads[order], gradient(whole_inputs, whole.loss)[torch.argsort(whole_inputs.log_probs.detach())]
    )

    merged = reduce(add, [part.metrics for part in parts])
    assert merged.summary() == pytest.approx(whole.metrics.summary(), rel=1e-12, abs=1e-12)
    for view in ("by_step", "by_block"):
        for ours, theirs in zip(getattr(merged, view)(), getattr(whole.metrics, view)(), strict=True):
            assert vars(ours) == pytest.approx(vars(theirs), rel=1e-12, abs=1e-12)


def test_the_share_of_each_trajectory_names_the_culprit() -> None:
    batch = draw_batch(5)
    batch[2][0][0] = replace(batch[2][0][0], old=float("nan"))
    output = trace_loss(flatten(batch), totals_of(batch), TraceLossConfig())
    assert not output.loss.isfinite()
    assert output.trajectory_losses.isfinite().tolist() == [True, True, False, True]


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    def action(ratio: float, advantage: float, block: int, step: int) -> Action:
        old = math.log(0.25)
        return Action(
            new=old + math.log(ratio),
            old=old,
            base=old + math.log(ratio) + math.log(2),
            engine=old + math.log(1.25),
            advantage=advantage,
            entropy=2.0 * block,
            block=block,
            step=step,
        )

    batch = [
        [
            [action(1.5, 1.0, 0, 0), action(1.5, -1.0, 0, 0)],  # clipped high, and not: it may fall
            [action(0.5, -1.0, 0, 1)],  # clipped low
            [action(0.5, 1.0, 1, 0), action(1.0, 0.0, 1, 0)],
        ]
    ]
    config = TraceLossConfig(kl_beta=0.0, importance_cap=0.9)
    output = trace_loss(flatten(batch), totals_of(batch), config)
    weight = 0.8  # π_old / π_engine
    policy_loss = -weight * ((1.2 - 1.5) / 2 - 0.8 + (0.5 + 0) / 2)
    k3_up, k3_down = 1 / 1.5 - 1 + math.log(1.5), 2 - 1 - math.log(2)
    assert output.metrics.summary() == pytest.approx(
        {
            "loss": policy_loss,
            "policy_loss": policy_loss,
            "kl_loss": 0.0,
            "clip_fraction_low": 0.2,
            "clip_fraction_high": 0.2,
            "ratio_mean": 1.0,
            "ratio_max": 1.5,
            "ratio_min": 0.5,
            "kl_old": (2 * k3_up + 2 * k3_down) / 5,
            "kl_base": 2 - 1 - math.log(2),
            "entropy": 0.8,
            "rollout_train_kl": 0.8 - 1 + math.log(1.25),
            "rollout_ratio_max": 1.25,
            "importance_mean": 0.8,
            "importance_truncated": 0.0,
            "advantage_mean": 0.0,
            "advantage_std": math.sqrt(4 / 5),
            "advantage_max": 1.0,
            "advantage_min": -1.0,
            "advantage_zero": 0.2,
            "num_actions": 5.0,
        }
    )
    by_step, by_block = output.metrics.by_step(), output.metrics.by_block()
    assert [(b.index, b.num_actions, b.clip_fraction) for b in by_step] == [(0, 4, 0.25), (1, 1, 1.0)]
    assert [(b.index, b.num_actions, b.entropy) for b in by_block] == [(0, 3, 0.0), (1, 2, 2.0)]
    assert [b.policy_loss for b in by_block] == pytest.approx([weight * 0.95, -weight * 0.25])


def test_neighbours_of_a_breakdown_are_put_together() -> None:
    """Seven blocks in at most three rows are blocks 0-2, 3-5 and 6; nothing is lost."""
    action = Action(-1.0, -1.0, -1.0, -1.0, advantage=1.0, entropy=0.0, block=0, step=0)
    batch = [[[replace(action, block=block, entropy=float(block))] for block in range(7)]]
    metrics = trace_loss(flatten(batch), totals_of(batch), TraceLossConfig()).metrics
    found = [(b.index, b.num_actions, b.entropy, b.policy_loss) for b in metrics.by_block(at_most=3)]
    np.testing.assert_allclose(found, [(0, 3, 1.0, -3.0), (3, 3, 4.0, -3.0), (6, 1, 6.0, -1.0)])
    assert metrics.by_block(at_most=7) == metrics.by_block()
    assert len(metrics.by_step(at_most=3)) == 1


def test_the_truncated_share_is_counted() -> None:
    batch = draw_batch(3, scale=1.0)
    inputs = flatten(batch)
    assert inputs.engine_log_probs is not None
    summary = trace_loss(inputs, totals_of(batch), TraceLossConfig(importance_cap=1.0)).metrics.summary()
    share = (inputs.old_log_probs >= inputs.engine_log_probs).double().mean().item()
    assert 0.2 < share < 0.8
    assert summary["importance_truncated"] == pytest.approx(share)
    assert summary["importance_mean"] < 1


def test_what_was_not_given_is_not_measured() -> None:
    batch = draw_batch(0)
    inputs = replace(flatten(batch), engine_log_probs=None, base_log_probs=None)
    with_all = trace_loss(flatten(batch), totals_of(batch), TraceLossConfig()).metrics
    with_less = trace_loss(inputs, totals_of(batch), TraceLossConfig()).metrics
    missing = set(with_all.summary()) - set(with_less.summary())
    assert missing == {"kl_base", "rollout_train_kl", "rollout_ratio_max"}
    with pytest.raises(ValueError, match="kl_base, rollout_train_kl measured in one pack and not"):
        with_all + with_less


def test_equal_rewards_give_no_gradient_and_the_metrics_say_so() -> None:
    batch = [[[replace(a, advantage=0.0) for a in s] for s in t] for t in draw_batch(4, scale=0.0)]
    inputs = flatten(batch)
    output = trace_loss(inputs, totals_of(batch), TraceLossConfig())
    assert (gradient(inputs, output.loss) == 0).all()
    assert output.metrics.summary()["advantage_zero"] == 1.0


# -- the value model ---------------------------------------------------------------------------


def value_inputs(seed: int, sizes: Sequence[int]) -> ValueLossInputs:
    generator = torch.Generator().manual_seed(seed)
    trajectory_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    values, moves, returns = torch.randn(
        3, len(trajectory_ids), generator=generator, dtype=torch.float64
    ).unbind()
    nothing = torch.zeros_like(trajectory_ids)
    return ValueLossInputs(
        actions=Actions(torch.arange(len(trajectory_ids)), trajectory_ids, nothing, nothing),
        values=values.requires_grad_(),
        old_values=values.detach() + 0.3 * moves,
        returns=returns,
        trajectory_sizes=torch.tensor(sizes)[trajectory_ids],
    )


@given(
    st.integers(0, 10_000), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.sampled_from([None, 0.2])
)
def test_value_loss_equals_a_loop(seed: int, sizes: list[int], clip_eps: float | None) -> None:
    inputs = value_inputs(seed, sizes)
    total = 0.0
    for trajectory in range(len(sizes)):
        mine = [k for k, owner in enumerate(inputs.actions.trajectory_ids.tolist()) if owner == trajectory]
        for k in mine:
            value, old, goal = (x[k].item() for x in (inputs.values, inputs.old_values, inputs.returns))
            error = (value - goal) ** 2
            if clip_eps is not None:
                error = max(error, (min(max(value, old - clip_eps), old + clip_eps) - goal) ** 2)
            total += 0.5 * error / len(mine)
    totals = BatchTotals.of([inputs.actions], sizes)
    output = value_loss(inputs, totals, clip_eps)
    assert output.loss.item() == pytest.approx(total / len(sizes), rel=1e-12)
    assert output.metrics.summary()["value_loss"] == pytest.approx(output.loss.item())
    assert output.trajectory_losses.sum().item() == pytest.approx(output.loss.item())


def test_value_packs_add_up() -> None:
    """Cut anywhere, also within a trajectory."""
    whole = value_inputs(0, [3, 1, 5])
    totals = BatchTotals.of([whole.actions], [3, 1, 5])
    expected = value_loss(whole, totals)
    for cut in range(1, 9):
        parts = [
            value_loss(
                ValueLossInputs(
                    Actions(*(ids[part] for ids in vars(whole.actions).values())),
                    *(x[part] for x in list(vars(whole).values())[1:]),
                ),
                totals,
            )
            for part in (slice(0, cut), slice(cut, 9))
        ]
        one, other = parts
        assert (one.loss + other.loss).item() == pytest.approx(expected.loss.item(), rel=1e-12)
        summed = one.trajectory_losses + other.trajectory_losses
        torch.testing.assert_close(summed, expected.trajectory_losses)
        assert (one.metrics + other.metrics).summary() == pytest.approx(expected.metrics.summary(), rel=1e-12)


def test_the_clip_stops_a_value_that_ran_ahead() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    ran_ahead = ValueLossInputs(
        Actions(zero, zero, zero, zero),
        values=torch.tensor([1.0], requires_grad=True),
        old_values=torch.tensor([0.0]),
        returns=torch.tensor([1.0]),
        trajectory_sizes=zero + 1,
    )
    output = value_loss(ran_ahead, BatchTotals(1, 1, 1), clip_eps=0.2)
    assert output.loss.item() == pytest.approx(0.5 * 0.8**2)
    assert torch.autograd.grad(output.loss, ran_ahead.values)[0].item() == 0
    assert output.metrics.summary()["value_clip_fraction"] == 1
    assert value_loss(ran_ahead, BatchTotals(1, 1, 1), clip_eps=None).loss.item() == 0


def test_explained_variance() -> None:
    inputs = value_inputs(0, [30, 50])
    totals = BatchTotals.of([inputs.actions], [30, 50])

    def explained(values: Tensor, returns: Tensor) -> float | None:
        changed = replace(inputs, values=values, returns=returns)
        return value_loss(changed, totals).metrics.summary().get("explained_variance")

    assert explained(inputs.returns, inputs.returns) == pytest.approx(1.0)
    assert explained(torch.full_like(inputs.returns, 3.0), inputs.returns) == pytest.approx(0.0)
    noise = (inputs.returns - inputs.values).detach().numpy()
    assert explained(inputs.values, inputs.returns) == pytest.approx(
        1 - noise.var() / inputs.returns.numpy().var()
    )
    assert explained(inputs.values, torch.ones_like(inputs.returns)) is None


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_eps": 0.0}, "clip_eps: 0.0 is not between 0 and 1"),
        ({"clip_eps": 1.0}, "clip_eps: 1.0 is not between 0 and 1"),
        ({"clip_eps_high": -0.1}, "clip_eps_high: -0.1 is not positive"),
        ({"kl_beta": -1.0}, "kl_beta: -1.0 is negative"),
        ({"log_ratio_clamp": 0.0}, "log_ratio_clamp: 0.0 is not positive"),
        ({"importance_cap": float("nan")}, "importance_cap: nan is not positive"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceLossConfig(**options)


@pytest.mark.parametrize(
    ("options", "missing", "message"),
    [
        ({"kl_reference": "base"}, "base_log_probs", "base_log_probs: None; kl_reference = 'base'"),
        ({"importance_cap": 2.0}, "engine_log_probs", "engine_log_probs: None; importance_cap needs them"),
    ],
)
def test_missing_log_probs_are_refused(options: dict[str, Any], missing: str, message: str) -> None:
    batch = draw_batch(0)
    with pytest.raises(ValueError, match=message):
        trace_loss(replace(flatten(batch), **{missing: None}), totals_of(batch), TraceLossConfig(**options))


def test_an_empty_batch_is_refused() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="step_ids: empty"):
        Actions(nothing, nothing, nothing, nothing)
    with pytest.raises(ValueError, match="num_trajectories: 0; a batch without trajectories has no loss"):
        BatchTotals.of([], [])
