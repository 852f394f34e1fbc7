"""AdamW with everything around it that a resume has to bring back: masters, moments, clipping, schedule.

Weights below fp32 get an fp32 master copy: an update of 1e-6 vanishes beside a bf16 weight. Their
gradients are added up in fp32 too, pack by pack, as the backward pass yields them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tstar.errors import UserError
from tstar.parallel.sharding import whole

LrSchedule = Literal["constant", "linear", "cosine"]

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
_PORTION = 1 << 18
"""Numbers of a gradient that are widened at once."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class NonFiniteGradientError(FloatingPointError):
    """A gradient that must not be trained on; weights and optimizer are as they were before."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its learning rate over time, and the clipping before it."""

    learning_rate: float = 1e-6
    """The highest one; the schedule scales it."""
    lr_schedule: LrSchedule = "constant"
    """How the learning rate falls between the warm-up and `num_steps`."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly; the first has 1 / warmup_steps of it."""
    num_steps: int | None = None
    """Optimizer steps after which linear and cosine have reached `final_lr_ratio`."""
    final_lr_ratio: float = 0.0
    """What linear and cosine end at, as a share of learning_rate."""
    beta1: float = 0.9
    """AdamW's: how long it averages gradients."""
    beta2: float = 0.999
    """... and their squares."""
    eps: float = 1e-8
    """AdamW's, beside the root of the average square."""
    weight_decay: float = 0.0
    """Decoupled, on matrices alone: norms and biases have no scale to decay to."""
    max_grad_norm: float | None = 1.0
    """Longer gradients are scaled down to this norm (None: never)."""

    def __post_init__(self) -> None:
        require = _require
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "use a positive number")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "use 0 or more")
        require(0 <= self.beta1 < 1, "beta1", self.beta1, "use 0 <= beta1 < 1")
        require(0 <= self.beta2 < 1, "beta2", self.beta2, "use 0 <= beta2 < 1")
        require(self.eps > 0, "eps", self.eps, "use a positive number, like 1e-8")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "use 0 or more")
        require(0 <= self.final_lr_ratio <= 1, "final_lr_ratio", self.final_lr_ratio, "use 0 to 1")
        norm = self.max_grad_norm
        require(norm is None or norm > 0, "max_grad_norm", norm, "use a positive number or None")
        if self.lr_schedule != "constant":
            enough = self.num_steps is not None and self.num_steps > self.warmup_steps
            why = f"lr_schedule {self.lr_schedule!r} needs more than warmup_steps = {self.warmup_steps}"
            require(enough, "num_steps", self.num_steps, why)


@dataclass(frozen=True)
class OptimizerStep:
    """What one optimizer step did."""

    learning_rate: float
    grad_norm: float
    """Before clipping."""


def learning_rate_at(config: OptimizerConfig, optimizer_step: int) -> float:
    """The learning rate of the optimizer step with this 0-based number."""
    if optimizer_step < config.warmup_steps:
        return config.learning_rate * (optimizer_step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    assert config.num_steps is not None
    progress = (optimizer_step - config.warmup_steps) / (config.num_steps - config.warmup_steps)
    progress = min(progress, 1.0)
    share = 1 - progress if config.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * share)


