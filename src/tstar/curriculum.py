"""Algorithm 1: progressive block scaling, to be read beside the paper.

What it does to the world (sampling, TraceRL, evaluation, disk) it asks of a `World`; it knows no tensor.
`Progress` is where it stands: a small record that a checkpoint holds, and from which `climb` goes on as
if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from tstar.errors import UserError
from tstar.guard import Action, Alarm, GuardConfig, Health, judge
from tstar.partition import Origin, PartitionRule
from tstar.unmask import UnmaskPolicy

ShiftedRollouts = Literal["off", "replay", "sample"]

Group = TypeVar("Group")


@dataclass(frozen=True)
class Plateau:
    """When a stage may end before its last update."""

    patience: int = 4
    """Evaluations in a row without a better validation accuracy."""
    min_gain: float = 0.0
    """What is to count as better: more than this above the best before."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise UserError(f"patience: {self.patience} is too few; use 1 or more")


@dataclass(frozen=True)
class WeightedPolicy(UnmaskPolicy):
    """One unmask policy of a mixture."""

    weight: float = 1.0
    """How often it is drawn, relative to the others."""


@dataclass(frozen=True)
class ColdStart:
    """SFT on the policy's own correct rollouts, at the new block size."""

    num_problems: int = 256
    """Problems that are answered for it, decoded at the block size before; in the first stage at its own."""
    num_samples: int = 4
    """Responses to each; the correct ones are learnt."""
    policy: UnmaskPolicy | None = None
    """How they are decoded. Default: as the rollouts of the stage before."""
    num_steps: int = 100
    """Optimizer steps."""
    batch_size: int = 64
    """Responses per optimizer step."""
    learning_rate: float = 1e-5
    """The highest one; it falls as a cosine, to 0 at the last step."""
    warmup_steps: int = 5
    """Optimizer steps over which it rises."""

    def __post_init__(self) -> None:
        for name in ("num_problems", "num_samples", "num_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} is too few; use 1 or more")
        if not self.learning_rate > 0:
            raise UserError(f"learning_rate: {self.learning_rate} cannot be used; use a positive number")
        if not 0 <= self.warmup_steps < self.num_steps:
            raise UserError(
                f"warmup_steps: {self.warmup_steps} does not fit num_steps: {self.num_steps}; use 0 or more, "
                "and fewer than them"
            )


@dataclass(frozen=True)
class Stage:
    """Updates at one block size."""

    block_size: int
    """B."""
    num_updates: int
    """K_B; with a plateau, the most."""
    learning_rate: float
    policies: tuple[WeightedPolicy, ...]
    """How rollouts are decoded: each problem by one of these, drawn by weight."""
    shifted_rollouts: ShiftedRollouts = "replay"
    """d2's rollouts: drawn under P^(0) and replayed under P^(B/2), or sampled under P^(B/2). off: no second
    pass; all problems are trained on under P^(0), as direct TraceRL does."""
    origin: Origin = "response"
    keep_optimizer: bool = True
    """Go on with the optimizer state of the stage before."""
    cold_start: ColdStart | None = None
    """Before the first update."""
    plateau: Plateau | None = None

    def __post_init__(self) -> None:
        if self.num_updates < 1:
            raise UserError(f"updates: {self.num_updates} is too few; use 1 or more")
        if self.shifted_rollouts != "off" and self.block_size % 2:
            raise UserError(
                f"block_size: {self.block_size} is odd and has no half shift; "
                "use an even block size, or shifted_rollouts: off"
            )

    @property
    def standard(self) -> PartitionRule:
        """P_B^(0)."""
        return PartitionRule(self.block_size, origin=self.origin)

    @property
    def shifted(self) -> PartitionRule:
        """P_B^(Δ), Δ = B/2."""
        return self.standard.half_shifted()

    @property
    def num_passes(self) -> int:
        """TraceRL passes of one update step."""
        return 1 if self.shifted_rollouts == "off" else 2


