"""`tstar quickstart`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tstar.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tstar.quickstart import State


@dataclass(frozen=True)
class Quickstart:
    """The whole story on this machine: an AR model, bases at B = 4, 8, 16, direct TraceRL, T*, what became of
    them.

    On two quiet cores it takes at most twelve minutes. Ctrl-C saves what there is; the same command goes
    on."""

    out: Path = Path("runs/quickstart")
    """Where everything is written."""
    smoke: bool = False
    """Everything once, in at most three minutes: too short to learn much."""
    seed: int = 0
    """Of weights, data, rollouts and evaluation."""
    workers: int | None = None
    """Processes side by side, one thread each. Default: 2, or 1 on a single core."""

    def run(self) -> None:
        from rich.console import Console

        from tstar import quickstart

        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers: {self.workers} is too few; use 1 or more")
        if self.seed < 0:
            raise UserError(f"seed: {self.seed} is negative; use 0 or more")
        out = self.out.resolve()
        tasks = quickstart.plan(quickstart.SMOKE if self.smoke else quickstart.FULL, out, self.seed)
        quickstart.prepare(tasks, out)
        num_workers = self.workers or min(2, os.cpu_count() or 1)
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
        began = time.monotonic()
        with _watching(console, num_workers) as watch:
            try:
                state = quickstart.run(tasks, out, num_workers, watch)
            except KeyboardInterrupt as interrupt:
                raise KeyboardInterrupt(
                    f"what is done is kept in {self.out}; the same command goes on"
                ) from interrupt
        _conclude(console, state, out, time.monotonic() - began)


@contextmanager
def _watching(console: Console, num_workers: int) -> Iterator[Callable[[State], None]]:
    """A table that is alive on a terminal, and elsewhere a line for each task that begins or ends."""
    from rich.live import Live

    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda state: live.update(_to_table(state, num_workers))
        return
    said: set[tuple[str, bool]] = set()

    def say(state: State) -> None:
        for task in state.tasks:
            is_done = task.name in state.took
            if (is_done or task.name in state.started) and (task.name, is_done) not in said:
                said.add((task.name, is_done))
                what = f"done in {_clock(state.took[task.name])}" if is_done else "begins"
                left = _clock(state.seconds_left(num_workers))
                note = f" ({state.notes[task.name]})" if task.name in state.notes else ""
                console.print(f"{task.title}: {what}{note}; about {left} left", markup=False)

    yield say


def _to_table(state: State, num_workers: int) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    left = _clock(state.seconds_left(num_workers))
    table = Table(box=None, title=f"about {left} left", title_justify="left", title_style="bold")
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify)
    for task in state.tasks:
        fraction = state.fraction(task)
        if task.name in state.took:
            clock = _clock(state.took[task.name]) if state.took[task.name] else "before"
        elif task.name in state.started:
            clock = _clock(time.monotonic() - state.started[task.name])
        else:
            clock = ""
        bar = ProgressBar(total=1.0, completed=fraction, width=30)
        table.add_row(task.title, bar, f"{clock} {state.notes.get(task.name, '')}")
    return table


def _conclude(console: Console, state: State, out: Path, seconds: float) -> None:
    """The tables, and where everything is."""
    from tstar.cli.eval import print_tables
    from tstar.evaluate import read_summary

    summaries = [
        read_summary(path.parent)
        for task in state.tasks
        if task.counter == "evaluations"
        for path in sorted(task.run.rglob("summary.json"))
    ]
    print_tables(console, summaries)
    report = _write_report(out)
    console.print(f"{_clock(seconds)} in all. Models, runs and evaluations: {out}", markup=False)
    console.print(f"The report: {report}", style="bold", markup=False)


def _write_report(out: Path) -> Path:
    from tstar import atomic
    from tstar.report.content import build
    from tstar.report.page import render

    path = out / "report.html"
    atomic.write_text(path, render(build((out,))))
    return path


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02}"
