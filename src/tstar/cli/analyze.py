"""`tstar analyze`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

    One row for each file and each partition (and temperature) in it. The unmask policy decides most of this,
    and only an evaluation says which it was: compare rows of the same policy only."""

    paths: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH...")] = ()
    """Runs, evaluations, directories with several of them, or .jsonl files of trajectories."""
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
                named = zip(rows, _names(rows), strict=True)
                tables += [table for row, name in named for table in _detail_tables(row, name)]
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
    label: str | None
    """The method, of an evaluation."""
    policy: str | None
    """The unmask policy, of an evaluation."""
    rule: Rule
    analysis: ScheduleAnalysis


def _analyze(paths: Sequence[Path]) -> Iterator[Row]:
    from tstar import schedule
    from tstar.report.lines import read_whole

    for file, label, policy in _find_files(paths):
        responses, is_torn = read_whole(file)
        if is_torn:
            print(f"tstar: {file}: ends in half a line, which is left out", file=sys.stderr)
        if not responses:
            raise UserError(f"{file}: holds no trajectories; name a file that does")
        by_rule: dict[Rule, list[schedule.DecodedResponse]] = {}
        for response in responses:
            partition = response.trajectory.partition
            rule = Rule(
                partition.block_size, partition.offset, partition.origin, response.trajectory.temperature
            )
            by_rule.setdefault(rule, []).append(response)
        for rule, group in sorted(by_rule.items()):
            yield Row(file, label, policy, rule, schedule.analyze(group))


def _find_files(paths: Sequence[Path]) -> Iterator[tuple[Path, str | None, str | None]]:
    """The files that the arguments mean, with an evaluation's label and unmask policy."""
    from tstar.report.sources import Notice, find, read_evaluation, rollout_files

    if not paths:
        raise UserError("paths: none is given; name a run, an evaluation or a .jsonl file of trajectories")
    found = find(paths)
    files: list[tuple[Path, str | None, str | None]] = []
    for run in found.runs:
        files += [(file, None, None) for file in rollout_files(run)]
    notices: list[Notice] = []
    for path in found.evaluations:
        evaluation = read_evaluation(path, str(path), None, notices)
        known = evaluation.record if evaluation else {}
        files.append((path / "responses.jsonl", known.get("label") or None, known.get("policy")))
    for notice in notices:
        print(f"tstar: {notice.source}: {notice.text}", file=sys.stderr)
    files += [(file, None, None) for file in found.trajectories]
    if not files:
        raise UserError(
            f"{paths[0]}: is a run without trajectories; decode some with `tstar generate` or `tstar eval`"
        )
    return iter(files)


# -- what is shown -----------------------------------------------------------------------------

Cell = str | float | int | None


def _cells(row: Row) -> Mapping[str, Cell]:
    """Column by column; None is shown as nothing."""
    analysis = row.analysis
    return {
        "source": str(row.source),
        "label": row.label,
        "policy": row.policy,
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


_COLUMNS = {
    "responses": "n",
    "accuracy": "acc.",
    "local_strict": "strict",
    "tokens_per_forward": "TPF",
    "steps_per_block": "steps",
    "distinct_schedules": "distinct",
    "confidence_correct": "conf ✓",
    "confidence_wrong": "conf ✗",
}
"""What fits a terminal; csv and json have all."""


def _to_table(rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title="Schedules (compare rows of the same unmask policy only)",
        caption="n: responses. strict: LocalStrict. steps: per block. distinct: schedules per response of a "
        "prompt. conf: of tokens when unmasked, in correct and wrong responses.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("source", overflow="fold")
    for heading in _COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row, name in zip(rows, _names(rows), strict=True):
        cells = _cells(row)
        # As text: what stands in a file is no markup.
        table.add_row(Text(name), *(_format(cells[column]) for column in _COLUMNS))
    return table


def _names(rows: Sequence[Row]) -> Sequence[str]:
    """How each was decoded, and its file without what all have in common: of an evaluation the directory, and
    only where what it says of itself does not tell it from the others."""
    from tstar.report.sources import name_paths

    hows = [" · ".join(part for part in (row.label, row.policy, str(row.rule)) if part) for row in rows]
    shown = [row.source.parent if row.policy is not None else row.source for row in rows]
    paths = name_paths(shown)
    return [
        how if row.label and hows.count(how) == 1 else f"{paths[path]}\n{how}"
        for row, how, path in zip(rows, hows, shown, strict=True)
    ]


def _detail_tables(row: Row, name: str) -> Iterator[Table]:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    analysis, title = row.analysis, escape(name.replace("\n", ", "))
    table = partial(Table, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", min_width=70)
    steps = table("steps", "blocks", title=f"{title}: steps that a block took")
    for number, count in enumerate(analysis.steps_per_block.tolist()):
        if count:
            steps.add_row(str(number), f"{count:,}")
    yield steps

    num_steps = analysis.first_unmask.shape[1]
    places = table(
        "place", "non-monotone", *map(str, range(num_steps)), title=f"{title}: tokens by place and step"
    )
    for place, (share, counts) in enumerate(
        zip(analysis.non_monotone_share, analysis.first_unmask.tolist(), strict=True)
    ):
        places.add_row(str(place), _format(share), *(f"{count:,}" for count in counts))
    yield places

    confidence = analysis.confidence
    bins = table("confidence", "tokens", "in correct responses", title=f"{title}: confidence when unmasked")
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
