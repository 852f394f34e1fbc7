"""`tstar report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tstar.errors import UserError

if TYPE_CHECKING:
    from tstar.report.record import Report as Record


@dataclass(frozen=True)
class Report:
    """Show runs and evaluations: curves, tables, schedules, and responses as they appear step by step.

    The page is one file that needs no network. Directories are searched for runs and evaluations, so all
    of an experiment goes into one report:

        tstar report runs/quickstart -o report.html

        tstar report runs/quickstart --figures figures

        tstar report --watch runs/quickstart/tstar
    """

    paths: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH...")] = ()
    """Runs, evaluations, directories with several of them, or .jsonl files of trajectories."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The page to write. Default: report.html, unless --figures or --watch is given."""
    figures: Path | None = None
    """Directory for each figure as PDF, SVG and PNG, and each table as LaTeX and Markdown."""
    watch: Path | None = None
    """Serve this run on localhost instead, and follow it while it trains."""
    port: int = 8765
    """Of --watch; 0 takes a free one."""

    def run(self) -> None:
        if self.watch is not None:
            self._watch(self.watch)
            return
        if not self.paths:
            raise UserError("paths: none is given; name a run, an evaluation or a directory of them")
        from tstar.report.content import build

        report = build(self.paths)
        output = self.output
        if output is None and self.figures is None:
            output = Path("report.html")
        if output is not None:
            print(_write_page(report, output))
        if self.figures is not None:
            print(_write_figures(report, self.figures))

    def _watch(self, path: Path) -> None:
        if self.output is not None or self.figures is not None:
            raise UserError("watch: serves a page and writes none; leave out --output and --figures")
        from tstar.report.watch import serve

        server = serve((path, *self.paths), self.port)
        print(f"http://127.0.0.1:{server.server_address[1]}/ shows {path}; Ctrl-C ends it", flush=True)
        with server:
            server.serve_forever()


def _write_page(report: Record, output: Path) -> str:
    from tstar import atomic
    from tstar.report.page import render

    page = render(report)
    try:
        atomic.write_text(output, page)
    except OSError as error:
        raise UserError(f"output: {output} cannot be written ({error.strerror}); name another") from error
    parts = [f"{output}: {len(page.encode()) / 1e6:.1f} MB", *_count(report)]
    return ", ".join(parts)


def _count(report: Record) -> Sequence[str]:
    counts = (
        (len(report.runs), "runs"),
        (len(report.evaluations), "evaluations"),
        (len(report.samples.responses), "responses to play"),
        (len(report.notices), "remarks on what is missing or sampled"),
    )
    return [f"{number} {what}" for number, what in counts if number]


def _write_figures(report: Record, directory: Path) -> str:
    from tstar.report.figures import write_figures
    from tstar.report.tables import write_tables

    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = [*write_figures(report, directory), *write_tables(report, directory)]
    except OSError as error:
        raise UserError(f"figures: {directory} cannot be written ({error.strerror}); name another") from error
    return f"{directory}: {len(names)} files"
