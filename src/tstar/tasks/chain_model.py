"""The small tokenizer of the chain task, and the shape of a fresh model for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tstar.model.config import ModelConfig
from tstar.model.tokenizer import MASK_TOKEN

if TYPE_CHECKING:
    import transformers  # slow to import: at run time only the function that needs it does

PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD_TOKEN, EOS_TOKEN, MASK_TOKEN, UNKNOWN_TOKEN)
CHARACTERS = "0123456789+-*^=;#"

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chain has no turns: the prompt is the question as it stands."""


def chain_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each character of a chain; `tstar.model.tokenizer.save_tokenizer` writes it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        mask_token=MASK_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        chat_template=CHAT_TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    )


def chain_config(hidden_size: int = 128, num_layers: int = 4) -> ModelConfig:
    """An AR model of Qwen3's shape for `chain_tokenizer`: 0.8M parameters by default.

    `tstar.model.tokenizer.add_mask_token` makes a block-diffusion model of it; the vocabulary has the
    mask token already.
    """
    num_heads = max(4 * round(hidden_size / 128), 2)  # fewer than 4 learn the arithmetic late
    return ModelConfig(
        model_type="qwen3",
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(num_heads // 2, 1),
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,  # at this width 0.02 is slow, and unstable at the rates that are not
        tie_word_embeddings=True,
        eos_token_id=SPECIAL_TOKENS.index(EOS_TOKEN),
        pad_token_id=SPECIAL_TOKENS.index(PAD_TOKEN),
    )
