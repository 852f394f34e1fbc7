"""The configuration of a run, and the ways to it: recipes, files, overrides (docs/train.md)."""

from tstar.config.reading import load_config, read_config
from tstar.config.run import (
    CheckpointsConfig,
    CurriculumConfig,
    DataConfig,
    RewardsConfig,
    RolloutConfig,
    RunConfig,
    StageOverrides,
    TrackingConfig,
    ValidationConfig,
    plain,
)
from tstar.config.text import to_yaml

__all__ = [
    "CheckpointsConfig",
    "CurriculumConfig",
    "DataConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "StageOverrides",
    "TrackingConfig",
    "ValidationConfig",
    "load_config",
    "plain",
    "read_config",
    "to_yaml",
]
