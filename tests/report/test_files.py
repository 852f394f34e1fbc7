"""What a report leaves on disk or serves: lines chosen, pages, tables, figures, the live server."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_runs import Evaluated, make_evaluation, make_run
from tstar.errors import UserError
from tstar.report import figures
from tstar.report.lines import LineIndex, choose
from tstar.report.page import render, to_json
from tstar.report.record import Report
from tstar.report.tables import Table, make_tables, to_latex, to_markdown, write_tables
from tstar.report.watch import LiveReport, fingerprint, serve

# -- lines -------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"")), max_size=8), st.booleans())
def test_an_index_reads_what_splitting_reads(lines: list[bytes], with_torn_end: bool) -> None:
    import tempfile

    content = b"".join(json.dumps(line.hex()).encode() + b"\n" for line in lines)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "lines.jsonl")
        path.write_bytes(content + b'{"a": ' * with_torn_end)
        index = LineIndex.of(path)
        assert list(index.read(np.arange(len(index)))) == content.split(b"\n")[:-1]
    assert index.is_torn == with_torn_end


@given(st.integers(0, 300), st.integers(1, 5), st.integers(5, 60), st.floats(0, 1))
def test_groups_are_chosen_whole_and_evenly(
    num_lines: int, group_size: int, max_lines: int, share: float
) -> None:
    chosen = choose(num_lines, group_size, max_lines, share).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= max(max_lines, group_size)
    assert all(0 <= number < num_lines for number in chosen)
    assert bool(chosen) == bool(num_lines)
    groups = {number // group_size for number in chosen}
    whole = [n for n in range(num_lines) if n // group_size in groups]
    assert chosen == whole
    gaps = np.diff(sorted(groups))
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


# -- the page ----------------------------------------------------------------------------------


def test_a_page_is_one_file_with_its_own_policy(world_report: Report) -> None:
    page = render(world_report)
    assert page == render(world_report)
    assert not re.findall(r"""(?:src|href)=["']?(?!#|data:)\w""", page.split("<script", 1)[0])
    assert "connect-src 'none'" in page
    assert re.findall(r"<!--\w+-->", page) == []
    data = page.split('id="data">', 1)[1].split("</script>", 1)[0]
    assert not set("<>&\u2028\u2029") & set(data)
    assert json.loads(data)["title"] == world_report.title
    assert "connect-src 'self'" in render(world_report, live=True)


