"""The processes of a job as one small object: who am I, who else is there, what do the others have.

`torchrun` starts them and tells each its number by environment variables, the only ones that tstar reads.
A `Parallel` of one process needs none of it and costs nothing: every method answers at once.

What is exchanged are Python objects (over gloo, on the host) and gradients (`GradientSum`); objects must hold
no tensors of a GPU. All methods are collective: every process calls them, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tstar.errors import UserError
from tstar.parallel.assignment import Reduction, owners_of

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others: longer than the longest straggler of a phase."""


class LostProcessError(UserError):
    """Another process of the job is gone, or no longer answers."""


@dataclass(frozen=True)
class Parallel:
    """This process among the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among those of this machine; also the number of its GPU."""
    local_world_size: int = 1
    reduction: Reduction = "ordered"
    """How gradients are added up; see `GradientSum`."""
    is_sharded: bool = False
    """The weights are spread over the processes: in forwards and backwards all must compute together."""
    store: Store | None = field(default=None, compare=False, repr=False)
    """The key-value store of the job, on which work queues count."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    # -- objects -------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """What each process gave, by rank."""
        if self.is_alone:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        with self.naming_the_lost():
            dist.all_gather_object(gathered, value)
        return gathered

    def on_main(self, action: Callable[[], T]) -> T:
        """What the main process finds, for all; its UserError, too."""
        if self.is_alone:
            return action()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = action()
            except UserError as error:
                outcome[1] = error
        with self.naming_the_lost():
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def any(self, is_so: bool) -> bool:
        """Whether it is so in any process."""
        return any(self.gather(is_so))

    def wait(self) -> None:
        """For all to come here."""
        self.gather(None)

    # -- work ----------------------------------------------------------------------------------

    def map(
        self,
        costs: Sequence[int],
        compute: Callable[[int], T],
        passed: Callable[[int], object] = lambda _: None,
        idle: Callable[[int], object] | None = None,
    ) -> list[T]:
        """`compute(number)` of every item, each in one process; the results in order, in all of them.

        passed: called in all processes after each number in turn, whoever computed it. A FloatingPointError
        of an item is raised in all processes, once they have passed all items.
        idle: what a process without an item of its own computes beside the others, where weights are
        sharded."""
        if self.is_sharded:
            return self._map_together(costs, compute, idle or compute)
        if self.is_alone:
            results = []
            for number in range(len(costs)):
                results.append(compute(number))
                passed(number)
            return results
        own: dict[int, T] = {}
        error: tuple[int, FloatingPointError] | None = None
        for number, owner in enumerate(owners_of(costs, self.world_size, self.reduction)):
            if owner == self.rank and error is None:
                try:
                    own[number] = compute(number)
                except FloatingPointError as caught:
                    error = (number, caught)
            passed(number)
        found: dict[int, T] = {}
        errors = []
        for theirs, failed in self.gather((own, error)):
            found |= theirs
            errors += [failed] if failed is not None else []
        if errors:
            raise min(errors, key=lambda each: each[0])[1]
        return [found[number] for number in range(len(costs))]

    def _map_together(
        self, costs: Sequence[int], compute: Callable[[int], T], idle: Callable[[int], object]
    ) -> list[T]:
        own: dict[int, T] = {}
        for number, is_own in self.turns(costs):
            if is_own:
                own[number] = compute(number)
            else:
                idle(number)
        found: dict[int, T] = {}
        for theirs in self.gather(own):
            found |= theirs
        return [found[number] for number in range(len(costs))]

    def turns(self, costs: Sequence[int]) -> list[tuple[int, bool]]:
        """What this process computes, in order, and whether it counts. Where weights are sharded all have
        equally many turns; one that has nothing left computes the cheapest item, for nothing."""
        owners = owners_of(costs, self.world_size, self.reduction)
        own = [(number, True) for number, owner in enumerate(owners) if owner == self.rank]
        if not self.is_sharded or not owners:
            return own
        most = max(owners.count(rank) for rank in range(self.world_size))
        cheapest = min(range(len(costs)), key=lambda i: costs[i])
        return own + [(cheapest, False)] * (most - len(own))

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """A FloatingPointError of one process in all, where these must go on, or stop, together."""
        error: FloatingPointError | None = None
        try:
            yield
        except FloatingPointError as caught:
            if not self.is_sharded:
                raise
            error = caught
        if self.is_sharded:
            errors = [each for each in self.gather(error) if each is not None]
            if errors:
                raise errors[0]

    def slice_of(self, count: int) -> slice:
        """This process's part of that many items, one after the other."""
        return slice(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)

    # -- failures ------------------------------------------------------------------------------

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """A collective that fails because somebody is gone, in one line; every other error as it is."""
        try:
            yield
        except RuntimeError as error:
            # gloo's are plain RuntimeErrors that name its source file.
            if self.is_alone or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LostProcessError(
                f"process {self.rank} of {self.world_size}: another process of this job is gone or does not "
                f"answer ({cause[:160]}); this one ends too; start the job again with --resume"
            ) from error


ALONE = Parallel()
"""One process."""


def launched() -> bool:
    """Whether torchrun (or another launcher of its kind) has started this process, with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def joined(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    reduction: Reduction | None = None,
    timeout: timedelta = TIMEOUT,
) -> Iterator[Parallel]:
    """Join the other processes for as long as the block lasts; alone where nobody launched any.

    reduction: by default exact on CPUs and fast on GPUs."""
    if not launched():
        yield ALONE
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(local_rank)
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        store=PrefixStore("tstar", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    try:
        yield Parallel(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            reduction=reduction or ("sum" if has_gpu else "ordered"),
            store=PrefixStore("work", store),
        )
    finally:
        dist.destroy_process_group()
