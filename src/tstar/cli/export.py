"""`tstar export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Export:
    """Write a model directory in another precision or shard size.

    Tokenizer, chat template, generation config and the model's own Python files are carried over as they
    are; none of them is run. What is written loads in transformers, SGLang and LMDeploy."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """Model directory to read."""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TARGET")]
    """Directory to write."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the written weights. Default: as stored."""
    shard_size: str = "5GB"
    """Largest weight file, like 5GB, 500MB or 2GiB."""
    remote_code: Path | None = None
    """Model directory whose *.py files and auto_map to add, where the source has none of its own."""
    overwrite: bool = False
    """Replace the target if it exists."""
    push: str | None = None
    """Also upload to this Hub repository, OWNER/NAME."""
    private: bool = False
    """With --push: make a new repository private."""

    def run(self) -> None:
        from tstar import export

        exported = export.export_model(
            self.source,
            self.target,
            dtype=self.dtype,
            shard_size=self.shard_size,
            remote_code=self.remote_code,
            overwrite=self.overwrite,
        )
        print(
            f"{exported.directory}: {exported.num_parameters:,} parameters, "
            f"{exported.num_bytes / 1e6:,.1f} MB in {len(exported.files)} files"
        )
        if self.push is not None:
            print(export.push_to_hub(self.target, self.push, private=self.private))
