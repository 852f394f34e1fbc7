"""What a run will need and how long it will take, before it is started: a roofline over phases.

Pure arithmetic on a model's shape, a workload and a device's constants (docs/scaling.md). Nothing is
allocated, except by `measure`, which finds the constants of the machine it runs on.
"""

from tstar.plan.advice import Advice, advise
from tstar.plan.device import DEVICES, Cluster, Device
from tstar.plan.measure import measure
from tstar.plan.memory import Memory, Part, plan_memory
from tstar.plan.scale import Conditions, ScaledUpdate, scale, with_work_for
from tstar.plan.timing import Phase, Timing, plan_time
from tstar.plan.workload import Workload

__all__ = [
    "DEVICES",
    "Advice",
    "Cluster",
    "Conditions",
    "Device",
    "Memory",
    "Part",
    "Phase",
    "ScaledUpdate",
    "Timing",
    "Workload",
    "advise",
    "measure",
    "plan_memory",
    "plan_time",
    "scale",
    "with_work_for",
]
