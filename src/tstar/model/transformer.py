"""The one decoder: Qwen3, Qwen2, Llama and SDAR shapes, dense or mixture of experts.

Tokens come flat, without a batch dimension and without padding; who sees whom is an `Attention` prepared
by the caller (a packed layout, or rows of blocks against a KV store), and the model does not know which.
Module and parameter names are the Hub's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tstar.model.attention import Attention
from tstar.model.config import ModelConfig
from tstar.model.elementwise import rms_norm, swiglu
from tstar.model.linear import Linear, linear
from tstar.model.moe import SparseMlp
from tstar.model.rope import RotaryAngles, rotary_angles, rotate


class LanguageModel(nn.Module):
    """A decoder and its LM head. ``forward`` gives hidden states; ``logits`` projects chosen ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        token_ids: Int64[Tensor, " tokens"],
        attention: Attention,
        read: Int64[Tensor, " chosen"] | None = None,
        recompute_activations: bool = False,
    ) -> Float[Tensor, "chosen hidden"]:
        """Last hidden states, after the final norm: those at the indices `read`, or all of them.

        The last layer does no work behind its attention for tokens that nobody reads.
        recompute_activations: keep the input of each layer's two halves alone, and compute the rest again in
        the backward pass: a quarter more time, and memory that does not grow with a layer's insides."""
        hidden: Tensor = self.model(token_ids, attention, read, recompute_activations)
        return hidden

    def logits(self, hidden: Float[Tensor, "chosen hidden"]) -> Float[Tensor, "chosen vocab"]:
        """The LM head on those hidden states that somebody wants to read."""
        return linear(hidden, self.output_weight)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Fresh weights: N(0, initializer_range) matrices, norms one, biases zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)

    @property
    def output_weight(self) -> Float[Tensor, "vocab hidden"]:
        """The LM head's weight: the embedding itself where the two are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        token_ids: Int64[Tensor, " tokens"],
        attention: Attention,
        read: Int64[Tensor, " chosen"] | None = None,
        recompute_activations: bool = False,
    ) -> Float[Tensor, "chosen hidden"]:
        hidden: Tensor = self.embed_tokens(token_ids)
        angles = rotary_angles(self.config, attention.positions, hidden.dtype)
        for layer in self.layers:
            own_read = read if layer is self.layers[-1] else None
            hidden = layer(hidden, angles, attention, own_read, recompute_activations)
        normed: Tensor = self.norm(hidden)
        return normed


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, index)
        is_sparse = config.moe is not None and config.moe.is_sparse_layer(index)
        self.mlp = SparseMlp(config) if is_sparse else Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        angles: RotaryAngles,
        attention: Attention,
        read: Int64[Tensor, " chosen"] | None = None,
        recompute_activations: bool = False,
    ) -> Float[Tensor, "chosen hidden"]:
        if recompute_activations and torch.is_grad_enabled():
            # In two halves: recomputation ends before the last matmul of each, whose result nobody needs.
            hidden = _recomputed(self._attend, hidden, angles, attention, read)
            return _recomputed(self._transform, hidden)
        return self._transform(self._attend(hidden, angles, attention, read))

    def _attend(
        self, hidden: Tensor, angles: RotaryAngles, attention: Attention, read: Tensor | None
    ) -> Tensor:
        mixed: Tensor = self.self_attn(self.input_layernorm(hidden), angles, attention, read)
        return mixed + (hidden if read is None else hidden[read])

    def _transform(self, hidden: Tensor) -> Tensor:
        transformed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + transformed


def _recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    out: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        heads, kv_heads = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = Linear(config.hidden_size, heads, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_heads, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_heads, bias=config.qkv_bias)
        self.o_proj = Linear(heads, config.hidden_size, bias=config.output_bias)
        self.has_qk_norm = config.family.has_qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        angles: RotaryAngles,
        attention: Attention,
        read: Int64[Tensor, " chosen"] | None = None,
    ) -> Float[Tensor, "chosen hidden"]:
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        if self.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = attention.attend(self.index, rotate(query, angles), rotate(key, angles), value)
        out: Tensor = self.o_proj((mixed if read is None else mixed[read]).flatten(-2))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))
        return out


class RMSNorm(nn.Module):
    """x / sqrt(mean x² + ε), scaled; the mean in fp32 whatever x is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return rms_norm(x, self.weight, self.eps)
