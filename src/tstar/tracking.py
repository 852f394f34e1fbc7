"""What a run says while it goes: `metrics.jsonl` always, and other people's dashboards if asked for.

An event is one line of JSON::

    {"event": "train", "update_step": 7, "block_size": 4, "kl_old": 0.0012, ..., "time": {"seconds": 3.1}}

Everything that depends on the clock stands under "time"; all the rest is the same in every repetition of
the run. docs/metrics.md says how to read each name.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

from tstar import atomic
from tstar.errors import UserError

TrackerName = Literal["wandb", "tensorboard", "trackio"]


@runtime_checkable
class Tracker(Protocol):
    """A dashboard."""

    def log(self, update_step: int, metrics: Mapping[str, float]) -> None:
        """Show some numbers at an update step; names are like ``train/kl_old``."""
        ...

    def close(self) -> None:
        """Send what is still to be sent."""
        ...


class MetricsFile:
    """Appends events; a crash leaves at most one torn line, which `truncate` removes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    @property
    def offset(self) -> int:
        """Bytes so far, on disk: what a checkpoint remembers."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def append(self, record: Mapping[str, object]) -> None:
        self._file.write(to_line(record).encode())
        self._file.flush()

    def truncate(self, offset: int) -> None:
        """Forget what came after a checkpoint: the run goes on from there and says it again."""
        if self._file.seek(0, os.SEEK_END) < offset:
            raise UserError(
                f"{self._file.name}: has {self._file.tell()} bytes where the checkpoint knows {offset}; "
                "restore the file, or resume from an earlier checkpoint"
            )
        self._file.truncate(offset)
        self._file.seek(offset)

    def close(self) -> None:
        self._file.close()


def to_line(record: Mapping[str, object]) -> str:
    """Strict JSON: what is not finite becomes a string, so that every reader can read the line."""
    return json.dumps({name: _jsonable(value) for name, value in record.items()}, allow_nan=False) + "\n"


def _jsonable(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return value


class Tracking:
    """Sends each event to the file and to every dashboard."""

    def __init__(self, file: MetricsFile, trackers: Sequence[Tracker] = ()) -> None:
        self.file = file
        self._trackers = trackers

    def log(self, event: str, update_step: int, record: Mapping[str, object], **time: float) -> None:
        """Numbers of the record go to the dashboards as ``event/name``; time only to where time is shown."""
        self.file.append({"event": event, "update_step": update_step, **record, "time": time})
        curves = _curves_of(event, record)
        numbers = {
            f"{curves}/{name}": float(value)
            for name, value in (*record.items(), *time.items())
            if isinstance(value, int | float)
        }
        for tracker in self._trackers:
            tracker.log(update_step, numbers)

    def close(self) -> None:
        self.file.close()
        for tracker in self._trackers:
            tracker.close()


def _curves_of(event: str, record: Mapping[str, object]) -> str:
    """What an event's curves are called: two passes of an update, or validations under several policies, have
    the same update step and are not one curve."""
    if record.get("pass"):
        return f"{event}_shifted"
    if event == "validation_extra":
        return f"{event}/{str(record['policy']).replace(' ', '-')}"
    return event


# -- dashboards --------------------------------------------------------------------------------


def start_tracker(
    name: TrackerName, run: Path, project: str, config: Mapping[str, Any], last_update_step: int
) -> Tracker:
    """Connect to a dashboard, under an id that is the run's own: a resumed run goes on in the same curves.

    last_update_step: of the checkpoint that the run goes on from, or -1: what the dashboard shows beyond it
    will be said again.
    """
    module = require_installed(name)
    if name == "tensorboard":
        return _TensorBoard(module, run / "tensorboard", last_update_step)
    return _Wandb(module, run, project, config)


def require_installed(name: TrackerName) -> ModuleType:
    """A dashboard's package."""
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"tracking.trackers: {name} is not installed; pip install 'tstar[{name}]'") from error


def run_id(run: Path) -> str:
    """What dashboards know a run by: drawn once, kept in its directory."""
    path = run / "run_id"
    if not path.exists():
        atomic.write_text(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()


class _Wandb:
    """wandb, and trackio, which has wandb's interface but knows a run by its name alone."""

    def __init__(self, module: ModuleType, run: Path, project: str, config: Mapping[str, Any]) -> None:
        name, key = run.resolve().name, run_id(run)
        if module.__name__ == "wandb":
            naming = {"name": name, "id": key, "dir": str(run)}
        else:
            naming = {"name": f"{name}-{key}"}
        self._run = module.init(project=project, config=dict(config), resume="allow", **naming)
        if module.__name__ == "wandb":
            self._run.define_metric("*", step_metric="update_step")

    def log(self, update_step: int, metrics: Mapping[str, float]) -> None:
        # Not as wandb's own step, which must not go back: a resumed run says some updates again.
        self._run.log({**metrics, "update_step": update_step})

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, module: ModuleType, directory: Path, last_update_step: int) -> None:
        self._writer = module.SummaryWriter(str(directory), purge_step=last_update_step + 1)

    def log(self, update_step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, update_step)

    def close(self) -> None:
        self._writer.close()
