"""What lies on disk: runs, evaluations, files of trajectories.

A report is wanted most when something went wrong. So what is missing, cut short or of another version
becomes a notice, and the rest is read. Only a path that does not exist is an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tstar.errors import UserError

SUMMARY_VERSION = 1
LINES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Notice:
    """Something that a reader has to know before believing the figures."""

    source: str
    text: str


@dataclass(frozen=True)
class Interval:
    """A number and its 95 % interval, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


# -- what is where -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The directories and files that the arguments mean."""

    runs: tuple[Path, ...]
    evaluations: tuple[Path, ...]
    """Those of runs too."""
    trajectories: tuple[Path, ...]
    """Files that stand alone: neither a run's rollouts nor an evaluation's responses."""

    @property
    def all(self) -> tuple[Path, ...]:
        return (*self.runs, *self.evaluations, *self.trajectories)


def find(paths: Sequence[Path]) -> Found:
    """Look through directories for runs and evaluations; without either, their .jsonl files are meant."""
    runs: list[Path] = []
    evaluations: list[Path] = []
    trajectories: list[Path] = []
    for path in paths:
        if path.is_file():
            trajectories.append(path)
            continue
        if not path.is_dir():
            raise UserError(f"{path}: no such file or directory; name a run, an evaluation or a .jsonl file")
        below = list(_walk(path))
        runs += [d for d in below if is_run(d)]
        evaluations += [d for d in below if is_evaluation(d)]
        if not any(is_run(d) or is_evaluation(d) for d in below):
            files = [f for d in below for f in sorted(d.iterdir()) if is_lines(f)]
            if not files:
                raise UserError(
                    f"{path}: holds no run, no evaluation and no .jsonl file; "
                    "make one with `tstar train`, `tstar eval` or `tstar generate`"
                )
            trajectories += files
    return Found(_unique(runs), _unique(evaluations), _unique(trajectories))


def is_run(directory: Path) -> bool:
    """A run, though it may have said nothing yet."""
    has_begun = (directory / "metrics.jsonl").is_file() or (directory / "rollouts").is_dir()
    return (directory / "config.yaml").is_file() and has_begun


def is_evaluation(directory: Path) -> bool:
    return (directory / "summary.json").is_file() and (directory / "responses.jsonl").is_file()


def is_lines(path: Path) -> bool:
    return path.name.endswith(LINES) and path.is_file()


def rollout_files(run: Path) -> tuple[Path, ...]:
    """One for each update step, in order."""
    directory = run / "rollouts"
    return tuple(sorted(p for p in directory.iterdir() if is_lines(p))) if directory.is_dir() else ()


def name_paths(paths: Sequence[Path]) -> Mapping[Path, str]:
    """Each path without what all have in common."""
    resolved = {path: path.resolve() for path in paths}
    if not resolved:
        return {}
    root = Path(os.path.commonpath([p.parent for p in resolved.values()]))
    return {path: str(full.relative_to(root)) for path, full in resolved.items()}


def _walk(path: Path) -> Iterator[Path]:
    """The directory and those below it, without hidden ones and what runs and evaluations hold inside."""
    for current, names, _ in os.walk(path):
        directory = Path(current)
        if is_evaluation(directory):
            names[:] = []
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in ("checkpoints", "rollouts"))
        yield directory


def _unique(paths: Sequence[Path]) -> tuple[Path, ...]:
    return tuple({path.resolve(): path for path in reversed(paths)}.values())[::-1]


# -- a run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Updates at one block size."""

    update_step: int
    """Updates done when it began."""
    block_size: int


@dataclass(frozen=True)
class TrainEvent:
    """One TraceRL pass."""

    update_step: int
    block_size: int
    metrics: Mapping[str, float]
    """Those that are finite."""
    not_finite: tuple[str, ...]
    """Names of those that are not."""
    refused: str | None
    """Why nothing could be trained on."""


@dataclass(frozen=True)
class Validation:
    """One validation of a run."""

    update_step: int
    block_size: int
    accuracy: Interval
    is_best: bool
    policy: str | None
    """The unmask policy."""


@dataclass(frozen=True)
class GuardEvent:
    """An alarm, and what was done."""

    update_step: int
    signal: str
    message: str
    action: str


