"""Runs a run and kills it with SIGKILL on the way, at given points or random moments, until it is done.

    python crash.py CONFIG.yaml RUN POINT...     each POINT ends one process; the last one goes to the end
    python crash.py CONFIG.yaml RUN --random N   N processes, each killed after a random while

A point is WHERE:N, the Nth time that something happens in a process: ``sample`` and ``evaluate`` (a
response has come to its end), ``step`` (an optimizer step begins), ``stepped`` (has been done),
``checkpoint`` (half of one is written), ``saved`` (one is whole, nothing is tidied up), ``metrics`` (half a
line is written).
Processes are forked from one, so that torch is imported once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

torch.set_num_threads(1)

from tstar import experiment  # noqa: E402
from tstar.config import load_config  # noqa: E402
from tstar.experiment import policy, world  # noqa: E402
from tstar.optimizer import Optimizer  # noqa: E402
from tstar.tracking import MetricsFile, to_line  # noqa: E402


class Killer:
    """Ends this process the Nth time that it is somewhere."""

    def __init__(self, point: str) -> None:
        self.where, _, number = point.partition(":")
        self.number = int(number or 1)
        self.seen: Counter[str] = Counter()

    def is_due(self, where: str) -> bool:
        self.seen[where] += 1
        return where == self.where and self.seen[where] == self.number

    def pass_by(self, where: str) -> None:
        if self.is_due(where):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_event(self, event: str, _step: int, record: Mapping[str, object], _time: object) -> None:
        if event == "phase" and "done" in record:
            self.pass_by(str(record["phase"]))


def set_traps(killer: Killer) -> None:
    """Let the places where no event happens pass by the killer."""
    step, save_file = Optimizer.step, policy.save_file
    tidy, append = world.RunWorld._tidy, MetricsFile.append

    def trapped_step(self: Optimizer) -> object:
        killer.pass_by("step")
        done = step(self)
        killer.pass_by("stepped")
        return done

    def trapped_save(*arguments: object) -> None:
        killer.pass_by("checkpoint")
        save_file(*arguments)  # type: ignore[arg-type]

    def trapped_tidy(self: world.RunWorld, progress: object) -> None:
        killer.pass_by("saved")
        tidy(self, progress)  # type: ignore[arg-type]

    def trapped_append(self: MetricsFile, record: Mapping[str, object]) -> None:
        if killer.is_due("metrics"):
            self._file.write(to_line(record)[:20].encode())
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, record)

    Optimizer.step = trapped_step  # type: ignore[method-assign,assignment]
    policy.save_file = trapped_save  # type: ignore[assignment]
    world.RunWorld._tidy = trapped_tidy  # type: ignore[method-assign,assignment]
    MetricsFile.append = trapped_append  # type: ignore[method-assign]


def go_on(config: Path, run: Path, killer: Killer) -> None:
    set_traps(killer)
    watch = experiment.Watch(killer.on_event)
    if (run / "config.yaml").exists():
        experiment.resume(run, watch)
    else:
        experiment.start(load_config(str(config)), run, watch)


def in_child(work: Callable[[], None], seconds: float | None = None) -> int:
    """Fork, do it there, kill it after a while; its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def main(config: str, run: str, *points: str) -> int:
    if points[:1] == ("--random",):
        began = time.monotonic()
        draw = random.Random(int(points[2]) if len(points) > 2 else None)
        killed = 0
        while killed < int(points[1]):
            status = in_child(lambda: go_on(Path(config), Path(run), Killer("")), draw.uniform(0.1, 2.5))
            killed += os.WIFSIGNALED(status)
            if not os.WIFSIGNALED(status):
                sys.stdout.write(f"done after {killed} kills, {time.monotonic() - began:.0f} s\n")
                return status
        points = ()
    for point in points:
        status = in_child(lambda point=point: go_on(Path(config), Path(run), Killer(point)))  # type: ignore[misc]
        if not os.WIFSIGNALED(status):
            sys.stderr.write(f"{point}: never came there (status {status})\n")
            return 1
    return in_child(lambda: go_on(Path(config), Path(run), Killer("")))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
