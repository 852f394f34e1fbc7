"""A model directory in another precision or shard size, and on to the Hub."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tstar.errors import UserError
from tstar.model.checkpoint import DTYPES, load_model, save_model

Dtype = Literal["float32", "bfloat16", "float16"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ExportedModel:
    """What an export wrote."""

    directory: Path
    num_parameters: int
    num_bytes: int
    files: tuple[str, ...]


def export_model(
    source: Path,
    target: Path,
    *,
    dtype: Dtype | None = None,
    shard_size: str = "5GB",
    remote_code: Path | None = None,
    overwrite: bool = False,
) -> ExportedModel:
    """Write the model of `source` to `target`; files that are no weights are carried over verbatim.

    remote_code: a model directory whose Python files and `auto_map` are carried besides, for a source
    that has none (SDAR's modelling files, so that transformers opens weights that began as Qwen3's).
    """
    max_shard_bytes = parse_size("shard_size", shard_size)
    if target.exists() and target.resolve() == source.resolve():
        raise UserError(f"target: {target} is the source itself; choose another path")
    if target.exists() and not overwrite:
        raise UserError(f"target: {target} exists already; choose another path or pass --overwrite")
    model = load_model(source, None if dtype is None else DTYPES[dtype])
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    _require_free_space(target, num_bytes)
    save_model(
        model,
        target,
        carry_from=source,
        code_from=remote_code,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )
    files = tuple(sorted(path.name for path in target.iterdir()))
    return ExportedModel(target, sum(p.numel() for p in model.parameters()), num_bytes, files)


def push_to_hub(directory: Path, repository: str, *, private: bool) -> str:
    """Upload a model directory; returns its address. Uses the login of huggingface_hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        api = HfApi()
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=directory, repo_id=address.repo_id)
    except HFValidationError as error:
        raise UserError(f"push: {repository!r} is no repository name ({error}); use OWNER/NAME") from error
    except LocalTokenNotFoundError as error:
        raise UserError("push: not logged in to the Hub; run `hf auth login` first") from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(
            f"push: {repository}: the Hub could not be written ({_first_line(error)}); "
            f"the export itself is complete in {directory}"
        ) from error
    return str(address)


def parse_size(name: str, text: str) -> int:
    """Bytes from '5GB', '500MB', '2GiB' or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)?\s*", text.upper())
    num_bytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if num_bytes < 1:
        raise UserError(f"{name}: {text!r} is no size; write it like 5GB, 500MB or 2GiB")
    return num_bytes


def _require_free_space(target: Path, num_bytes: int) -> None:
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise UserError(
            f"target: {target} needs {num_bytes / 1e9:.1f} GB, {parent} has {free / 1e9:.1f} GB free; "
            "make room or choose another disk"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
