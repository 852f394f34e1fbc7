"""The configuration of a run: what `tstar train` is told, and what stands in the run's config.yaml.

Every field says what it is in the docstring under it; `tstar train --help` and docs/config.md show the same
text. Ranges are checked where a record is made, what concerns several sections in `RunConfig.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from tstar.curriculum import (
    ColdStart,
    Plateau,
    Schedule,
    ShiftedRollouts,
    Stage,
    WeightedPolicy,
    doubling,
)
from tstar.data import prompt_template
from tstar.engine import EngineConfig
from tstar.errors import UserError
from tstar.guard import GuardConfig
from tstar.lora import LoraConfig
from tstar.partition import Origin
from tstar.rewards import RewardSpec, default_reward
from tstar.tracking import TrackerName
from tstar.trainer import TrainerConfig
from tstar.unmask import UnmaskPolicy

MOST_RESPONSES = 1_000_000
"""Of one update step. All of them are in memory at once."""


@dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    source: str = ""
    """Problems: a preset (math-train, gsm8k@train, openr1-math), a .jsonl or .parquet file of {question,
    answer}, OWNER/NAME of the Hub, or a generated task (chain:3, chain:2-4)."""
    levels: tuple[int, int] | None = None
    """Only problems from one level to another, both included. Default: all."""
    num_problems: int | None = None
    """Only that many, the first ones. Default: all (of a generated task: new ones without end)."""
    prompt: str | None = None
    """How a question becomes a prompt, in training and validation: math (the paper's instruction), chat (the
    question as the user's message), raw (the question alone), or a message of your own with {question} in
    it. Default: math; raw for a generated task."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_problems")
        if self.prompt is not None:
            prompt_template(self.prompt)
        if self.levels is not None and self.levels[0] > self.levels[1]:
            raise UserError(f"levels: {list(self.levels)} is empty; give the lower one first")


@dataclass(frozen=True)
class StageOverrides:
    """What is different in the stage of one block size; None: as everywhere."""

    num_updates: int | None = None
    """K_B."""
    learning_rate: float | None = None
    """In place of trainer.optimizer.learning_rate."""
    policies: tuple[WeightedPolicy, ...] | None = None
    """In place of rollout.policies."""
    shifted_rollouts: ShiftedRollouts | None = None
    """In place of curriculum.shifted_rollouts."""
    keep_optimizer: bool | None = None
    """In place of curriculum.keep_optimizer."""
    cold_start: ColdStart | Literal["off"] | None = None
    """In place of curriculum.cold_start; the first stage has one only here."""
    plateau: Plateau | Literal["off"] | None = None
    """In place of curriculum.plateau."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_updates")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise UserError(f"learning_rate: {self.learning_rate} cannot be used; use a positive number")
        if self.policies is not None:
            check_policies(self.policies)


@dataclass(frozen=True)
class CurriculumConfig:
    """The stages of Algorithm 1. Direct TraceRL is one stage: both block sizes equal, no shift."""

    initial_block_size: int = 4
    """B_0: that of the first stage."""
    target_block_size: int = 4
    """B̂: that of the last stage; B_0, or B_0 doubled any number of times."""
    updates_per_stage: int = 30
    """K_B. With a plateau, the most."""
    shifted_rollouts: ShiftedRollouts = "replay"
    """Where d2's rollouts come from, the half of the problems that is trained on under the shifted blocks:
    replay: drawn under the standard blocks; sample: under the shifted ones. off: no second pass, all
    problems are trained on under the standard blocks (direct TraceRL)."""
    keep_optimizer: bool = True
    """Go on with the optimizer state when the block size doubles."""
    cold_start: ColdStart | None = None
    """At the start of every stage after the first: SFT on own correct rollouts, at the new block size."""
    plateau: Plateau | None = None
    """End a stage when its validation accuracy stands still."""
    stages: Mapping[int, StageOverrides] = field(default_factory=dict, hash=False)
    """What is different in some stages, by block size."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "initial_block_size", "target_block_size", "updates_per_stage")
        _at_most(self, 256, "target_block_size")


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are drawn for training."""

    num_problems: int = 128
    """Problems of an update step."""
    num_samples: int = 16
    """Responses to each of them: the group that an advantage is computed over."""
    max_tokens: int = 2048
    """Length of a response that nothing stops."""
    temperature: float = 1.0
    """Divides the logits."""
    policies: tuple[WeightedPolicy, ...] = (WeightedPolicy(),)
    """Unmask policies: all responses to a problem are decoded by one of these, drawn by weight."""
    origin: Origin = "response"
    """Where blocks are counted from, in rollouts, training and validation: the response's first token (the
    paper), or the sequence's (SDAR's generate.py, SGLang, LMDeploy)."""
    max_stored_mb: float = 1000.0
    """Size of the run's rollouts/: the oldest files go first. 0 keeps none but the latest."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_problems", "num_samples", "max_tokens")
        _at_least(self, 0, "max_stored_mb")
        if not self.temperature > 0:
            raise UserError(
                f"temperature: {self.temperature} leaves nothing to explore; use a positive number"
            )
        check_policies(self.policies)
        if self.num_problems * self.num_samples > MOST_RESPONSES:
            raise UserError(
                f"num_samples: {self.num_samples} for each of {self.num_problems} problems are more than an "
                f"update can hold; use {MOST_RESPONSES:,} responses in all, or fewer"
            )


