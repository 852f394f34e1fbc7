"""`tstar report` and `tstar analyze`: what they print, write and refuse."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from fake_runs import Evaluated, make_evaluation, make_run
from tstar import cli
from tstar.report import figures
from tstar.schedule import analyze, read_responses


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "runs" / "tstar", [(4, 5), (8, 5)])
    how = Evaluated("T*", 8, 0.6, num_problems=2, update_step=10)
    make_evaluation(run / "eval" / "000010-b8", how)
    return tmp_path / "runs"


def test_report_writes_a_page(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(runs), "-o", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/out.html: 0.1 MB, 1 runs, 1 evaluations, ")
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


def test_the_page_has_a_default_name(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(runs)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_figures_go_to_a_directory(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "write_figures", lambda *_: ["a.pdf"])  # tests/report draws them
    assert cli.main(["report", str(runs), "--figures", str(tmp_path / "figures")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/figures: 5 files\n"
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "paths: none is given"),
        (["nowhere"], "nowhere: no such file or directory"),
        (["--watch", "nowhere"], "nowhere: no such file or directory"),
        (["--watch", "nowhere", "-o", "x"], "watch: serves a page and writes none"),
        (["{runs}", "-o", "{runs}/no/such/place.html"], "cannot be written"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", *(a.format(runs=runs) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


# -- analyze -----------------------------------------------------------------------------------


def test_analyze_reads_rollouts_and_evaluations(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", str(runs), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [Path(row["source"]).name for row in rows] == ["000005.jsonl", "000010.jsonl", "responses.jsonl"]
    assert [row["block_size"] for row in rows] == ["4", "8", "8"]
    assert (rows[2]["label"], rows[2]["policy"]) == ("T*", "dynamic 0.9")
    found = analyze(read_responses(Path(rows[2]["source"])))
    assert float(rows[2]["local_strict"]) == found.local_strict
    assert float(rows[2]["tokens_per_forward"]) == found.tokens_per_forward


def test_analyze_writes_json_with_histograms(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "tstar" / "rollouts" / "000005.jsonl"
    assert cli.main(["analyze", str(path), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    found = analyze(read_responses(path))
    assert row["first_unmask_counts"] == found.first_unmask.tolist()
    assert row["steps_per_block_counts"] == found.steps_per_block.tolist()
    assert row["non_monotone_share"] == list(found.non_monotone_share)
    assert row["confidence_counts_wrong"] == found.confidence.wrong.tolist()


def test_analyze_shows_tables(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = runs / "tstar" / "eval" / "000010-b8"
    assert cli.main(["analyze", str(evaluation), "--details"]) == 0
    shown = capsys.readouterr().out
    found = analyze(read_responses(evaluation / "responses.jsonl"))
    for text in (
        "T* · dynamic",
        f"{found.local_strict:.3f}",
        f"{found.tokens_per_forward:.3f}",
        "non-monotone",
    ):
        assert text in shown


def test_analyze_leaves_half_a_line_out_and_says_so(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "tstar" / "rollouts" / "000005.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:100])
    assert cli.main(["analyze", str(path), "--format", "csv"]) == 0
    streams = capsys.readouterr()
    assert streams.out.splitlines()[1].split(",")[8] == "8"
    assert streams.err == f"tstar: {path}: ends in half a line, which is left out\n"


def test_analyze_names_a_bad_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "tstar" / "rollouts" / "000005.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{}", lines[1]]) + "\n")
    assert cli.main(["analyze", str(path)]) == 2
    assert f"{path}:2: version: None is not this program's 1" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "message"), [("", "holds no trajectories"), (None, "no such file")])
def test_analyze_refuses_nothing(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    assert cli.main(["analyze", str(path)]) == 2
    assert message in capsys.readouterr().err
