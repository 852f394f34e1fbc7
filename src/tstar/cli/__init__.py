"""The command line: the only wiring, and the only place that prints.

A command is a frozen dataclass in a module of its own: its fields are the options, the docstrings are the
help, `run` does the work. To add one, write it and name it in COMMANDS. Whatever is heavy is imported
inside `run`, so that `tstar --help` answers at once.

Commands run after tyro has returned, not inside it: tyro takes a ValueError for a usage error, and
a bug must not look like one.
"""

import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import tyro

from tstar import __version__
from tstar.cli.analyze import Analyze
from tstar.cli.chat import Chat
from tstar.cli.doctor import Doctor
from tstar.cli.eval import Eval
from tstar.cli.export import Export
from tstar.cli.generate import Generate
from tstar.cli.lm_eval import LmEval
from tstar.cli.plan import Plan
from tstar.cli.quickstart import Quickstart
from tstar.cli.report import Report
from tstar.cli.sft import Sft
from tstar.cli.train import Train
from tstar.errors import UserError

DESCRIPTION = """Train block-diffusion language models to decode in larger blocks.

`tstar COMMAND --help` explains a command; `tstar --version` prints the version."""


@runtime_checkable
class Command(Protocol):
    """Options, and what to do with them."""

    def run(self) -> int | None:
        """Do it; an exit code other than 0 says how it went. A mistake of the user raises UserError."""


COMMANDS: Mapping[str, type[Command]] = {
    "analyze": Analyze,
    "chat": Chat,
    "doctor": Doctor,
    "eval": Eval,
    "export": Export,
    "generate": Generate,
    "lm-eval": LmEval,
    "plan": Plan,
    "report": Report,
    "quickstart": Quickstart,
    "sft": Sft,
    "train": Train,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for a mistake of the user, 130 for Ctrl-C."""
    try:
        exit_code = execute(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_stdout_abandoned():
            raise
        # What is still buffered must go somewhere, or the interpreter complains while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return exit_code


def execute(argv: Sequence[str]) -> int:
    """Parse and run; bugs fly."""
    if list(argv) == ["--version"]:
        print(f"tstar {__version__}")
        return 0
    try:
        try:
            command = parse(argv)
        except SystemExit as leaving:  # tyro has printed its help (0) or a usage error (2)
            return int(leaving.code or 0)
        return command.run() or 0
    except UserError as error:
        print(f"tstar: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(": ".join(["tstar: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 128 + signal.SIGINT


def parse(argv: Sequence[str]) -> Command:
    """The command that the arguments name, with its options."""
    if list(argv[:1]) == ["train"]:
        argv = ["train", *Train.prepare(argv[1:])]
    if list(argv[:1]) == ["lm-eval"] and list(argv[1:2]) not in (["-h"], ["--help"]):
        argv = ["lm-eval", "--", *argv[1:]]  # options that are not ours
    command: Command = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS),
        prog="tstar",
        description=DESCRIPTION,
        args=list(argv),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return command


def is_stdout_abandoned() -> bool:
    """Whether the reader of our output has gone, as in `tstar doctor | head -1`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
