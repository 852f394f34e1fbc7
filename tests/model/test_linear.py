"""The product with a weight, whichever way it is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tstar.model import linear as module
from tstar.model.linear import Linear, linear

# Rows, inputs, outputs, and the rows of the product that is asked for the other way round, if it is.
SHAPES = [
    (1, 512, 256, 2),
    (1, 1536, 128, 2),
    (1, 1537, 128, None),
    (2, 512, 256, 2),
    (8, 512, 256, 8),
    (8, 768, 256, 8),
    (8, 769, 256, None),
    (9, 512, 256, None),
    (3, 512, 255, None),
    (3, 8, 1 << 14, 3),
    (0, 512, 256, None),
    (64, 512, 256, None),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product asked for the other way round."""
    monkeypatch.setattr(module, "_HAS_MKL", True)
    found: list[int] = []

    def mm(a: torch.Tensor, b: torch.Tensor, mm: object = torch.mm) -> torch.Tensor:
        found.append(b.shape[1])
        return mm(a, b)  # type: ignore[operator]

    monkeypatch.setattr(module.torch, "mm", mm)
    return found


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs", "rows_asked"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_every_number_of_rows_gives_torchs_product(
    calls: list[int], num_rows: int, num_inputs: int, num_outputs: int, rows_asked: int | None, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    out = linear(x, weight, bias)
    assert calls == ([] if rows_asked is None else [rows_asked])
    assert out.is_contiguous()
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(out.double(), wide, rtol=1e-4, atol=1e-4)


def test_few_rows_take_the_other_way_round_only_without_gradient(calls: list[int]) -> None:
    layer = Linear(512, 256)
    x = torch.randn(3, 512)
    layer(x).sum().backward()
    assert calls == []
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer(x), layer(x[:1]), layer(x.expand(7, 3, 512)), layer.double()(x.double())
    assert calls == [3, 2]


def test_without_mkl_every_product_is_torchs(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HAS_MKL", False)
    with torch.no_grad():
        Linear(512, 256)(torch.randn(3, 512))
    assert calls == []
