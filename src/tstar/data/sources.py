"""From the name of a source to its problems: presets, files, the Hub."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tstar.data.problems import Problem, ProblemSet
from tstar.data.rows import SUFFIXES, Row, read_files, read_hub
from tstar.errors import UserError

# -- presets -----------------------------------------------------------------------------------


def _answer_as_it_stands(text: str) -> tuple[str, str | None]:
    return text, None


def _split_gsm8k(text: str) -> tuple[str, str | None]:
    """`... #### 1,234`: the number, and the text before it, without calculator notes, as a solution."""
    worked, marker, answer = text.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker:
        return answer, None
    return answer, re.sub(r"<<[^>]*>>", "", worked).strip() + f"\n\\boxed{{{answer}}}"


def _split_aime(text: str) -> tuple[str, str | None]:
    """AIME's form has three digits for every answer: 025 is 25."""
    return re.sub(r"^0+(?=\d)", "", text.strip()), None


@dataclass(frozen=True)
class Preset:
    """A known data set: where it lies on the Hub, and how its answers are written."""

    repository: str
    config: str | None
    split: str
    """The split taken when none is named."""
    split_answer: Callable[[str], tuple[str, str | None]] = _answer_as_it_stands
    """Its answer column -> gold answer and, if that column holds it, the solution."""
    columns: tuple[str, ...] = ("level", "subject")
    """What to read besides question, answer and solution: the rest can be gigabytes."""


PRESETS: Mapping[str, Preset] = {
    "math500": Preset("HuggingFaceH4/MATH-500", None, "test", columns=("level", "subject", "unique_id")),
    "gsm8k": Preset("openai/gsm8k", "main", "test", _split_gsm8k),
    "aime24": Preset("HuggingFaceH4/aime_2024", None, "train", _split_aime, ("id", "year")),
    "math-train": Preset(
        "DigitalLearningGmbH/MATH-lighteval", "default", "train", columns=("level", "subject", "type")
    ),
    "openr1-math": Preset(
        "open-r1/OpenR1-Math-220k", "default", "train", columns=("level", "problem_type", "source", "uuid")
    ),
}
_ALIASES = {"problem": "question", "unique_id": "id", "uuid": "id"}
"""The Hub's usual names and ours."""


# -- loading -----------------------------------------------------------------------------------

_SOURCE = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<split>[\w.-]+))?(?::(?P<path>.+))?")


def load_problems(source: str, needs_answer: bool = True) -> ProblemSet:
    """All problems of a source (`tstar.data` lists the forms).

    needs_answer: leave out what cannot be checked; otherwise a row with a solution is kept without one.
    """
    matched = _SOURCE.fullmatch(source)
    name, split, local = matched.groups() if matched else (source, None, None)
    if name in PRESETS:
        preset = PRESETS[name]
        chosen = split or preset.split
        if local is None:
            rows = read_hub(preset.repository, preset.config, chosen, preset.columns, f"{source}:DIR")
        else:
            rows = read_files(_preset_files(Path(local), name, preset, chosen), preset.columns)
        return _to_problem_set(f"{name}@{split}" if split else name, rows, needs_answer, preset.split_answer)
    path = Path(source)
    if source and (path.exists() or path.suffix in SUFFIXES):
        return _to_problem_set(path.name, read_files(_plain_files(path)), needs_answer)
    if "/" in name and matched and local is None:
        return _to_problem_set(source, read_hub(name, None, split or "train", None, "DIR"), needs_answer)
    raise UserError(_unknown_source(source))


def _to_problem_set(
    name: str,
    rows: Iterable[Row],
    needs_answer: bool,
    split_answer: Callable[[str], tuple[str, str | None]] = _answer_as_it_stands,
) -> ProblemSet:
    problems: dict[str, Problem] = {}
    num_rows = 0
    num_without_answer = 0
    for row in rows:
        problem = _to_problem(row, split_answer, default_id=f"{name}/{num_rows}")
        num_rows += 1
        if not problem.answer and (needs_answer or not problem.solution):
            num_without_answer += 1
        elif problem.id in problems:
            raise UserError(
                f"data: {row.place}: id {problem.id!r} stands in an earlier row too; make it unique"
            )
        else:
            problems[problem.id] = problem
    if not problems:
        why = f"none of its {num_rows} rows has an answer" if num_rows else "it has no rows"
        raise UserError(f"data: {name} is empty: {why}; give data with problems in it")
    return ProblemSet(name, tuple(problems.values()), num_without_answer)


