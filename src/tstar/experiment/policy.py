"""The policy of a run: model, tokenizer and trainer, from a model directory and back to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tstar.config import RunConfig
from tstar.engine import Engine
from tstar.errors import UserError
from tstar.lora import add_lora, has_lora, merged_copy
from tstar.model.checkpoint import DTYPES, load_model, save_model
from tstar.model.tokenizer import load_tokenizer
from tstar.model.transformer import LanguageModel
from tstar.parallel import ALONE, Parallel
from tstar.parallel.checkpoint import load_sharded, names_in
from tstar.trainer import Trainer

MODEL, TRAINER, ADAPTERS = "model", "trainer.safetensors", "adapters.safetensors"
SHARDS = "shards"
"""In place of TRAINER, where every process writes its part: weights and optimizer."""


class Policy:
    """θ, and everything that its next update depends on."""

    def __init__(self, config: RunConfig, parallel: Parallel = ALONE) -> None:
        self._config, self._parallel = config, parallel
        self.model = self._load(config.model)
        self.tokenizer = load_tokenizer(config.model)
        if not self.model.config.is_diffusion:
            raise UserError(
                f"model: {config.model} predicts the next token and cannot denoise; make a block-diffusion "
                "model of it with tstar sft"
            )
        if config.lora is not None:
            add_lora(self.model, config.lora, config.seed)
        self._base = self._load(config.model).requires_grad_(False) if self._needs_base else None
        self.trainer = Trainer(self.model, config.trainer, self._base, parallel=parallel)

    @property
    def is_sharded(self) -> bool:
        """Whether processes have parts of the weights."""
        return False

    @contextmanager
    def doing_alike(self) -> Iterator[None]:
        """For optimizer steps that every process takes by itself, on the same data."""
        yield

    @property
    def block_size(self) -> int | None:
        """What the model directory will say that it was trained at."""
        return self.model.config.block_size

    @block_size.setter
    def block_size(self, block_size: int) -> None:
        self.model.config = self.model.model.config = replace(self.model.config, block_size=block_size)

    def make_engine(self, weight_version: int) -> Engine:
        """An engine with the weights as they are now. A new one for every use: how it places requests and
        pages depends on what it did before, and the last bits of a sum on that."""
        return Engine(self._plain_model(), self._config.engine, weight_version)

    def set_learning_rate(self, learning_rate: float) -> None:
        """What the optimizer's schedule scales from now on."""
        optimizer = self.trainer.optimizer
        optimizer.config = replace(self._config.trainer.optimizer, learning_rate=learning_rate)

    def restart_optimizer(self, keep: Literal["nothing", "moments", "everything"]) -> None:
        """A new optimizer in place of the one before, with none of its state, with all but the weights (which
        something else has trained meanwhile), or with all of it, weights included."""
        old = self.trainer
        state = old.state_dict()
        for optimizer in (old.optimizer, old.value_optimizer):
            if optimizer is not None:
                optimizer.release()
        self.trainer = Trainer(self.model, self._config.trainer, self._base, old.value_model, self._parallel)
        if keep == "moments":
            state |= {n: value for n, value in self.trainer.state_dict().items() if _is_weight(n)}
        if keep != "nothing":
            self.trainer.load_state_dict(state)

    # -- weights -------------------------------------------------------------------------------

    def trained_weights(self) -> dict[str, Tensor]:
        """A copy of all that training changes."""
        return {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def put_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, in place."""
        for name, parameter in self.model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])

    def save(self, directory: Path) -> None:
        """The model as the Hub has it, and what else the next update depends on."""
        save_model(self._plain_model(), directory / MODEL, carry_from=self._config.model)
        save_file(self.trainer.state_dict(), directory / TRAINER)
        if has_lora(self.model):
            save_file(self.trained_weights(), directory / ADAPTERS)

    def help_save(self) -> None:
        """The part of the processes that do not write."""

    def load(self, directory: Path) -> None:
        """What `save` wrote, bit for bit; by any number of processes, sharded or not."""
        if (directory / SHARDS).is_dir():
            self._load_shards(directory / SHARDS)
        else:
            self._load_whole(directory)

    def _load_whole(self, directory: Path) -> None:
        if has_lora(self.model):
            self.put_weights(load_file(directory / ADAPTERS))
        else:
            self.put_weights(dict(self._load(directory / MODEL).named_parameters()))
        self.trainer.load_state_dict(load_file(directory / TRAINER, device=str(self.model.device)))

    def _load_shards(self, directory: Path) -> None:
        """Each process takes its part, or one takes all."""
        own = {name: p.detach() for name, p in self.model.named_parameters()}
        targets = {}
        for key in names_in(directory):
            kind, _, name = key.removeprefix("optimizer.").partition(".")
            is_whole = name in own and kind != "step"
            targets[key] = torch.zeros_like(own[name], dtype=torch.float32) if is_whole else torch.zeros(())
        targets["optimizer.num_steps_done"] = torch.tensor(0)
        load_sharded(targets, directory, self._parallel)
        weights = {name: targets.pop(f"weights.{name}") for name in own}
        self.put_weights(weights)
        masters = [name for name in self.trainer.state_dict() if _is_weight(name)]
        targets |= {name: weights[name.removeprefix("optimizer.master.")] for name in masters}
        self.trainer.load_state_dict(targets)

    # -- private -------------------------------------------------------------------------------

    @property
    def _needs_base(self) -> bool:
        return self._config.trainer.objective.kl_reference == "base" and self._config.lora is None

    @property
    def _device(self) -> str:
        has_cuda = torch.cuda.is_available()
        if self._config.device == "cuda" and not has_cuda:
            raise UserError("device: this machine has no CUDA device; use auto or cpu")
        return "cuda" if self._config.device != "cpu" and has_cuda else "cpu"

    def _load(self, directory: Path) -> LanguageModel:
        precision = self._config.precision
        return load_model(directory, None if precision is None else DTYPES[precision], self._device)

    def _plain_model(self) -> LanguageModel:
        return merged_copy(self.model) if has_lora(self.model) else self.model


def _is_weight(name: str) -> bool:
    """Of the policy, in the state of its trainer."""
    return name.startswith("optimizer.master.")
