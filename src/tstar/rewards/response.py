"""What a reward is given besides the problem: the text, and how it was decoded."""

from __future__ import annotations

from typing import Literal


class Response(str):
    """A response's text that also knows how it came about.

    It is a `str`, so a reward that reads the text alone is written, called and tested with plain strings.
    """

    __slots__ = ("finish_reason", "num_tokens", "tokens_per_forward")

    num_tokens: int
    """Tokens up to and including the stop."""
    tokens_per_forward: float
    """TPF: those tokens / denoising forwards."""
    finish_reason: Literal["stop", "length"]
    """``length``: cut off by the token limit."""

    def __new__(
        cls,
        text: str,
        num_tokens: int = 0,
        tokens_per_forward: float = 1.0,
        finish_reason: Literal["stop", "length"] = "stop",
    ) -> Response:
        response = super().__new__(cls, text)
        response.num_tokens = num_tokens
        response.tokens_per_forward = tokens_per_forward
        response.finish_reason = finish_reason
        return response
