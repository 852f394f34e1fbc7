"""Model directories that one can talk with: random weights; a token for each piece of a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_models import randomise
from tstar.model.checkpoint import save_model
from tstar.model.tokenizer import add_mask_token
from tstar.model.transformer import LanguageModel
from tstar.tasks.chain_model import chain_config, chain_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_chain_model(directory: Path, *, is_diffusion: bool = True, block_size: int | None = None) -> Path:
    """A model of the chain task that has learnt nothing."""
    model = LanguageModel(chain_config(hidden_size=32, num_layers=2))
    model.initialise(torch.Generator().manual_seed(0))
    randomise(model)
    tokenizer = chain_tokenizer()
    if is_diffusion:
        add_mask_token(model, tokenizer)
        model.config = model.model.config = replace(model.config, block_size=block_size)
    save_model(model, directory, tokenizer=tokenizer)
    return directory


def make_tokenizer(
    pieces: Sequence[str], chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-fallback tokenizer whose tokens are these pieces; spaces are part of them."""
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=pieces[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=pieces[1], unk_token=pieces[0], chat_template=chat_template
    )
