"""A run from its beginning, or from where it was: opens what it needs, lets Algorithm 1 climb."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tstar import curriculum
from tstar.config import RunConfig, read_config, to_yaml
from tstar.config.text import parse_file, to_plain
from tstar.curriculum import Progress
from tstar.data import ProblemSet, ProblemSource, prompt_template
from tstar.engine.memory import free_bytes
from tstar.errors import UserError
from tstar.experiment.journal import Journal, OnEvent
from tstar.experiment.local import OneProcess, Workforce
from tstar.experiment.policy import Policy
from tstar.experiment.sharded import make_policy
from tstar.experiment.team import SilentJournal, Team
from tstar.experiment.world import Problems, RunWorld, Tools, read_state
from tstar.parallel import ALONE, LostProcessError, Parallel
from tstar.rewards import Rewards
from tstar.run_dir import CONFIG_FILE, RunDir
from tstar.tasks import open_problem_set, open_problems
from tstar.tracking import MetricsFile, Tracking, require_installed, start_tracker


def ignore_event(
    event: str, update_step: int, record: Mapping[str, object], time: Mapping[str, float]
) -> None:
    """Nobody watches."""


def never() -> None:
    """Nobody interrupts."""


@dataclass(frozen=True)
class Watch:
    """Who is told what happens, and who may end it."""

    on_event: OnEvent = ignore_event
    check_interrupt: Callable[[], None] = never
    """Called often; raises InterruptedRunError to end the run."""


@dataclass(frozen=True)
class Parts:
    """What a run needs and what can be missing: opened before anything is written."""

    policy: Policy
    problems: Problems
    rewards: Rewards


def start(
    config: RunConfig, directory: Path, watch: Watch | None = None, parallel: Parallel = ALONE
) -> Progress:
    """A new run, to its end; its directory appears once model and data are there, and is empty again where
    the run is refused before it has begun.

    parallel: the processes that do this together; all call it alike."""
    parallel.on_main(lambda: RunDir.check_free(directory))  # before anything large is read
    config = parallel.on_main(lambda: resolved(config, parallel.local_world_size))
    problems, rewards = open_training(config), _open_rewards(config)
    for name in config.tracking.trackers:
        require_installed(name)
    policy = make_policy(config, parallel)
    run = parallel.on_main(lambda: RunDir.create(directory, to_yaml(config)))
    with _locked(run, parallel):
        try:
            return _train(run, config, Parts(policy, problems, rewards), watch or Watch(), parallel)
        except UserError as error:
            if parallel.is_main and _is_refusal(error):
                run.empty_unused()
            raise


def resume(directory: Path, watch: Watch | None = None, parallel: Parallel = ALONE) -> Progress:
    """A run from its latest checkpoint, or from its beginning, to its end; in as many processes as now."""
    run, config = open_run(directory)
    with _locked(run, parallel):
        parts = Parts(make_policy(config, parallel), open_training(config), _open_rewards(config))
        return _train(run, config, parts, watch or Watch(), parallel)


@contextmanager
def _locked(run: RunDir, parallel: Parallel) -> Iterator[None]:
    """One process holds the lock, for all."""
    with ExitStack() as held:
        parallel.on_main(lambda: held.enter_context(run.locked()))
        yield


def open_run(directory: Path) -> tuple[RunDir, RunConfig]:
    """A run that exists, and what it was told."""
    run = RunDir.open(directory)
    try:
        return run, read_config(parse_file(directory / CONFIG_FILE)).check()
    except UserError as error:
        raise UserError(f"{directory / CONFIG_FILE}: {error}") from error


def open_training(config: RunConfig) -> Problems:
    """The problems that a configuration names."""
    data, validation = config.data, config.validation
    training: ProblemSource
    if data.num_problems is None and data.levels is None:
        training = open_problems(data.source)
    else:
        training = _problem_set(data.source, data.levels, data.num_problems, "data")
    held_out = _problem_set(
        config.validation_source, validation.levels, validation.num_problems, "validation"
    )
    if data.prompt is not None:
        prompt = prompt_template(data.prompt)
        training = replace(training, prompt=prompt)  # type: ignore[type-var]  # both kinds are dataclasses
        held_out = replace(held_out, prompt=prompt)
    cold_starts = (stage.cold_start.num_problems for stage in config.stages if stage.cold_start is not None)
    training.draw(config.seed, 0, max(config.rollout.num_problems, *cold_starts, 0))  # are there enough?
    return Problems(training, held_out)


def resolved(config: RunConfig, processes_per_machine: int = 1) -> RunConfig:
    """With everything that depends on the machine or the working directory settled for good."""
    memory = config.engine.memory
    if isinstance(memory, float):
        is_cuda = config.device != "cpu" and torch.cuda.is_available()
        free = free_bytes(torch.device("cuda" if is_cuda else "cpu"))
        memory = int(memory * free / (1 if is_cuda else processes_per_machine))
    engine = replace(config.engine, memory=memory)
    return replace(config, model=config.model.resolve(), engine=engine)


# -- private -----------------------------------------------------------------------------------


def _is_refusal(error: BaseException | None) -> bool:
    """Whether something cannot be as it was asked for: a reward, too little memory. A run whose disk is full
    or that has lost a process can go on, and says so."""
    if isinstance(error, OSError | LostProcessError):
        return False
    return error is None or _is_refusal(error.__cause__)


def _train(run: RunDir, config: RunConfig, parts: Parts, watch: Watch, parallel: Parallel) -> Progress:
    """Go on from the latest checkpoint. Raises InterruptedRunError when what was done is saved."""
    with parallel.naming_the_lost(), ExitStack() as opened:
        latest = run.latest_checkpoint
        offset, begin = 0, Progress()
        if latest is not None:
            state = read_state(run.checkpoint_path(latest))
            offset, begin = state["metrics_offset"], Progress.from_record(state["progress"])
        journal: Journal = SilentJournal()
        if parallel.is_main:
            file = opened.enter_context(closing(MetricsFile(run.metrics)))
            file.truncate(offset)
            tracking = _start_tracking(run, config, file, -1 if latest is None else begin.checkpoint)
            journal = Journal(run, opened.enter_context(closing(tracking)), watch.on_event)
        scorer = opened.enter_context(parts.rewards)
        workforce: Workforce = OneProcess() if parallel.is_alone else Team(parallel)
        tools = Tools(scorer, workforce, journal, watch.check_interrupt)
        world = RunWorld(config, run, parts.policy, parts.problems, tools)
        if latest is not None:
            begin = world.load(latest)
        journal.show("begin", begin.update_step, {"stage": begin.stage, "resumed": latest is not None})
        end = curriculum.run(config.stages, world, config.schedule, begin)
        journal.log("end", end.update_step, {"reason": end.stop_reason})
        return end


def _open_rewards(config: RunConfig) -> Rewards:
    return Rewards(
        config.reward_terms,
        num_workers=config.rewards.num_workers,
        time_limit=config.rewards.time_limit,
        memory_limit=config.rewards.memory_limit_mb << 20,
    )


def _problem_set(
    source: str, levels: tuple[int, int] | None, num_problems: int | None, name: str
) -> ProblemSet:
    if levels is None:
        return open_problem_set(source, num_problems)
    if source.startswith("chain:"):
        raise UserError(
            f"{name}.levels: {source} names its levels itself; write chain:{levels[0]}-{levels[1]}"
        )
    found = open_problem_set(source).of_levels(*levels)
    return found if num_problems is None else found.first(num_problems)


def _start_tracking(run: RunDir, config: RunConfig, file: MetricsFile, latest: int) -> Tracking:
    settings = to_plain(config)
    trackers = [
        start_tracker(name, run.path, config.tracking.project, settings, latest)
        for name in config.tracking.trackers
    ]
    return Tracking(file, trackers)
