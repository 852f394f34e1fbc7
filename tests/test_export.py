"""`tstar export`: precision, shards, remote code, the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalTokenNotFoundError

from tiny_models import make_model
from tstar.cli import main
from tstar.errors import UserError
from tstar.export import export_model, parse_size, push_to_hub
from tstar.model.checkpoint import INDEX_FILE, load_model, save_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_model(make_model("sdar"), tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def test_export_converts_and_shards(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "deep" / "out"
    assert main(["export", str(source), str(target), "--dtype", "bfloat16", "--shard-size", "10KB"]) == 0
    assert "parameters" in capsys.readouterr().out
    assert (target / INDEX_FILE).exists()
    assert (target / "tokenizer.json").read_text() == "{}"
    exact, rounded = load_model(source), load_model(target)
    assert rounded.dtype == torch.bfloat16
    for one, other in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)


def test_export_takes_remote_code_from_another_directory(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "sdar"
    save_model(make_model("sdar"), other)
    (other / "modeling_sdar.py").write_text("raise SystemExit('remote code was run')\n")
    config = json.loads((other / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"}
    (other / "config.json").write_text(json.dumps(config))
    export_model(source, tmp_path / "out", remote_code=other)
    assert (tmp_path / "out" / "modeling_sdar.py").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == config["auto_map"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{source}", "{source}"], "is the source itself"),
        (["{source}", "{source}", "--overwrite"], "is the source itself"),
        (["{source}", "{taken}"], "exists already; choose another path or pass --overwrite"),
        (["{source}", "{tmp}/out", "--shard-size", "5 apples"], "shard_size: '5 apples' is no size"),
        (["{source}", "{tmp}/out", "--shard-size", "0"], "shard_size: '0' is no size"),
        (["{source}", "{tmp}/out", "--remote-code", "{tmp}/nowhere"], "nowhere: no such directory"),
        (["{source}", "{tmp}/a.txt/out"], "a.txt/out: could not be written"),
    ],
)
def test_bad_arguments_are_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "a.txt").write_text("x")
    places = {"source": str(source), "taken": str(tmp_path / "taken"), "tmp": str(tmp_path)}
    assert main(["export", *(a.format(**places) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "source", "taken"]


def test_a_disk_too_small_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(UserError, match=r"needs 0.0 GB, .* has 0.0 GB free"):
        export_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2**31), (" 1.5 kb", 1500), ("7", 7)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size("shard_size", text) == num_bytes


class FakeHub:
    """Stands for the Hub's API: what was asked of it, or the error it answers with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = error

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        huggingface_hub.utils.validate_repo_id(repo_id)
        if self.error is not None:
            raise self.error
        self.calls.append(("create_repo", repo_id, options))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, **options: Any) -> None:
        self.calls.append(("upload_folder", options))


def test_push_uploads_the_exported_directory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    target = tmp_path / "out"
    assert main(["export", str(source), str(target), "--push", "me/model", "--private"]) == 0
    assert hub.calls == [
        ("create_repo", "me/model", {"private": True, "exist_ok": True}),
        ("upload_folder", {"folder_path": target, "repo_id": "me/model"}),
    ]


@pytest.mark.parametrize(
    ("repository", "error", "message"),
    [
        ("me/my/model", None, "'me/my/model' is no repository name"),
        ("me/model", LocalTokenNotFoundError("no token"), "not logged in to the Hub; run `hf auth login`"),
        (
            "me/model",
            ConnectionError("unreachable\nmore"),
            r"could not be written \(unreachable\); the export",
        ),
    ],
)
def test_a_push_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: str, error: Exception | None, message: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: FakeHub(error))
    with pytest.raises(UserError, match=message):
        push_to_hub(tmp_path, repository, private=False)
