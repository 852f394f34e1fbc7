"""What a model's parts weigh, and what a token of them costs."""

from __future__ import annotations

from dataclasses import dataclass

from tstar.model.config import ModelConfig
from tstar.plan.device import Amount, Device


@dataclass(frozen=True)
class ModelCost:
    """Counts of one model."""

    num_params: int
    """All of them."""
    expert_params: int
    """Those of all experts together."""
    active_params: int
    """That multiply one token in the layers: a sparse layer's router and the token's own experts."""
    active_expert_params: int
    head_params: int
    num_layers: int
    flops_per_pair: int
    """Of a (query, key) pair, in all layers."""
    kv_numbers: int
    """Keys and values of one token."""

    @classmethod
    def of(cls, config: ModelConfig) -> ModelCost:
        hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        attention = hidden * (2 * heads + 2 * kv)
        dense = 3 * hidden * config.intermediate_size
        vectors = 2 * hidden
        if config.qkv_bias:
            vectors += heads + 2 * kv
        if config.output_bias:
            vectors += hidden
        if config.family.has_qk_norm:
            vectors += 2 * config.head_dim
        bias = 2 * config.intermediate_size + hidden if config.mlp_bias else 0
        stored, active, experts, active_experts = 0, 0, 0, 0
        for layer in range(config.num_hidden_layers):
            stored += attention + vectors
            active += attention
            if config.moe is not None and config.moe.is_sparse_layer(layer):
                one = 3 * hidden * config.moe.moe_intermediate_size
                router = hidden * config.moe.num_experts
                experts += one * config.moe.num_experts
                active_experts += one * config.moe.num_experts_per_tok
                stored += router + one * config.moe.num_experts
                active += router + one * config.moe.num_experts_per_tok
            else:
                stored += dense + bias
                active += dense
        head = config.vocab_size * hidden
        return cls(
            num_params=stored + hidden + head * (1 if config.tie_word_embeddings else 2),
            expert_params=experts,
            active_params=active,
            active_expert_params=active_experts,
            head_params=head,
            num_layers=config.num_hidden_layers,
            flops_per_pair=4 * heads * config.num_hidden_layers,
            kv_numbers=2 * kv * config.num_hidden_layers,
        )

    def flops(self, num_tokens: Amount, num_pairs: Amount, num_logits: Amount) -> Amount:
        """Of one forward; `num_logits`: positions that the LM head is computed for."""
        matmuls = 2.0 * (self.active_params * num_tokens + self.head_params * num_logits)
        return matmuls + self.flops_per_pair * num_pairs

    def read_params(self, num_tokens: Amount) -> Amount:
        """Parameters that a forward reads: of the experts, those that some token goes to."""
        if not self.expert_params:
            return float(self.num_params)
        share = self.active_expert_params / self.expert_params
        untouched: Amount = (1.0 - share) ** num_tokens
        return self.num_params - self.expert_params * untouched

    def denoise_seconds(
        self, device: Device, itemsize: int, vocab_size: int, forward: EngineForward
    ) -> Amount:
        """One forward of the engine: bound by its multiplications or by what it reads, plus launches."""
        flops = self.flops(forward.num_tokens, forward.num_pairs, forward.num_logits)
        read = itemsize * (
            self.read_params(forward.num_tokens) + self.kv_numbers * forward.num_context_tokens
        )
        overhead = device.forward_overhead + self.num_layers * device.layer_overhead
        work = device.work_seconds(flops, read)
        return work + overhead + forward.num_logits * vocab_size * device.logit_seconds


@dataclass(frozen=True)
class EngineForward:
    """What the engine computes at once."""

    num_tokens: Amount
    num_pairs: Amount
    num_logits: Amount
    """Positions that are read."""
    num_context_tokens: Amount
    """Tokens whose keys and values are read."""
