"""Run directories: one writer, whole checkpoints, and what is said when that cannot be."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tstar import atomic
from tstar.errors import UserError
from tstar.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


def fill(text: str = "weights") -> object:
    return lambda directory: (directory / "model").write_text(text)


def test_a_run_is_made_and_opened(run: RunDir) -> None:
    assert RunDir.open(run.path).config_yaml == "seed: 0\n"
    assert run.latest_checkpoint is None
    for directory in (run.rollouts, run.evaluations):
        assert directory.is_dir()


def test_directories_that_are_refused(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a run already; go on with --resume"):
        RunDir.create(run.path, "")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        with pytest.raises(UserError, match="exists and is not empty"):
            RunDir.create(tmp_path / name, "")
    with pytest.raises(UserError, match="no run can be made here"):
        RunDir.create(tmp_path / "file" / "below", "")
    with pytest.raises(UserError, match=r"is no run, config.yaml is missing"):
        RunDir.open(tmp_path)


def test_an_unused_run_makes_room_for_another(run: RunDir) -> None:
    run.metrics.write_text("{}\n")
    (run.path / "run.lock").touch()
    run.empty_unused()
    assert list(run.path.iterdir()) == []
    assert RunDir.create(run.path, "seed: 1\n").config_yaml == "seed: 1\n"


@pytest.mark.parametrize("name", ["checkpoints/000001", "rollouts/000001.jsonl.gz", "eval/000000-b4"])
def test_a_run_of_which_something_has_come_stays(run: RunDir, name: str) -> None:
    (run.path / name).touch()
    run.empty_unused()
    assert (run.path / name).exists()
    assert RunDir.open(run.path).config_yaml == "seed: 0\n"


def test_a_run_with_two_events_stays_and_so_does_what_others_put_there(run: RunDir) -> None:
    run.metrics.write_text("{}\n{}\n")
    run.empty_unused()
    assert RunDir.open(run.path).metrics.exists()
    run.metrics.write_text("{}\n")
    (run.path / "notes.txt").touch()
    run.empty_unused()
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]


def test_checkpoints_are_whole_numbered_and_pruned(run: RunDir) -> None:
    for number in (3, 40, 7):
        assert run.save_checkpoint(number, fill(str(number))) == run.checkpoint_path(number)  # type: ignore[arg-type]
    assert run.checkpoints == (3, 7, 40)
    assert run.latest_checkpoint == 40
    run.save_checkpoint(7, fill("again"))  # type: ignore[arg-type]
    assert (run.checkpoint_path(7) / "model").read_text() == "again"
    run.prune([7])
    assert run.checkpoints == (7,)
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["000007"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(run: RunDir) -> None:
    def fail(directory: Path) -> None:
        (directory / "model").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="there is no checkpoint; make room"):
        run.save_checkpoint(1, fail)
    run.save_checkpoint(1, fill())  # type: ignore[arg-type]
    for number in (1, 2):
        with pytest.raises(UserError, match=r"No space left on device; .* GiB are free\); .*000001 is whole"):
            run.save_checkpoint(number, fail)
    assert run.checkpoints == (1,)
    assert (run.checkpoint_path(1) / "model").read_text() == "weights"


def test_a_bug_in_a_checkpoint_flies(run: RunDir) -> None:
    def fail(_: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.save_checkpoint(1, fail)
    assert run.checkpoints == ()


def test_the_lock_clears_what_killed_writers_left(run: RunDir) -> None:
    left = [
        run.path / "checkpoints" / f".000001{atomic.PARTIAL}x",
        run.rollouts / f".a{atomic.PARTIAL}y",
        run.path / f".config.yaml{atomic.PARTIAL}z",
    ]
    left[0].mkdir()
    for path in left[1:]:
        path.touch()
    with run.locked():
        assert not any(path.exists() for path in left)
        assert "process " in (run.path / "run.lock").read_text()


def test_two_names_for_the_files_of_one_directory(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.mkdir()
    (source / "model").write_text("one")
    atomic.link_directory(source, target)
    assert (target / "model").samefile(source / "model")
    atomic.remove(source)
    assert (target / "model").read_text() == "one"
    source.mkdir()
    (source / "other").write_text("two")
    atomic.link_directory(source, target)
    assert [path.name for path in target.iterdir()] == ["other"]


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model").write_text("one")
    atomic.link_directory(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target" / "model").read_text() == "one"
