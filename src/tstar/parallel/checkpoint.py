"""Checkpoints that every process writes its part of, and any number of processes reads.

PyTorch's distributed checkpoint (DCP) in safetensors files: no pickle, and a shard per process. A model
directory as the Hub has it is made of one by filling a whole model from it, in one process, and saving that
(`tstar.model.checkpoint.save_model`): experts are stacked in memory and single on the Hub.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tstar.errors import UserError
from tstar.parallel.processes import Parallel


def save_sharded(state: Mapping[str, Tensor], directory: Path, parallel: Parallel) -> None:
    """Write named tensors, sharded or whole; every process calls it with its part. What one of them cannot
    write is a UserError of all."""
    with parallel.naming_the_lost():
        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
        try:
            save(dict(state), storage_writer=writer, no_dist=parallel.is_alone)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise UserError(f"{directory}: could not be written ({cause})") from cause


def names_in(directory: Path) -> set[str]:
    """Of the tensors in a checkpoint."""
    return set(HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata)


def load_sharded(state: Mapping[str, Tensor], directory: Path, parallel: Parallel) -> None:
    """Fill these tensors in place from a checkpoint that any number of processes wrote."""
    with parallel.naming_the_lost():
        reader = HuggingFaceStorageReader(str(directory))
        with warnings.catch_warnings():
            # That one process alone is meant is said by no_dist; DCP warns all the same.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(dict(state), storage_reader=reader, no_dist=parallel.is_alone)
