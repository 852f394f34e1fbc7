"""Who does the work of a run: here, this process alone.

A run in several processes has another such object, with the same results: requests shared out by group,
packs by tokens, and one process that writes. Nothing else in a run knows how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tstar.engine import Engine, GenerationError, Request, RequestFailed, RequestFinished
from tstar.partition import PartitionRule
from tstar.trainer import Rollout, Trainer, UpdateMetrics
from tstar.trajectory import Trajectory


@runtime_checkable
class Workforce(Protocol):
    """The processes of a run, as one."""

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run directory."""
        ...

    def generate(
        self, engine: Engine, requests: Sequence[Request], on_finished: Callable[[int, int], object]
    ) -> list[Trajectory]:
        """Decode; `on_finished(responses, tokens)` is told how far it is, and may raise to end it."""
        ...

    def update(self, trainer: Trainer, rollouts: Sequence[Rollout], rule: PartitionRule) -> UpdateMetrics:
        """One TraceRL update."""
        ...


class OneProcess:
    """All of it here."""

    is_writer = True

    def generate(
        self, engine: Engine, requests: Sequence[Request], on_finished: Callable[[int, int], object]
    ) -> list[Trajectory]:
        finished: dict[int, Trajectory] = {}
        failed: dict[int, str] = {}
        num_tokens = 0
        for event in engine.stream(requests, wants_steps=False):
            if isinstance(event, RequestFailed):
                failed[event.request_id] = event.reason
            elif isinstance(event, RequestFinished):
                finished[event.request_id] = event.trajectory
                num_tokens += event.trajectory.stop_length
                on_finished(len(finished), num_tokens)
        if failed:
            raise GenerationError(failed, finished)
        return [finished[index] for index in range(len(requests))]

    def update(self, trainer: Trainer, rollouts: Sequence[Rollout], rule: PartitionRule) -> UpdateMetrics:
        return trainer.update(rollouts, rule)