def _to_problem(row: Row, split_answer: Callable[[str], tuple[str, str | None]], default_id: str) -> Problem:
    names = {name: _ALIASES.get(name, name) for name in row.values}
    values = {
        ours: row.values[name] for name, ours in names.items() if name == ours or ours not in row.values
    }
    question = values.pop("question", None)
    if not isinstance(question, str) or not question.strip():
        raise UserError(_wrong_field(row, "question", question, "text"))
    solution = values.pop("solution", None)
    if not isinstance(solution, str | None):
        raise UserError(_wrong_field(row, "solution", solution, "text"))
    if "answer" in values:
        answer, found = split_answer(_answer_text(row, values.pop("answer")))
        solution = found if found is not None else solution
    elif solution is not None:
        answer = last_boxed(solution) or ""
    else:
        raise UserError(_wrong_field(row, "answer", None, "text or a number"))
    level = _level(row, values.pop("level", None))
    own_id = values.pop("id", None)
    return Problem(
        question,
        answer.strip(),
        level,
        default_id if own_id is None else str(own_id),
        solution,
        fields=values,
    )


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{} of a text, which is where MATH has its answers."""
    start = text.rfind("\\boxed{") + len("\\boxed{")
    if start < len("\\boxed{"):
        return None
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def _answer_text(row: Row, value: object) -> str:
    """An answer as text; empty for none."""
    if value is None:
        return ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and math.isfinite(value)):  # type: ignore[arg-type]
        return str(value)
    raise UserError(_wrong_field(row, "answer", value, "text or a number"))


def _level(row: Row, value: object) -> int | None:
    """3, "3", "Level 3"; none for nothing, NaN and MATH's own "Level ?"."""
    if value is None or value == "Level ?" or value != value:  # noqa: PLR0124  (NaN)
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"(?:Level )?\d+", value):
        return int(value.removeprefix("Level "))
    raise UserError(_wrong_field(row, "level", value, "a whole number"))


def _wrong_field(row: Row, name: str, value: object, wanted: str) -> str:
    if name not in (_ALIASES.get(given, given) for given in row.values):
        return f"data: {row.place}: {name} is missing (it has {', '.join(row.values)}); give it as {wanted}"
    return (
        f"data: {row.place}: {name}: {json.dumps(value, default=str)[:40]} is not {wanted}; correct the row"
    )


def _unknown_source(source: str) -> str:
    near = difflib.get_close_matches(source, PRESETS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"data: {source!r} is no preset and no file{hint}; use one of {', '.join(PRESETS)}, chain:LEVELS, "
        "a .jsonl or .parquet file, or OWNER/NAME of the Hub"
    )


# -- files -------------------------------------------------------------------------------------


def _plain_files(path: Path) -> list[Path]:
    """The file, or all files of the directory."""
    if not path.exists():
        raise UserError(f"data: {path}: no such file or directory; correct the path")
    files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in SUFFIXES:
        raise UserError(f"data: {path}: no .jsonl or .parquet file; convert the data to one of them")
    return files


def _preset_files(path: Path, name: str, preset: Preset, split: str) -> list[Path]:
    """A preset's files in a directory: as its repository has them, or one named after it."""
    files = _plain_files(path)
    if path.is_file():
        return files
    shards = [p for p in files if re.fullmatch(rf"{re.escape(split)}(-\d+-of-\d+)?", p.stem)]
    folders = (
        {p for p in shards if folder in p.relative_to(path).parts} for folder in (preset.config, "data")
    )
    of_repository = sorted(next(filter(None, folders), shards))
    names = {f"{name}_{split}", f"{name}-{split}"} | ({name} if split == preset.split else set())
    chosen = of_repository or [p for p in files if p.stem in names]
    if not chosen:
        raise UserError(
            f"data: {path}: none of its {len(files)} files is called {split}-*, {name}_{split} or {name}; "
            f"give the file itself: {name}:FILE"
        )
    return chosen
