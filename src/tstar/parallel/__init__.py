"""Everything of torch.distributed: the processes of a job, and what they share (docs/scaling.md)."""

from tstar.parallel.assignment import Reduction, owners_of
from tstar.parallel.gradients import GradientSum, broadcast_weights
from tstar.parallel.processes import ALONE, LostProcessError, Parallel, joined, launched
from tstar.parallel.queue import WorkQueue

__all__ = [
    "ALONE",
    "GradientSum",
    "LostProcessError",
    "Parallel",
    "Reduction",
    "WorkQueue",
    "broadcast_weights",
    "joined",
    "launched",
    "owners_of",
]