def doubling(initial_block_size: int, target_block_size: int) -> tuple[int, ...]:
    """The block sizes of Algorithm 1: B_0, 2 B_0, ... up to B̂, which must be one of them."""
    sizes = []
    block_size = initial_block_size
    while block_size <= target_block_size:
        sizes.append(block_size)
        block_size *= 2
    if not sizes or sizes[-1] != target_block_size:
        near = f"{sizes[-1]} or {block_size}" if sizes else str(initial_block_size)
        raise UserError(
            f"curriculum.target_block_size: {target_block_size} is not initial_block_size = "
            f"{initial_block_size} doubled; use {near}"
        )
    return tuple(sizes)


# -- where it stands ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The checkpoint that a stage is judged by."""

    update_step: int
    accuracy: float


@dataclass(frozen=True)
class Progress:
    """Everything that the next move depends on besides model, optimizer and data."""

    stage: int = 0
    is_inside: bool = False
    """The stage has begun: optimizer and cold start are done."""
    stage_start: int = 0
    """Update steps done when the stage began."""
    update_step: int = 0
    """Update steps done in all stages."""
    passes_done: int = 0
    """TraceRL passes of the update in progress."""
    examined: int = -1
    """The update step after which evaluation and guard were last done."""
    history: tuple[Health, ...] = ()
    """Of this stage, since its last roll-back."""
    pass_health: Health | None = None
    """What the first pass of the update in progress showed."""
    best: tuple[Best, ...] = ()
    """Of each stage that was evaluated, in order."""
    num_roll_backs: int = 0
    learning_rate_scale: float = 1.0
    stop_reason: str | None = None

    @property
    def is_at_rest(self) -> bool:
        """Between two update steps, with everything said about the last one."""
        return self.passes_done == 0 and self.examined == self.update_step

    @property
    def checkpoint(self) -> int:
        """The number of this state's checkpoint: an update in progress counts as done, so that it does not
        overwrite the checkpoint of the one before."""
        return self.update_step + (self.passes_done > 0)

    @property
    def stage_best(self) -> Best | None:
        return self.best[self.stage] if len(self.best) > self.stage else None

    @property
    def updates_in_stage(self) -> int:
        return self.update_step - self.stage_start

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Progress:
        health = record["pass_health"]
        return cls(
            **{
                **record,
                "history": tuple(Health(**h) for h in record["history"]),
                "pass_health": Health(**health) if health else None,
                "best": tuple(Best(**b) for b in record["best"]),
            }
        )


@dataclass(frozen=True)
class Schedule:
    """What happens between update steps."""

    evaluate_every: int
    """Update steps from one evaluation to the next, counted from the stage's start; its start and its end
    are always evaluated."""
    save_every: int
    guard: GuardConfig


# -- the world ---------------------------------------------------------------------------------


class InterruptedRunError(Exception):
    """Asked to stop. Model and optimizer are what the last completed pass made of them."""


@runtime_checkable
class World(Protocol[Group]):
    """What Algorithm 1 works on. A group is one problem with its responses.

    `sample`, `train` and `evaluate` may raise InterruptedRunError as long as they have changed nothing.
    """

    def enter(self, stage: Stage, progress: Progress) -> None:
        """Begin a stage: optimizer state, cold start."""
        ...

    def draw(self, update_step: int) -> Sequence[Any]:
        """The problems of an update step, a function of the update step alone."""
        ...

    def sample(
        self, stage: Stage, problems: Sequence[Any], rule: PartitionRule, progress: Progress
    ) -> Sequence[Group]:
        """Responses to each problem, decoded under the rule, rewarded."""
        ...

    def recall(self, stage: Stage, progress: Progress) -> Sequence[Group]:
        """What `sample` returned in the update in progress, before the run was interrupted."""
        ...

    def train(self, stage: Stage, groups: Sequence[Group], rule: PartitionRule, progress: Progress) -> Health:
        """TraceRL(θ, d, B, P)."""
        ...

    def evaluate(self, stage: Stage, progress: Progress) -> float:
        """Validation accuracy at the stage's block size."""
        ...

    def leave(self, stage: Stage, progress: Progress) -> None:
        """A stage is over; may be said again after a resume."""
        ...

    def roll_back(self, stage: Stage, progress: Progress, target: Best) -> None:
        """Put model and optimizer back to a checkpoint of this stage."""
        ...

    def warn(self, alarms: Sequence[Alarm], action: Action, progress: Progress) -> None:
        """The guard has something to say, and this is what is done about it."""
        ...

    def save(self, progress: Progress) -> None:
        """Write a checkpoint."""
        ...

    def check_interrupt(self) -> None:
        """Raise InterruptedRunError if somebody asked for it."""
        ...