@dataclass(frozen=True)
class RewardsConfig:
    """What a response earns."""

    terms: tuple[RewardSpec, ...] = ()
    """A weighted sum; the first term says what is correct. Default: math; chain for a generated task."""
    num_workers: int | None = None
    """Processes for rewards that may hang (math, your own). Default: as many as there are cores."""
    time_limit: float = 5.0
    """Seconds for one answer."""
    memory_limit_mb: int = 1024
    """Memory of a worker."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_workers", "memory_limit_mb")
        if not self.time_limit > 0:
            raise UserError(f"time_limit: {self.time_limit} leaves no time; use some seconds")


@dataclass(frozen=True)
class ValidationConfig:
    """How the policy is measured while it trains: the best checkpoint and the guard go by it."""

    source: str | None = None
    """Problems, named as in data.source. Default: the validation split of a generated task."""
    levels: tuple[int, int] | None = None
    """Only problems from one level to another, both included. Default: all."""
    every: int = 5
    """Update steps between two validations; a stage's start and end have one too."""
    num_problems: int | None = None
    """Only that many, the first ones. Default: all there are (500 of a generated task)."""
    num_samples: int = 1
    """Responses to each."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    max_tokens: int | None = None
    """Default: rollout.max_tokens."""
    policy: UnmaskPolicy | None = None
    """Default: the first one that the stage's rollouts are decoded by."""
    extra_policies: tuple[UnmaskPolicy, ...] = ()
    """Measured too, and shown beside it: training along one policy can harm the others."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "every", "num_problems", "num_samples", "max_tokens")
        if not self.temperature >= 0:
            raise UserError(f"temperature: {self.temperature} is negative; use 0 or more")
        if self.levels is not None and self.levels[0] > self.levels[1]:
            raise UserError(f"levels: {list(self.levels)} is empty; give the lower one first")


@dataclass(frozen=True)
class CheckpointsConfig:
    """What is kept to go on from. Each is complete, and written whole or not at all."""

    save_every: int = 10
    """Update steps between two; the start and end of a stage and every new best have one too."""
    keep_last: int = 2
    """How many of the latest stay; the stage's best always does."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "save_every", "keep_last")


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics go besides metrics.jsonl."""

    trackers: tuple[TrackerName, ...] = ()
    """Any of wandb, tensorboard, trackio (pip install 'tstar[wandb]' and so on)."""
    project: str = "tstar"
    """The dashboard's project; the run is named after its directory."""

    def __post_init__(self) -> None:
        if len(set(self.trackers)) < len(self.trackers):
            raise UserError(f"trackers: {', '.join(self.trackers)} name one twice; name each once")


