"""A model's shape, read from and written to the Hub's ``config.json``.

One transformer serves every family; what distinguishes them is a row of `FAMILIES`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from tstar.errors import UserError


@dataclass(frozen=True)
class Family:
    """What a ``model_type`` fixes that its ``config.json`` does not say."""

    architecture: str
    """The class name under ``architectures``, by which other tools pick their code."""
    has_qk_norm: bool
    qkv_bias: bool | None = None
    """None: as ``attention_bias`` says."""
    output_bias: bool | None = None
    """Bias of the attention's output projection. None: as ``attention_bias`` says."""
    is_moe: bool = False
    diffusion_type: str | None = None
    """The ``model_type`` this family's weights take once they denoise blocks (None: it stays)."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "sdar": Family("SDARForCausalLM", has_qk_norm=True),
        "sdar_moe": Family("SDARMoeForCausalLM", has_qk_norm=True, is_moe=True),
        "qwen3": Family("Qwen3ForCausalLM", has_qk_norm=True, diffusion_type="sdar"),
        "qwen3_moe": Family("Qwen3MoeForCausalLM", has_qk_norm=True, is_moe=True, diffusion_type="sdar_moe"),
        "qwen2": Family("Qwen2ForCausalLM", has_qk_norm=False, qkv_bias=True, output_bias=False),
        "llama": Family("LlamaForCausalLM", has_qk_norm=False),
    }
)


@dataclass(frozen=True)
class RopeScaling:
    """A change to RoPE's inverse frequencies that needs nothing but the position."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class MoeConfig:
    """The mixture-of-experts part of a Qwen3-MoE / SDAR-MoE config."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def is_sparse_layer(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. Field names are the Hub's where the Hub has one."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    moe: MoeConfig | None = None
    initializer_range: float = 0.02
    mask_token_id: int | None = None
    """Set: a block-diffusion model, a masked position predicts its own token. None: an AR model."""
    block_size: int | None = None
    """The block size the weights were last trained at; information, never a setting."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of the source's ``config.json`` that mean nothing here, kept for what is written from it."""

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise UserError(_unknown_model_type(self.model_type))
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        for name in (*sizes, "num_attention_heads", "num_key_value_heads"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "RoPE needs an even number")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"it must divide num_attention_heads = {self.num_attention_heads}",
        )
        if self.mask_token_id is not None:
            _require(
                0 <= self.mask_token_id < self.vocab_size,
                "mask_token_id",
                self.mask_token_id,
                f"it must lie inside the vocabulary of {self.vocab_size}",
            )
        _require(
            (self.moe is not None) == self.family.is_moe,
            "num_experts",
            None if self.moe is None else self.moe.num_experts,
            f"model_type {self.model_type!r} {'needs' if self.family.is_moe else 'has no'} experts",
        )
        if self.moe is not None:
            for name in ("moe_intermediate_size", "decoder_sparse_step"):
                _require(getattr(self.moe, name) >= 1, name, getattr(self.moe, name), "use 1 or more")
            _require(
                1 <= self.moe.num_experts_per_tok <= self.moe.num_experts,
                "num_experts_per_tok",
                self.moe.num_experts_per_tok,
                f"use 1 to num_experts = {self.moe.num_experts}",
            )

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def is_diffusion(self) -> bool:
        """True: masked positions predict their own token; False: every position the next one."""
        return self.mask_token_id is not None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def as_diffusion(self, mask_token_id: int, block_size: int | None = None) -> ModelConfig:
        """The same weights as a block-diffusion model (Qwen3 becomes SDAR, which has its shape)."""
        return replace(
            self,
            model_type=self.family.diffusion_type or self.model_type,
            mask_token_id=mask_token_id,
            block_size=block_size,
        )

    # -- config.json ---------------------------------------------------------------------------

    @classmethod
    def from_hub(cls, source: Mapping[str, Any]) -> ModelConfig:
        """Read a ``config.json``; what cannot be computed exactly is refused, never approximated."""
        model_type = source.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise UserError(_unknown_model_type(model_type))
        family = FAMILIES[model_type]
        _refuse_unsupported(source)
        hidden_size = _whole(source, "hidden_size")
        num_heads = _whole(source, "num_attention_heads")
        attention_bias = _flag(source, "attention_bias")
        rope_theta, rope_scaling = _read_rope(source)
        return cls(
            model_type=model_type,
            vocab_size=_whole(source, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_whole(source, "intermediate_size"),
            num_hidden_layers=_whole(source, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=_whole(source, "num_key_value_heads", default=num_heads),
            head_dim=_whole(source, "head_dim", default=hidden_size // max(num_heads, 1)),
            rms_norm_eps=_positive(source, "rms_norm_eps", default=1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_whole(source, "max_position_embeddings", default=32_768),
            tie_word_embeddings=_flag(source, "tie_word_embeddings"),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=model_type == "llama" and _flag(source, "mlp_bias"),
            moe=_read_moe(source) if family.is_moe else None,
            initializer_range=_positive(source, "initializer_range", default=0.02),
            mask_token_id=_whole_or_none(source, "mask_token_id"),
            block_size=_whole_or_none(source, "block_size"),
            bos_token_id=_whole_or_none(source, "bos_token_id"),
            eos_token_id=_read_ends(source),
            pad_token_id=_whole_or_none(source, "pad_token_id"),
            extra={key: value for key, value in source.items() if key not in _OWN_KEYS},
        )

    def to_hub(self, torch_dtype: str) -> dict[str, Any]:
        """The ``config.json`` of these weights: ours over what the source had besides."""
        own: dict[str, Any] = {
            "architectures": [self.family.architecture],
            "model_type": self.model_type,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id)
            if isinstance(self.eos_token_id, tuple)
            else self.eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": self.pad_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": _write_rope_scaling(self.rope_scaling),
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": torch_dtype,
            "vocab_size": self.vocab_size,
        }
        if self.family.qkv_bias is None:
            own["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            own["mlp_bias"] = self.mlp_bias
        if self.moe is not None:
            own |= {
                "num_experts": self.moe.num_experts,
                "num_experts_per_tok": self.moe.num_experts_per_tok,
                "moe_intermediate_size": self.moe.moe_intermediate_size,
                "norm_topk_prob": self.moe.norm_topk_prob,
                "decoder_sparse_step": self.moe.decoder_sparse_step,
                "mlp_only_layers": list(self.moe.mlp_only_layers),
            }
        for name in ("mask_token_id", "block_size"):
            if getattr(self, name) is not None:
                own[name] = getattr(self, name)
        return {**self.extra, **own}


# Keys that `to_hub` writes itself (or replaces by a newer or older spelling of the same thing).
_OWN_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "attention_bias",
        "bos_token_id",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_scaling",
        "rope_theta",
        "rope_parameters",
        "tie_word_embeddings",
        "torch_dtype",
        "dtype",
        "vocab_size",
        "mlp_bias",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "mask_token_id",
        "block_size",
    }
)


def _refuse_unsupported(source: Mapping[str, Any]) -> None:
    activation = source.get("hidden_act", "silu")
    _require(activation == "silu", "hidden_act", activation, "only 'silu' is supported")
    if _flag(source, "use_sliding_window") or "sliding_attention" in _listed(source, "layer_types"):
        raise UserError(
            "config.json: use_sliding_window: sliding-window layers are not supported; "
            "use a checkpoint whose layers all see the whole context"
        )
    if source.get("model_type") == "llama" and source.get("pretraining_tp", 1) != 1:
        raise UserError(
            f"config.json: pretraining_tp: {source['pretraining_tp']} is not supported; set it to 1"
        )


def _read_rope(source: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """RoPE's base and scaling from either spelling: transformers 4's two keys or 5's one."""
    parameters = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise UserError(f"config.json: rope_scaling: {parameters!r} is not a table of parameters")
    holder = parameters if parameters.get("rope_theta") is not None else source
    theta = _positive(holder, "rope_theta", default=10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise UserError(
            f"config.json: rope_scaling: type {kind!r} is not supported; "
            "use a checkpoint with 'default', 'linear' or 'llama3'"
        )
    if kind == "linear":
        return theta, RopeScaling("linear", _positive(parameters, "factor", of="rope_scaling: "))
    return theta, RopeScaling(
        "llama3",
        factor=_positive(parameters, "factor", of="rope_scaling: "),
        low_freq_factor=_positive(parameters, "low_freq_factor", default=1.0, of="rope_scaling: "),
        high_freq_factor=_positive(parameters, "high_freq_factor", default=4.0, of="rope_scaling: "),
        original_max_position_embeddings=_whole(
            parameters, "original_max_position_embeddings", default=8192, of="rope_scaling: "
        ),
    )


def _write_rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }


def _read_moe(source: Mapping[str, Any]) -> MoeConfig:
    # transformers 5 writes the number of experts under another name than 4 did.
    spelling = "num_local_experts" if "num_local_experts" in source else "num_experts"
    return MoeConfig(
        num_experts=_whole(source, spelling),
        num_experts_per_tok=_whole(source, "num_experts_per_tok"),
        moe_intermediate_size=_whole(source, "moe_intermediate_size"),
        norm_topk_prob=_flag(source, "norm_topk_prob"),
        decoder_sparse_step=_whole(source, "decoder_sparse_step", default=1),
        mlp_only_layers=tuple(_listed(source, "mlp_only_layers")),
    )


def _whole(source: Mapping[str, Any], name: str, default: int | None = None, of: str = "") -> int:
    value = source.get(name)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"config.json: {of}{name} is missing; a {source.get('model_type')} model needs it")
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"config.json: {of}{name}: {value!r} is not a whole number")
    return value


def _whole_or_none(source: Mapping[str, Any], name: str) -> int | None:
    return None if source.get(name) is None else _whole(source, name)


def _positive(source: Mapping[str, Any], name: str, default: float | None = None, of: str = "") -> float:
    value = source.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"config.json: {of}{name}: {value!r} is not a positive number")
    return float(value)


def _flag(source: Mapping[str, Any], name: str) -> bool:
    value = source.get(name)
    if not isinstance(value, bool | None):
        raise UserError(f"config.json: {name}: {value!r} is neither true nor false")
    return bool(value)


def _listed(source: Mapping[str, Any], name: str) -> list[Any]:
    value = source.get(name)
    if not isinstance(value, list | None):
        raise UserError(f"config.json: {name}: {value!r} is not a list")
    return value or []


def _read_ends(source: Mapping[str, Any]) -> int | tuple[int, ...] | None:
    """One end token, several, or none."""
    name = "eos_token_id"
    if not isinstance(source.get(name), list):
        return _whole_or_none(source, name)
    return tuple(_whole({name: end}, name) for end in source[name])


def _require(holds: bool, name: str, value: object, fix: str) -> None:
    if not holds:
        raise UserError(f"config.json: {name}: {value!r} cannot be used; {fix}")


def _unknown_model_type(model_type: object) -> str:
    near = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"config.json: model_type: {model_type!r} is not supported{hint}; use one of {', '.join(FAMILIES)}"
