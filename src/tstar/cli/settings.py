"""All settings of `tstar train` as tyro sees them, for its --help."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from tstar.cli.train import Train
from tstar.config import CurriculumConfig, RewardsConfig, RunConfig, StageOverrides, ValidationConfig
from tstar.curriculum import ColdStart, Plateau, WeightedPolicy
from tstar.lora import LoraConfig
from tstar.rewards import RewardSpec
from tstar.trainer import TrainerConfig, ValueConfig
from tstar.unmask import UnmaskPolicy

COMPLETE = RunConfig(
    curriculum=CurriculumConfig(
        cold_start=ColdStart(policy=UnmaskPolicy()),
        plateau=Plateau(),
        stages={
            8: StageOverrides(
                policies=(WeightedPolicy(),), cold_start=ColdStart(policy=UnmaskPolicy()), plateau=Plateau()
            )
        },
    ),
    rewards=RewardsConfig(terms=(RewardSpec("math", options={"name": 1}),)),
    trainer=TrainerConfig(value=ValueConfig()),
    lora=LoraConfig(),
    validation=ValidationConfig(policy=UnmaskPolicy(), extra_policies=(UnmaskPolicy(),)),
)
"""With every optional part there, so that its fields are shown."""


@dataclass(frozen=True)
class Documented(Train):
    """`Train` with all settings as options."""

    settings: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands] = field(
        default_factory=lambda: replace(COMPLETE)
    )
