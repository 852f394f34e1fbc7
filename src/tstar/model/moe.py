"""Mixture of experts as Qwen3-MoE and SDAR-MoE have it: top-k of a softmax router, SwiGLU experts.

An expert's weights are slices of stacked tensors, so that one grouped matmul (CUDA) or one loop over the
experts in use (CPU) serves all; checkpoints hold them one by one, under the Hub's names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from tstar.model.config import ModelConfig
from tstar.model.linear import Linear, linear


class SparseMlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.gate = Linear(config.hidden_size, config.moe.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        probabilities = torch.softmax(self.gate(hidden), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.moe.num_experts_per_tok, dim=-1)
        if self.moe.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        out: Tensor = self.experts(hidden, chosen, weights.to(hidden.dtype))
        return out


class Experts(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        num, inner, hidden = (
            config.moe.num_experts,
            config.moe.moe_intermediate_size,
            config.hidden_size,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * inner, hidden))
        """Gate rows, then up rows."""
        self.down_proj = nn.Parameter(torch.empty(num, hidden, inner))

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        chosen: Int64[Tensor, "tokens top_k"],
        weights: Float[Tensor, "tokens top_k"],
    ) -> Float[Tensor, "tokens hidden"]:
        """Sort (token, choice) pairs by expert, run each expert on its run of rows, add back up."""
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        # bincount would ask the device for the largest number, and a recorded forward cannot.
        counts = torch.zeros(len(self.gate_up_proj), dtype=torch.int64, device=hidden.device)
        counts.index_add_(0, chosen.flatten(), torch.ones_like(order))
        rows = hidden.index_select(0, tokens)
        if hidden.is_cuda:
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
            rows = F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        else:
            rows = self._one_by_one(rows, counts)
        rows = rows * weights.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(hidden).index_add(0, tokens, rows)

    def _one_by_one(
        self, rows: Float[Tensor, "rows hidden"], counts: Int64[Tensor, " experts"]
    ) -> Float[Tensor, "rows hidden"]:
        outputs = []
        for expert, own in enumerate(torch.split(rows, counts.tolist())):
            if len(own):
                gate, up = linear(own, self.gate_up_proj[expert]).chunk(2, -1)
                outputs.append(linear(F.silu(gate) * up, self.down_proj[expert]))
        return torch.cat(outputs)
