"""The methods of a report: their order, and the accent that each keeps in every figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = ("ar", "base", "tracerl", "tstar")
"""Accents that go by meaning, in the order of the paper's tables; the rest is first come, first served."""
NAMES = {"ar": "AR", "base": "base", "tracerl": "TraceRL", "tstar": "T*"}
"""What the paper calls them."""
NUM_OTHERS = 6


@dataclass(frozen=True)
class Method:
    """One label, everywhere in the same colour."""

    name: str
    slot: str
    """Name of its accent: one of SLOTS, or other1, other2, ..."""


@dataclass(frozen=True)
class Methods:
    """All of a report, in the order of its tables."""

    all: tuple[Method, ...]

    def index(self, label: str) -> int:
        return next(i for i, method in enumerate(self.all) if method.name == label)


def number_methods(*labels: Sequence[str]) -> Methods:
    """AR models first, then bases, direct TraceRL, T*, and whatever else there is.

    One label of a kind has its accent, the paper's own name before others; the rest are methods of their own.
    """
    names = dict.fromkeys(name for group in labels for name in group)
    slots: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name not in NAMES.values()):
        slot = guess_slot(name)
        if slot is not None and slot not in slots.values():
            slots[name] = slot
    others = [name for name in names if name not in slots]
    kinds = {name: guess_slot(name) for name in names}
    ranks = {name: SLOTS.index(kind) if kind is not None else len(SLOTS) for name, kind in kinds.items()}
    slots |= {name: f"other{i % NUM_OTHERS + 1}" for i, name in enumerate(others)}
    return Methods(tuple(Method(name, slots[name]) for name in sorted(names, key=ranks.__getitem__)))


def name_run(run: str, labels: Sequence[str]) -> str:
    """The method of a run that says none: what others of its kind are called here, else in the paper."""
    slot = guess_slot(run)
    if slot is None:
        return run
    return next((label for label in labels if guess_slot(label) == slot), NAMES[slot])


def guess_slot(label: str) -> str | None:
    """The paper's names, as people write them."""
    plain = label.lower().replace(" ", "").replace("_", "-").rsplit("/", 1)[-1]
    if plain.startswith(("t*", "tstar", "t-star", "t⋆", "t★")):
        return "tstar"
    if plain.startswith(("tracerl", "direct")):
        return "tracerl"
    if plain.startswith(("base", "sft", "--", "sdar")) or plain in ("b4", "b8", "b16", "b32", "b64"):
        return "base"
    if plain == "ar" or plain.startswith(("ar-", "qwen", "llama")):
        return "ar"
    return None