# -- Algorithm 1 -------------------------------------------------------------------------------

Steps = Generator[Progress, None, Progress]
"""Every state that a run can be resumed from, as it is reached; returns the last."""


def climb(stages: Sequence[Stage], world: World[Any], schedule: Schedule, progress: Progress) -> Steps:
    """Algorithm 1, from wherever `progress` stands."""
    while progress.stage < len(stages) and progress.stop_reason is None:  # while B <= B̂
        stage = stages[progress.stage]
        progress = yield from enter(stage, world, progress)
        progress = yield from examine(stage, world, schedule, progress)
        while not is_finished(stage, progress):  # for k = 1 to K_B
            progress = yield from update(stage, world, progress)
            progress = yield from examine(stage, world, schedule, progress)
        world.leave(stage, progress)
        if progress.stop_reason is None:
            progress = expand(progress)  # B = 2B
            yield progress
    return progress


def update(stage: Stage, world: World[Any], progress: Progress) -> Steps:
    """One update step: sample d, split it, TraceRL on d1 under P^(0) and on d2 under P^(B/2).

    The split is by problem, so that the group an advantage is computed over stays whole.
    """
    first, second = split(world.draw(progress.update_step), stage)
    if progress.passes_done == 0:
        drawn_together = [*first, *second] if stage.shifted_rollouts == "replay" else first
        rollouts = world.sample(stage, drawn_together, stage.standard, progress)
        d1, d2 = rollouts[: len(first)], rollouts[len(first) :]
        health = world.train(stage, d1, stage.standard, progress)
        progress = _after_pass(stage, progress, health)
        yield progress
    else:
        d2 = world.recall(stage, progress)[len(first) :] if stage.shifted_rollouts == "replay" else []
    if stage.num_passes == 2:
        if stage.shifted_rollouts == "sample":
            d2 = world.sample(stage, second, stage.shifted, progress)
        health = world.train(stage, d2, stage.shifted, progress)
        progress = _after_pass(stage, progress, health)
        yield progress
    return progress


