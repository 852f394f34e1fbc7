"""Adapters: nothing at first, trained alone, taken off, merged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiny_models import make_model
from tstar.errors import UserError
from tstar.lora import LoraConfig, add_lora, has_lora, merged_copy, without_lora
from tstar.model.attention import prepare
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel

pytest.importorskip("peft")

CONFIG = LoraConfig(rank=4, alpha=8.0)


def hidden_of(model: LanguageModel) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(40), prepare(PackedLayout.causal([40])))


def adapted_model(seed: int = 0, is_trained: bool = True) -> LanguageModel:
    model = make_model("sdar")
    add_lora(model, CONFIG, seed)
    if is_trained:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.1, generator=generator)
    return model


def test_new_adapters_change_nothing_and_are_all_that_is_trained() -> None:
    model = adapted_model(is_trained=False)
    torch.testing.assert_close(hidden_of(model), hidden_of(make_model("sdar")), rtol=0, atol=0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 3 * 7 * 2
    assert all("lora_" in name for name in trained)


def test_adapters_start_from_their_seed_alone() -> None:
    torch.manual_seed(5)
    one = dict(adapted_model(3, is_trained=False).named_parameters())
    torch.manual_seed(6)
    two = dict(adapted_model(3, is_trained=False).named_parameters())
    other = dict(adapted_model(4, is_trained=False).named_parameters())
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not torch.equal(one[name], other[name])


def test_without_adapters_it_is_the_base_model() -> None:
    model = adapted_model()
    adapted = hidden_of(model)
    with without_lora(model) as base:
        torch.testing.assert_close(hidden_of(base), hidden_of(make_model("sdar")), rtol=0, atol=0)
    assert (adapted - hidden_of(make_model("sdar"))).abs().max() > 0.1
    torch.testing.assert_close(hidden_of(model), adapted, rtol=0, atol=0)
    with pytest.raises(ValueError, match="it has no adapters"), without_lora(make_model("sdar")):
        pass


def test_the_merged_copy_computes_the_same_and_shares_what_is_frozen() -> None:
    model = adapted_model()
    merged = merged_copy(model)
    torch.testing.assert_close(hidden_of(merged), hidden_of(model), rtol=1e-4, atol=1e-5)
    assert has_lora(model)
    assert not has_lora(merged)
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in make_model("sdar").named_parameters()]
    assert merged.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "lora.rank: 0 is no rank"),
        ({"alpha": 0.0}, "lora.alpha: 0.0 cannot be used"),
        ({"target_modules": ("lm_head",)}, r"lora.target_modules: \['lm_head'\] cannot be adapted"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LoraConfig(**changes)  # type: ignore[arg-type]
