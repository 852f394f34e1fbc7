"""The whole story on a laptop, as tasks: each is one `tstar` command in a process of its own.

AR model -> b4 by SFT -> a base at each larger block size by SFT -> direct TraceRL on those bases, T* from b4
-> all of them evaluated -> the report. Tasks that do not need each other run side by side. What is done
stays done: after an interruption the same call goes on, with `--resume` where a task was in the middle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tstar import atomic
from tstar.errors import UserError

Counter = Literal["optimizer_step", "update_step", "evaluations"]
GUARD_STOPPED = 3
"""Exit code of a training run that its guard has ended: a result, not a failure."""


# -- what is to be done ------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One command, and how far it is."""

    name: str
    title: str
    arguments: tuple[str, ...]
    """Of `tstar`."""
    run: Path
    """The directory it writes."""
    needs: tuple[str, ...]
    """Tasks whose results it reads."""
    seconds: float
    """On one core of a quiet machine: what the time left is counted from."""
    total: int
    counter: Counter
    """What ``total`` counts."""
    is_resumable: bool = True
    """An interrupted one goes on with ``--resume``; otherwise by saying the same again."""
    num_threads: int = 1

    @property
    def command(self) -> tuple[str, ...]:
        if self.is_resumable and (self.run / "config.yaml").is_file():
            return (self.arguments[0], "--resume", str(self.run))
        return self.arguments

    def num_done(self) -> int:
        """How much of ``total`` is written down."""
        if self.counter == "evaluations":
            return len(list(self.run.rglob("summary.json")))
        return _last_count(self.run / "metrics.jsonl", self.counter)


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    data: str = "chain:9"
    hidden_size: int = 128
    num_layers: int = 3
    num_examples: int = 8000
    ar_steps: int = 400
    b4_steps: int = 600
    jump_steps: int = 150
    updates_per_stage: tuple[int, ...] = (20, 20, 40)
    """T*'s, at B = 4, 8, 16."""
    direct_updates: tuple[int, ...] = (40, 80)
    """Direct TraceRL's at B = 8 and 16: as many as T* has had there in all."""
    cold_start_steps: int = 150
    """T*'s at each expansion: as many as a base's jump has."""
    cold_start_problems: int = 3000
    num_problems: int = 24
    """Of an update, with 16 responses each."""
    num_validation: int = 200
    num_test: int = 400
    samples: int = 3


FULL = Sizes()
SMOKE = Sizes(
    hidden_size=96,
    num_examples=4000,
    ar_steps=250,
    b4_steps=280,
    jump_steps=60,
    updates_per_stage=(3, 4, 6),
    direct_updates=(7, 13),
    cold_start_steps=60,
    cold_start_problems=800,
    num_problems=8,
    num_validation=50,
    num_test=60,
    samples=1,
)
"""Everything once, too short to learn much."""

BLOCK_SIZES = (4, 8, 16)
POLICIES = ("static:4", "static:1", "static:2", "dynamic:0.9")
"""The first one is what the policies are trained with; RL along one may cost another."""


def plan(sizes: Sizes, out: Path, seed: int) -> tuple[Task, ...]:
    """Every task, those first that most waits for."""
    return (
        *_bases(sizes, out, seed),
        *_training(sizes, out, seed),
        *_evaluations(sizes, out, seed),
    )


def _bases(sizes: Sizes, out: Path, seed: int) -> Iterator[Task]:
    shape = (f"--hidden-size={sizes.hidden_size}", f"--num-layers={sizes.num_layers}")
    data = (f"--data={sizes.data}", f"--num-examples={sizes.num_examples}", f"--seed={seed}")

    def sft(name: str, title: str, steps: int, *options: str, needs: str = "", threads: int = 1) -> Task:
        start = (f"--model={out / needs / 'model'}",) if needs else shape
        arguments = ("sft", f"--out={out / name}", *data, *start, f"--num-steps={steps}", *options)
        return Task(
            name,
            title,
            arguments,
            out / name,
            (needs,) if needs else (),
            steps * (0.13 if name == "ar" else 0.24),
            steps,
            "optimizer_step",
            num_threads=threads,
        )

    ar = ("--objective=ar", "--learning-rate=2e-3")
    yield sft("ar", "an AR model", sizes.ar_steps, *ar, threads=2)
    mixed = ("--block-sizes", "4", "8", "16", "--block-size-weights", "0.6", "0.25", "0.15")
    yield sft("b4", "base, B = 4", sizes.b4_steps, "--learning-rate=2e-3", *mixed, needs="ar", threads=2)
    for block_size in BLOCK_SIZES[1:]:
        options = ("--learning-rate=1e-3", "--block-sizes", str(block_size))
        name, title = f"b{block_size}", f"base, B = {block_size}"
        yield sft(name, title, sizes.jump_steps, *options, needs="b4")


def _training(sizes: Sizes, out: Path, seed: int) -> Iterator[Task]:
    common = (
        f"seed={seed}",
        f"data.source={sizes.data}",
        f"rollout.num_problems={sizes.num_problems}",
        f"validation.num_problems={sizes.num_validation}",
    )

    def train(name: str, title: str, recipe: str, base: str, updates: int, seconds: float, *own: str) -> Task:
        model = f"model={out / base / 'model'}"
        arguments = ("train", recipe, f"--out={out / name}", model, *common, *own)
        return Task(name, title, arguments, out / name, (base,), seconds, updates, "update_step")

    stages = [
        f"curriculum.stages.{block_size}.num_updates={count}"
        for block_size, count in zip(BLOCK_SIZES, sizes.updates_per_stage, strict=True)
    ]
    cold = (
        f"curriculum.cold_start.num_steps={sizes.cold_start_steps}",
        f"curriculum.cold_start.num_problems={sizes.cold_start_problems}",
    )
    num_updates = sum(sizes.updates_per_stage)
    yield train(
        "tstar", "T*: B = 4, 8, 16", "quickstart-tstar", "b4", num_updates, 4.8 * num_updates, *cold, *stages
    )
    for block_size, count in reversed(list(zip(BLOCK_SIZES[1:], sizes.direct_updates, strict=True))):
        name, updates = f"direct-b{block_size}", f"curriculum.updates_per_stage={count}"
        title = f"direct TraceRL, B = {block_size}"
        yield train(name, title, f"quickstart-{name}", f"b{block_size}", count, 3.6 * count, updates)


def _evaluations(sizes: Sizes, out: Path, seed: int) -> Iterator[Task]:
    def evaluate(name: str, label: str, model: Path, needs: str, block_size: int) -> Task:
        arguments = (
            "eval",
            f"{label}={model}",
            f"--data={sizes.data}@test",
            f"--out={out / 'eval' / name}",
            f"--block-size={block_size}",
            f"--samples={sizes.samples}",
            f"--limit={sizes.num_test}",
            f"--seed={seed}",
            *(("--policy", *POLICIES) if label != "AR" else ()),
        )
        num_cells = 1 if label == "AR" else len(POLICIES)
        run, seconds = out / "eval" / name, 3.0 * num_cells
        title = f"evaluation of {label}" + ("" if label == "AR" else f", B = {block_size}")
        return Task(
            f"eval-{name}",
            title,
            arguments,
            run,
            (needs,),
            seconds,
            num_cells,
            "evaluations",
            is_resumable=False,
        )

    yield evaluate("ar", "AR", out / "ar" / "model", "ar", 1)
    for block_size in BLOCK_SIZES:
        yield evaluate(
            f"base-b{block_size}", "base", out / f"b{block_size}" / "model", f"b{block_size}", block_size
        )
    for block_size in BLOCK_SIZES[1:]:
        name = f"direct-b{block_size}"
        yield evaluate(name, "TraceRL", out / name / "best", name, block_size)
    for block_size in BLOCK_SIZES:
        # At B = 4 there is nothing to climb from: T*'s first stage is TraceRL there.
        label = "TraceRL" if block_size == BLOCK_SIZES[0] else "T*"
        yield evaluate(
            f"tstar-b{block_size}", label, out / "tstar" / "stages" / f"b{block_size}", "tstar", block_size
        )


