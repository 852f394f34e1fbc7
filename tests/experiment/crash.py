"""Runs a run and kills it with SIGKILL on the way, at given points or random moments, until it is done.

    python crash.py CONFIG.yaml RUN POINT...     each POINT ends one process; the last one goes to the end
    python crash.py CONFIG.yaml RUN --random N PLACES SEED
                                                 N processes, each killed by another one when it has passed a
                                                 random number of places, at most PLACES; says where it was

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
from contextlib import suppress
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

    def __init__(self, point: str, report: int | None = None) -> None:
        """report: a file descriptor that is told where the process is."""
        self.where, _, number = point.partition(":")
        self.number = int(number or 1)
        self.report = report
        self.seen: Counter[str] = Counter()

    def is_due(self, where: str) -> bool:
        if self.report is not None:
            os.write(self.report, f"{where}\n".encode())
        self.seen[where] += 1
        return where == self.where and self.seen[where] == self.number

    def pass_by(self, where: str) -> None:
        if self.is_due(where):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_event(self, event: str, _step: int, record: Mapping[str, object], _time: object) -> None:
        if event == "begin":
            self.pass_by("begin")
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
        killer.is_due("half a checkpoint")

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


def in_child(work: Callable[[], None]) -> int:
    """Fork, and do it there; the child's id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def kill_at_random(config: Path, run: Path, num_kills: int, most_places: int, seed: int) -> None:
    """Processes that are killed at random moments; ends early if one comes to the end of the run.

    Counted in places that they pass, not in seconds, so that a busy machine comes as far as an idle one; the
    parent, which kills, looks from time to time, so the moment itself is anywhere."""
    draw = random.Random(seed)
    for number in range(num_kills):
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        child = in_child(lambda writer=writer: go_on(config, run, Killer("", writer)))  # type: ignore[misc]
        os.close(writer)
        places = ""
        most = draw.randint(1, most_places)
        while places.count("\n") < most:
            time.sleep(draw.uniform(0, 0.01))
            with suppress(BlockingIOError):
                places += os.read(reader, 1 << 16).decode()
            if os.waitpid(child, os.WNOHANG)[0]:
                sys.stdout.write(f"came to the end after {number} kills\n")
                return
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with suppress(BlockingIOError):
            places += os.read(reader, 1 << 16).decode()
        os.close(reader)
        where = places.splitlines()
        sys.stdout.write(f"kill {number + 1}: after {len(where)} places, the last of them {where[-1]!r}\n")
        sys.stdout.flush()


def main(config: str, run: str, *points: str) -> int:
    whole = (Path(config), Path(run))
    if points[:1] == ("--random",):
        kill_at_random(*whole, int(points[1]), int(points[2]), int(points[3]))
        points = ()
    for point in points:
        child = in_child(lambda point=point: go_on(*whole, Killer(point)))  # type: ignore[misc]
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            sys.stderr.write(f"{point}: never came there (status {status})\n")
            return 1
    return os.waitpid(in_child(lambda: go_on(*whole, Killer(""))), 0)[1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
