"""A model directory with its tokenizer: prompts to requests, trajectories to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tstar.engine.request import Request, SamplingParams
from tstar.errors import UserError
from tstar.generation.options import DecodingOptions, Dtype
from tstar.generation.text import cut_at_stop, decode, stop_finder
from tstar.model.transformer import LanguageModel
from tstar.trajectory import Trajectory

if TYPE_CHECKING:
    import transformers  # slow to import

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, eq=False)
class TextModel:
    """A model directory, loaded: weights and tokenizer."""

    directory: Path
    model: LanguageModel
    tokenizer: transformers.PreTrainedTokenizerBase

    @classmethod
    def load(cls, directory: Path, dtype: Dtype | None = None, device: str = "auto") -> TextModel:
        """dtype None: as stored. device "auto": the first GPU, or the CPU where there is none."""
        import torch

        from tstar.model.checkpoint import DTYPES, load_model
        from tstar.model.tokenizer import load_tokenizer

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"device: {device} is not there (torch finds no GPU); use cpu")
        model = load_model(directory, None if dtype is None else DTYPES[dtype], device)
        model.requires_grad_(False)
        return cls(directory, model, load_tokenizer(directory))

    # -- in --------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """A raw prompt's ids, with what the tokenizer itself puts before them."""
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """A conversation's ids, up to where the answer begins."""
        from tstar.model.tokenizer import render_chat

        if self.tokenizer.chat_template is None:
            raise UserError(f"{self.directory}: has no chat template; give --raw and the prompt as it stands")
        return render_chat(self.tokenizer, messages)

    def request(
        self, prompt_ids: Sequence[int], options: DecodingOptions, seed: int, temperature: float = 0.0
    ) -> Request:
        """What the engine is asked for. `temperature` is taken where the options give none."""
        if len(prompt_ids) == 0:
            raise UserError("prompt: is empty; a response needs at least one token before it")
        rule, policy = options.rule(self.model.config), options.policy()
        room = self.model.config.max_position_embeddings - len(prompt_ids)
        default = max(1, min(DEFAULT_MAX_TOKENS, room))
        try:
            sampling = SamplingParams(
                max_tokens=default if options.max_tokens is None else options.max_tokens,
                temperature=temperature if options.temperature is None else options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                unmask=policy,
                ignore_eos=options.ignore_eos,
            )
            find_stop = stop_finder(self.tokenizer, options.stop, rule.block_size)
            return Request(np.array(prompt_ids, dtype=np.int64), rule, sampling, seed, find_stop)
        except ValueError as error:
            raise UserError(str(error)) from None

    # -- out -------------------------------------------------------------------------------------

    def text(self, trajectory: Trajectory, stop: Sequence[str] = ()) -> str:
        """What a response says: without special tokens, up to where a stop string begins."""
        ids = trajectory.response_ids[: trajectory.stop_length]
        if trajectory.finish_reason == "stop" and int(ids[-1]) in self.model.config.eos_token_ids:
            ids = ids[:-1]
        return cut_at_stop(self.decode(ids, skip_special_tokens=True), stop)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        return decode(self.tokenizer, ids, skip_special_tokens)


def keyed_seed(*key: int) -> int:
    """The seed of one response: the same key gives the same one, another key an unrelated one."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
