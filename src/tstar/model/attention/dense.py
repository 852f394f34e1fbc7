"""SDPA over the dense mask: the oracle of every other backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tstar.model.layout import PackedLayout


class DenseAttention:
    def __init__(self, layout: PackedLayout, device: torch.device | str) -> None:
        self.positions = torch.from_numpy(layout.positions).to(device)
        self._mask = torch.from_numpy(layout.dense_mask()).to(device)

    def attend(
        self,
        layer: int,  # noqa: ARG002  (part of the signature; only a KV store needs it)
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=self._mask,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)
