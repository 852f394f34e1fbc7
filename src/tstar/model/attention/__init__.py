"""Attention backends behind one signature: prepared once per forward, called once per layer.

- ``sdpa``: torch's scaled_dot_product_attention over the dense mask. Exact, plain, quadratic: the oracle.
- ``tiled``: tiles of queries against just the keys they see, on torch's matmul kernels. The CPU's path.
- ``flex``: FlexAttention with a BlockMask made by index arithmetic. CUDA's path.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tstar.model.layout import PackedLayout

Backend = Literal["sdpa", "tiled", "flex"]


@runtime_checkable
class Attention(Protocol):
    """Who sees whom in one forward, ready to be computed: what a model's forward is given."""

    positions: Int64[Tensor, " tokens"]
    """Position of each token in its sequence, on the model's device."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Softmax attention of one layer; each group of heads shares a key/value head."""
        ...


def choose_backend(device: torch.device | str) -> tuple[Backend, str]:
    """The backend that a device's packed forward uses, and why."""
    kind = torch.device(device).type
    if kind == "cuda":
        return "flex", "FlexAttention skips what nobody sees, with its mask in index arithmetic"
    if kind == "cpu":
        return "tiled", (
            "only visible tiles of scores, on the matmul kernels; "
            "FlexAttention has no CPU backward, dense SDPA computes pairs nobody sees"
        )
    return (
        "sdpa",
        f"no kernel of our own choice on {kind}: SDPA over the dense mask works everywhere",
    )


def prepare(
    layout: PackedLayout, device: torch.device | str = "cpu", backend: Backend | None = None
) -> Attention:
    """Make a layout ready for one or many forwards on a device (backend None: the device's own)."""
    match backend or choose_backend(device)[0]:
        case "sdpa":
            from tstar.model.attention.dense import DenseAttention

            return DenseAttention(layout, device)
        case "tiled":
            from tstar.model.attention.tiled import TiledAttention

            return TiledAttention(layout, device)
        case "flex":
            from tstar.model.attention.flex import FlexAttention

            return FlexAttention(layout, device)
