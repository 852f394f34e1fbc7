"""`tstar analyze`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import tyro

from tstar.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from tstar.schedule import ScheduleAnalysis


@dataclass(frozen=True)
class Analyze:
    """Show in what order responses were decoded: LocalStrict, tokens per forward, steps per block and more.

    One row for each file and each partition (and temperature) in it. A file does not say which unmask
    policy decoded it, and the policy decides most of this: compare rows of the same policy only."""

    paths: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN|TRAJECTORIES...")]
    """Runs, directories of trajectories, or .jsonl files of them."""
    format: Literal["table", "csv", "json"] = "table"
    """csv has the table's columns; json adds the histograms."""
    details: bool = False
    """With the table: each row's histograms too."""

    def run(self) -> None:
        from rich.console import Console

        rows = list(_analyze(self.paths))
        if self.format == "csv":
            print(_to_csv(rows), end="")
        elif self.format == "json":
            print(_to_json(rows))
        else:
            tables = [_to_table(rows)]
            if self.details:
                tables += [table for row in rows for table in _detail_tables(row)]
            Console().print(*tables)


class Rule(NamedTuple):
    """What a trajectory says of how it was decoded."""

    block_size: int
    offset: int
    origin: str
    temperature: float

    def __str__(self) -> str:
        parts = [f"B={self.block_size}"]
        if self.offset:
            parts.append(f"Δ={self.offset}")
        if self.origin != "response":
            parts.append(self.origin)
        if self.temperature != 1.0:
            parts.append(f"T={self.temperature:g}")
        return " ".join(parts)


@dataclass(frozen=True)
class Row:
    """The responses of one file that were decoded under one rule."""

    source: Path
    rule: Rule
    analysis: ScheduleAnalysis


def _analyze(paths: Sequence[Path]) -> Iterator[Row]:
    from tstar import schedule

    for file in _find_files(paths):
        by_rule: dict[Rule, list[schedule.DecodedResponse]] = {}
        for response in schedule.read_responses(file):
            partition = response.trajectory.partition
            rule = Rule(
                partition.block_size, partition.offset, partition.origin, response.trajectory.temperature
            )
            by_rule.setdefault(rule, []).append(response)
        if not by_rule:
            raise UserError(f"{file}: holds no trajectories; name a file that does")
        for rule, responses in sorted(by_rule.items()):
            yield Row(file, rule, schedule.analyze(responses))


def _find_files(paths: Sequence[Path]) -> list[Path]:
    """The files that the arguments mean. A run keeps its trajectories under rollouts/ and eval/."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            is_run = (path / "config.yaml").is_file()
            patterns = ("rollouts/**/*.jsonl", "eval/**/trajectories*.jsonl") if is_run else ("**/*.jsonl",)
            files = [file for pattern in patterns for file in sorted(path.glob(pattern))]
            if not files:
                what = "run without trajectories" if is_run else "directory without .jsonl files"
                raise UserError(f"{path}: is a {what}; decode some with `tstar generate` or `tstar eval`")
            found += files
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path}: no such file or directory; name a run or a .jsonl file")
    return found


# -- what is shown -----------------------------------------------------------------------------

Cell = str | float | int | None


def _cells(row: Row) -> Mapping[str, Cell]:
    """Column by column; None is shown as nothing."""
    analysis = row.analysis
    return {
        "source": str(row.source),
        **row.rule._asdict(),
        "prompts": analysis.num_prompts,
        "responses": analysis.num_responses,
        "tokens": analysis.num_tokens,
        "accuracy": analysis.accuracy,
        "truncated": analysis.truncated,
        "local_strict": analysis.local_strict,
        "tokens_per_forward": analysis.tokens_per_forward,
        "steps_per_block": analysis.mean_steps_per_block,
        "distinct_schedules": analysis.distinct_schedules,
        "confidence_correct": analysis.confidence.mean_correct,
        "confidence_wrong": analysis.confidence.mean_wrong,
    }


def _to_csv(rows: Sequence[Row]) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, list(_cells(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_cells(row) for row in rows)
    return text.getvalue()


def _to_json(rows: Sequence[Row]) -> str:
    import json

    return json.dumps(
        [
            {
                **_cells(row),
                "steps_per_block_counts": row.analysis.steps_per_block.tolist(),
                "first_unmask_counts": row.analysis.first_unmask.tolist(),
                "non_monotone_share": row.analysis.non_monotone_share,
                "confidence_counts_correct": row.analysis.confidence.correct.tolist(),
                "confidence_counts_wrong": row.analysis.confidence.wrong.tolist(),
            }
            for row in rows
        ],
        indent=2,
    )


def _to_table(rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(title="Schedules (compare rows of the same unmask policy only)")
    table.add_column("source", overflow="fold")
    table.add_column("partition")
    names = list(_cells(rows[0]))[5:]
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        cells = _cells(row)
        table.add_row(str(row.source), str(row.rule), *(_format(cells[name]) for name in names))
    return table


def _detail_tables(row: Row) -> Iterator[Table]:
    from rich.table import Table

    analysis = row.analysis
    title = f"{row.source}, {row.rule}"
    steps = Table("steps", "blocks", title=f"{title}: steps that a block took")
    for number, count in enumerate(analysis.steps_per_block.tolist()):
        if count:
            steps.add_row(str(number), f"{count:,}")
    yield steps

    num_steps = analysis.first_unmask.shape[1]
    places = Table(
        "place", "non-monotone", *map(str, range(num_steps)), title=f"{title}: tokens by place and step"
    )
    for place, (share, counts) in enumerate(
        zip(analysis.non_monotone_share, analysis.first_unmask.tolist(), strict=True)
    ):
        places.add_row(str(place), _format(share), *(f"{count:,}" for count in counts))
    yield places

    confidence = analysis.confidence
    bins = Table("confidence", "tokens", "in correct responses", title=f"{title}: confidence when unmasked")
    for number, (right, wrong) in enumerate(
        zip(confidence.correct.tolist(), confidence.wrong.tolist(), strict=True)
    ):
        share = right / (right + wrong) if right + wrong else None
        width = 1 / len(confidence.correct)
        bins.add_row(f"{number * width:.1f}-{(number + 1) * width:.1f}", f"{right + wrong:,}", _format(share))
    yield bins


def _format(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell
