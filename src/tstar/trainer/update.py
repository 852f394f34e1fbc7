"""One TraceRL update: θ ← TraceRL(θ, d, B, P) of Algorithm 1.

`Trainer.update` is the algorithm; advantages, replay and the objective stand in modules of their own.
What lives from update to update is here: the optimizer's state and the value model.

A minibatch is cut into packs by token budget alone, and every pack adds its share of the minibatch's
gradient: where the cuts fall changes nothing but memory and time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor, nn

from tstar.advantages import place_rewards, step_gae
from tstar.errors import UserError
from tstar.lora import has_lora, merged_copy, without_lora
from tstar.loss import (
    BatchTotals,
    TraceLossConfig,
    TraceLossInputs,
    TraceLossOutputs,
    ValueLossInputs,
    ValueLossOutputs,
    trace_loss,
    value_loss,
)
from tstar.loss_metrics import TraceLossMetrics, ValueLossMetrics
from tstar.model.transformer import LanguageModel
from tstar.optimizer import NonFiniteGradientError, Optimizer, OptimizerConfig
from tstar.parallel import ALONE, GradientSum, Parallel
from tstar.parallel.sharding import reshard
from tstar.partition import PartitionRule
from tstar.replay import ReplayPack, replay, score
from tstar.trainer.batch import Batch, FixedPack, Minibatch, Rollout, loss_actions, select, step_table
from tstar.trainer.metrics import StepMetrics, UpdateMetrics
from tstar.value import ValueModel, predict_values


@dataclass(frozen=True)
class ValueConfig:
    """Advantages by GAE over denoising steps, from a value model that is trained beside the policy."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    clip_eps: float | None = 0.2
    """A value's loss counts as if it had moved at most so far from the one before the update (None: off)."""
    gamma: float = 1.0
    """γ: what a reward counts one denoising step earlier."""
    lam: float = 1.0
    """λ of GAE: 1 trusts the rewards alone, 0 the next step's value."""

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}: {getattr(self, name)} cannot be used; use 0 to 1")
        if self.clip_eps is not None and not self.clip_eps > 0:
            raise UserError(f"clip_eps: {self.clip_eps} cannot be used; use a positive number or None")


@dataclass(frozen=True)
class TrainerConfig:
    """How one update goes."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    objective: TraceLossConfig = field(default_factory=TraceLossConfig)
    value: ValueConfig | None = None
    """None: advantages over the responses of a prompt, without a value model."""
    token_budget: int = 16_384
    """Tokens of one forward, clean and noisy; a trajectory that needs more is spread over several."""
    num_minibatches: int = 1
    """Optimizer steps for one pass over the rollouts."""
    num_passes: int = 1
    """Passes over the rollouts with the same old log-probs and advantages."""
    merge_steps: int = 1
    """Neighbouring steps of a block that are replayed as one (1: exact)."""
    truncated_is_wrong: bool = False
    """A response that ran out of tokens earns 0 and is not correct, whatever it says."""
    accuracy_band: tuple[float, float] | None = None
    """Train on groups whose accuracy lies in it, bounds included (None: on all)."""
    recompute_activations: bool = False
    """Keep two tensors of each layer for the backward pass, compute the rest again: a quarter more time."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "num_minibatches", "num_passes", "merge_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} cannot be used; use 1 or more")
        if self.accuracy_band is not None:
            lowest, highest = self.accuracy_band
            if not 0 <= lowest <= highest <= 1:
                raise UserError(
                    f"accuracy_band: {[lowest, highest]} is no part of [0, 1]; give the lower bound first"
                )


class NonFiniteLossError(FloatingPointError):
    """A loss that must not be trained on; weights and optimizer are as the last optimizer step left them."""


