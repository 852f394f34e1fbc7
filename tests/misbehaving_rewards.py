"""Rewards that do to their process whatever the answer says."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

from tstar.data import Problem
from tstar.rewards import Response


def obey(problem: Problem, response: str, *, bonus: float = 0.0) -> float:
    """The answer is a command, or the reward itself."""
    command, _, argument = response.partition(" ")
    if command == "level":
        return float(problem.level or 0)
    if command == "length":
        return float(len(response))
    if command in COMMANDS:
        result = COMMANDS[command](argument)
        return 1.0 if result is None else float(result)
    return float(command) + bonus


def _spin(_: str) -> None:
    while True:
        pass


def _raise(text: str) -> None:
    raise RuntimeError(text)


def _hoard(_: str) -> float:
    """Small pieces until there is no more, and then no word about it: what SymPy does."""
    pieces = []
    try:
        while True:
            pieces.append(bytearray(1 << 20))
    except MemoryError:
        return 1.0


COMMANDS: dict[str, Callable[[str], float | None]] = {
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "spin": _spin,
    # Inside one bytecode: no Python signal handler gets a turn.
    "power": lambda exponent: len(str(9 ** (9 ** int(exponent)))),
    "allocate": lambda size: len(bytearray(int(size))),
    "hoard": _hoard,
    "segfault": lambda _: ctypes.string_at(0) and None,
    "exit": lambda code: os._exit(int(code)),
    "raise": _raise,
    "print": lambda text: print(text, flush=True),  # noqa: T201
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "pid": lambda _: os.getpid(),
}


def always_wrong(problem: Problem, response: str) -> float:
    raise KeyError("gold")


def knows_all(problem: Problem, response: Response) -> float:
    """Raises unless problem and response arrived as they were sent."""
    assert problem == Problem("1+1", "2", 7, "a/b", "one", {"subject": "sums"})
    assert problem.fields == {"subject": "sums"}
    told = (response.num_tokens, response.tokens_per_forward, response.finish_reason)
    assert told == (7, 2.5, "length")
    assert response == "text"
    return 1.0
