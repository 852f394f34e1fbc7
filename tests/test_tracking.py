"""Events on disk and on dashboards."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tstar.errors import UserError
from tstar.tracking import MetricsFile, Tracking, run_id, start_tracker, to_line


class FakeTracker:
    def __init__(self) -> None:
        self.seen: list[tuple[int, Mapping[str, float]]] = []
        self.is_closed = False

    def log(self, update_step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append((update_step, metrics))

    def close(self) -> None:
        self.is_closed = True


def test_lines_are_strict_json() -> None:
    line = to_line({"a": float("nan"), "b": [float("-inf"), 1], "c": {"d": float("inf")}, "e": None})
    assert json.loads(line) == {"a": "nan", "b": ["-inf", 1], "c": {"d": "inf"}, "e": None}
    assert line.endswith("\n")


def test_a_resumed_run_says_again_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.append({"event": "a"})
    offset = file.offset
    file.append({"event": "b"})
    file.close()
    path.write_bytes(path.read_bytes() + b'{"event": "to')
    file = MetricsFile(path)
    file.truncate(offset)
    file.append({"event": "c"})
    file.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["a", "c"]
    file = MetricsFile(path)
    with pytest.raises(UserError, match="bytes where the checkpoint knows 1000; restore the file"):
        file.truncate(1000)
    file.close()


def test_an_event_goes_to_the_file_and_its_numbers_to_dashboards(tmp_path: Path) -> None:
    tracker = FakeTracker()
    tracking = Tracking(MetricsFile(tmp_path / "metrics.jsonl"), [tracker])
    tracking.log("train", 7, {"reward": 0.5, "is_best": True, "policy": "static"}, seconds=2.0)
    tracking.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "event": "train",
        "update_step": 7,
        "reward": 0.5,
        "is_best": True,
        "policy": "static",
        "time": {"seconds": 2.0},
    }
    assert tracker.seen == [(7, {"train/reward": 0.5, "train/is_best": 1.0, "train/seconds": 2.0})]
    assert tracker.is_closed


def test_what_has_the_same_update_step_has_curves_of_its_own(tmp_path: Path) -> None:
    tracker = FakeTracker()
    tracking = Tracking(MetricsFile(tmp_path / "metrics.jsonl"), [tracker])
    for number in (0, 1):
        tracking.log("train", 7, {"pass": number, "kl_old": 0.5})
    for policy in ("static k=1", "dynamic 0.9"):
        tracking.log("validation_extra", 7, {"policy": policy, "accuracy": 0.5})
    tracking.close()
    names = [next(name for name in metrics if "pass" not in name) for _, metrics in tracker.seen]
    assert names == [
        "train/kl_old",
        "train_shifted/kl_old",
        "validation_extra/static-k=1/accuracy",
        "validation_extra/dynamic-0.9/accuracy",
    ]


def test_a_resumed_run_goes_on_in_tensorboards_own_curves(tmp_path: Path) -> None:
    """With the real one, where it is installed: nothing is lost, nothing stands there twice."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for last, steps in ((-1, (0, 1, 2, 3)), (2, (3, 4))):
        tracker = start_tracker("tensorboard", tmp_path, "tstar", {}, last)
        for step in steps:
            tracker.log(step, {"train/reward": step / 10})
        tracker.close()
    curves = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, round(event.value, 3)) for event in curves.Scalars("train/reward")]
    assert found == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_tensorboard_replaces_what_it_showed_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Writer:
        def __init__(self, directory: str, purge_step: int) -> None:
            self.directory, self.purge_step, self.scalars = directory, purge_step, []
            made.append(self)

        def add_scalar(self, *scalar: object) -> None:
            self.scalars.append(scalar)

        def close(self) -> None:
            self.scalars.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    tracker = start_tracker("tensorboard", tmp_path, "tstar", {}, 12)
    tracker.log(13, {"train/reward": 0.5})
    tracker.close()
    (writer,) = made
    assert (writer.directory, writer.purge_step) == (str(tmp_path / "tensorboard"), 13)
    assert writer.scalars == [("train/reward", 0.5, 13), "closed"]


@pytest.mark.parametrize(("name", "naming"), [("wandb", "id"), ("trackio", "name")])
def test_a_run_keeps_its_name_on_dashboards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, naming: str
) -> None:
    started: list[dict[str, Any]] = []
    module = types.ModuleType(name)
    run = types.SimpleNamespace(define_metric=lambda *_, **__: None)
    module.init = lambda **settings: started.append(settings) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        start_tracker(name, tmp_path, "mine", {"seed": 1}, 0)
    assert started[0] == started[1]
    assert run_id(tmp_path) in started[0][naming]
    assert (started[0]["project"], started[0]["config"]) == ("mine", {"seed": 1})


def test_a_dashboard_that_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb is not installed; pip install 'tstar\[wandb\]'"):
        start_tracker("wandb", tmp_path, "tstar", {}, 0)
