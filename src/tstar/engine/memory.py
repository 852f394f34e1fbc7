"""How the engine's memory is spent: logits and activations of one forward, and pages with the rest."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from tstar.cgroup import read_limits
from tstar.engine.request import EngineConfig
from tstar.errors import UserError
from tstar.model.attention.padded import padded_limits
from tstar.model.attention.store import GatherLimits, KVStore, gather_limits
from tstar.model.config import ModelConfig

BYTES_PER_LOGIT = 32
"""A logit, its exponential in fp32, and what sorting and filtering copy."""
MAX_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Logits of one portion: full matmul speed, and on the CPU not much more than its cache."""
GRAPHS_BY_DEFAULT = {"cuda"}
"""Kinds of devices on which short forwards come in fixed shapes unless an engine is told otherwise."""
MAX_PADDED_TOKENS = 1024
"""Of a forward in a fixed shape: beyond that a GPU is busy enough for launches not to matter."""
MAX_GRAPH_BYTES = 512 << 20
"""What recorded forwards may take beside what they compute in."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a budget is good for."""

    budget: int
    """Bytes in all."""
    max_logits: int
    """Logits of one portion."""
    max_forward_tokens: int
    num_pages: int
    limits: GatherLimits
    """Of what attention gathers at once."""
    max_padded_tokens: int
    """Of a forward in a fixed shape; 0: there are none."""
    graph_bytes: int
    """What recorded forwards may take in all."""

    @classmethod
    def of(
        cls, settings: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> MemoryPlan:
        budget = (
            settings.memory if isinstance(settings.memory, int) else int(settings.memory * free_bytes(device))
        )
        rows = max(1, budget // 8 // (model.vocab_size * BYTES_PER_LOGIT))
        max_logits = min(MAX_LOGITS.get(device.type, MAX_LOGITS["cuda"]), rows * model.vocab_size)
        max_logits = max(max_logits, model.vocab_size)
        per_token = activation_bytes_per_token(model, dtype)
        limits = gather_limits(device, budget // 8 // dtype.itemsize)
        max_padded_tokens, graph_bytes = 0, 0
        if can_pad(settings, model, dtype, device):
            max_padded_tokens = min(MAX_PADDED_TOKENS, max(1, budget // 16 // per_token))
            graph_bytes = padded_bytes(settings, model, dtype, limits) + max_padded_tokens * per_token
            graph_bytes += min(MAX_GRAPH_BYTES, budget // 16)
        fixed = max_logits * BYTES_PER_LOGIT + attention_bytes(model, dtype, limits) + graph_bytes
        num_tokens = min(settings.max_forward_tokens, max(0, budget - fixed) // 4 // per_token)
        page_bytes = settings.page_size * KVStore.num_bytes_per_token(model, dtype)
        num_pages = (budget - fixed - num_tokens * per_token) // page_bytes - 1  # the scratch page
        if num_pages < 1 or num_tokens < 1:
            raise UserError(
                f"memory: {budget:,} bytes hold no keys and values beside {fixed:,} for logits and attention "
                f"and {per_token:,} for each token of a forward; give more"
            )
        most_useful = settings.max_requests * -(-model.max_position_embeddings // settings.page_size)
        num_pages = min(num_pages, most_useful)
        return cls(budget, max_logits, num_tokens, num_pages, limits, max_padded_tokens, graph_bytes)


def attention_bytes(model: ModelConfig, dtype: torch.dtype, limits: GatherLimits) -> int:
    """What one layer's attention holds at once: gathered keys and values, scores and their softmax."""
    longest_context = model.max_position_embeddings * 5 // 4  # as it is padded
    gathered = max(limits.gathered, longest_context * model.num_key_value_heads * model.head_dim)
    return 2 * (gathered + limits.scores) * dtype.itemsize


def can_pad(settings: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether short forwards come in fixed shapes: where it is wanted, and where a GPU can record them."""
    is_wanted = device.type in GRAPHS_BY_DEFAULT if settings.graphs is None else settings.graphs
    if not is_wanted or model.moe is None or device.type != "cuda":
        return is_wanted
    # Elsewhere torch's grouped matmul asks the device how many rows each expert has.
    can_record = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] == 9
    if settings.graphs and not can_record:
        raise UserError(
            f"graphs: mixtures of experts in {str(dtype).removeprefix('torch.')} cannot be recorded on this "
            "GPU (only in bfloat16 on Hopper); leave it out"
        )
    return can_record


def padded_bytes(settings: EngineConfig, model: ModelConfig, dtype: torch.dtype, limits: GatherLimits) -> int:
    """The same of a forward in a fixed shape, whose memory nothing else may use: and the bias of all its
    rows, and its inputs, which are pages for the most part."""
    limits = padded_limits(limits)
    computed = 2 * (limits.gathered + 2 * limits.scores) * dtype.itemsize
    return computed + max_inputs(settings, model, limits) * torch.int64.itemsize


def max_inputs(settings: EngineConfig, model: ModelConfig, limits: GatherLimits) -> int:
    """Numbers that a forward in a fixed shape is described by: its tokens and its page table."""
    longest_context = model.max_position_embeddings * 3 // 2 + settings.page_size
    num_pages = min(settings.max_requests * 3 // 2 * longest_context, limits.scores) // settings.page_size
    return 4 * MAX_PADDED_TOKENS + num_pages


def activation_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """What a forward holds at once for each of its tokens: the residual stream in and out, projections and
    the rotated copies of queries and keys, or the two halves of the MLP and their product."""
    heads = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    inner = model.intermediate_size
    if model.moe is not None:
        inner = max(
            inner, model.moe.num_experts_per_tok * (model.moe.moe_intermediate_size + model.hidden_size)
        )
    return dtype.itemsize * (4 * model.hidden_size + max(6 * heads, 4 * inner))


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses, under the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit = read_limits().free_memory_bytes
    return free if limit is None else min(free, limit)
