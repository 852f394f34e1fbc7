"""Some lines out of very many: a run stores more trajectories than a page can hold or a reader wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from tstar.errors import UserError
from tstar.schedule import DecodedResponse, open_lines, parse_response

_CHUNK = 1 << 24


@dataclass(frozen=True, eq=False)
class LineIndex:
    """Where the lines of a file begin and end."""

    path: Path
    starts: Int64[np.ndarray, " lines"]
    stops: Int64[np.ndarray, " lines"]
    is_torn: bool
    """What comes behind the last line break is no whole record: somebody writes, or was killed."""

    @classmethod
    def of(cls, path: Path) -> LineIndex:
        breaks, length = [np.zeros(0, dtype=np.int64)], 0
        with open_lines(path) as file:
            while chunk := file.read(_CHUNK):
                breaks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + length)
                length += len(chunk)
        stops = np.concatenate(breaks)
        starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
        rest = int(stops[-1]) + 1 if len(stops) else 0
        index = cls(path, starts, stops, is_torn=False)
        if rest == length:
            return index
        whole = cls(path, np.append(starts, rest), np.append(stops, length), is_torn=False)
        if _is_record(next(whole.read(np.array([len(stops)])))):
            return whole
        return cls(path, starts, stops, is_torn=True)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_bytes(self) -> int:
        return int((self.stops - self.starts).sum())

    def read(self, chosen: Int64[np.ndarray, " chosen"]) -> Iterator[bytes]:
        """The lines with these numbers, which rise."""
        with open_lines(self.path) as file:
            for number in chosen.tolist():
                file.seek(int(self.starts[number]))
                yield file.read(int(self.stops[number] - self.starts[number]))


@dataclass(frozen=True, eq=False)
class Sample:
    """Responses of one file, and what could not be had of it."""

    responses: tuple[DecodedResponse, ...]
    numbers: tuple[int, ...]
    """Line number of each."""
    num_stored: int
    num_refused: int = 0
    """Lines of the sample that are no trajectory of this version."""
    refusal: str | None = None
    """The first one's."""
    is_torn: bool = False


def read_sample(path: Path, group_size: int, max_responses: int, max_bytes: int) -> Sample:
    """Whole groups of lines (the samples of a prompt stand together), evenly over the file.

    Raises OSError or EOFError where the file as such cannot be read.
    """
    index = LineIndex.of(path)
    chosen = choose(len(index), group_size, max_responses, max_bytes / max(index.num_bytes, 1))
    responses, numbers, refusals = [], [], []
    for number, line in zip(chosen.tolist(), index.read(chosen), strict=True):
        if not line.strip():
            continue
        try:
            responses.append(parse_response(line, f"{path.name}:{number + 1}"))
            numbers.append(number + 1)
        except UserError as error:
            refusals.append(str(error))
    refusal = refusals[0] if refusals else None
    return Sample(tuple(responses), tuple(numbers), len(index), len(refusals), refusal, index.is_torn)


def read_whole(path: Path) -> tuple[list[DecodedResponse], bool]:
    """Every response of a file, and whether half a line at its end was left out; raises UserError."""
    try:
        index = LineIndex.of(path)
        lines = enumerate(index.read(np.arange(len(index))), start=1)
        return [parse_response(line, f"{path}:{n}") for n, line in lines if line.strip()], index.is_torn
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error}); is it cut short?") from None


def choose(num_lines: int, group_size: int, max_lines: int, share: float) -> Int64[np.ndarray, " chosen"]:
    """Numbers of lines: groups at even distances, at most so many lines and about that share of them."""
    num_groups = -(-num_lines // group_size)
    wanted = max(1, min(max_lines // group_size, int(num_groups * share))) if num_groups else 0
    if wanted >= num_groups:
        return np.arange(num_lines)
    groups = np.arange(wanted) * num_groups // wanted
    chosen = (groups[:, None] * group_size + np.arange(group_size)).ravel()
    return chosen[chosen < num_lines]


def _is_record(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
