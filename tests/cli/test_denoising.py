"""What is drawn in the terminal: harmless text, wrapped lines, and blocks while they are denoised."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from text_models import make_tokenizer
from tiny_models import make_model
from tstar.cli import denoising
from tstar.cli.denoising import COLOURS, MASK, DenoisingView, colour, legend, line_ends, printable
from tstar.engine import Request, SamplingParams, TokensUnmasked
from tstar.generation.text_model import TextModel
from tstar.partition import PartitionRule
from tstar.trajectory import ForwardCounts, Trajectory

HOSTILE = (
    *("<unk>", "<eos>", "\x1b[31m", "[bold red]", "\r", "\x07", "\x9b2J", "\u202e", "[/]", "\\[", "日本"),
    *("a ", "\n", "\x1b]0;owned\x07", ":smile:", "\t", "\u2028", "http://x.y/z "),
)
"""Tokens, by id."""
TEXT_MODEL = TextModel(
    Path("nowhere"),
    make_model("sdar", vocab_size=97),
    make_tokenizer([*HOSTILE, *(f"<{i}>" for i in range(len(HOSTILE), 97))]),
)


# -- text --------------------------------------------------------------------------------------


@given(st.text())
def test_nothing_printable_commands_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not re.search(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]", shown
    )


def test_escapes_are_spelled_out() -> None:
    assert printable("a\x1b[31mb\r\n\u202ec\x9b") == "a\\x1b[31mb\\x0d\n\\u202ec\\x9b"
    assert printable("naïve 日本 🙂 \\x1b") == "naïve 日本 🙂 \\x1b"


@given(st.text(alphabet="ab日 \n", max_size=60), st.integers(2, 12))
def test_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    ends = line_ends(text, width)
    starts = [0, *ends[:-1]]
    assert ends[-1] == len(text)
    for start, end in zip(starts, ends, strict=True):
        line = text[start:end]
        assert cell_len(line.rstrip()) <= width
        assert "\n" not in line[:-1]
        if end < len(text) and not line.endswith("\n"):  # full: the next word would not have fitted
            word = re.match(r"[^ \n]+", text[end:])
            assert word is not None
            assert cell_len(line) + cell_len(word[0]) > width


def test_words_stay_whole() -> None:
    text = "one two three four"
    ends = line_ends(text, 9)
    assert [text[a:b] for a, b in zip([0, *ends], ends, strict=False)] == ["one two ", "three ", "four"]


# -- the view ----------------------------------------------------------------------------------


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(denoising, "_FRAME_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Console(
        file=io.StringIO(), force_terminal=True, width=20, height=8, color_system="256", _environ={}
    )


def make_view(
    console: Console, style: str, block_size: int, num_tokens: int
) -> tuple[DenoisingView, Request]:
    request = Request(np.array([11]), PartitionRule(block_size), SamplingParams(max_tokens=num_tokens))
    return DenoisingView(console, TEXT_MODEL, "show" if style == "show" else "chat"), request


def unmask(step: int, tokens: dict[int, int]) -> TokensUnmasked:
    positions = np.array(list(tokens))
    return TokensUnmasked(0, step, positions, np.array(list(tokens.values())), np.ones(len(tokens)))


def finished(request: Request, ids: list[int], stop_length: int) -> Trajectory:
    return Trajectory(
        request.prompt_ids,
        np.array(ids),
        np.arange(len(ids)),
        np.zeros(len(ids), dtype=np.float32),
        stop_length,
        "stop",
        request.rule.cut(1, len(ids)),
        ForwardCounts(len(ids)),
        0,
        0,
    )


def written(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def plain(text: str) -> str:
    """Without the colours; what else is in there stays."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_masks_are_seen_where_they_are(console: Console) -> None:
    view, request = make_view(console, "show", 4, 8)
    view.begin(request, Text("PROMPT "))
    view.unmask(unmask(0, {2: 10}), 0.1)
    frame = plain(written(console))
    assert f"PROMPT {MASK}{MASK}日本{MASK}" in frame
    assert "block 1 · 1 token " in frame
    assert f"{MASK} " not in frame  # the next block is not drawn yet
    view.close()


def test_colours_tell_the_step_in_the_block(console: Console) -> None:
    view, request = make_view(console, "show", 2, 4)
    view.begin(request, Text())
    view.unmask(unmask(0, {1: 11}), 0.1)
    view.unmask(unmask(1, {0: 10}), 0.1)
    view.unmask(unmask(2, {2: 11, 3: 10}), 0.1)
    view.finish(finished(request, [10, 11, 11, 10], 4), 0.2)
    first, second = (re.sub(r"\D", "", colour(step, 2)) for step in (0, 1))
    last = written(console).rpartition("\x1b[2K")[2]
    assert f"38;5;{second}m日本\x1b" in last
    assert f"38;5;{first}m日本\x1b" in last
    assert last.count("a ") == last.count(f"38;5;{first}ma ") == 2


@pytest.mark.parametrize("style", ["show", "chat"])
def test_hostile_text_is_shown_not_obeyed(console: Console, style: str) -> None:
    view, request = make_view(console, style, 4, 20)
    ids = [2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 16]
    view.begin(request, Text())
    for step, token in enumerate(ids):
        view.unmask(unmask(step, {step: token}), 0.1)
    view.finish(finished(request, ids, len(ids)), 0.2)
    output = written(console)
    for sequence in ("\x1b[31m", "\x07", "\x9b", "\u202e", "\x1b]", "\u2028", "🙂", "😄"):
        assert sequence not in output
    shown = "".join(_screen(plain(output)))
    assert "\\x1b[31m[bold" in shown
    assert "[/]\\[" in shown
    assert ":smile:" in shown


@given(st.data())
def test_every_token_ends_up_on_the_screen_once(data: st.DataObject) -> None:
    """However the blocks were denoised, and whatever has scrolled away."""
    console = Console(
        file=io.StringIO(), force_terminal=True, width=20, height=6, color_system="256", _environ={}
    )
    denoising._FRAME_SECONDS = 0.0
    block_size = data.draw(st.integers(1, 6))
    ids = data.draw(st.lists(st.sampled_from([11, 12, 10, 3, 17]), min_size=1, max_size=60))
    view, request = make_view(console, "chat", block_size, len(ids))
    view.begin(request, Text())
    step = 0
    for span in request.rule.cut(1, len(ids)).response_slices:
        places = data.draw(st.permutations(range(span.start, span.stop)))
        while places:
            count = data.draw(st.integers(1, len(places)))
            view.unmask(unmask(step, {p: ids[p] for p in places[:count]}), 0.1)
            places, step = places[count:], step + 1
    view.finish(finished(request, ids, len(ids)), 0.2)
    kept = _screen(written(console))
    expected = printable("".join(HOSTILE[i] for i in ids))
    assert re.sub(r"\s", "", "".join(kept[:-1])) == re.sub(r"\s", "", expected)
    assert MASK not in "".join(kept)
    assert view.settled_text == "".join(HOSTILE[i] for i in ids)


def _screen(output: str) -> list[str]:
    """The lines that a terminal with endless scrollback would hold."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] != "\x1b" and part != "\r":
            lines[row] += part
    return [line for line in lines if line]


def test_what_stands_behind_the_stop_is_marked_or_left_out(console: Console) -> None:
    for style, expected in (("show", "a 日本"), ("chat", "a ")):
        view, request = make_view(console, style, 4, 4)
        view.begin(request, Text())
        view.unmask(unmask(0, {0: 11, 1: 1, 2: 10, 3: 11}), 0.1)
        view.finish(finished(request, [11, 1, 10, 11], 2), 0.2)
        last = plain(written(console).rpartition("\x1b[2K")[2])
        assert last.replace("<eos>", "").strip().startswith(expected.strip())
        assert ("<eos>" in last, "日本" in last) == ((True, True) if style == "show" else (False, False))


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 256])
def test_legend_fits_a_terminal(block_size: int) -> None:
    assert cell_len(legend(block_size).plain) < 80
    colours = [colour(step, block_size) for step in range(block_size)]
    assert colours[0] == COLOURS[0]
    assert len(set(colours)) == min(block_size, len(COLOURS))
