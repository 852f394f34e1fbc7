"""TraceRL: rollouts and their rewards in, one update of the policy out."""

from tstar.trainer.batch import Rollout
from tstar.trainer.metrics import UpdateMetrics
from tstar.trainer.update import NonFiniteLossError, Trainer, TrainerConfig, ValueConfig

__all__ = ["NonFiniteLossError", "Rollout", "Trainer", "TrainerConfig", "UpdateMetrics", "ValueConfig"]
