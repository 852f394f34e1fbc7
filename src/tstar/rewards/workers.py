"""Rewards in processes that can be killed: each call has a time and a memory limit of its own.

Workers are fresh interpreters with a socket each, not forks: they inherit neither torch's threads nor the
weights, do not run the user's main module again, and import nothing but the rewards they serve. They are
started once. One that hangs is killed, one that dies is replaced, and the call it was in has failed; the
others go on meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tstar.cgroup import read_limits
from tstar.errors import UserError

START_LIMIT = 300.0
"""Seconds a worker may take to import its rewards."""

Cause = Literal["timeout", "memory", "crash", "error"]
CAUSES: tuple[Cause, ...] = ("timeout", "memory", "crash", "error")
"""Killed at the time limit; out of memory; died otherwise; the reward raised or returned no finite number."""


@dataclass(frozen=True)
class Call:
    """One reward of one answer, as JSON has it."""

    function: int
    """Index into the pool's functions."""
    problem: Mapping[str, Any]
    response: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """A call that gave no reward."""

    cause: Cause
    detail: str


class WorkerPool:
    def __init__(
        self,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        num_workers: int | None = None,
        time_limit: float = 5.0,
        memory_limit: int = 1 << 30,
    ) -> None:
        """functions: each as ``module:function`` with its options. num_workers: None for one a core.
        time_limit: seconds per call. memory_limit: bytes that a worker may take beyond its imports."""
        if num_workers is not None and num_workers < 1:
            raise UserError(f"num_workers: {num_workers} is too few; use 1 or more")
        if not time_limit > 0:
            raise UserError(f"time_limit: {time_limit} leaves no time; use more than 0 seconds")
        if memory_limit < 1 << 20:
            raise UserError(f"memory_limit: {memory_limit} bytes are too few; use {1 << 20} or more")
        self.num_workers = num_workers or _num_usable_cores()
        self.time_limit = time_limit
        self._setup = {
            "functions": [{"reference": name, "options": dict(options)} for name, options in functions],
            "time_limit": time_limit,
            "memory_limit": memory_limit,
        }
        self._workers: list[_Worker] = []

    def start(self) -> None:
        """Start what is not running; the workers import their rewards while the caller goes on."""
        while len(self._workers) < self.num_workers:
            self._workers.append(_Worker({**self._setup, "path": sys.path}))

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def run(self, calls: Sequence[Call]) -> list[float | Failure]:
        """The result of each call, in the order of the calls."""
        results: dict[int, float | Failure] = {}
        waiting = deque(range(len(calls)))
        try:
            while len(results) < len(calls):
                self.start()
                for worker in [each for each in self._workers if each.is_idle]:
                    if waiting:
                        self._hand_out(worker, calls, waiting, results)
                self._collect(results)
        except BaseException:  # an interrupt, say: what the workers still compute nobody will fetch
            self.close()
            raise
        return [results[index] for index in range(len(calls))]

    def _hand_out(
        self,
        worker: _Worker,
        calls: Sequence[Call],
        waiting: deque[int],
        results: dict[int, float | Failure],
    ) -> None:
        if worker.process.poll() is not None:  # died between two runs: no answer's fault
            self._drop(worker)
            return
        index = waiting.popleft()
        failure = worker.send(index, calls[index], self.time_limit)
        if failure is not None:
            results[index] = failure
            self._drop(worker)

    def _collect(self, results: dict[int, float | Failure]) -> None:
        """Wait for the next reply or deadline, then take all replies and kill what is overdue."""
        busy = [worker for worker in self._workers if not worker.is_idle]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            wait = max(0.0, min((worker.deadline for worker in busy), default=0.0) - time.monotonic())
            ready = [key.data for key, _ in selector.select(wait)]
        for worker in ready:
            if worker.index is None:
                worker.finish_start()
                continue
            result = worker.receive()
            if result is None:
                continue
            results[worker.index] = result
            if isinstance(result, Failure) and result.cause != "error":
                self._drop(worker)
            else:
                worker.index, worker.is_idle = None, True
        now = time.monotonic()
        for worker in busy:
            if worker not in ready and now >= worker.deadline:
                self._expire(worker, results)

    def _expire(self, worker: _Worker, results: dict[int, float | Failure]) -> None:
        if worker.index is None:
            raise RuntimeError(f"a reward worker was not ready after {START_LIMIT:.0f} s")
        results[worker.index] = Failure("timeout", f"not done after {self.time_limit:g} s")
        self._drop(worker)

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)
        self.start()  # the next one imports while others work


@dataclass(eq=False)
class _Worker:
    """One process and what it is doing: starting (neither idle nor with an index), idle, or a call."""

    setup: Mapping[str, Any]
    is_idle: bool = False
    index: int | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + START_LIMIT)
    received: bytes = b""

    def __post_init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from tstar.rewards.worker import main; main()", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent, which ends them
            )
        self.connection.sendall(_line(self.setup))

    def send(self, index: int, call: Call, time_limit: float) -> Failure | None:
        self.index, self.is_idle, self.received = index, False, b""
        self.deadline = time.monotonic() + time_limit
        self.connection.settimeout(time_limit)  # the pipe holds 200 kB, an answer may have more
        try:
            self.connection.sendall(
                _line({"function": call.function, "problem": call.problem, "response": call.response})
            )
        except TimeoutError:
            return Failure("timeout", f"not read after {time_limit:g} s")
        except OSError:
            return self._death()
        return None

    def receive(self) -> float | Failure | None:
        """The call's result; None where part of it is still to come."""
        reply = self._receive_line()
        if reply is None:
            return None
        if not reply:
            return self._death()
        if "failure" in reply:
            return Failure(reply["failure"], reply["detail"])
        return float(reply["reward"])

    def finish_start(self) -> None:
        reply = self._receive_line()
        if reply is None:
            return
        if "error" in reply:
            raise UserError(
                f"rewards: {reply['error'].strip().splitlines()[-1].removeprefix('ValueError: ')}"
            )
        if not reply:
            raise RuntimeError(f"a reward worker did not start: {self._death().detail}")
        self.is_idle = True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def _receive_line(self) -> dict[str, Any] | None:
        """A whole line; none of it yet: None; the worker is gone: an empty one."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:  # reset: it died with our request unread
            return {}
        if not data:
            return {}
        self.received += data
        if not self.received.endswith(b"\n"):
            return None
        reply: dict[str, Any] = json.loads(self.received)
        self.received = b""
        return reply

    def _death(self) -> Failure:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed its socket and lives on
            return Failure("crash", "it closed its connection")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Failure("timeout" if -code == signal.SIGXCPU else "crash", how)


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, default=str).encode() + b"\n"


def _num_usable_cores() -> int:
    num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = read_limits().num_cpus
    return num_allowed if limit is None else max(1, min(num_allowed, math.ceil(limit)))
