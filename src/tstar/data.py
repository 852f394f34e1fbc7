"""Problems: what a policy is asked and what the answer must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """One question with its verifiable answer."""

    question: str
    answer: str
    """The gold answer alone, without the way to it."""
    level: int | None = None
    """How hard, in the source's own numbers."""
    id: str = ""
    """Unique within its data set."""
    solution: str | None = None
    """A whole correct response, where the source has one: what SFT learns from."""
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)
    """What else the source says of it (subject, ...)."""
