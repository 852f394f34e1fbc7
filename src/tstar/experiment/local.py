"""Who does the work of a run: here, this process alone.

A run in several processes has another such object, with the same results: requests shared out by group,
packs by tokens, and one process that writes. Nothing else in a run knows how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from tstar.engine import Engine, GenerationError, Request, RequestFailed, RequestFinished
from tstar.evaluate import Scorer
from tstar.partition import PartitionRule
from tstar.trainer import Rollout, Trainer, UpdateMetrics
from tstar.trajectory import Trajectory

T = TypeVar("T")


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

    def scorer(self, scorer: Scorer) -> Scorer:
        """What scores for all processes."""
        ...

    def update(self, trainer: Trainer, rollouts: Sequence[Rollout], rule: PartitionRule) -> UpdateMetrics:
        """One TraceRL update."""
        ...

    def share_weights(self, weights: Sequence[Tensor]) -> None:
        """After each process has trained them by itself: the same in all, in place."""
        ...

    def check_interrupt(self, check: Callable[[], None]) -> None:
        """Raise InterruptedRunError in all processes if `check` does in any."""
        ...

    def on_writer(self, action: Callable[[], T]) -> T:
        """What the process that writes finds, for all; its UserError too."""
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

    def scorer(self, scorer: Scorer) -> Scorer:
        return scorer

    def update(self, trainer: Trainer, rollouts: Sequence[Rollout], rule: PartitionRule) -> UpdateMetrics:
        return trainer.update(rollouts, rule)

    def share_weights(self, weights: Sequence[Tensor]) -> None:
        pass

    def check_interrupt(self, check: Callable[[], None]) -> None:
        check()

    def on_writer(self, action: Callable[[], T]) -> T:
        return action()