class Trainer:
    """A policy, its optimizer and, where advantages ask for one, its value model."""

    def __init__(
        self,
        model: LanguageModel,
        config: TrainerConfig,
        base: LanguageModel | None = None,
        value_model: ValueModel | None = None,
        parallel: Parallel = ALONE,
    ) -> None:
        """base: the frozen model that the KL is taken to, or only measured; one with LoRA has it inside.
        value_model: the one to go on with; by default a new one starts from the policy's weights.
        parallel: the processes that share the packs of an update; each has all weights and all rollouts."""
        if model.config.mask_token_id is None:
            raise UserError("model: its config.json has no mask_token_id; TraceRL needs a diffusion model")
        if config.objective.kl_reference == "base" and base is None and not has_lora(model):
            raise UserError("kl_reference: 'base' needs the base model; give it, or use 'old'")
        if config.value is not None and parallel.is_sharded:
            raise UserError(
                "value: a value model cannot be sharded yet; use sharding none, or advantages over groups"
            )
        self.model = model
        self.config = config
        self.optimizer = Optimizer(model.named_parameters(), config.optimizer)
        self.value_model: ValueModel | None = None
        self.value_optimizer: Optimizer | None = None
        if config.value is not None:
            policy = merged_copy(model) if has_lora(model) else model
            self.value_model = value_model or ValueModel.from_policy(policy)
            self.value_optimizer = Optimizer(self.value_model.named_parameters(), config.value.optimizer)
        self._base = base
        self._parallel = parallel
        self._mask_token_id = model.config.mask_token_id

    def update(self, rollouts: Sequence[Rollout], rule: PartitionRule) -> UpdateMetrics:
        """Train on the rollouts, replayed under the rule's blocks.

        The responses of a prompt belong into one call: advantages are taken among them.
        """
        start = time.perf_counter()
        self._check_process_rewards(rollouts)
        selection = select(rollouts, self.config.truncated_is_wrong, self.config.accuracy_band)
        parts = _split(selection.batch, self.config.num_minibatches)
        wants_old = len(parts) * self.config.num_passes > 1
        minibatches = [self._prepare(part, rule, wants_old) for part in parts]
        prepared = time.perf_counter()
        steps = [self._optimizer_step(m) for _ in range(self.config.num_passes) for m in minibatches]
        return UpdateMetrics(
            num_rollouts=len(rollouts),
            num_trained=len(selection.batch.rollouts),
            num_truncated=sum(r.trajectory.finish_reason == "length" for r in rollouts),
            num_groups=selection.num_groups,
            num_uniform_groups=selection.num_uniform_groups,
            reward_mean=selection.reward_mean,
            accuracy=selection.accuracy,
            steps=tuple(steps),
            num_tokens=sum(fixed.pack.layout.num_tokens for m in minibatches for fixed in m.packs),
            num_packs=sum(len(m.packs) for m in minibatches),
            prepare_seconds=prepared - start,
            train_seconds=time.perf_counter() - prepared,
        )

    def _check_process_rewards(self, rollouts: Sequence[Rollout]) -> None:
        """Over groups a response has one reward; a reward of a step would go unheard."""
        for number, rollout in enumerate(rollouts):
            if rollout.token_rewards is None:
                continue
            if self.config.value is None:
                raise UserError(
                    f"rollouts[{number}].token_rewards: given, but advantages are taken over groups of whole "
                    "responses; use a value model, or put them into the reward"
                )
            expected = len(rollout.trajectory.response_ids)
            if len(rollout.token_rewards) != expected:
                raise ValueError(
                    f"rollouts[{number}].token_rewards: {len(rollout.token_rewards)} for {expected} tokens"
                )

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next update depends on besides the policy's weights, as named tensors (for
        safetensors). They are the trainer's own: write or copy them before the next update."""
        parts = {"optimizer": self.optimizer.state_dict()}
        if self.value_model is not None and self.value_optimizer is not None:
            parts["value_model"] = dict(self.value_model.state_dict())
            parts["value_optimizer"] = self.value_optimizer.state_dict()
        return {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave; the policy's weights of the same moment are in place already."""
        parts: dict[str, dict[str, Tensor]] = {"optimizer": {}}
        if self.value_model is not None:
            parts |= {"value_model": {}, "value_optimizer": {}}
        for key, value in state.items():
            part, _, name = key.partition(".")
            if part not in parts:
                raise ValueError(f"state: {key!r} has no place here; it belongs to a trainer of another kind")
            parts[part][name] = value
        missing = [part for part, found in parts.items() if not found]
        if missing:
            raise ValueError(f"state: {missing[0]} is missing; it belongs to a trainer of another kind")
        self.optimizer.load_state_dict(parts["optimizer"])
        if self.value_model is not None and self.value_optimizer is not None:
            self.value_model.load_state_dict(parts["value_model"])
            self.value_optimizer.load_state_dict(parts["value_optimizer"])

    # -- before the first optimizer step -------------------------------------------------------

    @torch.no_grad()
    def _prepare(
        self, batch: Batch, rule: PartitionRule, wants_old: bool, parallel: Parallel | None = None
    ) -> Minibatch:
        """Replay, and everything that the optimizer steps hold fixed; log-probs of this process's packs."""
        config = self.config
        trajectories = [r.trajectory for r in batch.rollouts]
        packs = replay(trajectories, rule, self._mask_token_id, config.token_budget, config.merge_steps)
        is_as_decoded = config.merge_steps == 1 and all(
            t.partition == rule.cut(len(t.prompt_ids), len(t.response_ids)) for t in trajectories
        )
        if config.objective.importance_cap is not None and not is_as_decoded:
            raise UserError(
                f"importance_cap: {config.objective.importance_cap} weighs by the engine's log-probs, but "
                "these rollouts are replayed under other blocks or merged steps; leave it out"
            )
        parallel = self._parallel if parallel is None else parallel
        fixed = [self._fix(batch, pack, is_as_decoded) for pack in packs]
        for number, _ in parallel.turns([_cost(p) for p in packs]):
            fixed[number] = self._score(fixed[number], wants_old)
        if config.value is not None:
            fixed = self._with_values(batch, fixed, config.value, parallel)
        totals = BatchTotals.of([p.actions for p in fixed], [len(t.response_ids) for t in trajectories])
        return Minibatch(batch, rule, totals, tuple(fixed))

    def _fix(self, batch: Batch, pack: ReplayPack, is_as_decoded: bool) -> FixedPack:
        """A pack with its advantages over groups."""
        device, actions = self.model.device, pack.actions
        by_group = batch.advantages[pack.trajectories][actions.members]
        return FixedPack(
            pack,
            loss_actions(pack, device),
            advantages=torch.from_numpy(by_group).to(device),
            engine_log_probs=torch.from_numpy(actions.engine_log_probs).to(device) if is_as_decoded else None,
        )

    def _score(self, fixed: FixedPack, wants_old: bool) -> FixedPack:
        """A pack with its log-probs under the models that stay as they are."""
        return replace(
            fixed,
            old_log_probs=score(self.model, fixed.pack).log_probs if wants_old else None,
            base_log_probs=self._base_log_probs(fixed.pack),
        )

    def _with_values(
        self, batch: Batch, fixed: Sequence[FixedPack], config: ValueConfig, parallel: Parallel
    ) -> list[FixedPack]:
        """The packs with values, and advantages by GAE over the steps of their trajectories."""
        assert self.value_model is not None
        packs, device, model = [f.pack for f in fixed], self.model.device, self.value_model
        found = parallel.map([_cost(p) for p in packs], lambda n: predict_values(model, packs[n]).cpu())
        values = [v.to(device) for v in found]
        table = step_table(packs)
        rewards = place_rewards(table, batch.rewards, per_token=batch.token_rewards(packs))
        gae = step_gae(table, rewards, torch.cat(values).double().cpu().numpy(), config.gamma, config.lam)
        numbers = torch.from_numpy(np.stack([gae.advantages, gae.returns])).to(device)
        parts = torch.split(numbers, [len(v) for v in values], 1)
        return [
            replace(f, advantages=own[0], old_values=old, returns=own[1])
            for f, old, own in zip(fixed, values, parts, strict=True)
        ]

    def _base_log_probs(self, pack: ReplayPack) -> Tensor | None:
        """Under the base model, where there is one to read."""
        if self._base is not None:
            return score(self._base, pack).log_probs
        if self.config.objective.kl_reference == "base":
            with without_lora(self.model) as base:
                return score(base, pack).log_probs
        return None

    # -- one optimizer step --------------------------------------------------------------------

    def _optimizer_step(self, minibatch: Minibatch) -> StepMetrics:
        packs = minibatch.packs
        optimizers = [o for o in (self.optimizer, self.value_optimizer) if o is not None]
        with self._naming_the_culprit(minibatch):
            trained = [p for o in optimizers for p in o.trained]
            gradients = GradientSum(self._parallel, trained, len(packs))
            costs = [_cost(f.pack) for f in packs]
            found = self._parallel.map(
                costs,
                lambda n: self._backward(packs[n], minibatch),
                passed=gradients.passed,
                idle=lambda n: self._backward(packs[n], minibatch, weight=0.0),
            )
            gradients.finish()
            value_step = None if self.value_optimizer is None else self.value_optimizer.step()
            policy_step = self.optimizer.step()
        policy = reduce(add, (metrics for metrics, _ in found))
        values = [metrics for _, metrics in found if metrics is not None]
        return StepMetrics(
            policy, policy_step, None if value_step is None else (reduce(add, values), value_step)
        )

    def _backward(
        self, fixed: FixedPack, minibatch: Minibatch, weight: float = 1.0
    ) -> tuple[TraceLossMetrics, ValueLossMetrics | None]:
        """Add a pack's share to the gradients; with a weight of 0, only compute along."""
        with self._parallel.raising_together():
            outputs = self._policy_loss(fixed, minibatch)
        (outputs.loss * weight).backward()  # type: ignore[no-untyped-call]
        if self.value_model is None:
            return outputs.metrics.on_host(), None
        value_outputs = self._value_loss(fixed, minibatch)
        value_outputs.loss.backward()  # type: ignore[no-untyped-call]
        return outputs.metrics.on_host(), value_outputs.metrics.on_host()

    def _policy_loss(self, fixed: FixedPack, minibatch: Minibatch) -> TraceLossOutputs:
        """A pack's share of -J (Eq. 3)."""
        scores = score(self.model, fixed.pack, recompute_activations=self.config.recompute_activations)
        old = scores.log_probs.detach() if fixed.old_log_probs is None else fixed.old_log_probs
        inputs = TraceLossInputs(
            actions=fixed.actions,
            log_probs=scores.log_probs,
            old_log_probs=old,
            advantages=fixed.advantages,
            entropies=scores.entropies,
            engine_log_probs=fixed.engine_log_probs,
            base_log_probs=fixed.base_log_probs,
        )
        outputs = trace_loss(inputs, minibatch.totals, self.config.objective)
        _refuse_non_finite("loss", outputs.trajectory_losses, minibatch.batch)
        return outputs

    def _value_loss(self, fixed: FixedPack, minibatch: Minibatch) -> ValueLossOutputs:
        """A pack's share of the value model's loss."""
        assert self.value_model is not None
        assert self.config.value is not None
        assert fixed.old_values is not None
        assert fixed.returns is not None
        values = predict_values(self.value_model, fixed.pack, self.config.recompute_activations)
        sizes = torch.from_numpy(minibatch.batch.sizes).to(values.device)[fixed.actions.trajectory_ids]
        inputs = ValueLossInputs(fixed.actions, values, fixed.old_values, fixed.returns, sizes)
        outputs = value_loss(inputs, minibatch.totals, self.config.value.clip_eps)
        _refuse_non_finite("value loss", outputs.trajectory_losses, minibatch.batch)
        return outputs

    # -- numbers that are none -----------------------------------------------------------------

    @contextmanager
    def _naming_the_culprit(self, minibatch: Minibatch) -> Iterator[None]:
        """Forget the gradients of a step that fails, and say which rollout made them infinite or NaN."""
        try:
            yield
        except FloatingPointError as error:
            for optimizer in (self.optimizer, self.value_optimizer):
                if optimizer is not None:
                    optimizer.zero_grad()
            reshard(self.model)
            if not isinstance(error, NonFiniteGradientError):
                raise
            raise NonFiniteGradientError(f"{self._find_culprit(minibatch)}: {error}") from error

    def _find_culprit(self, minibatch: Minibatch) -> str:
        """The first rollout whose gradient alone is not finite."""
        if self._parallel.is_sharded:
            return "one of the rollouts (which one, a run without sharding says)"
        for place in range(len(minibatch.batch.rollouts)):
            part = minibatch.batch.part(np.array([place]))
            alone = self._prepare(part, minibatch.rule, wants_old=False, parallel=ALONE)
            is_finite = True
            for fixed in alone.packs:
                is_finite &= _has_finite_gradient(self._policy_loss(fixed, alone).loss, self.model)
                if self.value_model is not None:
                    value = self._value_loss(fixed, alone).loss
                    is_finite &= _has_finite_gradient(value, self.value_model)
            if not is_finite:
                return minibatch.batch.name(place)
        return "no rollout alone"


def _split(batch: Batch, num_parts: int) -> list[Batch]:
    """Neighbours together, about equally many; fewer parts where there are fewer rollouts."""
    parts = np.array_split(np.arange(len(batch.rollouts)), num_parts)
    return [batch.part(part) for part in parts if len(part)]


def _cost(pack: ReplayPack) -> int:
    """What packs are shared out by."""
    return pack.layout.num_tokens


def _has_finite_gradient(loss: Tensor, model: nn.Module) -> bool:
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(loss, trained, allow_unused=True)
    return all(bool(g.isfinite().all()) for g in gradients if g is not None)


def _refuse_non_finite(what: str, losses: Tensor, batch: Batch) -> None:
    is_wrong = ~losses.isfinite()
    if is_wrong.any():
        place = int(is_wrong.nonzero()[0])
        others = f", as that of {int(is_wrong.sum()) - 1} others" if is_wrong.sum() > 1 else ""
        raise NonFiniteLossError(
            f"{batch.name(place)}: its {what} is {float(losses[place])}{others}; no step was taken"
        )
