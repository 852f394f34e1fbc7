"""The paper's two tables, as LaTeX (booktabs) and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tstar import atomic
from tstar.report.record import Report, Score
from tstar.report.sources import Interval


@dataclass(frozen=True)
class Table:
    """A table without a syntax."""

    name: str
    """Of its files."""
    caption: str
    head: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]
    """Rows; a line is drawn between groups."""


def write_tables(report: Report, directory: Path) -> list[str]:
    """Each table as NAME.tex and NAME.md; returns the files' names."""
    names = []
    for table in make_tables(report):
        for ending, text in (("tex", to_latex(table)), ("md", to_markdown(table))):
            atomic.write_text(directory / f"{table.name}.{ending}", text)
            names.append(f"{table.name}.{ending}")
    return names


def make_tables(report: Report) -> list[Table]:
    """Both tables of each setting that was evaluated in."""
    tables: list[Table] = []
    settings = sorted({s.setting for s in report.scores})
    for number, setting in enumerate(settings, start=1):
        scores, name = [s for s in report.scores if s.setting == setting], report.settings[setting]
        suffix = f"-{number}" if len(settings) > 1 else ""
        tables.append(_schedule_table(report, scores, name, f"table-schedule{suffix}"))
        tables.append(_block_table(report, scores, name, f"table-block-size{suffix}"))
    return tables


def _schedule_table(report: Report, scores: Sequence[Score], setting: str, name: str) -> Table:
    """AR models first, then from the largest block size down, as in the paper."""
    sizes = sorted({s.block_size for s in scores}, key=lambda b: (b != 1, -b))
    groups = []
    for size in sizes:
        rows = [s for s in scores if s.block_size == size]
        groups.append(
            tuple(
                (
                    report.methods[s.method].name,
                    str(size),
                    show(s.local_strict, 3),
                    show(s.accuracy, 1, 100.0),
                    show(s.tokens_per_forward, 2),
                )
                for s in rows
            )
        )
    head = ("Method", "B", "LocalStrict", f"avg@{scores[0].num_samples} (%)", "TPF")
    caption = f"LocalStrict, accuracy and tokens per forward ({_explain(scores, setting)})."
    return Table(name, caption, head, tuple(groups))


def _block_table(report: Report, scores: Sequence[Score], setting: str, name: str) -> Table:
    sizes = sorted({s.block_size for s in scores})
    by_place = {(s.method, s.block_size): s.accuracy for s in scores}
    rows = tuple(
        (report.methods[m].name, *(show(by_place.get((m, size)), 1, 100.0) for size in sizes))
        for m in sorted({s.method for s in scores})
    )
    head = ("Method", *(f"B = {size}" for size in sizes))
    caption = f"avg@{scores[0].num_samples} in % by method and block size ({_explain(scores, setting)})."
    return Table(name, caption, head, (rows,))


def _explain(scores: Sequence[Score], setting: str) -> str:
    counts = {s.num_evaluations for s in scores}
    several = "; of several seeds, their mean" if len(counts) > 1 else f"; means of {max(counts)} seeds"
    several = "" if counts == {1} else several
    return f"{setting}; {scores[0].num_problems} problems, 95 % intervals{several}"


def show(interval: Interval | None, digits: int, scale: float = 1.0) -> str:
    """As in "71.2 [68.0, 74.1]"."""
    if interval is None:
        return "–"
    text = f"{scale * interval.value:.{digits}f}"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{scale * interval.low:.{digits}f}, {scale * interval.high:.{digits}f}]"


# -- syntax ------------------------------------------------------------------------------------


def to_markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(c.replace('|', chr(92) + '|').replace(chr(10), ' ') for c in cells)} |"

    rule = line(["---", *["---:"] * (len(table.head) - 1)])
    rows = [line(row) for group in table.groups for row in group]
    return "\n".join([table.caption.replace("\n", " "), "", line(table.head), rule, *rows]) + "\n"


def to_latex(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "  " + " & ".join(_escape(cell) for cell in cells) + r" \\"

    def body() -> Iterator[str]:
        for number, group in enumerate(table.groups):
            if number:
                yield r"  \midrule"
            yield from (line(row) for row in group)

    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}",
            r"  \toprule",
            line(table.head),
            r"  \midrule",
            *body(),
            r"  \bottomrule",
            r"  \end{tabular}",
            rf"  \caption{{{_escape(table.caption)}}}",
            rf"  \label{{tab:{table.name}}}",
            r"\end{table}",
            "",
        ]
    )


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "·": r"$\cdot$",
    "×": r"$\times$",
    "⋆": r"$\star$",
    "★": r"$\star$",
    "β": r"$\beta$",
    "η": r"$\eta$",
    "Δ": r"$\Delta$",
    "[": "{[}",  # behind \\ a bracket would be taken for a distance
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text.replace("\n", " "))