@dataclass(frozen=True)
class RunSource:
    """One run directory."""

    path: Path
    name: str
    config_yaml: str
    config: Mapping[str, str]
    """Flat: dotted name -> value."""
    stages: tuple[Stage, ...]
    train: tuple[TrainEvent, ...]
    validations: tuple[Validation, ...]
    guards: tuple[GuardEvent, ...]
    is_ended: bool
    end_reason: str | None
    """None: it ran to its end."""
    is_sft: bool
    """It is no run of the curriculum: it has neither rollouts nor update steps."""
    rollouts: tuple[Path, ...]

    @property
    def update_step(self) -> int:
        """Updates done."""
        trained = max((e.update_step for e in self.train), default=0)
        return max(trained, max((v.update_step for v in self.validations), default=0))


def read_run(path: Path, name: str, notices: list[Notice]) -> RunSource:
    """A run, finished or not."""
    events = _read_events(path / "metrics.jsonl", name, notices)
    end = next((e for e in reversed(events) if e["event"] == "end"), None)
    config_yaml, config = _read_config(path / "config.yaml", name, notices)
    return RunSource(
        path=path,
        name=name,
        config_yaml=config_yaml,
        config=config,
        stages=tuple(Stage(_int(e, "update_step"), _int(e, "block_size")) for e in _of(events, "stage")),
        train=tuple(_train_event(e) for e in _of(events, "train")),
        validations=tuple(v for e in _of(events, "validation") if (v := _validation(e)) is not None),
        guards=tuple(_guard(e) for e in _of(events, "guard")),
        is_ended=end is not None,
        end_reason=None if end is None or end.get("reason") is None else str(end["reason"]),
        is_sft=bool(events) and all(e["event"] == "sft" for e in events),
        rollouts=rollout_files(path),
    )


