"""Tokenizers, chat templates and the mask token, through transformers' fast tokenizers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from tstar.errors import UserError
from tstar.model.config import FAMILIES, ModelConfig
from tstar.model.transformer import LanguageModel

if TYPE_CHECKING:
    import transformers  # slow to import: at run time only the functions that need it do

MASK_TOKEN = "<|MASK|>"  # noqa: S105  (a token of text)
"""SDAR's spelling; what an AR model's mask token is called here too."""

_TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILE = "tokenizer_config.json"
_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


# -- files -------------------------------------------------------------------------------------


def load_tokenizer(directory: Path) -> transformers.PreTrainedTokenizerBase:
    """The fast tokenizer of a local directory: exactly its ``tokenizer.json``, no code, no network.

    Not through ``AutoTokenizer``: that picks a class by ``tokenizer_class``, ``auto_map`` and the model's
    type, which may ask for remote code and, in transformers 5, rebuilds the pipeline from the class
    instead of reading it.
    """
    _check_tokenizer_files(directory)
    from transformers import PreTrainedTokenizerFast

    try:
        with _class_notice_hidden():
            tokenizer: transformers.PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
                str(directory),
                local_files_only=True,
                trust_remote_code=False,
                # No decoder here has token types, and `generate` refuses what its model does not take.
                model_input_names=["input_ids", "attention_mask"],
            )
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"tokenizer: {directory}: {_first_line(error)}; "
            f"repair {_SETTINGS_FILE} or copy the tokenizer's files again"
        ) from error
    return tokenizer


def save_tokenizer(tokenizer: transformers.PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a tokenizer so that transformers 4 and 5 (hence SGLang, LMDeploy, ...) load it alike.

    transformers 5 writes a class name and a list under ``extra_special_tokens`` on which 4 fails, and
    keeps an ``auto_map`` that names code which need not be there.
    """
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    path = directory / _SETTINGS_FILE
    settings = _read_json(path)
    for name in ("auto_map", "backend", "is_local", "local_files_only", "tokenizer_object"):
        settings.pop(name, None)
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _check_tokenizer_files(directory: Path) -> None:
    from tokenizers import Tokenizer

    if not directory.is_dir():
        raise UserError(f"tokenizer: {directory} is no directory; give one that holds {_TOKENIZER_FILE}")
    path = directory / _TOKENIZER_FILE
    if not path.is_file():
        slow = [name for name in _SLOW_FILES if (directory / name).is_file()]
        why = f"only a slow tokenizer ({', '.join(slow)})" if slow else f"no {_TOKENIZER_FILE}"
        raise UserError(
            f"tokenizer: {directory} holds {why}; write {_TOKENIZER_FILE} there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises nothing narrower
        raise UserError(
            f"tokenizer: {path} cannot be read ({_first_line(error)}); copy the file again"
        ) from error
    settings = directory / _SETTINGS_FILE
    if settings.exists():
        _check_special_tokens(settings, _read_json(settings))


def _check_special_tokens(path: Path, settings: Mapping[str, Any]) -> None:
    """transformers 4 answers such a mistake by asking for the protobuf package."""
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token"):
        if not isinstance(settings.get(name), str | Mapping | None):
            raise UserError(f"tokenizer: {path}: {name}: {settings[name]!r} is no token; write its text")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"tokenizer: {path} cannot be read ({_first_line(error)}); copy the file again"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"tokenizer: {path} holds no JSON object; copy the file again")
    return content


@contextmanager
def _class_notice_hidden() -> Iterator[None]:
    """Without transformers 4's notice that ``tokenizer_class`` names another class: so it is meant."""

    def is_other(record: logging.LogRecord) -> bool:
        return "is not the same type as the class" not in record.getMessage()

    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".: ") or type(error).__name__


# -- chat --------------------------------------------------------------------------------------


def render_chat(
    tokenizer: transformers.PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **template_options: Any,
) -> list[int]:
    """A conversation as ids, by the tokenizer's chat template (options such as ``enable_thinking``)."""
    from jinja2 import TemplateError

    name = tokenizer.name_or_path or "this one"
    if tokenizer.chat_template is None:
        raise UserError(f"tokenizer: {name} has no chat template; use a raw prompt")
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **template_options,
        )
    except TemplateError as error:
        raise UserError(
            f"tokenizer: the chat template of {name} refuses these messages ({_first_line(error)}); "
            "change their roles or use a raw prompt"
        ) from error
    return cast(list[int], ids)


# -- mask token --------------------------------------------------------------------------------


def find_mask_token(tokenizer: transformers.PreTrainedTokenizerBase, config: ModelConfig) -> int | None:
    """The mask token's id: as the config says, else as the tokenizer does. None: an AR model.

    The two must agree.
    """
    named = _mask_tokens(tokenizer)
    mask_id = config.mask_token_id
    if mask_id is None:
        mask_id = next(iter(named.values()), None)
    elif named and mask_id not in named.values():
        spelled = " and ".join(f"{token!r} = {token_id}" for token, token_id in named.items())
        raise UserError(
            f"mask_token_id: config.json says {mask_id}, the tokenizer says {spelled}; set "
            f"mask_token_id in config.json or mask_token in {_SETTINGS_FILE} so that they agree"
        )
    if mask_id is not None and mask_id >= config.vocab_size:
        raise UserError(
            f"mask_token: the tokenizer's {next(iter(named))!r} = {mask_id} lies beyond the model's "
            f"vocabulary of {config.vocab_size}; use the tokenizer this model was trained with"
        )
    return mask_id


