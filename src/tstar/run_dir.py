"""A run is a directory: all that it knows, so that it can be killed at any moment and go on.

::

    config.yaml       the resolved configuration
    metrics.jsonl     one event a line (tracking.py)
    rollouts/         what was sampled
    checkpoints/      000040/: everything that the next update depends on
    eval/             evaluations in full
    report.html

Checkpoints are numbered by update step and are complete or absent. One process writes a run at a time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from tstar import atomic
from tstar.errors import UserError

CONFIG_FILE = "config.yaml"
LOCK_FILE = "run.lock"


@dataclass(frozen=True)
class RunDir:
    """The paths of a run, and its checkpoints."""

    path: Path

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> RunDir:
        """A new run with its resolved configuration."""
        cls.check_free(path)
        try:
            for directory in (path, path / "rollouts", path / "checkpoints", path / "eval"):
                directory.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path / CONFIG_FILE, config_yaml)
        except OSError as error:
            raise UserError(
                f"{path}: no run can be made here ({error.strerror}); choose another directory"
            ) from error
        return cls(path)

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a directory that something else is in."""
        if (path / CONFIG_FILE).exists():
            raise UserError(
                f"{path}: is a run already; go on with --resume {path}, or choose another directory"
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path}: exists and is not empty; choose another directory")

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """A run that exists."""
        if not (path / CONFIG_FILE).is_file():
            raise UserError(f"{path}: is no run, {CONFIG_FILE} is missing; give the directory of a run")
        return cls(path)

    def empty_unused(self) -> None:
        """Take away what `create` and a first event have made, unless more has come of the run; another
        one can take its place then. What is not the run's own stays."""
        own = (self._checkpoints, self.rollouts, self.evaluations)
        num_events = len(self.metrics.read_bytes().splitlines()) if self.metrics.is_file() else 0
        if num_events > 1 or any(directory.is_dir() and any(directory.iterdir()) for directory in own):
            return
        for directory in own:
            if directory.is_dir():
                directory.rmdir()
        for file in (self.path / CONFIG_FILE, self.metrics, self.path / LOCK_FILE):
            file.unlink(missing_ok=True)

    @property
    def config_yaml(self) -> str:
        return (self.path / CONFIG_FILE).read_text(encoding="utf-8")

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def evaluations(self) -> Path:
        return self.path / "eval"

    # -- one writer ----------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one process that writes this run.

        The lock is the kernel's: it goes with the process, however that ends, and children do not
        inherit it. The file only tells who holds it.
        """
        with (self.path / LOCK_FILE).open("a+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                file.seek(0)
                raise UserError(
                    f"{self.path}: {file.read().strip() or 'another process'} writes this run; "
                    "stop it first, or start another run"
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            for directory in (self.path, self._checkpoints, self.rollouts, self.evaluations):
                atomic.remove_partial(directory)
            yield

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The numbers of the complete ones, rising."""
        return tuple(sorted(int(path.name) for path in self._checkpoints.iterdir() if path.name.isdecimal()))

    @property
    def latest_checkpoint(self) -> int | None:
        return max(self.checkpoints, default=None)

    def checkpoint_path(self, number: int) -> Path:
        return self._checkpoints / f"{number:06}"

    def save_checkpoint(self, number: int, fill: Callable[[Path], None]) -> Path:
        """Let `fill` write files into a directory that becomes the checkpoint with this number."""
        target = self.checkpoint_path(number)
        with self.writing(target, "the checkpoint "), atomic.replacing(target) as partial:
            fill(partial)
        return target

    @contextmanager
    def writing(self, path: Path, what: str = "") -> Iterator[None]:
        """Say what to do where something of the run cannot be written."""
        try:
            yield
        except (OSError, SafetensorError, UserError) as error:
            cause = error.__cause__ if isinstance(error, UserError) else error
            if not isinstance(cause, OSError | SafetensorError):
                raise
            raise UserError(f"{path}: {what}{self._describe_failure(cause)}") from error

    def prune(self, keep: Collection[int]) -> None:
        """Remove every checkpoint but these."""
        for number in set(self.checkpoints) - set(keep):
            atomic.remove(self.checkpoint_path(number))

    # -- private -------------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _describe_failure(self, cause: OSError | SafetensorError) -> str:
        reason = getattr(cause, "strerror", None) or str(cause)
        free = shutil.disk_usage(self.path).free / 2**30
        latest = self.latest_checkpoint
        kept = "there is no checkpoint" if latest is None else f"{self.checkpoint_path(latest)} is whole"
        return (
            f"could not be written ({reason}; {free:.1f} GiB are free); {kept}; "
            f"make room, then go on with --resume {self.path}"
        )
