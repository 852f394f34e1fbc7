"""One worker process, started by `tstar.rewards.workers`; its argument is the number of a socket.

It reads a line of JSON per answer from the socket and writes one back. Whatever happens to it in between
(it is killed, it runs out of memory, it crashes) happens to nobody else.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tstar.data import Problem
from tstar.rewards.response import Response

_STATUS = Path("/proc/self/status")
_NEARLY_FULL = 0.9
"""A peak above this share of the limit means that an allocation has failed: SymPy and math-verify catch
MemoryError like any other and go on with half an answer."""


def load(reference: str, options: dict[str, Any]) -> Callable[[Problem, Response], float]:
    """The function that ``module:function`` names, with its options; ValueError says what is wrong."""
    module_name, _, name = reference.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"reward {reference!r} cannot be imported ({error}); write MODULE:FUNCTION"
        ) from error
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise ValueError(f"reward {reference!r}: its options do not fit ({error})") from error

    def reward(problem: Problem, response: Response) -> float:
        return float(function(problem, response, **options))

    return reward


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)  # what a reward prints is no reply
    with connection, connection.makefile("rb") as lines:
        setup = json.loads(lines.readline())
        sys.path[:] = setup["path"]
        try:
            functions = [load(**function) for function in setup["functions"]]
        except Exception:  # noqa: BLE001  (importing somebody's module may raise anything: it is reported)
            _send(connection, {"error": traceback.format_exc(limit=-1)})
            return
        limit = _limit_memory(setup["memory_limit"])
        _send(connection, {"ready": True})
        for line in lines:
            request = json.loads(line)
            _limit_cpu(setup["time_limit"])
            reply = _judge(functions[request["function"]], request)
            if limit is not None and limit - _memory("VmPeak") < (1 - _NEARLY_FULL) * setup["memory_limit"]:
                reply = {"failure": "memory", "detail": "its memory limit was reached"}
            _send(connection, reply)


def _judge(function: Callable[[Problem, Response], float], request: dict[str, Any]) -> dict[str, Any]:
    try:
        reward = function(Problem(**request["problem"]), Response(**request["response"]))
    except MemoryError:
        return {"failure": "memory", "detail": "its memory limit was reached"}
    except Exception as error:  # noqa: BLE001  (an answer may make a reward raise anything: it is counted)
        return {"failure": "error", "detail": f"{type(error).__name__}: {error}"[:1000]}
    if not math.isfinite(reward):
        return {"failure": "error", "detail": f"the reward is {reward}; it must be a finite number"}
    return {"reward": reward}


def _send(connection: socket.socket, reply: dict[str, Any]) -> None:
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _limit_memory(num_bytes: int) -> int | None:
    """Let this process take so much beyond what it has now; its new size at most. None: this system does not
    say what it has (macOS), and only the time limit holds."""
    if not _STATUS.exists():
        return None
    limit = _memory("VmSize") + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return limit


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end what nobody waits for any more, should the parent have been killed meanwhile."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    end = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def _memory(name: str) -> int:
    """A size of this process in bytes, as Linux counts it."""
    status = _STATUS.read_text(encoding="ascii", errors="replace")
    return int(status.split(f"{name}:", 1)[1].split(maxsplit=1)[0]) * 1024
