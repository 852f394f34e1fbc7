"""Responses drawn in the terminal while they are decoded: what is masked, and when each token came.

What can no longer change is printed and scrolls away; the block being denoised, with the line before it and a
line of figures, is drawn over and over. Whatever the model says is shown, never obeyed: control characters
are written out, and nothing is read as markup.
"""

from __future__ import annotations

import time
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tstar.generation.text import token_pieces
from tstar.generation.text_model import TextModel
from tstar.partition import Partition

if TYPE_CHECKING:
    from tstar.engine import Request, TokensUnmasked
    from tstar.trajectory import Trajectory

MASK = "░"
COLOURS = tuple(f"color({number})" for number in (81, 78, 148, 220, 208, 203, 170, 99))
"""Of tokens, from the first step of a block to the last that it may take."""
_FRAME_SECONDS = 1 / 30
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: what cannot be looked at is written as an escape."""
    return "".join(c if _is_harmless(c) else "    " if c == "\t" else _escape(c) for c in text)


def _is_harmless(character: str) -> bool:
    if character == "\n":
        return True
    return character not in _BIDI_CONTROLS and unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def line_ends(text: str, width: int) -> list[int]:
    """Where the lines of a text end when it is wrapped at spaces; spaces may hang over the edge."""
    ends: list[int] = []
    start = column = after_space = 0
    for at, character in enumerate(text):
        if character == "\n":
            ends.append(at + 1)
            start, column, after_space = at + 1, 0, at + 1
            continue
        size = cell_len(character)
        while column + size > width and column > 0 and not character.isspace():
            cut = after_space if after_space > start else at
            ends.append(cut)
            start, column, after_space = cut, cell_len(text[cut:at]), cut
        column += size
        if character.isspace():
            after_space = at + 1
    return [*ends, len(text)]


@dataclass(eq=False)
class _Block:
    """The block being denoised."""

    index: int
    first_step: int
    tokens: dict[int, int] = field(default_factory=dict)
    """Index into the response -> id."""
    steps: dict[int, int] = field(default_factory=dict)
    """Index into the response -> step, counted from the block's first."""


class DenoisingView:
    """One response after another; `begin`, `unmask` for each step, `finish` (or `close`).

    ``show`` keeps the colours, spells special tokens out and marks what stands behind the stop; ``chat``
    leaves plain text behind.
    """

    def __init__(self, console: Console, text_model: TextModel, style: Literal["show", "chat"]) -> None:
        self._console, self._text_model, self._is_show = console, text_model, style == "show"
        self._live: Live | None = None

    def begin(self, request: Request, lead: Text) -> None:
        """A response is about to come; `lead` stands before it."""
        self._partition: Partition = request.rule.cut(len(request.prompt_ids), request.sampling.max_tokens)
        self._context: list[int] = request.prompt_ids.tolist()
        self._settled = lead
        """What is final and not yet printed for good."""
        self._block = _Block(0, 0)
        self._num_tokens, self._num_steps, self._drawn_at = 0, 0, 0.0
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def unmask(self, event: TokensUnmasked, seconds: float) -> None:
        """A step was taken, `seconds` after the response began."""
        if event.positions[0] >= self._partition.response_slices[self._block.index].stop:
            self._settle()
            self._block = _Block(self._block.index + 1, event.step)
        for position, token in zip(event.positions.tolist(), event.token_ids.tolist(), strict=True):
            self._block.tokens[position] = token
            self._block.steps[position] = event.step - self._block.first_step
        self._num_tokens += len(event.positions)
        self._num_steps = event.step + 1
        self._draw(seconds)

    def finish(self, trajectory: Trajectory, seconds: float) -> None:
        """The response has ended."""
        self._settle(trajectory.stop_length)
        self._num_tokens = trajectory.stop_length
        self.close()
        self._print(Text(self._figures(seconds), style="dim"))

    @property
    def settled_text(self) -> str:
        """The text of all complete blocks."""
        return self._text_model.decode(
            self._context[self._partition.prompt_length :], skip_special_tokens=True
        )

    def close(self) -> None:
        """Leave behind what is final; what was still masked goes."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        for line in self._lines(self._settled):
            self._print(line)

    # -- text ------------------------------------------------------------------------------------

    def _settle(self, stop: int | None = None) -> None:
        """The block is complete: its text is final."""
        block = self._block
        drawn = self._block_text(stop)
        if self._is_show:
            self._settled.append_text(drawn)
        else:
            self._settled.append(drawn.plain)
        self._context += [block.tokens[position] for position in sorted(block.tokens)]

    def _block_text(self, stop: int | None = None) -> Text:
        """The block as it stands; stop: the response's length, where it is known."""
        span = self._partition.response_slices[self._block.index]
        positions = range(span.start, span.stop)
        text = Text()
        run: list[int] = []
        for position in [*positions, None]:
            if position is not None and position in self._block.tokens:
                run.append(position)
                continue
            self._append_run(text, run, len(positions), stop)
            run = []
            if position is not None:
                text.append(MASK, style="dim")
        return text

    def _append_run(self, text: Text, run: list[int], block_length: int, stop: int | None) -> None:
        """Neighbouring tokens, each in the colour of its step."""
        ids = [self._block.tokens[position] for position in run]
        special = self._text_model.tokenizer.all_special_ids
        for position, token, piece in zip(
            run, ids, token_pieces(self._text_model.tokenizer, self._context, ids), strict=True
        ):
            is_behind_stop = stop is not None and position >= stop
            if not self._is_show and (is_behind_stop or token in special):
                continue
            shown = printable(piece)
            if self._is_show:
                shown = shown.replace("\n", "↵\n")
            style = colour(self._block.steps[position], block_length)
            if token in special:
                style += " italic"
            text.append(shown, style="dim strike" if is_behind_stop else style)

    # -- drawing ---------------------------------------------------------------------------------

    def _draw(self, seconds: float) -> None:
        now = time.monotonic()
        if self._live is None or now - self._drawn_at < _FRAME_SECONDS:
            return
        self._drawn_at = now
        text = self._settled + self._block_text()
        lines = self._lines(text)
        # The line before the first one that may change is kept: a word may still move up to it.
        while len(lines) > 2 and len(lines[0]) + len(lines[1]) <= len(self._settled):
            self._settled = self._settled[len(lines[0]) :]
            self._print(lines.pop(0))
        lines = lines[-max(1, self._console.height - 2) :]
        figures = Text(self._figures(seconds), style="dim", no_wrap=True, overflow="crop")
        self._live.update(Group(*map(_without_end, lines), figures), refresh=True)

    def _lines(self, text: Text) -> list[Text]:
        ends = line_ends(text.plain, self._console.width)
        return list(text.divide(ends[:-1])) if len(ends) > 1 else [text]

    def _print(self, line: Text) -> None:
        self._console.print(_without_end(line), no_wrap=True, overflow="crop")

    def _figures(self, seconds: float) -> str:
        steps = max(self._num_steps, 1)
        return (
            f"block {self._block.index + 1} · {_count(self._num_tokens, 'token')} · "
            f"{_count(self._num_steps, 'forward')} · "
            f"TPF {self._num_tokens / steps:.2f} · {self._num_tokens / max(seconds, 1e-9):,.0f} tokens/s"
        )


def colour(step_in_block: int, block_length: int) -> str:
    """The colour of a step: from the first to the last that a block of this length may take."""
    return COLOURS[min(step_in_block * len(COLOURS) // block_length, len(COLOURS) - 1)]


def legend(block_size: int) -> Text:
    """What the colours mean."""
    text = Text("step in block: ", style="dim")
    if block_size <= len(COLOURS):
        for step in range(block_size):
            text.append(f"■ {step + 1}  ", style=colour(step, block_size))
    else:
        text.append("first ").append_text(Text.assemble(*(("■", c) for c in COLOURS))).append(" last  ")
    return text.append(f"{MASK} masked", style="dim")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _without_end(line: Text) -> Text:
    """A line as it is printed: no newline, no space over the edge."""
    shown = line.copy()
    shown.rstrip()
    shown.no_wrap, shown.overflow = True, "crop"
    return shown
