"""Small random models, ours and transformers' own, with every weight away from its default."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tstar.model.config import ModelConfig
from tstar.model.transformer import LanguageModel

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

PEERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 8}),
    "qwen3-tied": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1e6},
    ),
    "qwen3-bias": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"head_dim": 8, "attention_bias": True},
    ),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, {"head_dim": 8, **EXPERTS}),
    "qwen3_moe-mixed": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"head_dim": 8, **EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"hidden_size": 48, "tie_word_embeddings": True},
    ),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"hidden_size": 48}),
    "llama-bias": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"hidden_size": 48, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-linear": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "hidden_size": 48,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
        },
    ),
    "llama-llama3": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"hidden_size": 48, "rope_parameters": LLAMA3_SCALING},
    ),
}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights large enough to matter; norms and biases away from one and zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.dim() > 1
            parameter.normal_(0.0 if is_matrix else 0.8, 0.25, generator=generator)


def make_peer(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of a kind of PEERS."""
    config_class, model_class, changes = PEERS[name]
    peer = model_class(config_class(**{**SIZES, **changes})).to(dtype).eval()
    randomise(peer)
    return peer


def make_config(model_type: str = "qwen3", **changes: Any) -> ModelConfig:
    source = {**SIZES, "head_dim": 8, "model_type": model_type, **changes}
    if model_type.endswith("_moe"):
        source = {**EXPERTS, **source}
    if model_type.startswith("sdar"):
        source.setdefault("mask_token_id", 96)
    return ModelConfig.from_hub(source)


def make_model(
    model_type: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any
) -> LanguageModel:
    model = LanguageModel(make_config(model_type, **changes))
    randomise(model)
    return model.to(dtype)
