"""Algorithm 1 against a literal transcription, and its runs against themselves, resumed anywhere."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tstar.curriculum import (
    Best,
    InterruptedRunError,
    Plateau,
    Progress,
    Schedule,
    Stage,
    WeightedPolicy,
    doubling,
    is_finished,
    run,
)
from tstar.errors import UserError
from tstar.guard import Action, Alarm, GuardConfig, Health
from tstar.partition import PartitionRule

NO_GUARD = Schedule(evaluate_every=1000, save_every=1000, guard=GuardConfig(action="warn"))


def make_stages(block_sizes: Sequence[int], num_updates: int = 3, **changes: Any) -> list[Stage]:
    return [Stage(b, num_updates, 1e-6, (WeightedPolicy(),), **changes) for b in block_sizes]


def trace_rl(theta: str, d: Sequence[Any], block_size: int, rule: PartitionRule, scale: float = 1.0) -> str:
    """Weights: a digest of all that was ever done to them."""
    return hashlib.blake2b(
        repr((theta, tuple(d), block_size, rule, scale)).encode(), digest_size=8
    ).hexdigest()


@dataclass
class FakeWorld:
    """Everything asked of it is written down."""

    theta: str = "theta_0"
    num_problems: int = 6
    accuracy: Callable[[Progress], float] = lambda _: 0.5
    health: Callable[[Progress], dict[str, float]] = lambda _: {}
    interrupt_at: int | None = None
    """The number of the call at which it is asked to stop."""
    log: list[Any] = field(default_factory=list)
    saved: dict[int, tuple[str, str]] = field(default_factory=dict)
    rollouts: Any = None

    def note(self, *event: Any) -> None:
        self.log.append(event)

    def check_interrupt(self) -> None:
        if self.interrupt_at is not None:
            self.interrupt_at -= 1
            if self.interrupt_at < 0:
                raise InterruptedRunError

    def enter(self, stage: Stage, _progress: Progress) -> None:
        self.note("enter", stage.block_size)

    def draw(self, update_step: int) -> list[str]:
        return [f"problem {update_step}.{i}" for i in range(self.num_problems)]

    def sample(self, _stage: Stage, problems: Sequence[str], rule: PartitionRule, _progress: Progress) -> Any:
        self.check_interrupt()
        self.note("sample", tuple(problems), rule)
        self.rollouts = [(problem, rule, self.theta) for problem in problems]
        return self.rollouts

    def recall(self, _stage: Stage, _progress: Progress) -> Any:
        return self.rollouts

    def train(self, stage: Stage, groups: Sequence[Any], rule: PartitionRule, progress: Progress) -> Health:
        self.check_interrupt()
        self.note("train", tuple(groups), stage.block_size, rule)
        scale = progress.learning_rate_scale
        self.theta = trace_rl(self.theta, groups, stage.block_size, rule, scale)
        return Health(progress.update_step, **self.health(progress))

    def evaluate(self, stage: Stage, progress: Progress) -> float:
        self.check_interrupt()
        self.note("evaluate", stage.block_size, progress.update_step)
        return self.accuracy(progress)

    def leave(self, stage: Stage, _progress: Progress) -> None:
        self.note("leave", stage.block_size)

    def roll_back(self, _stage: Stage, _progress: Progress, target: Best) -> None:
        self.note("roll back", target.update_step)
        self.theta = self.saved[target.update_step][0]

    def warn(self, alarms: Sequence[Alarm], _action: Action, progress: Progress) -> None:
        self.note("warn", tuple(alarm.signal for alarm in alarms), progress.update_step)

    def save(self, progress: Progress) -> None:
        self.note("save", progress.checkpoint)
        self.saved[progress.checkpoint] = (self.theta, json.dumps(progress.to_record()))


def algorithm_1(theta: str, b_0: int, b_hat: int, k_b: int, num_problems: int) -> Iterator[Any]:
    """The paper's, line by line."""
    b, update_step = b_0, 0
    while b <= b_hat:
        delta = b // 2
        standard, shifted = PartitionRule(b, 0), PartitionRule(b, delta)
        for _k in range(1, k_b + 1):
            problems = [f"problem {update_step}.{i}" for i in range(num_problems)]
            d = tuple((problem, standard, theta) for problem in problems)
            yield ("sample", tuple(problems), standard)
            d1, d2 = d[: len(d) // 2], d[len(d) // 2 :]
            yield ("train", d1, b, standard)
            theta = trace_rl(theta, d1, b, standard)
            yield ("train", d2, b, shifted)
            theta = trace_rl(theta, d2, b, shifted)
            update_step += 1
        b = 2 * b
    yield theta


def test_equals_algorithm_1() -> None:
    world = FakeWorld()
    run(make_stages(doubling(4, 32)), world, NO_GUARD, Progress())
    *calls, theta = algorithm_1("theta_0", 4, 32, 3, 6)
    assert [event for event in world.log if event[0] in ("sample", "train")] == calls
    assert world.theta == theta


def test_the_direct_baseline_is_the_same_runner_without_a_shift() -> None:
    world = FakeWorld()
    run(make_stages([16], 2, shifted_rollouts="off"), world, NO_GUARD, Progress())
    trained = [event for event in world.log if event[0] == "train"]
    assert [(len(groups), b, rule) for _, groups, b, rule in trained] == [(6, 16, PartitionRule(16))] * 2


def test_sampled_shifts_are_drawn_on_policy() -> None:
    """d2 is decoded under the shifted partition, with the weights that d1 made."""
    world = FakeWorld(num_problems=5)
    run(make_stages([8], 1, shifted_rollouts="sample"), world, NO_GUARD, Progress())
    (_, d1, _, _), (_, d2, _, _) = (event for event in world.log if event[0] == "train")
    after_d1 = trace_rl("theta_0", d1, 8, PartitionRule(8))
    sampled = [problems for name, problems, _ in (e for e in world.log if e[0] == "sample")]
    assert sampled == [tuple(problem for problem, _, _ in d) for d in (d1, d2)], "each drawn once"
    assert d1 == tuple((f"problem 0.{i}", PartitionRule(8), "theta_0") for i in range(3))
    assert d2 == tuple((f"problem 0.{i}", PartitionRule(8, 4), after_d1) for i in range(3, 5))


@pytest.mark.parametrize("shifted_rollouts", ["off", "replay", "sample"])
def test_resumed_anywhere_it_ends_the_same(shifted_rollouts: str) -> None:
    schedule = Schedule(evaluate_every=2, save_every=2, guard=GuardConfig())

    def make_world() -> FakeWorld:  # collapses at update step 2, once
        return FakeWorld(accuracy=lambda p: 0.2 if p.update_step == 2 else 0.5 + p.update_step / 100)

    stages = make_stages([4, 8], 3, shifted_rollouts=shifted_rollouts)
    whole = make_world()
    end = run(stages, whole, schedule, Progress())
    assert end.update_step == 6
    assert ("roll back", 0) in whole.log

    for stop in range(200):
        world = make_world()
        world.interrupt_at = stop
        try:
            progress = run(stages, world, schedule, Progress())
        except InterruptedRunError:
            world.interrupt_at = None
            latest = max(world.saved, default=None)
            start = Progress()
            if latest is not None:
                world.theta, record = world.saved[latest]
                start = Progress.from_record(json.loads(record))
            progress = run(stages, world, schedule, start)
        else:
            assert stop > 25, "it was interrupted in every one of its calls"
            break
        assert (progress, world.theta) == (end, whole.theta), f"stopped at call {stop}"


def test_every_resting_state_is_a_place_to_resume_from() -> None:
    """As after a kill: whatever was saved last, on the way, leads to the same end."""
    schedule = Schedule(evaluate_every=1, save_every=1, guard=GuardConfig())
    stages = make_stages([4, 8], 2)
    whole = FakeWorld()
    end = run(stages, whole, schedule, Progress())
    assert sorted(whole.saved) == [0, 1, 2, 3, 4]
    for theta, record in whole.saved.values():
        world = FakeWorld(theta=theta)
        assert run(stages, world, schedule, Progress.from_record(json.loads(record))) == end
        assert world.theta == whole.theta


def test_evaluation_at_start_end_and_between() -> None:
    world = FakeWorld()
    run(make_stages([4, 8], 5), world, replace(NO_GUARD, evaluate_every=2), Progress())
    evaluated = [(b, step) for name, b, step in (e for e in world.log if e[0] == "evaluate")]
    assert evaluated == [(4, 0), (4, 2), (4, 4), (4, 5), (8, 5), (8, 7), (8, 9), (8, 10)]


def test_a_plateau_ends_a_stage_early() -> None:
    accuracies = [0.5, 0.6, 0.7, 0.7, 0.65, 0.7, 0.9]
    world = FakeWorld(accuracy=lambda p: accuracies[p.update_step])
    stages = make_stages([4], 6, plateau=Plateau(patience=3))
    end = run(stages, world, replace(NO_GUARD, evaluate_every=1), Progress())
    assert end.update_step == 5
    gaining = make_stages([4], 6, plateau=Plateau(patience=3, min_gain=-0.01))
    assert run(gaining, world, replace(NO_GUARD, evaluate_every=1), Progress()).update_step == 6


def test_the_best_of_each_stage_is_remembered_and_saved() -> None:
    accuracies = [0.5, 0.6, 0.55, 0.4, 0.45, 0.45]
    world = FakeWorld(accuracy=lambda p: accuracies[p.update_step])
    schedule = Schedule(evaluate_every=1, save_every=100, guard=GuardConfig(action="warn"))
    end = run(make_stages([4, 8], 2), world, schedule, Progress())
    assert end.best == (Best(1, 0.6), Best(2, 0.55))
    assert {1, 2} <= set(world.saved)


def collapse(progress: Progress) -> float:
    return 0.1 if progress.update_step >= 3 else 0.5


@pytest.mark.parametrize(
    ("action", "num_updates", "events"),
    [
        ("warn", 6, ["warn"] * 4),
        ("stop", 3, ["warn"]),
        ("roll_back", 4, ["warn", "roll back", "warn"]),
    ],
)
def test_the_guard_acts(action: Any, num_updates: int, events: list[str]) -> None:
    """Accuracy falls for good at update step 3; with one roll-back allowed the second fall ends the run."""
    world = FakeWorld(accuracy=collapse)
    schedule = Schedule(1, 100, GuardConfig(action=action, max_roll_backs=1))
    end = run(make_stages([4, 8], 6), world, schedule, Progress())
    assert end.update_step >= num_updates
    seen = [event[0] for event in world.log if event[0] in ("warn", "roll back")]
    assert seen[: len(events)] == events
    if action == "warn":
        assert end.stop_reason is None
        assert end.update_step == 12
    else:
        assert end.update_step == num_updates
        assert "validation accuracy 0.100 is 0.400 below" in str(end.stop_reason)
        assert world.log[-2:] == [("save", num_updates), ("leave", 4)]


def test_a_roll_back_restores_the_best_and_slows_down() -> None:
    world = FakeWorld(accuracy=lambda p: {0: 0.4, 1: 0.5, 2: 0.1}.get(p.update_step, 0.5))
    schedule = Schedule(1, 100, GuardConfig(learning_rate_factor=0.25))
    end = run(make_stages([4], 3, shifted_rollouts="off"), world, schedule, Progress())
    *_, (_, d, b, rule) = (event for event in world.log if event[0] == "train")
    assert world.theta == trace_rl(world.saved[1][0], d, b, rule, scale=0.25)
    assert end.best == (Best(1, 0.5),)


def test_what_is_rolled_back_is_no_new_best() -> None:
    """KL says that update 2 went wrong, and its accuracy is the highest so far: it has no checkpoint to go
    back to, and never gets one."""
    world = FakeWorld(
        accuracy=lambda p: 0.4 + 0.1 * p.update_step if p.update_step < 3 else 0.45,
        health=lambda p: {"kl": 9.0 if p.update_step == 1 else 0.0},
    )
    schedule = Schedule(1, 100, GuardConfig(patience=1))
    end = run(make_stages([4], 4), world, schedule, Progress())
    assert [event for event in world.log if event[0] in ("warn", "roll back")] == [
        ("warn", ("kl",), 2),
        ("roll back", 1),
    ]
    assert (end.best, end.update_step) == ((Best(1, 0.5),), 4)
    stopping = replace(schedule, guard=GuardConfig(action="stop", patience=1))
    stopped = run(make_stages([4], 4), replace(world, log=[]), stopping, Progress())
    assert stopped.best[0].update_step == 2, "where nothing is given up it is the best"


def test_an_unfinished_update_does_not_overwrite_the_best() -> None:
    half = Progress(update_step=7, passes_done=1)
    assert (half.checkpoint, Progress(update_step=7).checkpoint) == (8, 7)


def test_is_finished_waits_for_the_update_in_progress() -> None:
    stage = make_stages([4], 9, plateau=Plateau(1))[0]
    history = tuple(Health(i, accuracy=0.5) for i in range(3))
    assert is_finished(stage, Progress(history=history))
    assert not is_finished(stage, Progress(history=history, passes_done=1))


def test_block_sizes_double() -> None:
    assert doubling(4, 32) == (4, 8, 16, 32)
    assert doubling(16, 16) == (16,)
    with pytest.raises(UserError, match=r"target_block_size: 24 .* use 16 or 32"):
        doubling(4, 24)
    with pytest.raises(UserError, match="target_block_size: 2 "):
        doubling(4, 2)


def test_an_odd_block_size_has_no_shift() -> None:
    with pytest.raises(UserError, match="block_size: 5 is odd and has no half shift"):
        make_stages([5])
    assert make_stages([5], shifted_rollouts="off")[0].standard == PartitionRule(5)
    with pytest.raises(UserError, match="updates: 0 is too few"):
        make_stages([4], 0)


def test_climb_knows_no_torch() -> None:
    code = "import sys, tstar.curriculum; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
