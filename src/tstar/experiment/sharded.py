"""A policy whose weights, moments and gradients are spread over the processes of each machine (FSDP2).

Forwards and backwards gather a layer at a time; each process decodes with a whole copy in the compute
dtype, filled from the shards when an engine is made, and gone with it. The masters are the shards, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tstar.config import RunConfig
from tstar.errors import UserError
from tstar.experiment.policy import MODEL, SHARDS, TRAINER, Policy
from tstar.model.checkpoint import DTYPES, load_config, load_model, read_parameters, save_model
from tstar.model.transformer import LanguageModel
from tstar.parallel import Parallel
from tstar.parallel.checkpoint import save_sharded
from tstar.parallel.sharding import averaging, copy_into, like, shard


class ShardedPolicy(Policy):
    """All methods that touch weights are called by all processes."""

    def __init__(self, config: RunConfig, parallel: Parallel) -> None:
        if config.lora is not None:
            raise UserError("sharding: 'full' cannot spread a model with LoRA; use none, adapters are small")
        self._compute_dtype = torch.float32
        super().__init__(config, replace(parallel, is_sharded=True))

    @property
    def is_sharded(self) -> bool:
        return True

    @contextmanager
    def doing_alike(self) -> Iterator[None]:
        with averaging(self.model, self._parallel.world_size):
            yield

    # -- checkpoints: each process writes its part ---------------------------------------------

    def save(self, directory: Path) -> None:
        """Of the main process; the others meet it in `help_save`."""
        self._write(self._parallel.on_main(lambda: directory))

    def help_save(self) -> None:
        """What goes wrong here the main process says, when it has left the directory as it was."""
        directory = self._parallel.on_main(Path)
        with suppress(UserError):
            self._write(directory)

    def _write(self, directory: Path) -> None:
        model = self._plain_model()
        self._parallel.on_main(lambda: save_model(model, directory / MODEL, carry_from=self._config.model))
        del model
        weights = {f"weights.{name}": p.detach() for name, p in self.model.named_parameters()}
        save_sharded({**weights, **self.trainer.state_dict()}, directory / SHARDS, self._parallel)

    def _load_whole(self, directory: Path) -> None:
        """What a run without shards wrote."""
        state = load_file(directory / TRAINER)
        own = dict(self.model.named_parameters())
        masters = {n: state.pop(f"optimizer.master.{n}") for n in own if f"optimizer.master.{n}" in state}
        if not masters:
            masters = dict(load_model(directory / MODEL, torch.float32).named_parameters())
        self.put_weights({name: like(masters[name].detach(), own[name]) for name in own})
        self.trainer.load_state_dict({key: self._spread(key, value, own) for key, value in state.items()})

    def _spread(self, key: str, value: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        _, _, name = key.removeprefix("optimizer.").partition(".")
        return like(value, own[name]) if name in own else value

    # -- weights -------------------------------------------------------------------------------

    def _load(self, directory: Path) -> LanguageModel:
        """Nobody holds it whole: each parameter is read, cut, and let go of."""
        with torch.device("meta"):
            model = LanguageModel(load_config(directory))
        parameters = read_parameters(directory, model)
        first = next(parameters)
        precision = self._config.precision
        self._compute_dtype = first[1].dtype if precision is None else DTYPES[precision]
        shard(model, self._parallel, self._device, self._compute_dtype)
        model.to_empty(device=self._device)
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in chain([first], parameters):
                own[name].copy_(like(tensor.to(torch.float32), own[name]))
        return model

    def _plain_model(self) -> LanguageModel:
        with torch.device("meta"):
            model = LanguageModel(self.model.config).to(self._compute_dtype)
        model = model.to_empty(device=self._device)
        copy_into(model, self.model)
        return model


def make_policy(config: RunConfig, parallel: Parallel) -> Policy:
    """As the configuration says; one process alone has nothing to spread."""
    if config.sharding == "full" and not parallel.is_alone:
        return ShardedPolicy(config, parallel)
    return Policy(config, parallel)
