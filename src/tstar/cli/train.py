"""`tstar train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tstar.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from tstar.config import RunConfig
    from tstar.curriculum import Progress
    from tstar.experiment import Watch
    from tstar.experiment.outlook import Outlook

INTERRUPTED, STOPPED = 75, 3
"""Exit codes: asked to stop, and saved (EX_TEMPFAIL: try again, with --resume); stopped by the guard."""


@dataclass(frozen=True)
class Train:
    """Train a block-diffusion model by RL: T*, or TraceRL at one block size.

    A recipe is a name that comes with tstar or a .yaml file; what the command line says holds instead of it:

        tstar train quickstart-tstar --model runs/b4/model --out runs/tstar

        tstar train my.yaml --rollout.num-samples 8 --curriculum.stages.8.num-updates 20

        tstar train --resume runs/tstar

    The first Ctrl-C or SIGTERM lets the optimizer step in progress finish and saves it (exit code 75), the
    second leaves at once. A run that was killed in any other way goes on with --resume from its latest
    checkpoint, to the same numbers. Exit code 3: the guard has ended the run."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE|FILE.yaml")] = ""
    """Where settings come from."""
    overrides: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Other values of settings, as rollout.num_samples=8; --rollout.num-samples 8 does the same."""
    out: Path | None = None
    """Directory of the run, new. Default: runs/RECIPE."""
    resume: Path | None = None
    """Directory of a run to go on with. Its own settings hold; give no others."""
    dry_run: bool = False
    """Show the settings in full, the plan, and what it takes; do nothing."""

    @classmethod
    def prepare(cls, arguments: Sequence[str]) -> list[str]:
        """Settings given as flags become overrides, so that both are read and refused alike."""
        if {"-h", "--help"} & set(arguments):
            _print_help()
        return list(_flags_to_overrides(arguments, {f.name for f in fields(cls)}))

    def run(self) -> int:
        self._check()
        if self.dry_run:
            _describe(self._configure())
            return 0
        from tstar.process import keep_freed_memory

        keep_freed_memory()
        config = None if self.resume is not None else self._configure()
        directory = self.resume or self.out or Path("runs") / Path(self.recipe).stem
        return _train(config, directory)

    def _check(self) -> None:
        if self.resume is not None and (self.recipe or self.overrides or self.out):
            given = self.recipe or (self.overrides[0] if self.overrides else "--out")
            raise UserError(f"{given}: the settings of {self.resume} are its own; leave this out")
        if self.resume is None and not self.recipe:
            raise UserError("recipe: none is given; name one, like quickstart-tstar, or a .yaml file")
        if "=" in self.recipe:
            raise UserError(
                f"{self.recipe}: no recipe comes before it; write tstar train RECIPE {self.recipe}"
            )

    def _configure(self) -> RunConfig:
        if self.resume is not None:
            from tstar.experiment import open_run

            return open_run(self.resume)[1]
        from tstar.config import load_config

        return load_config(self.recipe, self.overrides)


def _flags_to_overrides(arguments: Sequence[str], own: set[str]) -> Iterator[str]:
    """``--rollout.num-samples 8`` -> ``rollout.num_samples=8``; a flag without a value means true."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name.replace("-", "_") in own:
            yield argument
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        yield f"{name.replace('-', '_')}={value}"


def _train(config: RunConfig | None, directory: Path) -> int:
    from rich.console import Console

    from tstar import experiment
    from tstar.cli.watch import watching
    from tstar.curriculum import InterruptedRunError
    from tstar.experiment.run import ignore_event
    from tstar.parallel import joined

    settings = config or experiment.open_run(directory)[1]
    with (
        experiment.Interrupts().listening() as interrupts,
        joined(settings.device) as parallel,
        watching(settings, directory) if parallel.is_main else nullcontext(ignore_event) as on_event,
    ):
        watch: Watch = experiment.Watch(on_event, interrupts.check)
        try:
            end: Progress = (
                experiment.resume(directory, watch, parallel)
                if config is None
                else experiment.start(config, directory, watch, parallel)
            )
        except InterruptedRunError:
            interrupted = True
        else:
            interrupted = False
    console = Console(soft_wrap=True, highlight=False, quiet=not parallel.is_main)
    if interrupted:
        console.print(f"interrupted and saved; tstar train --resume {directory} goes on")
        return INTERRUPTED
    best = f"; the best checkpoint is {directory / 'best'}" if (directory / "best").is_dir() else ""
    if end.stop_reason is not None:
        console.print(f"stopped after update {end.update_step}: {end.stop_reason}{best}")
        return STOPPED
    console.print(f"done: {end.update_step} updates{best}")
    return 0


def _describe(config: RunConfig) -> None:
    """The settings as they would be kept, the stages, and what they take."""
    from rich.console import Console

    from tstar.config import to_yaml
    from tstar.experiment.outlook import look_ahead

    print(to_yaml(config))
    outlook = look_ahead(config)
    rollout = config.rollout
    responses = f"{rollout.num_problems} problems x {rollout.num_samples} responses an update"
    Console(highlight=False).print(_to_table(outlook), f"{responses}; {outlook.assumptions}", sep="")


def _to_table(outlook: Outlook) -> Table:
    from rich import box
    from rich.table import Table

    from tstar.cli.watch import format_duration

    names = ("B", "updates", "lr", "shifted", "cold start", "rollouts", "memory", "time")
    table = Table(title="stages", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        is_text = name == "rollouts"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    for each in outlook.stages:
        stage, memory, timing = each.stage, each.memory, each.timing
        at_most = "" if stage.plateau is None else "at most "
        steps = "" if stage.cold_start is None else f"{stage.cold_start.num_steps} steps"
        if memory is not None and not memory.fits:
            table.caption = f"! there are only {memory.available / 1e9:.1f} GB"
        too_much = "" if memory is None or memory.fits else "!"
        table.add_row(
            str(stage.block_size),
            f"{at_most}{stage.num_updates}",
            f"{stage.learning_rate:g}",
            stage.shifted_rollouts,
            steps,
            each.policies,
            "?" if memory is None else f"{memory.peak / 1e9:.1f} GB{too_much}",
            "?" if timing is None else format_duration(timing.hours * 3600),
        )
    return table


def _print_help() -> None:
    """tyro's help of everything, settings included."""
    from tstar.cli.settings import Documented

    tyro.cli(Documented, prog="tstar train", description=Train.__doc__, args=["--help"])
