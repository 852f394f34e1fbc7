"""An evaluation on disk: whole or not at all, or a journal to go on from.

::

    summary.json      conditions and numbers
    responses.jsonl   one judged response a line, by (problem, sample)
    problems.jsonl    id, question, answer, level
    pieces.json       token id -> text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tstar import atomic
from tstar.data import Problem
from tstar.errors import UserError
from tstar.evaluate.summary import Evaluation, Summary
from tstar.schedule import read_responses

SUMMARY_FILE = "summary.json"
RESPONSES_FILE = "responses.jsonl"
PROBLEMS_FILE = "problems.jsonl"
PIECES_FILE = "pieces.json"

T = TypeVar("T")


def write_evaluation(directory: Path, evaluation: Evaluation) -> None:
    """Write an evaluation directory; what the name stood for before is replaced."""
    try:
        with atomic.replacing(directory) as partial:
            (partial / SUMMARY_FILE).write_text(evaluation.summary.to_json(), encoding="utf-8")
            _write_lines(partial / RESPONSES_FILE, (r.to_json() for r in evaluation.responses))
            _write_lines(partial / PROBLEMS_FILE, (_problem_json(p) for p in evaluation.problems))
            pieces = {str(token_id): text for token_id, text in sorted(evaluation.pieces.items())}
            (partial / PIECES_FILE).write_text(json.dumps(pieces, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{directory}: could not be written ({error.strerror or error})") from error


def is_evaluation(directory: Path) -> bool:
    """Whether a whole evaluation stands there."""
    return (directory / SUMMARY_FILE).is_file() and (directory / RESPONSES_FILE).is_file()


def read_summary(directory: Path) -> Summary:
    path = directory / SUMMARY_FILE
    return _read(path, Summary.from_json)


def read_evaluation(directory: Path) -> Evaluation:
    return Evaluation(
        summary=read_summary(directory),
        problems=_read(directory / PROBLEMS_FILE, _parse_problems),
        responses=tuple(read_responses(directory / RESPONSES_FILE)),
        pieces=_read(directory / PIECES_FILE, _parse_pieces),
    )


def _parse_problems(text: str) -> tuple[Problem, ...]:
    records = [json.loads(line) for line in text.split("\n") if line]
    return tuple(Problem(r["question"], r["answer"], r["level"], r["id"]) for r in records)


def _parse_pieces(text: str) -> dict[int, str]:
    return {int(token_id): piece for token_id, piece in json.loads(text).items()}


def _read(path: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give the directory of an evaluation"
        ) from error
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; evaluate again") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error}); evaluate again") from error


def _problem_json(problem: Problem) -> str:
    record = {
        "id": problem.id,
        "question": problem.question,
        "answer": problem.answer,
        "level": problem.level,
    }
    return json.dumps(record)


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
