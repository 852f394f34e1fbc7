"""The product with a weight, whichever way it is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tstar.model import linear as module
from tstar.model.linear import Linear, linear

SHAPES = [
    (1, 8),
    (2, 8),
    (3, 512),
    (10, 614),
    (11, 8),
    (4, 1536),
    (4, 1537),
    (1, 1536),
    (1, 1537),
    (0, 8),
    (64, 128),
]


@pytest.mark.parametrize(("num_rows", "num_inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_every_number_of_rows_gives_torchs_product(num_rows: int, num_inputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(24, num_inputs, generator=generator)
    bias = torch.randn(24, generator=generator) if has_bias else None
    out = linear(x, weight, bias)
    assert out.is_contiguous()
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(out.double(), wide, rtol=1e-4, atol=1e-4)


def test_few_rows_take_the_other_way_round_only_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(module.torch, "mm", lambda a, b, mm=torch.mm: (calls.append(b.shape[1]), mm(a, b))[1])
    layer = Linear(16, 4)
    x = torch.randn(3, 16)
    layer(x).sum().backward()
    assert calls == []
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer(x), layer(x[:1]), layer(x.expand(7, 3, 16)), layer.double()(x.double())
    assert calls == [3, 2]
