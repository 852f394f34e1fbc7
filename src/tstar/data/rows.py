"""Rows of files and of the Hub's data sets, one at a time, with the place each stands at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tstar.errors import UserError

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Row:
    place: str
    """File and line, for messages."""
    values: dict[str, Any]


def read_files(files: Sequence[Path], columns: tuple[str, ...] | None = None) -> Iterator[Row]:
    for path in files:
        yield from _read_parquet(path, columns) if path.suffix == ".parquet" else _read_jsonl(path, columns)


def _read_jsonl(path: Path, columns: tuple[str, ...] | None) -> Iterator[Row]:
    wanted = _wanted(columns)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = f"{path}:{number}"
                    values = _parse_line(place, line)
                    yield Row(place, {name: value for name, value in values.items() if wanted(name)})
    except OSError as error:
        raise UserError(f"data: {path} cannot be read ({error.strerror}); correct the path") from error


def _parse_line(place: str, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"data: {place}: not valid JSON ({error}); repair or remove the line") from error
    if not isinstance(values, dict):
        raise UserError(
            f"data: {place}: a {type(values).__name__} where an object is expected; write "
            '{"question": ..., "answer": ...}'
        )
    return values


def _read_parquet(path: Path, columns: tuple[str, ...] | None) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"data: {path}: parquet needs pyarrow; pip install 'tstar[data]'") from error
    wanted = _wanted(columns)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if wanted(name)]
            number = 0
            for batch in file.iter_batches(columns=names):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", values)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(
            f"data: {path}: no readable parquet file ({_first_line(error)}); copy it again"
        ) from error


def read_hub(
    repository: str, config: str | None, split: str, columns: tuple[str, ...] | None, local_form: str
) -> Iterator[Row]:
    """A data set of the Hub; ``local_form`` is how its source is named once it lies in DIR."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"data: {repository}: the Hub needs `datasets`; pip install 'tstar[data]'") from error
    try:
        table = datasets.load_dataset(repository, config, split=split)
    except (OSError, ValueError) as error:
        raise UserError(
            f"data: {repository} cannot be loaded ({_first_line(error)}); where there is a network run "
            f"`hf download {repository} --repo-type dataset --local-dir DIR` and give {local_form}"
        ) from error
    wanted = _wanted(columns)
    table = table.select_columns([name for name in table.column_names if wanted(name)])
    for number, values in enumerate(table, start=1):
        yield Row(f"{repository} row {number}", values)


def _wanted(columns: tuple[str, ...] | None) -> Callable[[str], bool]:
    """Which columns to read: a preset's, or all."""
    if columns is None:
        return lambda _: True
    names = {"question", "answer", "solution", "problem", "id", *columns}
    return names.__contains__


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".: ") or type(error).__name__
