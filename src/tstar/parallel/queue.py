"""Work that goes to whoever is free: a counter on the job's store, added to atomically."""

from __future__ import annotations

from dataclasses import dataclass

from tstar.parallel.processes import Parallel


@dataclass(frozen=True)
class WorkQueue:
    """Numbers 0, 1, ... below a count, each handed out once in all processes."""

    parallel: Parallel
    name: str
    """Of this use; a queue is never used again under the same name."""
    count: int

    def take(self) -> int | None:
        """The next number; None if all are taken, or somebody closed the queue."""
        store = self.parallel.store
        assert store is not None
        with self.parallel.naming_the_lost():
            number = store.add(self.name, 1) - 1
        return number if number < self.count else None

    def close(self) -> None:
        """Nobody gets anything more."""
        store = self.parallel.store
        assert store is not None
        with self.parallel.naming_the_lost():
            store.add(self.name, self.count)
            store.add(f"{self.name} closed", 1)

    @property
    def is_closed(self) -> bool:
        """Whether somebody closed it."""
        store = self.parallel.store
        assert store is not None
        with self.parallel.naming_the_lost():
            return store.add(f"{self.name} closed", 0) > 0
