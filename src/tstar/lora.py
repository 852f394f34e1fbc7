"""LoRA through peft: low-rank adapters beside the linear layers, everything else frozen.

The model stays a `LanguageModel` and is trained as any other: its parameters that require a gradient are
the adapters. Without them it is the base model, so a KL to the base costs no second copy of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tstar.errors import UserError
from tstar.model.transformer import LanguageModel

_ADAPTER = "default"
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All of an attention and of a dense feed-forward; experts are one stacked tensor and stay frozen."""


@dataclass(frozen=True)
class LoraConfig:
    """Adapters B A · alpha / rank beside each target's weight."""

    rank: int = 16
    """Inner size of the adapters."""
    alpha: float = 32.0
    """They count alpha / rank."""
    target_modules: tuple[str, ...] = LINEAR_LAYERS
    """The linear layers that get one."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"lora.rank: {self.rank} is no rank; use 1 or more")
        if not self.alpha > 0:
            raise UserError(f"lora.alpha: {self.alpha} cannot be used; use a positive number")
        unknown = sorted(set(self.target_modules) - set(LINEAR_LAYERS))
        if unknown or not self.target_modules:
            raise UserError(
                f"lora.target_modules: {unknown or 'none'} cannot be adapted; "
                f"use some of {', '.join(LINEAR_LAYERS)}"
            )


def add_lora(model: LanguageModel, config: LoraConfig, seed: int) -> None:
    """Put adapters into the model, in place, and freeze the rest; at first they change nothing."""
    peft = _import_peft()
    lora_config = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.target_modules), bias="none"
    )
    peft.inject_adapter_in_model(lora_config, model, adapter_name=_ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_A" in name:  # drawn again: peft draws from the process's generator
            fresh = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
            with torch.no_grad():
                parameter.copy_(fresh)


@contextmanager
def without_lora(model: LanguageModel) -> Iterator[LanguageModel]:
    """The base model, for as long as the block lasts."""
    layers = _adapted_layers(model)
    if not layers:
        raise ValueError("model: it has no adapters, so there is no base model under it")
    try:
        for layer in layers.values():
            layer.enable_adapters(False)
        yield model
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def merged_copy(model: LanguageModel) -> LanguageModel:
    """A plain model with the adapters added to the weights; what is frozen is shared, not copied."""
    weights: dict[str, Tensor] = {
        name.replace(".base_layer.", "."): parameter.detach()
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    }
    for name, layer in _adapted_layers(model).items():
        base = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = (base.float() + layer.get_delta_weight(_ADAPTER).float()).to(base.dtype)
    with torch.device("meta"):
        merged = LanguageModel(model.config)
    merged.load_state_dict(weights, assign=True)
    return merged.requires_grad_(False)


def has_lora(model: LanguageModel) -> bool:
    return bool(_adapted_layers(model))


def _adapted_layers(model: LanguageModel) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if hasattr(m, "get_delta_weight")}


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("lora: the package peft is missing; run `pip install 'tstar[lora]'`") from error
    return peft
