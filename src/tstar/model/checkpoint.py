"""Model directories as the Hub has them: config.json, safetensors shards with an index, tokenizer files.

Reading never runs code of the directory and never unpickles. Weights are read one tensor at a time into
memory allocated once, so loading needs no second copy. Writing goes to a directory beside the target
that takes its name at the end: a reader sees the whole checkpoint or none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tstar import atomic
from tstar.errors import UserError
from tstar.model.config import ModelConfig
from tstar.model.moe import Experts
from tstar.model.transformer import LanguageModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that old checkpoints saved and nobody needs


# -- reading -----------------------------------------------------------------------------------


def load_config(directory: Path) -> ModelConfig:
    """The config of a model directory. An SDAR config without a mask token asks the tokenizer for it.

    End tokens are those of generation_config.json too, as in transformers' `generate`: chat models end their
    turn with one that config.json does not name (SDAR's and Qwen's <|im_end|>).
    """
    config = ModelConfig.from_hub(_read_json(_model_file(directory, "config.json")))
    config = _with_generation_ends(config, directory / "generation_config.json")
    if config.is_diffusion or config.model_type not in ("sdar", "sdar_moe"):
        return config
    from tstar.model.tokenizer import find_mask_token, load_tokenizer

    mask_token_id = find_mask_token(load_tokenizer(directory), config)
    if mask_token_id is None:
        raise UserError(
            f"{directory / 'config.json'}: mask_token_id is missing and the tokenizer names none; "
            "add it (SDAR's is 151669)"
        )
    return replace(config, mask_token_id=mask_token_id)


def _with_generation_ends(config: ModelConfig, path: Path) -> ModelConfig:
    named = _read_json(path).get("eos_token_id") if path.is_file() else None
    ends = named if isinstance(named, list) else [named]
    new = [end for end in ends if isinstance(end, int) and end not in config.eos_token_ids]
    return replace(config, eos_token_id=(*config.eos_token_ids, *new)) if new else config


def load_model(
    directory: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LanguageModel:
    """Build a model on meta and fill it from disk (dtype None: as stored)."""
    config = load_config(directory)
    shards = _find_shards(directory)
    with torch.device("meta"):
        model = LanguageModel(config)
    missing = dict(weight_slots(model))
    unexpected: list[str] = []
    for path, names in shards.items():
        with _open_shard(path) as shard:
            for name in sorted(shard.keys() if names is None else names):
                if name in missing:
                    _fill(model, missing.pop(name), name, _read_tensor(shard, path, name), dtype, device)
                elif not _is_redundant(model, name):
                    unexpected.append(name)
    _refuse_leftovers(directory, list(missing), unexpected)
    return model


def read_parameters(directory: Path, model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """A directory's weights for this model (which may be on meta), one whole parameter at a time, on the host
    and as stored: for those who keep a part of each and have no room for all of them."""
    slots: dict[str, list[tuple[str, WeightSlot]]] = {}
    for hub_name, slot in weight_slots(model):
        slots.setdefault(slot.parameter, []).append((hub_name, slot))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with ExitStack() as opened:
        home: dict[str, tuple[Any, Path]] = {}
        for path, names in _find_shards(directory).items():
            shard = opened.enter_context(_open_shard(path))
            home |= dict.fromkeys(shard.keys() if names is None else names, (shard, path))
        missing = [name for parts in slots.values() for name, _ in parts if name not in home]
        _refuse_leftovers(directory, missing, [])
        for parameter, parts in slots.items():
            first = _read_tensor(*home[parts[0][0]], parts[0][0])
            if len(parts) == 1:
                whole = first
            else:
                whole = torch.empty(shapes[parameter], dtype=first.dtype)
                for name, slot in parts:
                    whole[slot.index] = _read_tensor(*home[name], name)
            if whole.shape != shapes[parameter]:
                raise UserError(
                    f"{parameter}: the checkpoint has shape {list(whole.shape)}, config.json asks for "
                    f"{list(shapes[parameter])}; the two do not belong together"
                )
            yield parameter, whole


@dataclass(frozen=True)
class WeightSlot:
    """Where a tensor of a Hub checkpoint lives in the model."""

    parameter: str
    """Qualified name of the parameter."""
    index: tuple[int | slice, ...] = ()
    """The part of the parameter that it fills; () is all of it."""


def weight_slots(model: LanguageModel) -> Iterator[tuple[str, WeightSlot]]:
    """Hub name -> slot, for every tensor of the model. Names are equal but for stacked experts."""
    modules = dict(model.named_modules())
    for name, _ in model.named_parameters():
        prefix, _, last = name.rpartition(".")
        module = modules[prefix]
        if not isinstance(module, Experts):
            yield name, WeightSlot(name)
            continue
        num_experts, inner = module.gate_up_proj.shape[0], module.gate_up_proj.shape[1] // 2
        for expert in range(num_experts):
            if last == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", WeightSlot(name, (expert,))
            else:
                yield f"{prefix}.{expert}.gate_proj.weight", WeightSlot(name, (expert, slice(0, inner)))
                yield f"{prefix}.{expert}.up_proj.weight", WeightSlot(name, (expert, slice(inner, None)))


def _fill(
    model: LanguageModel,
    slot: WeightSlot,
    name: str,
    tensor: Tensor,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> None:
    """Copy one tensor into its parameter, allocating the parameter when its first part arrives."""
    prefix, _, last = slot.parameter.rpartition(".")
    module = model.get_submodule(prefix)
    parameter = getattr(module, last)
    if parameter.is_meta:
        real = torch.empty(parameter.shape, dtype=dtype or tensor.dtype, device=device)
        parameter = nn.Parameter(real, requires_grad=parameter.requires_grad)
        setattr(module, last, parameter)
    target = parameter.data[slot.index]
    if target.shape != tensor.shape:
        raise UserError(
            f"{name}: the checkpoint has shape {list(tensor.shape)}, config.json asks for "
            f"{list(target.shape)}; the two do not belong together"
        )
    target.copy_(tensor)


def _find_shards(directory: Path) -> dict[Path, list[str] | None]:
    """Shard -> the tensors to read from it (None: all it has)."""
    index_path = directory / INDEX_FILE
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index_path}: weight_map is missing or empty; download the file again")
        shards: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(f"{index_path}: weight_map: {name!r} points to {file!r}, no file beside it")
            names = shards.setdefault(directory / file, [])
            assert names is not None
            names.append(name)
        for path in shards:
            if not path.is_file():
                raise UserError(f"{path}: this shard is missing ({INDEX_FILE} names it); download it again")
        return shards
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: None}
    if any(directory.glob("*.bin")):
        raise UserError(
            f"{directory}: weights are pickled (*.bin), which is never opened; convert them to safetensors"
        )
    raise UserError(f"{directory}: no weights found; it needs {SINGLE_FILE} or {INDEX_FILE} with its shards")


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); download it again") from error


def _read_tensor(shard: Any, path: Path, name: str) -> Tensor:
    tensor: Tensor = shard.get_tensor(name)
    if not tensor.is_floating_point() or tensor.dtype not in DTYPES.values():
        raise UserError(
            f"{path}: {name} is stored as {tensor.dtype}; use weights in {', '.join(DTYPES)} "
            "(quantised checkpoints are not supported)"
        )
    # One pass over the data finds a NaN or infinity: it survives every sum.
    if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
        raise UserError(f"{path}: {name} holds NaN or infinite values; the checkpoint is damaged")
    return tensor


def _is_redundant(model: LanguageModel, name: str) -> bool:
    """Tensors that a checkpoint may carry though the model has no place for them."""
    return name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and model.config.tie_word_embeddings)


def _refuse_leftovers(directory: Path, missing: list[str], unexpected: list[str]) -> None:
    if missing:
        raise UserError(f"{directory}: {_some(missing)} missing from the weights; download them again")
    if unexpected:
        raise UserError(
            f"{directory}: {_some(unexpected)} in the weights, but config.json has no place for them; "
            "the two do not belong together"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more} {'is' if len(names) == 1 else 'are'}"


def _model_file(directory: Path, name: str) -> Path:
    if not directory.is_dir():
        raise UserError(
            f"{directory}: no such directory; give the path of a model directory (config.json, "
            "tokenizer, safetensors)"
        )
    if not (directory / name).is_file():
        raise UserError(f"{directory}: {name} is missing; this is no model directory")
    return directory / name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__} where an object is expected")
    return content


# -- writing -----------------------------------------------------------------------------------


def save_model(
    model: LanguageModel,
    directory: Path,
    *,
    carry_from: Path | None = None,
    code_from: Path | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a model directory that transformers, SGLang and LMDeploy load.

    carry_from: a model directory whose other files (tokenizer, chat template, generation config, licence
    and the model's own remote code) are copied over verbatim; none of them is executed.
    code_from: a model directory whose Python files and auto_map are taken in place of carry_from's.
    tokenizer: a transformers tokenizer, saved over the carried files.
    dtype: what the weights are written in; None keeps theirs.
    """
    if directory.exists() and not overwrite:
        raise UserError(f"{directory}: exists already; choose another path, or allow to overwrite it")
    try:
        with atomic.replacing(directory) as partial:
            _write_model(model, partial, carry_from, code_from, tokenizer, dtype, max_shard_bytes)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{directory}: could not be written ({reason}); nothing was changed") from error


