"""Being asked to stop: the first signal lets the step in progress finish, the second does not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tstar.curriculum import InterruptedRunError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Remembers the first signal; the next one raises KeyboardInterrupt where the program stands."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def check(self) -> None:
        """Raise if somebody asked to stop."""
        if self.received is not None:
            raise InterruptedRunError(self.received.name)

    @contextmanager
    def listening(self) -> Iterator[Interrupts]:
        """In charge of SIGINT and SIGTERM for as long as the block lasts."""
        previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        if self.received is not None:
            raise KeyboardInterrupt("left at once; the last checkpoint is whole")
        self.received = signal.Signals(number)
