"""The command line: exit codes, what lands on which stream, and what is imported when."""

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

import pytest

from tstar import __version__, cli
from tstar.errors import UserError

HEAVY = ("torch", "transformers", "numpy", "pydantic", "huggingface_hub", "rich")


@dataclass(frozen=True)
class Fail:
    """Raise whatever the test asks for."""

    kind: str
    """Name of the exception."""

    def run(self) -> None:
        raise {
            "user": UserError("steps: 0 is too few; use 1 or more"),
            "interrupt": KeyboardInterrupt(),
            "bug": ValueError("a bug"),
            "pipe": BrokenPipeError("a worker's pipe, not stdout"),
        }[self.kind]


@pytest.fixture
def fail_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {"fail": Fail})


def run_python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=False, text=True, timeout=60, **options)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tstar.cli import main; code = main(['--help'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = run_python("-c", code, capture_output=True)
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert done.stderr == "[]\n"


def test_help_answers_at_once() -> None:
    """Half a second of the processor's time; that of the clock depends on who else is there."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_python("-m", "tstar", "--help", stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tstar {__version__}\n"
    assert metadata.version("tstar") == __version__


def test_module_and_script_are_the_same_command() -> None:
    done = run_python("-m", "tstar", "--version", capture_output=True)
    assert (done.returncode, done.stdout) == (0, f"tstar {__version__}\n")
    (script,) = metadata.entry_points(group="console_scripts", name="tstar")
    assert script.value == "tstar.cli:main"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    explained = " ".join(capsys.readouterr().out.split())
    summary = (cli.COMMANDS[name].__doc__ or "no docstring").split(".")[0]
    assert " ".join(summary.split()) in explained


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_usage_error_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "tstar --help" in streams.err


@pytest.mark.usefixtures("fail_command")
def test_user_error_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fail", "--kind", "user"]) == 2
    streams = capsys.readouterr()
    assert (streams.out, streams.err) == ("", "tstar: error: steps: 0 is too few; use 1 or more\n")


@pytest.mark.usefixtures("fail_command")
def test_interrupt_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fail", "--kind", "interrupt"]) == 130
    assert capsys.readouterr().err == "tstar: interrupted\n"


@pytest.mark.usefixtures("fail_command")
def test_bugs_fly() -> None:
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["fail", "--kind", "bug"])


@pytest.mark.usefixtures("fail_command", "capfd")
def test_broken_pipe_that_is_not_stdout_flies() -> None:
    with pytest.raises(BrokenPipeError, match="a worker's pipe"):
        cli.main(["fail", "--kind", "pipe"])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_that_left_is_no_error(arguments: list[str], unbuffered: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = run_python("-m", "tstar", *arguments, stdout=write_end, stderr=subprocess.PIPE, env=environment)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")
