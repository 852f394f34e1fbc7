"""A run in several processes, with the results of one.

Each process has all weights, an engine of its own and all rollouts. Groups of responses go to whoever is
free; packs of an update are shared out, and their gradients added in the order of the packs
(`tstar.parallel`). Every process then takes the same optimizer step. The main one writes the run directory,
which all read: it lies on a file system that they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

import numpy as np
from torch import Tensor

from tstar.curriculum import InterruptedRunError
from tstar.data import Problem
from tstar.engine import Engine, GenerationError, Request, RequestFailed, RequestFinished
from tstar.evaluate import Scorer
from tstar.experiment.journal import Journal
from tstar.parallel import Parallel, WorkQueue, broadcast_weights
from tstar.partition import PartitionRule
from tstar.rewards import Scores
from tstar.trainer import Rollout, Trainer, UpdateMetrics
from tstar.trajectory import Trajectory

T = TypeVar("T")

STOP_CHECK_SECONDS = 1.0
"""How often a process looks whether another one was asked to stop."""


class Team:
    """This process and the others; every method is called by all of them."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._num_queues = 0

    @property
    def is_writer(self) -> bool:
        return self._parallel.is_main

    # -- sampling ------------------------------------------------------------------------------

    def generate(
        self, engine: Engine, requests: Sequence[Request], on_finished: Callable[[int, int], object]
    ) -> list[Trajectory]:
        """Decode, group by group wherever there is room; all responses in all processes.

        on_finished is told what this process has done, and may raise InterruptedRunError, for all."""
        groups = _groups(requests)
        queue = WorkQueue(self._parallel, f"generate {self._num_queues}", len(groups))
        self._num_queues += 1
        finished: dict[int, Trajectory] = {}
        failed: dict[int, str] = {}
        refusal: Exception | None = None
        num_tokens = 0
        try:
            for index, event in self._decode(engine, requests, groups, queue):
                if isinstance(event, RequestFailed):
                    failed[index] = event.reason
                else:
                    finished[index] = event.trajectory
                    num_tokens += event.trajectory.stop_length
                    on_finished(len(finished), num_tokens)
        except (InterruptedRunError, ValueError) as error:
            queue.close()
            refusal = error
        return self._together(len(requests), finished, failed, refusal)

    def _decode(
        self, engine: Engine, requests: Sequence[Request], groups: Sequence[Sequence[int]], queue: WorkQueue
    ) -> Iterator[tuple[int, RequestFinished | RequestFailed]]:
        """The ends of this process's requests. It holds no more of them at a time than half its even share,
        so that a slow process leaves its work to others."""
        even_share = -(-len(requests) // (2 * self._parallel.world_size))
        most = min(engine.config.max_requests, even_share)
        index_of: dict[int, int] = {}
        is_open, looked = True, time.monotonic()
        try:
            while is_open or engine.num_unfinished:
                while is_open and engine.num_unfinished < most:
                    number = queue.take()
                    is_open = number is not None
                    for index in groups[number] if number is not None else ():
                        index_of[_submit(engine, requests, index)] = index
                if time.monotonic() - looked > STOP_CHECK_SECONDS:
                    looked = time.monotonic()
                    if queue.is_closed:
                        return
                for event in engine.step() if engine.num_unfinished else ():
                    if isinstance(event, RequestFinished | RequestFailed):
                        yield index_of.pop(event.request_id), event
        finally:
            for request_id in index_of:
                engine.abort(request_id)

    def _together(
        self,
        count: int,
        finished: Mapping[int, Trajectory],
        failed: Mapping[int, str],
        refusal: Exception | None,
    ) -> list[Trajectory]:
        """What all have decoded; or what went wrong anywhere, in all."""
        all_finished: dict[int, Trajectory] = {}
        all_failed: dict[int, str] = {}
        refusals = []
        for theirs, their_failed, their_refusal in self._parallel.gather((finished, failed, refusal)):
            all_finished |= theirs
            all_failed |= their_failed
            refusals += [] if their_refusal is None else [their_refusal]
        if refusals:
            raise refusals[0]
        if all_failed:
            raise GenerationError(all_failed, all_finished)
        return [all_finished[index] for index in range(count)]

    def scorer(self, scorer: Scorer) -> Scorer:
        return SharedScorer(scorer, self._parallel)

    # -- training ------------------------------------------------------------------------------

    def update(self, trainer: Trainer, rollouts: Sequence[Rollout], rule: PartitionRule) -> UpdateMetrics:
        """The trainer shares its packs itself."""
        return trainer.update(rollouts, rule)

    def share_weights(self, weights: Sequence[Tensor]) -> None:
        """Take the main process's, bit for bit: what everyone computed alone may differ on a GPU."""
        broadcast_weights(self._parallel, weights)

    # -- one run -------------------------------------------------------------------------------

    def check_interrupt(self, check: Callable[[], None]) -> None:
        """Raise in all if anyone was asked to stop."""
        asked: str | None = None
        try:
            check()
        except InterruptedRunError as error:
            asked = str(error)
        names = [name for name in self._parallel.gather(asked) if name is not None]
        if names:
            raise InterruptedRunError(names[0])

    def on_writer(self, action: Callable[[], T]) -> T:
        return self._parallel.on_main(action)


class SharedScorer:
    """Each process scores its part: a verdict that depends on the clock is the same for all."""

    def __init__(self, scorer: Scorer, parallel: Parallel) -> None:
        self.specs = scorer.specs
        self._scorer, self._parallel = scorer, parallel

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> Scores:
        own = self._parallel.slice_of(len(responses))
        scores = self._scorer.score(problems[own], responses[own])
        failures = tuple(replace(f, index=f.index + own.start) for f in scores.failures)
        parts = self._parallel.gather(replace(scores, failures=failures))
        return Scores(
            rewards=np.concatenate([part.rewards for part in parts]),
            terms={name: np.concatenate([part.terms[name] for part in parts]) for name in parts[0].terms},
            is_correct=np.concatenate([part.is_correct for part in parts]),
            failures=tuple(failure for part in parts for failure in part.failures),
        )


class SilentJournal(Journal):
    """Of a process that does not write."""

    def __init__(self) -> None:
        pass

    @property
    def offset(self) -> int:
        return 0

    def log(
        self,
        event: str,
        update_step: int,
        record: Mapping[str, object],
        time: Mapping[str, float] | None = None,
    ) -> None:
        pass

    def show(self, event: str, update_step: int, record: Mapping[str, object]) -> None:
        pass


def _groups(requests: Sequence[Request]) -> list[list[int]]:
    """Neighbours with the same prompt and blocks: they share keys and values, and stay together."""

    def kind(index: int) -> tuple[object, ...]:
        return requests[index].prompt_ids.tobytes(), requests[index].rule

    return [list(members) for _, members in groupby(range(len(requests)), kind)]


def _submit(engine: Engine, requests: Sequence[Request], index: int) -> int:
    try:
        return engine.submit(requests[index])
    except ValueError as error:
        raise ValueError(f"requests[{index}].{error}") from None