@dataclass(frozen=True)
class RunConfig:
    """All of a run."""

    model: Path = Path()
    """Directory of the block-diffusion model to start from, as the Hub has it: config.json, safetensors,
    tokenizer. `hf download` brings one, `tstar sft` makes one."""
    data: DataConfig = field(default_factory=DataConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig | None = None
    """Train low-rank adapters in place of the weights."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 0
    """Of everything that is drawn: data order, responses, cold starts."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Of the weights in a forward; below float32 the optimizer keeps float32 masters. Default: as stored."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    sharding: Literal["none", "full"] = "none"
    """Of weights and optimizer, where torchrun starts several processes. none: each has all of them. full:
    they are spread over the processes of each machine (FSDP2)."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "seed")
        _at_most(self, 2**63 - 1, "seed")
        if self.sharding == "full" and self.lora is not None:
            raise UserError("sharding: full cannot spread a model with LoRA; use none, adapters are small")

    # -- what follows from it ------------------------------------------------------------------

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stage by stage, what is to be done."""
        curriculum = self.curriculum
        sizes = doubling(curriculum.initial_block_size, curriculum.target_block_size)
        unknown = sorted(set(curriculum.stages) - set(sizes))
        if unknown:
            raise UserError(
                f"curriculum.stages: {unknown[0]} is no stage; the block sizes are "
                f"{', '.join(map(str, sizes))}"
            )
        return tuple(self._stage(size, is_first=size == sizes[0]) for size in sizes)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.validation.every, self.checkpoints.save_every, self.guard)

    def validation_policy(self, stage: Stage) -> UnmaskPolicy:
        """What the stage is judged by."""
        return self.validation.policy or plain(stage.policies[0])

    @property
    def reward_terms(self) -> tuple[RewardSpec, ...]:
        return self.rewards.terms or (RewardSpec(default_reward(self.data.source)),)

    @property
    def validation_source(self) -> str:
        if self.validation.source is not None:
            return self.validation.source
        return f"{self.data.source.partition('@')[0]}@validation"

    def check(self) -> RunConfig:
        """Refuse what its sections cannot mean together; the config itself if all is well."""
        if self.model == Path():
            raise UserError("model: none is given; give the directory of a model, --model DIR")
        if not self.data.source:
            raise UserError("data.source: none is given; give a preset, a file, or chain:3")
        if self.validation.source is None and not self.data.source.startswith("chain:"):
            raise UserError(
                f"validation.source: none is given, and {self.data.source} has no split of its own for it; "
                "give another source, like math500"
            )
        stages = self.stages
        if self.trainer.value is None and self.rollout.num_samples < 2:
            raise UserError(
                "rollout.num_samples: 1 response has no group to be compared with; use 2 or more, or "
                "trainer.value"
            )
        if max(stage.num_passes for stage in stages) > self.rollout.num_problems:
            raise UserError(
                "rollout.num_problems: 1 problem cannot be split into two halves; use 2 or more, or "
                "curriculum.shifted_rollouts: off"
            )
        self._check_trainer(stages)
        return self

    # -- private -------------------------------------------------------------------------------

    def _stage(self, block_size: int, is_first: bool) -> Stage:
        curriculum = self.curriculum
        own = curriculum.stages.get(block_size, StageOverrides())

        def choose(name: str, otherwise: Any) -> Any:
            value = getattr(own, name)
            return otherwise if value is None else None if value == "off" else value

        try:
            return Stage(
                block_size=block_size,
                num_updates=choose("num_updates", curriculum.updates_per_stage),
                learning_rate=choose("learning_rate", self.trainer.optimizer.learning_rate),
                policies=choose("policies", self.rollout.policies),
                shifted_rollouts=own.shifted_rollouts or curriculum.shifted_rollouts,
                origin=self.rollout.origin,
                keep_optimizer=choose("keep_optimizer", curriculum.keep_optimizer),
                cold_start=choose("cold_start", None if is_first else curriculum.cold_start),
                plateau=choose("plateau", curriculum.plateau),
            )
        except UserError as error:
            # The first stage's: all others are even, and have their updates.
            raise UserError(f"curriculum.initial_{error}") from error

    def _check_trainer(self, stages: tuple[Stage, ...]) -> None:
        if self.trainer.objective.importance_cap is not None and (
            self.trainer.merge_steps > 1 or any(s.shifted_rollouts == "replay" for s in stages)
        ):
            raise UserError(
                "trainer.objective.importance_cap: it weighs by the engine's log-probs, which hold for the "
                "blocks that were decoded; use curriculum.shifted_rollouts: sample or off, and merge_steps: 1"
            )


def plain(policy: WeightedPolicy) -> UnmaskPolicy:
    """The policy without its weight."""
    return UnmaskPolicy(**{f.name: getattr(policy, f.name) for f in fields(UnmaskPolicy)})


def check_policies(policies: tuple[WeightedPolicy, ...]) -> None:
    """Refuse a mixture that nothing can be drawn from."""
    weights = [policy.weight for policy in policies]
    if not policies:
        raise UserError("policies: none given; name at least one, as in [{kind: static}]")
    if not all(0 <= weight < float("inf") for weight in weights) or sum(weights) == 0:
        raise UserError(f"policies: weights {weights} cannot be drawn by; use 0 or more, and not 0 for all")


def _at_least(record: object, lowest: int, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if value is not None and not value >= lowest:
            raise UserError(f"{name}: {value} is too small; use {lowest} or more")


def _at_most(record: object, highest: int, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if value > highest:
            raise UserError(f"{name}: {value} is too large; use {highest} or less")
