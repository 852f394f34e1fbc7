"""`tstar train` as people use it: what it prints, its exit codes, its view."""

from __future__ import annotations

import io
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiny_runs import assert_same_run, read_events, tiny_config
from tstar import cli
from tstar.cli import watch
from tstar.cli.watch import View, format_duration
from tstar.config import RunConfig, to_yaml
from tstar.run_dir import RunDir


@pytest.fixture
def config(base: Path) -> RunConfig:
    return tiny_config(base)


@pytest.fixture
def recipe(config: RunConfig, tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(to_yaml(config))
    return str(path)


def test_a_run_from_the_command_line(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", recipe, "--rollout.num-samples", "3", "validation.every=2"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == "stage 1 of 2: block size 4, 2 updates, learning rate 0.001"
    assert "B = 4, static k=2: validation accuracy" in lines[1]
    assert lines[1].endswith("(best of the stage)")
    assert lines[2].startswith("update 1/4  B = 4  reward ")
    assert "tokens/s" in lines[2]
    assert lines[-1] == "done: 4 updates; the best checkpoint is runs/tiny/best"
    assert read_events(tmp_path / "runs/tiny", "train")[0]["num_rollouts"] == 6

    assert cli.main(["train", recipe]) == 2
    assert "runs/tiny: is a run already; go on with --resume runs/tiny" in capsys.readouterr().err


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1) -> None:
    """SIGTERM at an event, perhaps twice."""
    on_event, seen = View.on_event, 0

    def interrupting(self: View, *event: Any) -> None:
        nonlocal seen
        seen += 1
        for _ in range(times if seen == number else 0):
            signal.raise_signal(signal.SIGTERM)
        on_event(self, *event)

    monkeypatch.setattr(View, "on_event", interrupting)


def test_an_interrupted_run_has_a_code_of_its_own(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["train", recipe, "--out", str(tmp_path / "whole")]) == 0
    run = tmp_path / "run"
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 40)
        assert cli.main(["train", recipe, "--out", str(run)]) == 75
    assert f"interrupted and saved; tstar train --resume {run} goes on" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is handler
    latest = RunDir.open(run).latest_checkpoint
    assert latest is not None
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, times=2)
        assert cli.main(["train", "--resume", str(run)]) == 130
    shown = capsys.readouterr()
    assert "left at once" in shown.err
    assert RunDir.open(run).latest_checkpoint == latest
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert "resumed after update" in capsys.readouterr().out
    assert_same_run(tmp_path / "whole", run)


def test_a_run_that_the_guard_ends_has_another(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harsh = "guard={action: stop, patience: 1, max_grad_norm_factor: 1, max_accuracy_drop: 0}"
    code = cli.main(
        ["train", recipe, harsh, "trainer.optimizer.learning_rate=1", "--out", str(tmp_path / "run")]
    )
    shown = capsys.readouterr().out
    assert code == 3
    assert "guard: update" in shown
    assert "stopped after update" in shown


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards={terms: [{name: 'nowhere:reward'}]}", "nowhere"),
        ("engine.memory=20000", "memory"),
        ("rollout.max_tokens=100000", "max_tokens"),
    ],
)
def test_a_run_refused_before_its_first_answer_leaves_an_empty_directory(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    run = tmp_path / "run"
    assert cli.main(["train", recipe, override, "--out", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(run.iterdir()) == []
    RunDir.check_free(run)


def test_dry_run_with_a_model_estimates(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", recipe, "--dry-run", "--out", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "estimated for one cpu, with prompts of 12 and responses of 18 tokens" in shown
    assert "GB" in shown
    assert not (tmp_path / "run").exists()


# -- the view ----------------------------------------------------------------------------------


EVENTS: list[tuple[str, int, Mapping[str, object], Mapping[str, float]]] = [
    ("begin", 0, {"stage": 0, "resumed": True}, {}),
    ("stage", 0, {"stage": 0, "block_size": 4, "num_updates": 2, "learning_rate": 1e-3}, {}),
    ("phase", 0, {"phase": "sample", "done": 5, "total": 16, "tokens": 80}, {}),
    (
        "train",
        1,
        {
            "stage": 0,
            "block_size": 4,
            "pass": 1,
            "reward_mean": 0.25,
            "tokens_per_forward": 1.9,
            "kl_old": 0.0,
        },
        {"tokens_per_second": 1234.0},
    ),
    (
        "validation",
        1,
        {
            "stage": 0,
            "block_size": 4,
            "policy": "static k=2",
            "accuracy": 0.5,
            "accuracy_low": 0.4,
            "accuracy_high": 0.6,
            "tokens_per_forward": 1.8,
            "is_best": True,
        },
        {},
    ),
    ("guard", 1, {"message": "entropy 0 is below 0.1", "action": "roll_back"}, {}),
    ("train", 2, {"stage": 0, "block_size": 4, "pass": 1, "refused": "a NaN"}, {}),
    ("something new", 2, {}, {}),
]


def test_the_live_view_shows_where_a_run_stands(config: RunConfig, tmp_path: Path) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    view = View(config, tmp_path / "run", terminal)
    terminal.print(view)  # before anything is known
    for event in EVENTS[:6]:
        view.on_event(*event)
    page = Console(file=io.StringIO(), width=120, color_system=None)
    page.print(view)
    shown = page.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        "stage 1/2 (B = 4)",
        "update 1/4",
        "0.250",
        "1.90",
        "1,234",
        "50.0% (best 50.0%)",
        "sample",
        "5/16",
    ):
        assert text in shown, text
    said = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "guard: update 1: entropy 0 is below 0.1: roll back" in said
    assert "update 1/4  B" not in said.split("guard")[0].split("elapsed")[-1], "no plain lines on a terminal"


def test_plain_lines_elsewhere(config: RunConfig, tmp_path: Path) -> None:
    page = Console(file=io.StringIO(), width=40, soft_wrap=True)
    view = View(config, tmp_path, page)
    for event in EVENTS:
        view.on_event(*event)
    lines = page.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "resumed after update 0"
    assert lines[2].startswith("update 1/4  B = 4  reward 0.250  TPF 1.90  KL 0  tokens/s 1,234  left ")
    assert lines[-1] == "update 2: not trained on: a NaN"


def test_words_are_wrapped_on_a_terminal(config: RunConfig, tmp_path: Path) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    View(config, tmp_path, terminal).on_event(*EVENTS[4])
    said = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert len(said.splitlines()) == 2
    assert " ".join(said.split()).endswith("TPF 1.80 (best of the stage)"), "no word is cut"


def test_durations() -> None:
    assert [format_duration(s) for s in (None, 0.4, 61.0, 7260.0)] == ["?", "0m00s", "1m01s", "2h01m"]


def test_watching_closes_its_view(config: RunConfig, tmp_path: Path) -> None:
    with watch.watching(config, tmp_path) as on_event:
        on_event(*EVENTS[0])