def split(problems: Sequence[Any], stage: Stage) -> tuple[list[Any], list[Any]]:
    """d1 and d2: halves, d1 the larger if they cannot be equal; without a shift all is d1."""
    middle = -(-len(problems) // stage.num_passes)
    return list(problems[:middle]), list(problems[middle:])


def enter(stage: Stage, world: World[Any], progress: Progress) -> Steps:
    """Begin the stage, once."""
    if not progress.is_inside:
        world.enter(stage, progress)
        progress = replace(progress, is_inside=True, stage_start=progress.update_step)
        yield progress
    return progress


def examine(stage: Stage, world: World[Any], schedule: Schedule, progress: Progress) -> Steps:
    """Evaluate if it is time, and let the guard look; once after each update step and at a stage's start."""
    if progress.examined == progress.update_step:
        return progress
    best_before = progress.best
    if _is_evaluation_due(stage, schedule, progress):
        progress = _with_accuracy(progress, world.evaluate(stage, progress))
    alarms = judge(progress.history, schedule.guard)
    if alarms:
        action = _action(schedule.guard, replace(progress, best=best_before))
        world.warn(alarms, action, progress)
        if action == "roll_back":  # what is given up is no new best, however it did on the validation set
            progress = replace(progress, best=best_before)
        progress = _after_alarm(stage, world, schedule.guard, progress, alarms, action)
    progress = replace(progress, examined=progress.update_step)
    yield progress
    return progress


def expand(progress: Progress) -> Progress:
    """On to the next stage."""
    return replace(
        progress,
        stage=progress.stage + 1,
        is_inside=False,
        examined=-1,
        history=(),
        num_roll_backs=0,
        learning_rate_scale=1.0,
    )


def is_finished(stage: Stage, progress: Progress) -> bool:
    """Whether the stage has had its updates, or stands still, or the run is to end."""
    if progress.stop_reason is not None or progress.updates_in_stage >= stage.num_updates:
        return True
    if stage.plateau is None or progress.passes_done:
        return False
    accuracies = [h.accuracy for h in progress.history if h.accuracy is not None]
    earlier, latest = accuracies[: -stage.plateau.patience], accuracies[-stage.plateau.patience :]
    return bool(earlier) and max(latest) <= max(earlier) + stage.plateau.min_gain


def run(stages: Sequence[Stage], world: World[Any], schedule: Schedule, progress: Progress) -> Progress:
    """Climb, saving on the way: the start, every new best, every `save_every` updates, every new stage, the
    end; and where it was interrupted."""
    saved = progress
    try:
        for reached in climb(stages, world, schedule, progress):
            is_due, progress = _is_save_due(stages, schedule, progress, reached), reached
            if is_due:
                world.save(progress)
                saved = progress
            world.check_interrupt()
    except InterruptedRunError:
        if progress is not saved:
            world.save(progress)
        raise
    return progress


# -- private -----------------------------------------------------------------------------------


def _after_pass(stage: Stage, progress: Progress, health: Health) -> Progress:
    so_far = health if progress.pass_health is None else progress.pass_health.merged(health)
    if progress.passes_done + 1 < stage.num_passes:
        return replace(progress, passes_done=progress.passes_done + 1, pass_health=so_far)
    update_step = progress.update_step + 1
    return replace(
        progress,
        update_step=update_step,
        passes_done=0,
        pass_health=None,
        history=(*progress.history, replace(so_far, update_step=update_step)),
    )


def _is_evaluation_due(stage: Stage, schedule: Schedule, progress: Progress) -> bool:
    done = progress.updates_in_stage
    return done % schedule.evaluate_every == 0 or done >= stage.num_updates


def _with_accuracy(progress: Progress, accuracy: float) -> Progress:
    seen = Health(progress.update_step, accuracy=accuracy)
    history = progress.history
    if history and history[-1].update_step == progress.update_step:
        history, seen = history[:-1], replace(history[-1], accuracy=accuracy)
    best = progress.best
    if progress.stage_best is None or accuracy > progress.stage_best.accuracy:
        best = (*best[: progress.stage], Best(progress.update_step, accuracy))
    return replace(progress, history=(*history, seen), best=best)


def _action(guard: GuardConfig, progress: Progress) -> Action:
    """What the guard does now: a roll-back needs somewhere to go, and has to help in the end."""
    if guard.action != "roll_back":
        return guard.action
    can_help = progress.stage_best is not None and progress.num_roll_backs < guard.max_roll_backs
    return "roll_back" if can_help else "stop"


def _after_alarm(
    stage: Stage,
    world: World[Any],
    guard: GuardConfig,
    progress: Progress,
    alarms: Sequence[Alarm],
    action: Action,
) -> Progress:
    if action == "warn":
        return progress
    if action == "stop":
        return replace(progress, stop_reason="; ".join(alarm.message for alarm in alarms))
    target = progress.stage_best
    assert target is not None
    world.roll_back(stage, progress, target)
    return replace(
        progress,
        history=tuple(h for h in progress.history if h.update_step <= target.update_step),
        num_roll_backs=progress.num_roll_backs + 1,
        learning_rate_scale=progress.learning_rate_scale * guard.learning_rate_factor,
    )


def _is_save_due(stages: Sequence[Stage], schedule: Schedule, before: Progress, reached: Progress) -> bool:
    if not reached.is_at_rest:
        return False
    is_last = reached.stop_reason is not None or is_finished(stages[reached.stage], reached)
    is_new_stage = reached.updates_in_stage == 0
    return (
        is_last
        or is_new_stage
        or before.best != reached.best
        or before.num_roll_backs != reached.num_roll_backs
        or reached.update_step % schedule.save_every == 0
    )