def test_the_record_is_strict_json(world_report: Report) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads(to_json(world_report), parse_constant=refuse)
    assert len(record["samples"]["responses"]) == len(world_report.samples.responses)


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    make_evaluation(tmp_path / "e", Evaluated("T*", 8, 0.6, num_problems=2))
    code = (
        "import sys; from tstar.cli import main; code = main(sys.argv[1:])\n"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(tmp_path), "-o", str(tmp_path / "r.html")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.startswith(f"{tmp_path}/r.html: 0.1 MB, 1 evaluations, ")


# -- tables ------------------------------------------------------------------------------------


def test_tables_hold_the_numbers(world_report: Report) -> None:
    schedule, blocks, *_ = make_tables(world_report)
    assert schedule.head == ("Method", "B", "LocalStrict", "avg@3 (%)", "TPF")
    assert schedule.groups[0][0][:2] == ("AR", "1")
    assert [group[0][1] for group in schedule.groups] == ["1", "16", "8", "4"]
    assert schedule.groups[1][1][3] == "54.4 [52.3, 56.5]"
    assert blocks.head == ("Method", "B = 1", "B = 4", "B = 8", "B = 16")
    assert blocks.groups[0][2] == ("TraceRL", "–", "–", "60.2 [58.1, 62.3]", "54.4 [52.3, 56.5]")


def test_tables_escape_their_syntax() -> None:
    table = Table("t", "50 % & more\nlines", ("A|B", "C_D"), ((("x\\y", "[1]"),), (("{z}", "$5"),)))
    assert to_markdown(table).splitlines()[2:] == [
        r"| A\|B | C_D |",
        "| --- | ---: |",
        "| x\\y | [1] |",
        "| {z} | $5 |",
    ]
    latex = to_latex(table)
    assert r"A|B & C\_D \\" in latex
    assert "x\\textbackslash{}y & {[}1] \\\\\n  \\midrule\n  \\{z\\} & \\$5 \\\\" in latex
    assert r"\caption{50 \% \& more lines}" in latex
    assert all(rule in latex for rule in (r"\toprule", r"\midrule", r"\bottomrule"))


def test_tables_are_written_twice(world_report: Report, tmp_path: Path) -> None:
    names = write_tables(world_report, tmp_path)
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 8
    assert (tmp_path / "table-block-size-1.md").read_text().count("|") > 20


# -- figures -----------------------------------------------------------------------------------


def test_figures_are_written_in_three_formats(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: tstar[report]")
    make_run(tmp_path / "runs" / "tstar $x^2$", [(4, 4), (8, 4)])
    for seed in range(2):
        make_run(tmp_path / "runs" / f"seed{seed}" / "direct-b8", [(8, 5)], seed=seed)
    make_evaluation(tmp_path / "runs" / "base", Evaluated("base", 8, 0.5, num_problems=2))
    make_evaluation(tmp_path / "runs" / "ar", Evaluated("AR", 1, 0.7, num_problems=2, policy="next token"))
    from tstar.report.content import build

    names = figures.write_figures(build([tmp_path / "runs"]), tmp_path)
    assert {name.split(".")[0] for name in names} == {
        "validation-accuracy",
        "accuracy-by-block-size",
        "training-health",
        "schedules",
        "first-unmask",
    }
    heads = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(heads[name.split(".")[1]])
    drawn = (tmp_path / "validation-accuracy.svg").read_text()
    assert "tstar $x^2$" in drawn  # a name, no formula
    assert "B = 8" in drawn
    assert "direct-b8 (2 seeds)" in drawn
    assert "KL to the old policy" in (tmp_path / "training-health.svg").read_text()


def test_without_matplotlib_the_extra_is_named(
    world_report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'tstar\[report\]'"):
        figures.write_figures(world_report, tmp_path)


# -- the live server ---------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run that goes on, and the port that shows it."""
    run = make_run(tmp_path / "run", [(4, 3)], is_ended=False)
    server = serve([run], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield run, server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.getheader("ETag")
    connection.close()
    return found


def test_news_are_told_once(served: tuple[Path, int]) -> None:
    run, port = served
    assert ask(port, "/")[1].startswith(b"<!doctype html>")
    status, record, tag = ask(port, "/report.json")
    assert (status, json.loads(record)["runs"][0]["is_running"]) == (200, True)
    assert tag is not None
    assert ask(port, "/report.json", **{"If-None-Match": tag})[:2] == (304, b"")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "end", "update_step": 3, "reason": null, "time": {}}\n')
    status, record, _ = ask(port, "/report.json", **{"If-None-Match": tag})
    assert (status, json.loads(record)["runs"][0]["is_running"]) == (200, False)


def test_only_this_machine_is_answered(served: tuple[Path, int]) -> None:
    _, port = served
    assert ask(port, "/report.json", Host="evil.example")[0] == 403
    assert ask(port, "/report.json", Host=f"localhost:{port}")[0] == 200
    assert ask(port, "/../config.yaml")[0] == 404


def test_a_run_that_goes_away_leaves_the_last_report(served: tuple[Path, int]) -> None:
    run, port = served
    before = ask(port, "/report.json")[1]
    run.rename(run.parent / "elsewhere")
    assert ask(port, "/report.json")[:2] == (200, before)


def test_a_port_in_use_is_named(served: tuple[Path, int]) -> None:
    run, port = served
    with pytest.raises(UserError, match=f"port: {port} cannot be used"):
        serve([run], port)


def test_only_changed_files_build_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", [(4, 3)])
    live = LiveReport([run])
    before = fingerprint([run])
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "weights").write_text("much")
    (run / ".partial").write_text("half")
    assert fingerprint([run]) == before
    monkeypatch.setattr("tstar.report.watch.build", lambda _: pytest.fail("nothing has changed"))
    live.refresh()