def _of(events: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (e for e in events if e["event"] == kind)


def _train_event(event: Mapping[str, Any]) -> TrainEvent:
    values = {name: _number(value) for name, value in event.items()}
    return TrainEvent(
        update_step=_int(event, "update_step"),
        block_size=_int(event, "block_size"),
        metrics={n: v for n, v in values.items() if v is not None and math.isfinite(v)},
        not_finite=tuple(n for n, v in values.items() if v is not None and not math.isfinite(v)),
        refused=None if event.get("refused") is None else str(event["refused"]),
    )


def _validation(event: Mapping[str, Any]) -> Validation | None:
    accuracy = _finite(event.get("accuracy"))
    if accuracy is None:
        return None
    return Validation(
        update_step=_int(event, "update_step"),
        block_size=_int(event, "block_size"),
        accuracy=Interval(accuracy, _finite(event.get("accuracy_low")), _finite(event.get("accuracy_high"))),
        is_best=bool(event.get("is_best")),
        policy=None if event.get("policy") is None else str(event["policy"]),
    )


def _guard(event: Mapping[str, Any]) -> GuardEvent:
    return GuardEvent(
        _int(event, "update_step"),
        str(event.get("signal", "?")),
        str(event.get("message", "")),
        str(event.get("action", "?")),
    )


def _read_events(path: Path, name: str, notices: list[Notice]) -> list[Mapping[str, Any]]:
    """The lines that can be read; a run that is being written may end in half a line."""
    events: list[Mapping[str, Any]] = []
    damaged: list[int] = []
    try:
        content = path.read_bytes()
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        notices.append(Notice(name, f"metrics.jsonl {why}"))
        return []
    *lines, rest = content.split(b"\n")
    for number, line in enumerate((*lines, rest), start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError:
            damaged.append(number)
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            damaged.append(number)
    if damaged and damaged[-1] == len(lines) + 1:
        damaged.pop()
        notices.append(Notice(name, "metrics.jsonl ends in half a line, which is left out"))
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        notices.append(Notice(name, f"metrics.jsonl: {len(damaged)} lines are no events (line {shown})"))
    return events


def _read_config(path: Path, name: str, notices: list[Notice]) -> tuple[str, Mapping[str, str]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        return text, dict(_flatten(yaml.safe_load(text)))
    except OSError as error:
        notices.append(Notice(name, f"config.yaml cannot be read ({error.strerror})"))
        return "", {}
    except yaml.YAMLError:
        notices.append(Notice(name, "config.yaml is no YAML"))
        return text, {}


def _flatten(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None or prefix:
        yield prefix, json.dumps(value, default=str) if isinstance(value, list) else str(value)


# -- an evaluation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationSource:
    """One evaluation directory."""

    path: Path
    name: str
    run: str | None
    """Name of the run it was made in."""
    label: str
    """The method; may be empty, as it is in a run's own evaluations."""
    model: str
    data: str
    block_size: int
    offset: int
    policy: str
    temperature: float | None
    max_tokens: int | None
    num_problems: int
    num_samples: int
    update_step: int | None
    accuracy: Interval | None
    pass_at: Mapping[int, Interval]
    tokens_per_forward: Interval | None
    local_strict: Interval | None
    mean_length: float | None
    truncated: float | None
    tokens_per_second: float | None
    num_worker_failures: int
    record: Mapping[str, Any] = field(repr=False)

    @property
    def responses(self) -> Path:
        return self.path / "responses.jsonl"


def read_evaluation(path: Path, name: str, run: str | None, notices: list[Notice]) -> EvaluationSource | None:
    """An evaluation; None, with a notice, if its summary is of no use."""
    try:
        record = json.loads((path / "summary.json").read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no JSON; was it cut short?"
        notices.append(Notice(name, f"summary.json cannot be read ({reason})"))
        return None
    version = record.get("version") if isinstance(record, dict) else None
    if version != SUMMARY_VERSION:
        notices.append(
            Notice(
                name, f"summary.json: version {version!r} is not this program's {SUMMARY_VERSION}; left out"
            )
        )
        return None
    block_size = _number(record.get("block_size"))
    if block_size is None:
        notices.append(Notice(name, "summary.json: block_size is missing; left out"))
        return None
    evaluation = _evaluation(path, name, run, record)
    missing = [
        n for n in ("accuracy", "tokens_per_forward", "local_strict") if getattr(evaluation, n) is None
    ]
    if missing:
        notices.append(Notice(name, f"summary.json: {', '.join(missing)} missing"))
    if evaluation.num_worker_failures:
        notices.append(Notice(name, f"{evaluation.num_worker_failures} answers could not be checked; wrong"))
    return evaluation


def _evaluation(path: Path, name: str, run: str | None, record: Mapping[str, Any]) -> EvaluationSource:
    pass_at = {int(k): _interval(v) for k, v in _mapping(record.get("pass_at")).items() if k.isdecimal()}
    return EvaluationSource(
        path=path,
        name=name,
        run=run,
        label=str(record.get("label") or ""),
        model=str(record.get("model", "")),
        data=str(record.get("data", "")),
        block_size=_int(record, "block_size"),
        offset=_int(record, "offset"),
        policy=str(record.get("policy", "")),
        temperature=_finite(record.get("temperature")),
        max_tokens=_int(record, "max_tokens") or None,
        num_problems=_int(record, "num_problems"),
        num_samples=_int(record, "num_samples"),
        update_step=None if record.get("update_step") is None else _int(record, "update_step"),
        accuracy=_interval(record.get("accuracy")),
        pass_at={k: v for k, v in pass_at.items() if v is not None},
        tokens_per_forward=_interval(record.get("tokens_per_forward")),
        local_strict=_interval(record.get("local_strict")),
        mean_length=_finite(_mapping(record.get("response_length")).get("mean")),
        truncated=_finite(record.get("truncated")),
        tokens_per_second=_finite(_mapping(record.get("time")).get("tokens_per_second")),
        num_worker_failures=_int(record, "num_worker_failures"),
        record=record,
    )


def read_pieces(path: Path, name: str, notices: list[Notice]) -> Mapping[int, str]:
    """Token id -> text, of an evaluation directory."""
    try:
        record = json.loads((path / "pieces.json").read_bytes())
        return {int(token): str(piece) for token, piece in _mapping(record).items()}
    except FileNotFoundError:
        notices.append(Notice(name, "pieces.json is missing: tokens are shown by their ids"))
    except (OSError, ValueError):
        notices.append(Notice(name, "pieces.json cannot be read: tokens are shown by their ids"))
    return {}


def read_questions(path: Path, name: str, notices: list[Notice]) -> Mapping[str, tuple[str, str]]:
    """Problem id -> question and answer."""
    questions = {}
    try:
        for line in (path / "problems.jsonl").read_bytes().split(b"\n"):
            if line.strip():
                record = _mapping(json.loads(line))
                questions[str(record.get("id"))] = (str(record.get("question")), str(record.get("answer")))
    except FileNotFoundError:
        notices.append(Notice(name, "problems.jsonl is missing: problems are shown by their ids"))
    except (OSError, ValueError):
        notices.append(Notice(name, "problems.jsonl cannot be read to its end"))
    return questions


# -- values ------------------------------------------------------------------------------------


def _number(value: object) -> float | None:
    """Of JSON; what is not finite was written as a string."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _finite(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _int(record: Mapping[str, Any], name: str) -> int:
    return int(_finite(record.get(name)) or 0)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _interval(value: object) -> Interval | None:
    record = _mapping(value)
    number = _finite(record.get("value"))
    if number is None:
        return None
    return Interval(number, _finite(record.get("low")), _finite(record.get("high")))
