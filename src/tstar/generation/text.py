"""Between ids and text: stop strings, and what each token looks like where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tstar.engine.request import FindStop
from tstar.errors import UserError

if TYPE_CHECKING:
    import transformers  # slow to import


def decode(
    tokenizer: transformers.PreTrainedTokenizerBase,
    ids: Sequence[int] | np.ndarray,
    skip_special_tokens: bool = False,
) -> str:
    text = tokenizer.decode(
        np.asarray(ids, dtype=np.int64).tolist(),
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    assert isinstance(text, str)
    return text


# -- stop strings ------------------------------------------------------------------------------


def stop_finder(
    tokenizer: transformers.PreTrainedTokenizerBase, strings: Sequence[str], block_size: int
) -> FindStop | None:
    """Looks for strings in the text of a response: None for no strings.

    The response ends with the token that completes a string; the string may begin in the middle of a token,
    so the text is cut apart from it (`cut_at_stop`). Strings are looked for with special tokens spelled
    out, so that ``<|im_end|>`` may be one. Only the end of the response is decoded: a block, and before it
    as many tokens as the longest string has bytes, for no text needs more.
    """
    if not strings:
        return None
    if "" in strings:
        raise UserError("stop: an empty string ends every response; leave it out")
    reach = block_size + max(len(string.encode()) for string in strings) + 1

    def contains(ids: np.ndarray) -> bool:
        text = decode(tokenizer, ids)
        return any(string in text for string in strings)

    def find_stop(ids: np.ndarray) -> int | None:
        start = max(0, len(ids) - reach)
        if not contains(ids[start:]):
            return None
        before = max(start, len(ids) - block_size)
        ends = (end for end in range(before + 1, len(ids)) if contains(ids[start:end]))
        return next(ends, len(ids))

    return find_stop


def cut_at_stop(text: str, strings: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    found = [at for string in strings if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text


# -- text token by token -----------------------------------------------------------------------

_CONTEXT = 4
"""Tokens before a token that decide how it is written (a space after a word, none after a line's start)."""


def token_pieces(
    tokenizer: transformers.PreTrainedTokenizerBase,
    context: Sequence[int],
    ids: Sequence[int],
) -> Iterator[str]:
    """The text of each token where it stands, after the tokens of `context`.

    A character made of several tokens stands with the last of them; the others give "".
    """
    known = [int(token) for token in context][-_CONTEXT:]
    start, text = 0, decode(tokenizer, known)
    for token in ids:
        known.append(int(token))
        longer = decode(tokenizer, known[start:])
        if longer.endswith("�") and len(known) - start <= 2 * _CONTEXT:
            yield ""
            continue
        yield longer[len(text) :]
        start = max(0, len(known) - _CONTEXT)
        text = decode(tokenizer, known[start:])