def _write_model(
    model: LanguageModel,
    directory: Path,
    carry_from: Path | None,
    code_from: Path | None,
    tokenizer: Any,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    config = model.config.to_hub(str(dtype or model.dtype).removeprefix("torch."))
    carried: set[str] = set()
    if carry_from is not None:
        carried |= set(_carry_files(carry_from, directory))
    if code_from is not None:
        config["auto_map"] = _read_json(_model_file(code_from, "config.json")).get("auto_map")
        carried |= set(_carry_files(code_from, directory, suffix=".py"))
    _write_json(directory / "config.json", _without_absent_code(config, carried))
    if "generation_config.json" not in carried:
        _write_json(directory / "generation_config.json", _generation_config(model.config))
    if tokenizer is not None:
        from tstar.model.tokenizer import save_tokenizer

        save_tokenizer(tokenizer, directory)
    _write_shards(model, directory, dtype, max_shard_bytes)


def _carry_files(source: Path, target: Path, suffix: str = "") -> Iterator[str]:
    """Copy what is neither weights nor config: tokenizer, templates, remote code, licence."""
    for path in sorted(source.iterdir()):
        is_ours = path.name == "config.json" or path.name.startswith(".")
        is_weights = path.name.endswith(_WEIGHT_SUFFIXES) or path.name.endswith(".index.json")
        if path.is_file() and path.name.endswith(suffix) and not is_weights and not is_ours:
            shutil.copyfile(path, target / path.name)
            yield path.name


def _without_absent_code(config: dict[str, Any], carried: set[str]) -> dict[str, Any]:
    """Drop auto_map entries whose module is not in the directory: they would only break loading."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return config

    def is_there(reference: object) -> bool:
        return isinstance(reference, str) and (
            "--" in reference or f"{reference.split('.')[0]}.py" in carried
        )

    kept = {key: reference for key, reference in auto_map.items() if is_there(reference)}
    rest = {key: value for key, value in config.items() if key != "auto_map"}
    return rest | {"auto_map": kept} if kept else rest


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    eos = list(config.eos_token_ids)
    ids["eos_token_id"] = (eos[0] if len(eos) == 1 else eos) if eos else None  # type: ignore[assignment]
    return {name: value for name, value in ids.items() if value is not None}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(
    model: LanguageModel, directory: Path, dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    parameters = dict(model.named_parameters())
    slots = dict(weight_slots(model))
    sizes = {
        name: parameters[slot.parameter].data[slot.index].numel()
        * (dtype or parameters[slot.parameter].dtype).itemsize
        for name, slot in slots.items()
    }
    shards = _split_by_size(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: parameters[slots[name].parameter].data[slots[name].index].to("cpu", dtype).contiguous()
            for name in names
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        # safetensors keeps its files to their owner; a model is for whoever may read the rest of it.
        (directory / file).chmod((directory / "config.json").stat().st_mode & 0o777)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(directory / INDEX_FILE, index)


def _split_by_size(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Consecutive tensors into shards of at most max_bytes; a larger tensor has a shard of its own."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards
