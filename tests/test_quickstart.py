"""The quickstart's tasks: what they ask for can be had, and they run in order, once, and are gone on with."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tstar import cli
from tstar.cli.eval import Eval
from tstar.cli.sft import Sft
from tstar.cli.train import Train
from tstar.config import load_config
from tstar.errors import UserError
from tstar.quickstart import FULL, POLICIES, SMOKE, Sizes, State, Task, plan, prepare, run

SIZES = pytest.mark.parametrize("sizes", [FULL, SMOKE], ids=["full", "smoke"])


def nobody(_state: State) -> None:
    """Watches."""


def task(name: str, out: Path, *arguments: str, needs: tuple[str, ...] = ()) -> Task:
    return Task(name, name, arguments or ("--version",), out / name, needs, 1.0, 1, "optimizer_step")


@SIZES
def test_every_command_can_be_said(sizes: Sizes, tmp_path: Path) -> None:
    """Each is parsed, and each training's settings are read and checked as `tstar train` does."""
    for each in plan(sizes, tmp_path, seed=3):
        if each.arguments[0] == "train":
            recipe, *rest = each.arguments[1:]
            config = load_config(recipe, [argument for argument in rest if not argument.startswith("--")])
            assert sum(stage.num_updates for stage in config.stages) == each.total
            assert config.seed == 3
            assert config.stages[-1].policies[0].tokens_per_step == int(POLICIES[0].removeprefix("static:"))
        command = cli.parse(each.arguments)
        assert isinstance(command, Sft | Train | Eval)


@pytest.mark.parametrize("updates", [(30, 30, 60), (1, 1, 1)])
def test_every_arm_of_the_ablations_can_be_said(updates: tuple[int, int, int], tmp_path: Path) -> None:
    examples = Path(__file__).parents[1] / "examples"
    script = runpy.run_path(str(examples / "ablations.py"))
    for name, arm in script["arms"](updates).items():
        (training, evaluation) = script["train_tasks"](name, arm, tmp_path / "seed3", 3, tmp_path)
        _, recipe, *rest = training.arguments
        config = load_config(recipe, [argument for argument in rest if not argument.startswith("--")])
        assert sum(stage.num_updates for stage in config.stages) == sum(updates)
        assert config.stages[-1].block_size == 16
        assert isinstance(cli.parse(training.arguments), Train)
        assert isinstance(cli.parse(evaluation.arguments), Eval)


@SIZES
def test_what_a_task_reads_another_one_writes(sizes: Sizes, tmp_path: Path) -> None:
    tasks = {each.name: each for each in plan(sizes, tmp_path, seed=0)}
    for each in tasks.values():
        read = [a.partition("=")[2] for a in each.arguments if "model=" in a or each.arguments.index(a) == 1]
        for path in read:
            if str(tmp_path) in path and not path.startswith(str(each.run)):
                assert any(path.startswith(str(tasks[needed].run)) for needed in each.needs), path


def test_direct_and_tstar_train_alike(tmp_path: Path) -> None:
    """Same data, rewards, rollouts and learning rate; direct has at B = 16 all the updates that T* has."""
    configs = {}
    for each in plan(FULL, tmp_path, seed=0):
        if each.arguments[0] == "train":
            recipe, *rest = each.arguments[1:]
            configs[each.name] = load_config(recipe, [a for a in rest if not a.startswith("--")])
    tstar = configs["tstar"]
    for name in ("direct-b8", "direct-b16"):
        direct = configs[name]
        assert (direct.data, direct.rollout, direct.trainer) == (tstar.data, tstar.rollout, tstar.trainer)
        assert [stage.shifted_rollouts for stage in direct.stages] == ["off"]
    assert configs["direct-b16"].stages[0].num_updates == sum(s.num_updates for s in tstar.stages)


def test_tasks_are_done_in_order_and_once(tmp_path: Path) -> None:
    tasks = (task("b", tmp_path, needs=("a",)), task("a", tmp_path))
    prepare(tasks, tmp_path)
    order: list[str] = []

    def watch(state: State) -> None:
        order.extend(name for name in state.took if name not in order)

    run(tasks, tmp_path, 2, watch)
    assert order == ["a", "b"]
    logs = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "logs").iterdir()}
    prepare(tasks, tmp_path)
    state = run(tasks, tmp_path, 2, nobody)
    assert state.took == {"a": 0.0, "b": 0.0}
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "logs").iterdir()} == logs


def test_a_failing_task_ends_it_with_its_last_line(tmp_path: Path) -> None:
    tasks = (task("a", tmp_path, "export", str(tmp_path / "nowhere"), str(tmp_path / "b")),)
    prepare(tasks, tmp_path)
    with pytest.raises(UserError, match=r"a: exit code 2: .*nowhere.*; .*a\.log has all of it"):
        run(tasks, tmp_path, 2, nobody)


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    """A run directory that is there already is gone on with, in the command's own way."""
    sft = task("ar", tmp_path, "sft", "--out=x", "--data=chain:1")
    assert sft.command == sft.arguments
    sft.run.mkdir()
    (sft.run / "config.yaml").touch()
    assert sft.command == ("sft", "--resume", str(sft.run))
    assert replace(sft, is_resumable=False).command == sft.arguments


def test_other_settings_and_other_directories_are_refused(tmp_path: Path) -> None:
    prepare(plan(SMOKE, tmp_path / "a", 0), tmp_path / "a")
    with pytest.raises(UserError, match="holds a quickstart with other settings"):
        prepare(plan(FULL, tmp_path / "a", 0), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(UserError, match="exists and is no quickstart"):
        prepare(plan(SMOKE, tmp_path / "b", 0), tmp_path / "b")


def test_progress_is_read_from_what_tasks_write(tmp_path: Path) -> None:
    each = replace(task("a", tmp_path), total=10)
    assert each.num_done() == 0
    each.run.mkdir()
    lines = [json.dumps({"optimizer_step": step}) for step in (1, 2, 3)]
    (each.run / "metrics.jsonl").write_text("\n".join([*lines, '{"optimizer_st']))
    assert each.num_done() == 3
    state = State((each, task("b", tmp_path, needs=("a",))), started={"a": 0.0})
    assert state.fraction(each) == 0.3
    assert state.seconds_left(2) > 0


def test_children_end_with_us(tmp_path: Path) -> None:
    """Ctrl-C reaches the one process that the user sees; what it started saves and ends too."""
    script = f"""if True:
        from pathlib import Path
        from tstar.quickstart import Task, prepare, run
        out = Path({str(tmp_path / "q")!r})
        arguments = ("sft", f"--out={{out / 'a'}}", "--data=chain:1", "--hidden-size=32", "--num-layers=1",
            "--num-examples=50", "--num-validation=5", "--batch-size=4", "--objective=ar",
            "--num-steps=100000")
        tasks = (Task("a", "a", arguments, out / "a", (), 1.0, 100000, "optimizer_step"),)
        prepare(tasks, out)
        run(tasks, out, 1, lambda state: None)
    """
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    metrics = tmp_path / "q" / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    assert list((tmp_path / "q" / "a" / "checkpoints").glob("[0-9]*")), "the child was asked to save, and did"
