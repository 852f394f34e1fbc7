"""What a run looks like while it goes: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tstar.config import RunConfig
    from tstar.experiment import OnEvent

Record = Mapping[str, object]

SHOWN = {
    "reward": ("reward_mean", "{:.3f}"),
    "TPF": ("tokens_per_forward", "{:.2f}"),
    "KL": ("kl_base", "{:.2g}"),
    "entropy": ("entropy", "{:.3f}"),
    "grad": ("grad_norm", "{:.2g}"),
    "length": ("response_length", "{:.0f}"),
    "truncated": ("num_truncated", "{:.0f}"),
}
"""Of a train event: heading, name, form."""


@contextmanager
def watching(config: RunConfig, directory: Path) -> Iterator[OnEvent]:
    """Something that shows the events it is given, for as long as the block lasts."""
    console = Console(highlight=False)
    view = View(config, directory, console)
    if not console.is_terminal:
        yield view.on_event
        return
    with Live(view, console=console, refresh_per_second=4, transient=True):
        yield view.on_event


class View:
    """Where a run stands, as far as its events tell."""

    def __init__(self, config: RunConfig, directory: Path, console: Console) -> None:
        self._config, self._directory, self._console = config, directory, console
        self._stages = config.stages
        self._began = time.monotonic()
        self._first_step: int | None = None
        self._step = 0
        """Update steps done."""
        self._stage = 0
        self._left = 0
        """Update steps to do, if no stage ends early."""
        self._stage_start = 0
        self._train: Record = {}
        self._time: Mapping[str, float] = {}
        self._validation: Record = {}
        self._best: float | None = None
        self._phase: Record = {}

    # -- events --------------------------------------------------------------------------------

    def on_event(self, event: str, update_step: int, record: Record, time: Mapping[str, float]) -> None:
        handler = getattr(self, f"_on_{event}", None)
        if handler is not None:
            handler(update_step, record, time)

    def _on_begin(self, update_step: int, record: Record, _: Mapping[str, float]) -> None:
        self._step = self._first_step = self._stage_start = update_step
        self._stage = _int(record["stage"])
        if record["resumed"]:
            self._say(f"resumed after update {update_step}")

    def _on_phase(self, _step: int, record: Record, _: Mapping[str, float]) -> None:
        self._phase = record

    def _on_stage(self, update_step: int, record: Record, _: Mapping[str, float]) -> None:
        self._stage, self._stage_start, self._best = _int(record["stage"]), update_step, None
        self._say(
            f"stage {self._stage + 1} of {len(self._stages)}: block size {record['block_size']}, "
            f"{record['num_updates']} updates, learning rate {record['learning_rate']:g}"
        )

    def _on_cold_start(self, _step: int, record: Record, _: Mapping[str, float]) -> None:
        self._say(
            f"cold start: {record['num_correct']} of {record['num_responses']} own responses learnt, loss "
            f"{record['first_loss']:.3f} -> {record['last_loss']:.3f}"
        )

    def _on_train(self, update_step: int, record: Record, time: Mapping[str, float]) -> None:
        self._train, self._time = record, {**self._time, **time}
        stage = self._stages[_int(record["stage"])]
        if _int(record["pass"]) + 1 < stage.num_passes:
            return
        self._step = update_step
        if "refused" in record:
            self._say(f"update {update_step}: not trained on: {record['refused']}")
        elif not self._console.is_terminal:
            self._say(self._line())

    def _on_validation(self, update_step: int, record: Record, _: Mapping[str, float]) -> None:
        self._validation = record
        accuracy = _float(record["accuracy"])
        if record["is_best"]:
            self._best = accuracy
        best = " (best of the stage)" if record["is_best"] else ""
        low, high = _float(record["accuracy_low"]), _float(record["accuracy_high"])
        self._say(
            f"update {update_step}: B = {record['block_size']}, {record['policy']}: validation accuracy "
            f"{accuracy:.1%} [{low:.1%}, {high:.1%}], TPF {record['tokens_per_forward']:.2f}{best}"
        )

    def _on_validation_extra(self, update_step: int, record: Record, _: Mapping[str, float]) -> None:
        self._say(
            f"update {update_step}: B = {record['block_size']}, {record['policy']}: "
            f"{_float(record['accuracy']):.1%}, TPF {record['tokens_per_forward']:.2f}"
        )

    def _on_guard(self, update_step: int, record: Record, _: Mapping[str, float]) -> None:
        action = str(record["action"]).replace("_", " ")
        self._say(f"guard: update {update_step}: {record['message']}: {action}")

    # -- what is shown -------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        # Words are wrapped for people; a line of a log file stays one line.
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)

    @property
    def _total(self) -> int:
        """Update steps of the whole run, if no stage ends early."""
        return self._stage_start + sum(stage.num_updates for stage in self._stages[self._stage :])

    @property
    def _seconds_left(self) -> float | None:
        done = self._step - (self._first_step or 0)
        if done == 0:
            return None
        return (time.monotonic() - self._began) / done * (self._total - self._step)

    def _metrics(self) -> dict[str, str]:
        shown = {"KL": ("kl_base" if "kl_base" in self._train else "kl_old", "{:.2g}")}
        found = {}
        for heading, (name, form) in {**SHOWN, **shown}.items():
            if name in self._train:
                found[heading] = form.format(self._train[name])
        if "tokens_per_second" in self._time:
            found["tokens/s"] = f"{self._time['tokens_per_second']:,.0f}"
        return found

    def _line(self) -> str:
        parts = [f"update {self._step}/{self._total}", f"B = {self._train['block_size']}"]
        parts += [f"{heading} {value}" for heading, value in self._metrics().items()]
        return "  ".join([*parts, f"left {format_duration(self._seconds_left)}"])

    def __rich__(self) -> Group:
        block_size = self._stages[min(self._stage, len(self._stages) - 1)].block_size
        place = (
            f"  stage {self._stage + 1}/{len(self._stages)} (B = {block_size})"
            f"  update {self._step}/{self._total}  elapsed {format_duration(time.monotonic() - self._began)}"
            f"  left {format_duration(self._seconds_left)}"
        )
        head = Text.assemble((str(self._directory), "bold"), place)
        parts: list[Text | Table] = [head]
        metrics = self._metrics()
        if self._validation:
            accuracy = f"{_float(self._validation['accuracy']):.1%}"
            metrics["validation"] = accuracy if self._best is None else f"{accuracy} (best {self._best:.1%})"
        if metrics:
            table = Table(*metrics, box=None, pad_edge=False)
            table.add_row(*metrics.values())
            parts.append(table)
        if "total" in self._phase:
            bar = Table.grid(padding=(0, 1))
            done, total = _int(self._phase["done"]), _int(self._phase["total"])
            bar.add_row(str(self._phase["phase"]), ProgressBar(total, done, width=40), f"{done:,}/{total:,}")
            parts.append(bar)
        elif self._phase:
            parts.append(Text(str(self._phase["phase"])))
        return Group(*parts)


def format_duration(seconds: float | None) -> str:
    """2h05m, 3m20s; ? for what is not known."""
    if seconds is None:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _float(value: object) -> float:
    assert isinstance(value, float | int)
    return float(value)
