"""What a run says, and to whom: metrics.jsonl and dashboards by `Tracking`, people by a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tstar.run_dir import RunDir
from tstar.tracking import Tracking

OnEvent = Callable[[str, int, Mapping[str, object], Mapping[str, float]], object]
"""(event, update_step, record, time)"""


class Journal:
    """Takes every event of a run."""

    def __init__(self, run: RunDir, tracking: Tracking, on_event: OnEvent) -> None:
        self._run, self._tracking, self._on_event = run, tracking, on_event

    @property
    def offset(self) -> int:
        """Bytes of metrics.jsonl so far, on disk."""
        return self._tracking.file.offset

    def log(
        self,
        event: str,
        update_step: int,
        record: Mapping[str, object],
        time: Mapping[str, float] | None = None,
    ) -> None:
        with self._run.writing(self._run.metrics):
            self._tracking.log(event, update_step, record, **(time or {}))
        self._on_event(event, update_step, record, time or {})

    def show(self, event: str, update_step: int, record: Mapping[str, object]) -> None:
        """Something for people alone: how far a phase has come."""
        self._on_event(event, update_step, record, {})
