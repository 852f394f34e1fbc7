"""Bytes of one device by part, and which parts are there at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from tstar.model.attention.tiled import MAX_KEPT_WEIGHTS
from tstar.model.config import ModelConfig
from tstar.plan.cost import ModelCost
from tstar.plan.device import Amount, Cluster
from tstar.plan.workload import Workload

_CPU_LOGITS, _GPU_LOGITS = (1 << 23, 1 << 26), (1 << 27, 1 << 30)
"""Of a portion, and kept for the backward pass: model/head.py."""
_SAMPLER_LOGITS, _BYTES_PER_SAMPLED_LOGIT = {"cpu": 1 << 23, "cuda": 1 << 26}, 24
"""engine/memory.py."""


@dataclass(frozen=True)
class Part:
    """Something that takes memory."""

    name: str
    num_bytes: Amount
    while_sampling: bool
    while_training: bool


@dataclass(frozen=True)
class Memory:
    """One device."""

    parts: tuple[Part, ...]
    available: Amount
    num_requests: int
    """Decoded at once: as many as are allowed and have room for their longest response."""

    @property
    def sampling(self) -> Amount:
        return sum(p.num_bytes for p in self.parts if p.while_sampling)

    @property
    def training(self) -> Amount:
        return sum(p.num_bytes for p in self.parts if p.while_training)

    @property
    def peak(self) -> Amount:
        return max(self.sampling, self.training)

    @property
    def fits(self) -> bool:
        return self.peak <= self.available and self.num_requests >= 1

    def bytes_of(self, name: str) -> Amount:
        return sum(p.num_bytes for p in self.parts if p.name == name)


def plan_memory(workload: Workload, cluster: Cluster) -> Memory:
    """Weights and optimizer are sharded over the devices of a node; the engine has all weights."""
    cost, size, item = ModelCost.of(workload.model), cluster.shard_size, workload.itemsize
    is_low = item < 4
    is_sharded = size > 1
    held = cost.num_params * (2 if workload.has_value else 1)
    trained = held - cost.num_params if workload.is_lora else held
    largest = trained_layer_params(workload.model)
    is_cpu = cluster.device.name == "cpu"
    portion, kept = _CPU_LOGITS if is_cpu else _GPU_LOGITS
    num_logits = min(kept, workload.pack_tokens * workload.action_share * workload.model.vocab_size)
    sampled = _SAMPLER_LOGITS["cpu" if is_cpu else "cuda"] * _BYTES_PER_SAMPLED_LOGIT
    # One device: the engine reads the trainer's own weights. Shards: each layer is gathered while in use.
    weights = held * item if not is_sharded else 2 * largest * item
    parts = [
        Part("weights", weights, not is_sharded, True),
        Part("fp32 masters", trained * 4 / size if is_low or is_sharded else 0.0, True, True),
        Part("Adam moments", trained * 8 / size, True, True),
        Part("gradients", trained * 4 / size + (largest * 4 if is_sharded else 0), False, True),
        Part("base model", cost.num_params * item / size if workload.has_base else 0.0, True, True),
        Part("engine weights", cost.num_params * item if is_sharded else 0.0, True, False),
        Part("activations", activation_bytes(workload, is_cpu), False, True),
        Part("logits", num_logits * item + portion * (item + 8), False, True),
        Part("sampler's logits", sampled, True, False),
    ]
    available = cluster.device.memory
    left = available - sum(p.num_bytes for p in parts if p.while_sampling)
    # Every admitted request has pages for its worst case; the others wait.
    longest = workload.prompt_length + workload.max_response_length
    one = longest * cost.kv_numbers * item
    num_requests = min(workload.max_requests, max(0, int(left // one)))
    parts.append(Part("KV pages", max(num_requests, 1) * one, True, False))
    return Memory(tuple(p for p in parts if p.num_bytes), available, num_requests)


def activation_bytes(workload: Workload, keeps_weights: bool) -> Amount:
    """What a training forward keeps for its backward pass; attention weights on a CPU alone."""
    tokens, layers = workload.pack_tokens, workload.model.num_hidden_layers
    pairs = workload.replay_pairs / workload.replay_tokens * workload.model.num_attention_heads
    weights = min(tokens * pairs, MAX_KEPT_WEIGHTS) if keeps_weights else 0.0
    inside = tokens * layer_numbers_per_token(workload.model) + weights
    if workload.recompute_activations:
        kept = layers * tokens * 2 * workload.model.hidden_size + inside  # the inputs of a layer's halves
    else:
        kept = layers * inside
    return kept * workload.itemsize


def layer_numbers_per_token(model: ModelConfig) -> Amount:
    """Numbers that one layer keeps for each token without recomputation, beside attention weights.

    The stream before each norm and after it (4 hidden); queries and keys before their norm, where they have
    one, and rotated; values, and what attention returns; gate, up and their product. With experts, those,
    their silu and what the product is scaled to, and the rows around them, for each expert of the token.
    """
    heads, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    copies = 2 if model.family.has_qk_norm else 1
    attention = copies * (heads + kv) + kv + heads
    if model.moe is None:
        inner = 3 * model.intermediate_size
    else:
        inner = model.moe.num_experts_per_tok * (5 * model.moe.moe_intermediate_size + 3 * model.hidden_size)
    return 4 * model.hidden_size + attention + inner


def trained_layer_params(model: ModelConfig) -> Amount:
    """The largest unit that is gathered whole: a layer, or the embedding."""
    cost = ModelCost.of(model)
    head = cost.head_params
    outside = head * (1 if model.tie_word_embeddings else 2)
    return max((cost.num_params - outside) / cost.num_layers, head)
