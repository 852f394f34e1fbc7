"""Rotary position embedding, in the half-rotation form of the Hub's checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tstar.model.config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class RotaryAngles:
    """cos and sin of every token's angles, ready to multiply with heads."""

    cos: Float[Tensor, "tokens 1 head_dim"]
    signed_sin: Float[Tensor, "tokens 1 head_dim"]
    """(-sin, sin): the sign of the half that rotation swaps in."""


def rotary_angles(
    config: ModelConfig, positions: Int64[Tensor, " tokens"], dtype: torch.dtype
) -> RotaryAngles:
    """Angles in fp32 (bf16 cannot tell position 1000 from 1001), rounded once at the end."""
    angles = positions[:, None, None].to(torch.float32) * inverse_frequencies(config, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return RotaryAngles(torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype))


def rotate(
    heads: Float[Tensor, "tokens heads head_dim"], angles: RotaryAngles
) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate each pair (x_i, x_{i + d/2}) by its token's angle."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * angles.cos, swapped, angles.signed_sin)


def inverse_frequencies(config: ModelConfig, device: torch.device) -> Float[Tensor, " half_head_dim"]:
    """θ^(-2i/d), as the checkpoint's scaling changes it."""
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
    )
    frequencies = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return frequencies
        case RopeScaling(kind="linear") as scaling:
            return frequencies / scaling.factor
        case scaling:
            return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(
    frequencies: Float[Tensor, " half_head_dim"], scaling: RopeScaling
) -> Float[Tensor, " half_head_dim"]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies
