"""Where in a response the answer stands. Time is linear in the response's length, whatever it holds."""

from __future__ import annotations

import re

MAX_ANSWER_LENGTH = 2000
"""Characters; the longest gold answer of MATH has 159. A longer box is no answer."""
MAX_BOXES = 32
"""How many boxes are looked at, from the last one back."""

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
_SEPARATOR = re.compile(
    r"(?:[\s$,;]|\\[()\[\],;]|\\q?quad|and|or|\\text\s?\{\s*(?:and|or)\s*\}|[a-zA-Z](?:_\{?\w\}?)?\s?=)*"
)
_ANSWER_PHRASE = re.compile(r"answer(?:\s+is\b\s*:?|\s*:)\s*(?=(\S[^\n]{0,200}))", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last closed ``\boxed{...}``.

    Boxes with nothing but separators between them are one answer (``\boxed{1} or \boxed{2}``), so that
    writing down every candidate gives none of them. A box that is never closed is no box: the response
    was cut inside it.
    """
    contents: list[str] = []
    next_start = end = len(text)
    for _ in range(MAX_BOXES):
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            break
        end = start
        opened = _BOX.match(text, start)
        closed = None if opened is None else _closing_brace(text, opened.end())
        if opened is None or closed is None or closed > next_start:  # around a box that was taken: the same
            continue
        if contents and _SEPARATOR.fullmatch(text[closed + 1 : next_start][: MAX_ANSWER_LENGTH + 1]) is None:
            break
        content = text[opened.end() : closed].strip()
        if content not in contents:
            contents.insert(0, content)
        next_start = start
    return ", ".join(contents) if any(contents) else None


def has_box(text: str) -> bool:
    """Whether a box was at least begun."""
    return _BOX.search(text) is not None


def answer_phrase(text: str) -> str | None:
    """What follows the last "answer is" or "answer:" on its line."""
    phrases = _ANSWER_PHRASE.findall(text[-MAX_ANSWER_LENGTH:])
    return phrases[-1].strip() if phrases else None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for found in _BRACE.finditer(text, start, start + MAX_ANSWER_LENGTH):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return found.start()
    return None