def add_mask_token(model: LanguageModel, tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    """Give an AR model and its tokenizer a mask token, in place; return its id.

    The tokenizer gets ``<|MASK|>`` unless it has a mask token. The embedding (and an untied LM head)
    grows only if that id lies beyond it: Qwen3's 267 padded rows hold it, where SDAR has it too. A
    model that is a diffusion model already is left alone. Do this before optimizer or sharding see
    the parameters.

    The row, in the LM head likewise, becomes the mean of the rows the tokenizer can produce (padded rows
    were never trained). An uninformative token is what the average token is: trained rows share a large
    part that every layer expects, with 0.57 of a typical row's norm in stories260K and 0.75 in stories15M
    (independent rows: 0.04 and 0.005), so the first RMSNorm amplifies the mean little more than a token,
    where it would blow a near-zero row up into noise. Cross-entropy of these AR models, half of their
    context replaced by the new token (nothing replaced: 1.29 and 1.23):

        mean 2.93, 3.25; mean at a typical norm 2.89, 3.24; mean + 1 % noise 2.93, 3.26;
        N(mean, rows' std) 3.34, 3.32; N(0, rows' std) 3.36, 4.01; N(0, 0.02) 3.40, 3.71; zero 3.80, 4.53

    Noise would tell several new tokens apart; there is one. In the LM head the mean row's logit is the
    mean of the others, so a reader that, unlike tstar, does not exclude the mask token gives it no more
    than 1 / vocabulary.
    """
    if model.config.mask_token_id is not None:
        mask_id = find_mask_token(tokenizer, model.config)
        assert mask_id is not None
        return mask_id
    # Weights of a diffusion family whose config merely does not name the token have it trained.
    is_trained = bool(_mask_tokens(tokenizer)) and model.config.model_type in _DIFFUSION_TYPES
    mask_id = _ensure_mask_token(tokenizer)
    vocab_size = max(model.config.vocab_size, mask_id + 1)
    if not is_trained or vocab_size > model.config.vocab_size:
        ids = {i for i in tokenizer.get_vocab().values() if i < model.config.vocab_size}
        known = torch.tensor(sorted(ids - {mask_id}))
        tables: list[nn.Embedding | nn.Linear] = [model.model.embed_tokens]
        if not model.config.tie_word_embeddings:
            tables.append(model.lm_head)
        for table in tables:
            _set_mask_row(table, known, mask_id, vocab_size)
    config = replace(model.config, vocab_size=vocab_size).as_diffusion(mask_id)
    model.config = model.model.config = config
    return mask_id


_DIFFUSION_TYPES = frozenset(family.diffusion_type for family in FAMILIES.values()) - {None}


def _mask_tokens(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, int]:
    """The tokens that may be meant as the mask token, the likeliest first.

    SDAR's files disagree: some of its special_tokens_map.json name ``<MASK>``, a token its weights
    have never seen and which transformers then adds behind the others (151670). Its
    tokenizer.json and config.json mean ``<|MASK|>`` = 151669; so that spelling, where it is an added
    token, goes before the tokenizer's own ``mask_token``.
    """
    tokens = {}
    added = tokenizer.get_added_vocab()
    if MASK_TOKEN in added:
        tokens[MASK_TOKEN] = added[MASK_TOKEN]
    if tokenizer.mask_token is not None:
        tokens[str(tokenizer.mask_token)] = tokenizer.mask_token_id
    return tokens


def _ensure_mask_token(tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    """The id of the tokenizer's mask token, which is ``<|MASK|>``, added if need be, if it names none."""
    from transformers import AddedToken

    named = _mask_tokens(tokenizer)
    if not named or next(iter(named)) != tokenizer.mask_token:
        vocab = tokenizer.get_vocab()
        token = AddedToken(MASK_TOKEN, special=True, normalized=False)
        tokenizer.add_special_tokens({"mask_token": token})
        if MASK_TOKEN not in vocab and tokenizer.mask_token_id in vocab.values():
            raise UserError(
                f"tokenizer: {tokenizer.name_or_path}: its ids have gaps, so {MASK_TOKEN!r} would take "
                f"the id of another token ({tokenizer.mask_token_id}); number the vocabulary 0, 1, 2, ..."
            )
    mask_id: int = tokenizer.mask_token_id
    return mask_id


@torch.no_grad()
def _set_mask_row(
    table: nn.Embedding | nn.Linear,
    known: Int64[Tensor, " known"],
    mask_id: int,
    vocab_size: int,
) -> None:
    """Grow a table to ``vocab_size`` rows; the mask's row and new ones are the mean of the known."""
    weight = table.weight
    mean = _mean_row(weight, known.to(weight.device))
    num_new = vocab_size - len(weight)
    if num_new > 0:
        grown = torch.cat([weight, mean.expand(num_new, -1)])
        table.weight = nn.Parameter(grown, requires_grad=weight.requires_grad)
        setattr(table, "num_embeddings" if isinstance(table, nn.Embedding) else "out_features", vocab_size)
    table.weight[mask_id] = mean


def _mean_row(
    weight: Float[Tensor, "vocab hidden"], rows: Int64[Tensor, " known"]
) -> Float[Tensor, " hidden"]:
    """In fp64, a portion of the rows at a time: bf16 would lose the later ones beside the sum."""
    total = weight.new_zeros(weight.shape[1], dtype=torch.float64)
    for portion in torch.split(rows, 8192):
        total += weight[portion].sum(dim=0, dtype=torch.float64)
    return (total / len(rows)).to(weight.dtype)
