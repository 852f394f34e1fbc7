"""`tstar sft`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tstar.errors import UserError
from tstar.sft.options import SftOptions

if TYPE_CHECKING:
    from tstar.sft.training import SftRun, StepReport


@dataclass(frozen=True)
class Sft:
    """Fine-tune a model: block diffusion (Eq. 2) at any block size, or the next token.

    The result is RUN/model, a directory that transformers, SGLang and LMDeploy load; RUN/metrics.jsonl has a
    line for each step. Ctrl-C saves a checkpoint first, and --resume goes on from the latest:

        tstar sft --out run/ar --data chain:3 --objective ar --learning-rate 2e-3

        tstar sft --out run/b4 --data chain:3 --model run/ar/model --block-sizes 4

        tstar sft --resume run/b4
    """

    out: Path | None = None
    """Directory of the run, new."""
    resume: Path | None = None
    """Directory of a run to go on with. Its own options hold; give no others."""
    options: Annotated[SftOptions, tyro.conf.arg(name="")] = field(default_factory=SftOptions)

    def run(self) -> None:
        self._check()
        from tstar.process import keep_freed_memory
        from tstar.sft.training import SftRun

        keep_freed_memory()
        if self.resume is not None:
            run = SftRun.resume(self.resume)
        else:
            assert self.out is not None
            run = SftRun.start(self.options, self.out)
        _train(run)

    def _check(self) -> None:
        if (self.out is None) == (self.resume is None):
            raise UserError("out: give --out RUN to begin a run, or --resume RUN to go on with one")
        default = SftOptions()
        changed = [
            f.name for f in fields(default) if getattr(self.options, f.name) != getattr(default, f.name)
        ]
        if self.resume is not None and changed:
            raise UserError(f"{changed[0]}: the options of {self.resume} are its own; leave this one out")
        if self.resume is None and not self.options.data:
            raise UserError("data: none is given; give --data FILE, a preset like gsm8k@train, or chain:3")


def _train(run: SftRun) -> None:
    """Train with a line of progress; the first Ctrl-C stops after the step, the second at once."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    console.print(_introduce(run))
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress, _interrupts() as interrupts:
        task = progress.add_task("", total=run.options.num_steps, completed=run.optimizer_step)

        def show(report: StepReport) -> None:
            progress.update(task, completed=report.optimizer_step, description=_describe(report))
            if report.validation is not None:
                progress.console.print(
                    f"step {report.optimizer_step}: validation loss {report.validation.loss:.4f}, "
                    f"cross-entropy {report.validation.cross_entropy:.4f}"
                )

        is_finished = run.train(show, should_stop=lambda: bool(interrupts))
    if not is_finished:
        raise KeyboardInterrupt(
            f"step {run.optimizer_step} is saved; tstar sft --resume {run.run.path} goes on"
        )
    console.print(f"{run.model_directory}: written")


def _introduce(run: SftRun) -> str:
    data = run.data
    left_out = f", {data.num_left_out} left out (longer than token_budget)" if data.num_left_out else ""
    num_trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    return (
        f"{run.run.path}: {len(data.examples)} examples, {len(data.validation)} for validation{left_out}; "
        f"{num_trained:,} parameters to train"
    )


def _describe(report: StepReport) -> str:
    return (
        f"loss {report.batch.loss:.4f}  grad norm {report.grad_norm:.2f}  lr {report.learning_rate:.1e}  "
        f"{report.batch.num_tokens / report.seconds:,.0f} tokens/s"
    )


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects the first Ctrl-C (or SIGTERM) instead of raising; the next one ends the program."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
