"""Rewards that do to their process whatever the answer says."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from tstar.data import Problem


def obey(problem: Problem, response: str, *, bonus: float = 0.0) -> float:
    """The answer is a command, or the reward itself."""
    command, _, argument = response.partition(" ")
    match command:
        case "sleep":
            time.sleep(float(argument))
        case "spin":
            while True:
                pass
        case "power":  # inside one bytecode: no Python signal handler gets a turn
            return float(len(str(9 ** (9 ** int(argument)))))
        case "allocate":
            return float(len(bytearray(int(argument))))
        case "hoard":
            return _hoard()
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(int(argument))
        case "raise":
            raise RuntimeError(argument)
        case "nan" | "inf":
            return float(command)
        case "print":
            print(argument, flush=True)  # noqa: T201
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "pid":
            return float(os.getpid())
        case "length":
            return float(len(response))
        case "level":
            return float(problem.level or 0)
        case _:
            return float(command) + bonus
    return 1.0


def _hoard() -> float:
    """Small pieces until there is no more, and then no word about it: what SymPy does."""
    pieces = []
    try:
        while True:
            pieces.append(bytearray(1 << 20))
    except MemoryError:
        return 1.0


def always_wrong(problem: Problem, response: str) -> float:
    raise KeyError("gold")
