"""Runs: Algorithm 1 with models, problems and files (docs/train.md)."""

from tstar.experiment.interrupt import Interrupts
from tstar.experiment.journal import OnEvent
from tstar.experiment.run import Watch, open_run, resolved, resume, start

__all__ = ["Interrupts", "OnEvent", "Watch", "open_run", "resolved", "resume", "start"]