# -- doing it ----------------------------------------------------------------------------------


@dataclass
class State:
    """Where the whole stands."""

    tasks: tuple[Task, ...]
    started: dict[str, float] = field(default_factory=dict)
    """When each running task began."""
    took: dict[str, float] = field(default_factory=dict)
    """Seconds of each that is done; 0 for what an earlier call did."""
    notes: dict[str, str] = field(default_factory=dict)

    def fraction(self, task: Task) -> float:
        if task.name in self.took:
            return 1.0
        return min(task.num_done() / task.total, 0.99) if task.name in self.started else 0.0

    def seconds_left(self, num_workers: int) -> float:
        """By the nominal times of what is left, scaled by how long what is done took."""
        nominal = sum(t.seconds * self.fraction(t) for t in self.tasks if self.took.get(t.name) != 0)
        spent = sum(self.took.values()) + sum(time.monotonic() - s for s in self.started.values())
        scale = spent / nominal if nominal > 10 else 1.0
        left = {t.name: t.seconds * (1 - self.fraction(t)) for t in self.tasks}
        chains: dict[str, float] = {}
        for task in self.tasks:
            chains[task.name] = left[task.name] + max((chains[n] for n in task.needs), default=0.0)
        return scale * max(*chains.values(), sum(left.values()) / num_workers)


def prepare(tasks: Sequence[Task], out: Path) -> None:
    """Make the directory, or go on in one that was made with the same tasks."""
    text = json.dumps([task.arguments for task in tasks], indent=1) + "\n"
    path = out / "quickstart.json"
    if path.is_file():
        if path.read_text(encoding="utf-8") != text:
            raise UserError(
                f"out: {out} holds a quickstart with other settings; choose another directory, or remove it"
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists and is no quickstart; choose another directory")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, text)


def run(tasks: tuple[Task, ...], out: Path, num_workers: int, watch: Callable[[State], None]) -> State:
    """Do everything that is not done yet, at most so many tasks at once; `watch` is called all the time."""
    state = State(tasks)
    for task in tasks:
        if _marker(out, task).is_file():
            state.took[task.name] = 0.0
    running: dict[str, subprocess.Popen[bytes]] = {}
    with _ended_with_us(running):
        while len(state.took) < len(tasks):
            for task in _startable(state, running, num_workers):
                running[task.name] = _start(task, out)
                state.started[task.name] = time.monotonic()
            for name, process in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    _finish(next(t for t in tasks if t.name == name), process.returncode, out, state)
            watch(state)
            time.sleep(0.2)
    return state


def _startable(state: State, running: Mapping[str, object], num_workers: int) -> list[Task]:
    free = num_workers - len(running)
    ready = [
        task
        for task in state.tasks
        if task.name not in state.took
        and task.name not in running
        and all(n in state.took for n in task.needs)
    ]
    return ready[: max(free, 0)]


def _start(task: Task, out: Path) -> subprocess.Popen[bytes]:
    # More threads than cores cost far more than they give, so each process is told how many it has.
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    with (out / "logs" / f"{task.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tstar", *task.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on once
        )


def _finish(task: Task, exit_code: int, out: Path, state: State) -> None:
    if exit_code not in (0, GUARD_STOPPED):
        log = out / "logs" / f"{task.name}.log"
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"{task.name}: exit code {exit_code}: {last}; {log} has all of it")
    if exit_code == GUARD_STOPPED:
        state.notes[task.name] = "ended by its guard"
    state.took[task.name] = time.monotonic() - state.started.pop(task.name)
    _marker(out, task).parent.mkdir(exist_ok=True)
    atomic.write_text(_marker(out, task), f"{state.took[task.name]:.1f}\n")


def _marker(out: Path, task: Task) -> Path:
    return out / "done" / task.name


@contextmanager
def _ended_with_us(running: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """However this ends, its children save what they have and end too."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def _last_count(metrics: Path, counter: str) -> int:
    """The count in the last line that has one; lines may be torn while they are written."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 16_384))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)[counter])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
