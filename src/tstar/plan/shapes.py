"""Shapes of published models, for plans before anything is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tstar.model.config import ModelConfig, MoeConfig

_MASK, _VOCABULARY = 151_669, 151_936


def _dense(hidden: int, inner: int, layers: int, heads: int, is_tied: bool) -> ModelConfig:
    return ModelConfig(
        model_type="sdar",
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=is_tied,
        mask_token_id=_MASK,
    )


# As the config.json of Qwen3's models of these sizes has them, whose shapes SDAR's are.
SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "sdar-1.7b": _dense(2048, 6144, 28, 16, is_tied=True),
        "sdar-4b": _dense(2560, 9728, 36, 32, is_tied=True),
        "sdar-8b": _dense(4096, 12_288, 36, 32, is_tied=False),
        "sdar-30b-a3b": ModelConfig(
            model_type="sdar_moe",
            vocab_size=_VOCABULARY,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe=MoeConfig(
                num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True
            ),
            mask_token_id=_MASK,
        ),
    }
)


def shape_named(name: str) -> ModelConfig | None:
    """The published shape that a model directory's name speaks of."""
    lowered = name.lower()
    return next((shape for key, shape in SHAPES.items() if key in lowered), None)