class Optimizer:
    """Steps the trainable parameters of a model.

    One step: any number of backward passes (their gradients add up), then `step`, which also clears them.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.config = config
        self.num_steps_done = 0
        self._parameters = {name: p for name, p in parameters if p.requires_grad}
        if not self._parameters:
            raise ValueError("parameters: none of them requires a gradient; there is nothing to train")
        self._hooks: list[RemovableHandle] = []
        self._trained = {name: self._master_of(p) for name, p in self._parameters.items()}
        is_matrix = [p.dim() > 1 for p in self._trained.values()]
        groups = [
            {
                "params": [p for p, m in zip(self._trained.values(), is_matrix, strict=True) if m == decays],
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        devices = {p.device.type for p in self._trained.values()}
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=devices <= _FUSED_DEVICES,
        )

    @property
    def trained(self) -> list[nn.Parameter]:
        """What is stepped and collects gradients: the parameters, or below fp32 their masters."""
        return list(self._trained.values())

    @property
    def learning_rate(self) -> float:
        """What the next step will use."""
        return learning_rate_at(self.config, self.num_steps_done)

    def step(self) -> OptimizerStep:
        """Clip, update, clear the gradients."""
        grad_norm = self._clip()
        learning_rate = self.learning_rate
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._copy_masters()
        self.zero_grad()
        self.num_steps_done += 1
        return OptimizerStep(learning_rate, grad_norm)

    def release(self) -> None:
        """Let go of the parameters: below fp32, only one optimizer at a time may collect their gradients."""
        self.zero_grad()
        for hook in self._hooks:
            hook.remove()

    def zero_grad(self) -> None:
        """Forget the gradients of the backward passes since the last step."""
        for parameter in (*self._parameters.values(), *self._trained.values()):
            parameter.grad = None

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next step depends on besides the fp32 weights, as named tensors (for safetensors).

        Masters are in it: the bf16 weights are what they round to, not what they are. The tensors are the
        optimizer's own: write or copy them before the next step.
        """
        state = {"num_steps_done": torch.tensor(self.num_steps_done)}
        for name, trained in self._trained.items():
            if trained is not self._parameters[name]:
                state[f"master.{name}"] = trained.detach()
            for moment, value in self._adamw.state[trained].items():
                state[f"{moment}.{name}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over another optimizer's state, of the same parameters; bf16 weights follow their masters."""
        expected = {"num_steps_done"} | {
            f"master.{name}"
            for name, trained in self._trained.items()
            if trained is not self._parameters[name]
        }
        moments = {f"{moment}.{name}" for name in self._trained for moment in _MOMENTS}
        missing, unexpected = expected - state.keys(), state.keys() - expected - moments
        if missing or unexpected:
            fault = "is missing" if missing else "has no parameter here"
            raise ValueError(
                f"state: {min(missing or unexpected)!r} {fault}; it belongs to another model or precision"
            )
        self.num_steps_done = int(state["num_steps_done"])
        for name, trained in self._trained.items():
            if f"master.{name}" in state:
                trained.data.copy_(state[f"master.{name}"])
            kept = {m: state[f"{m}.{name}"] for m in _MOMENTS if f"{m}.{name}" in state}
            self._adamw.state[trained] = {
                moment: value.clone().to(trained.device) for moment, value in kept.items()
            }
        self._copy_masters()

    # -- private -------------------------------------------------------------------------------

    @torch.no_grad()
    def _clip(self) -> float:
        gradients = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        if not gradients:
            raise ValueError("gradients: there are none; call backward before step")
        norm = whole(torch.nn.utils.get_total_norm(gradients.values()))
        if not norm.isfinite():
            raise NonFiniteGradientError(_describe_non_finite(gradients, self.num_steps_done))
        if self.config.max_grad_norm is not None and norm > self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._trained.values(), self.config.max_grad_norm, norm)
        return float(norm)

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter itself, or below fp32 a copy that collects its gradients in fp32."""
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))

        def collect(low: Tensor) -> None:
            assert low.grad is not None
            gradient, low.grad = low.grad, None
            if master.grad is None:
                master.grad = gradient.to(torch.float32)
            else:
                _add(master.grad, gradient)

        hook = parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
        self._hooks.append(hook)
        return master

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, parameter in self._parameters.items():
            if self._trained[name] is not parameter:
                parameter.copy_(self._trained[name])


def _add(total: Tensor, gradient: Tensor) -> None:
    """In place. On a CPU torch widens all of a lower operand first; in portions it stays in the cache."""
    is_plain = type(gradient) is Tensor and gradient.device.type == "cpu"
    if not (is_plain and gradient.is_contiguous() and total.is_contiguous()):
        total.add_(gradient)
        return
    parts, own_parts = (torch.split(x.view(-1), _PORTION) for x in (total, gradient))
    for part, own in zip(parts, own_parts, strict=True):
        part.add_(own)


def _describe_non_finite(gradients: Mapping[str, Tensor], optimizer_step: int) -> str:
    for name, gradient in gradients.items():
        num_wrong = int((~gradient.isfinite()).sum())
        if num_wrong:
            return (
                f"{name}: {num_wrong} of {gradient.numel()} gradient values are NaN or infinite "
                f"at optimizer step {optimizer_step}"
            )
    name = max(gradients, key=lambda key: float(gradients[key].abs().max()))
    return f"{name}: gradients are finite but their norm overflows at optimizer step {optimizer_step}"


def _require(holds: bool, name: str, value: object, fix: str) -> None:
    if not holds:
        raise UserError(f"{name}: {value!r} cannot be used; {fix}")
