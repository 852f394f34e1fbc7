"""config.json in and out, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tiny_models import EXPERTS, SIZES
from tstar.errors import UserError
from tstar.model.config import FAMILIES, ModelConfig

GOOD: dict[str, Any] = {**SIZES, "model_type": "sdar", "head_dim": 8, "mask_token_id": 96, "block_size": 4}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_written_reads_back_equal(model_type: str) -> None:
    source = {**GOOD, "model_type": model_type, "hidden_size": 48, "my_note": [1, 2]}
    if FAMILIES[model_type].is_moe:
        source |= EXPERTS
    config = ModelConfig.from_hub(source)
    assert ModelConfig.from_hub(json.loads(json.dumps(config.to_hub("float32")))) == config
    assert config.to_hub("float32")["my_note"] == [1, 2]
    assert config.to_hub("bfloat16")["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("file", ["config.1dot7B.json", "config.4B.json"])
def test_published_sdar_configs_come_back_word_for_word(shared: Path, file: str) -> None:
    published = json.loads((shared / "tokenizers" / "sdar" / file).read_text())
    config = ModelConfig.from_hub(published)
    assert config.is_diffusion
    assert (config.vocab_size, config.mask_token_id, config.block_size) == (151_936, 151_669, 4)
    written = config.to_hub("bfloat16")
    assert {key: written[key] for key in published} == published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "sdarr"}, r"model_type: 'sdarr' is not supported \(did you mean 'sdar'\?\)"),
        ({"model_type": None}, "model_type: None is not supported"),
        ({"hidden_size": None}, "hidden_size is missing; a sdar model needs it"),
        ({"hidden_size": "32"}, "hidden_size: '32' is not a whole number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: .false. is neither true nor false"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 cannot be used; use 1 or more"),
        ({"head_dim": 7}, "head_dim: 7 cannot be used; RoPE needs an even number"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4 cannot be used; it must divide"),
        ({"mask_token_id": 97}, "mask_token_id: 97 cannot be used; it must lie inside the vocabulary of 97"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' cannot be used; only 'silu' is supported"),
        ({"use_sliding_window": True}, "use_sliding_window: sliding-window layers are not supported"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window layers are not supported"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling: type 'yarn' is not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: None is not a positive number"),
        ({"rope_scaling": [4.0]}, "rope_scaling: .* is not a table"),
        ({"model_type": "sdar_moe"}, "num_experts is missing; a sdar_moe model needs it"),
        ({"model_type": "sdar_moe", **EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok: 9 cannot"),
        ({"model_type": "llama", "pretraining_tp": 2}, "pretraining_tp: 2 is not supported"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        ModelConfig.from_hub({**GOOD, **changes})
    assert "\n" not in str(refusal.value)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("name", [*ModelConfig.from_hub(GOOD).to_hub("float32"), *EXPERTS, "layer_types"])
@pytest.mark.parametrize("junk", ["x", -1, 1.5, math.nan, True, [], {}, [1.5], {"a": 1}], ids=repr)
def test_junk_is_refused_in_one_line_or_means_nothing(name: str, junk: Any) -> None:
    """No traceback for any key: what is read can be written, hashed and compared."""
    refusal = None
    try:
        config = ModelConfig.from_hub({**GOOD, "model_type": "sdar_moe", **EXPERTS, name: junk})
    except UserError as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.startswith("config.json: ")
        assert name.removesuffix("_scaling") in refusal
        assert "\n" not in refusal
        return
    hash(config)
    assert ModelConfig.from_hub(config.to_hub("float32")) == config
    assert all(isinstance(end, int) for end in config.eos_token_ids)


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("junk", ["x", [], {}, True], ids=repr)
def test_junk_in_a_rope_scaling_is_refused_by_name(name: str, junk: Any) -> None:
    with pytest.raises(UserError, match=f"rope_scaling: {name}: "):
        ModelConfig.from_hub({**GOOD, "rope_scaling": {**LLAMA3, name: junk}})


def test_rope_is_read_in_both_spellings() -> None:
    old = ModelConfig.from_hub({**GOOD, "rope_theta": 5e5, "rope_scaling": None})
    new = ModelConfig.from_hub({**GOOD, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert old.rope_theta == new.rope_theta == 5e5
    assert old == new


def test_qwen3_becomes_sdar_and_llama_stays_llama() -> None:
    qwen = ModelConfig.from_hub({**GOOD, "model_type": "qwen3", "mask_token_id": None})
    assert not qwen.is_diffusion
    diffusion = qwen.as_diffusion(mask_token_id=5, block_size=8)
    assert (diffusion.model_type, diffusion.mask_token_id, diffusion.block_size) == ("sdar", 5, 8)
    llama = ModelConfig.from_hub({**GOOD, "model_type": "llama", "mask_token_id": None})
    assert llama.as_diffusion(mask_token_id=5).model_type == "llama"


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (3, (3,)), ([3, 4], (3, 4))])
def test_eos_may_be_absent_one_or_several(eos: Any, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_hub({**GOOD, "eos_token_id": eos}).eos_token_ids == ids
