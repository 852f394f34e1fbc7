"""What a report says, as one record: page, figures and tables show it, and none of them computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tstar.report.curves import Arm, Health, ValidationCurves
from tstar.report.methods import Method
from tstar.report.schedules import Samples, ScheduleFigure
from tstar.report.sources import GuardEvent, Interval, Notice, Stage


@dataclass(frozen=True)
class RunView:
    """One run in the header and in the curves."""

    name: str
    arm: int
    method: int
    status: str
    """As in "in progress, 37 updates done"."""
    is_running: bool
    stages: tuple[Stage, ...]
    guards: tuple[GuardEvent, ...]
    config_yaml: str


@dataclass(frozen=True)
class EvaluationView:
    """One row of the full table."""

    name: str
    method: int
    setting: int
    block_size: int
    offset: int
    update_step: int | None
    num_problems: int
    num_samples: int
    accuracy: Interval | None
    pass_at: Mapping[int, Interval]
    tokens_per_forward: Interval | None
    local_strict: Interval | None
    mean_length: float | None
    truncated: float | None
    tokens_per_second: float | None
    is_selected: bool
    """Whether it stands for its run (or itself) in figures and the paper's tables."""


@dataclass(frozen=True)
class Score:
    """One method at one block size in one setting: a point of the second figure, a cell of the tables."""

    setting: int
    method: int
    block_size: int
    accuracy: Interval | None
    """Of several evaluations (seeds), their mean with the interval of `seeds.mean_interval`."""
    tokens_per_forward: Interval | None
    local_strict: Interval | None
    num_evaluations: int
    by_seed: Mapping[str, Interval]
    """Accuracy of each seed, where the names of the evaluations say it."""
    num_samples: int
    """The k of avg@k."""
    num_problems: int


@dataclass(frozen=True)
class Claim:
    """What the numbers let one say, and the numbers."""

    text: str
    numbers: str = ""


@dataclass(frozen=True)
class Difference:
    """A field of the configuration that is not the same in all runs."""

    field: str
    values: tuple[str, ...]
    """Of each arm."""


@dataclass(frozen=True)
class Report:
    """Everything."""

    title: str
    facts: tuple[str, ...]
    """What the runs' configurations have in common, in short."""
    verdict: tuple[Claim, ...]
    notices: tuple[Notice, ...]
    methods: tuple[Method, ...]
    arms: tuple[Arm, ...]
    runs: tuple[RunView, ...]
    settings: tuple[str, ...]
    evaluations: tuple[EvaluationView, ...]
    scores: tuple[Score, ...]
    validation: ValidationCurves
    health: Health
    schedules: tuple[ScheduleFigure, ...]
    samples: Samples
    differences: tuple[Difference, ...]
