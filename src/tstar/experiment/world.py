"""Algorithm 1's world: what `tstar.curriculum` asks for, done with models, problems and files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tstar import atomic
from tstar.config import RunConfig
from tstar.curriculum import Best, Progress, Stage, WeightedPolicy
from tstar.data import ProblemSet, ProblemSource
from tstar.engine import GenerationError, Request, SamplingParams
from tstar.errors import UserError
from tstar.evaluate import (
    EvalSettings,
    Evaluation,
    Kept,
    Provenance,
    Scorer,
    Summary,
    describe_policy,
    evaluate,
    requests_of,
    write_evaluation,
)
from tstar.experiment import rollouts
from tstar.experiment.cold_start import learn_from
from tstar.experiment.journal import Journal
from tstar.experiment.local import Workforce
from tstar.experiment.policy import MODEL, Policy
from tstar.experiment.rollouts import Asking, Drawn, Group, key
from tstar.guard import Action, Alarm, Health
from tstar.loss_metrics import Breakdown
from tstar.partition import PartitionRule
from tstar.run_dir import RunDir
from tstar.trainer import UpdateMetrics
from tstar.trajectory import Trajectory
from tstar.unmask import UnmaskPolicy

STATE, PENDING = "state.json", "rollouts.jsonl.gz"
_BREAKDOWN = tuple(f.name for f in fields(Breakdown))
_MAX_ROWS = 64
"""Of a breakdown in a line of metrics.jsonl; a long response has many more blocks."""


@dataclass(frozen=True)
class Problems:
    """What is trained and validated on."""

    training: ProblemSource
    validation: ProblemSet


@dataclass(frozen=True)
class Tools:
    """What a run works with besides its policy."""

    scorer: Scorer
    workforce: Workforce
    journal: Journal
    check_interrupt: Callable[[], None]


class RunWorld:
    """A run at work: the policy it trains and the directory it writes."""

    def __init__(
        self, config: RunConfig, run: RunDir, policy: Policy, problems: Problems, tools: Tools
    ) -> None:
        self.config, self.run, self.policy, self.problems = config, run, policy, problems
        self._check_here = tools.check_interrupt
        self._workforce, self._journal = tools.workforce, tools.journal
        self._scorer = tools.workforce.scorer(tools.scorer)
        self._asking = Asking(
            policy.tokenizer,
            problems.training.prompt,
            config.rollout.num_samples,
            config.rollout.max_tokens,
            config.rollout.temperature,
        )
        self._sampled: tuple[Group, ...] = ()
        """Of the update in progress."""
        self._sample_time: dict[str, float] = {}

    # -- Algorithm 1 ---------------------------------------------------------------------------

    def draw(self, update_step: int) -> Sequence[Drawn]:
        problems = self.problems.training.draw(
            self.config.seed, update_step, self.config.rollout.num_problems
        )
        return [Drawn(place, problem) for place, problem in enumerate(problems)]

    def sample(
        self, stage: Stage, problems: Sequence[Drawn], rule: PartitionRule, progress: Progress
    ) -> Sequence[Group]:
        requests = self._asking.requests(
            problems, stage.policies, rule, self.config.seed, "rollout", progress.update_step
        )
        groups = self._answer(problems, requests, self._asking, progress, "sample")
        self._sampled = groups if progress.passes_done == 0 else (*self._sampled, *groups)
        if self._workforce.is_writer:
            file = self._rollout_file(progress)
            with self.run.writing(file):
                rollouts.write_groups(file, self._sampled)
            rollouts.prune(self.run.rollouts, self.config.rollout.max_stored_mb * 1e6)
        return groups

    def recall(self, stage: Stage, progress: Progress) -> Sequence[Group]:  # noqa: ARG002
        return self._sampled

    def train(self, stage: Stage, groups: Sequence[Group], rule: PartitionRule, progress: Progress) -> Health:
        self.check_interrupt()
        self._journal.show("phase", progress.update_step, {"phase": "train"})
        self.policy.set_learning_rate(stage.learning_rate * progress.learning_rate_scale)
        batch = [rollout for group in groups for rollout in group.rollouts]
        try:
            metrics = self._workforce.update(self.policy.trainer, batch, rule)
        except FloatingPointError as error:
            # Nothing was trained on. It is for the guard to judge how often that may happen.
            found: dict[str, object] = {"refused": str(error)}
            health, took = Health(progress.update_step, grad_norm=math.nan), {}
        else:
            found = {**metrics.summary(), **_breakdowns(metrics)}
            health, took = _health(progress, metrics), _train_time(metrics)
        record = {
            **self._place(stage, progress),
            "offset": rule.offset,
            "pass": progress.passes_done,
            **found,
            **rollouts.describe(groups),
        }
        self._journal.log("train", progress.update_step + 1, record, {**self._sample_time, **took})
        self._sample_time = {}
        return health

    def evaluate(self, stage: Stage, progress: Progress) -> float:
        policy, extras = self.config.validation_policy(stage), self.config.validation.extra_policies
        summary = self._evaluate(stage, progress, policy, "").summary
        others = [
            self._evaluate(stage, progress, extra, f"-{describe_policy(extra).replace(' ', '-')}").summary
            for extra in extras
        ]
        # All is measured before anything is said: an interrupt in between has changed nothing.
        best = progress.stage_best
        is_best = best is None or summary.accuracy.value > best.accuracy
        self._log_validation("validation", stage, progress, policy, summary, is_best=is_best)
        for extra, other in zip(extras, others, strict=True):
            self._log_validation("validation_extra", stage, progress, extra, other)
        return summary.accuracy.value

    def _log_validation(
        self,
        event: str,
        stage: Stage,
        progress: Progress,
        policy: UnmaskPolicy,
        summary: Summary,
        **more: object,
    ) -> None:
        record = {
            **self._place(stage, progress),
            "policy": describe_policy(policy),
            **_numbers(summary),
            **more,
        }
        time = {"seconds": summary.time.seconds, "tokens_per_second": summary.time.tokens_per_second}
        self._journal.log(event, progress.update_step, record, time)

    # -- stages --------------------------------------------------------------------------------

    def enter(self, stage: Stage, progress: Progress) -> None:
        if stage.cold_start is not None:
            self._cold_start(stage, progress)
            self.policy.restart_optimizer("moments" if stage.keep_optimizer else "nothing")
        elif not stage.keep_optimizer and progress.stage > 0:
            self.policy.restart_optimizer("nothing")
        self.policy.block_size = stage.block_size
        record = {
            **self._place(stage, progress),
            "num_updates": stage.num_updates,
            "learning_rate": stage.learning_rate,
            "shifted_rollouts": stage.shifted_rollouts,
        }
        self._journal.log("stage", progress.update_step, record)

    def leave(self, stage: Stage, progress: Progress) -> None:
        best = progress.stage_best
        if best is not None:
            directory = self.run.path / "stages" / f"b{stage.block_size}"
            self._workforce.on_writer(lambda: self._export(best.update_step, directory))

    def roll_back(self, stage: Stage, progress: Progress, target: Best) -> None:  # noqa: ARG002
        self.policy.load(self.run.checkpoint_path(target.update_step))

    def warn(self, alarms: Sequence[Alarm], action: Action, progress: Progress) -> None:
        for alarm in alarms:
            record = {
                "stage": progress.stage,
                "signal": alarm.signal,
                "message": alarm.message,
                "action": action,
            }
            self._journal.log("guard", progress.update_step, record)

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, progress: Progress) -> None:
        if not self._workforce.is_writer:
            self.policy.help_save()
        self._workforce.on_writer(lambda: self._save(progress))

    def _save(self, progress: Progress) -> None:
        with self.run.writing(self.run.metrics):
            state = {"progress": progress.to_record(), "metrics_offset": self._journal.offset}

        def fill(directory: Path) -> None:
            self.policy.save(directory)
            if progress.passes_done:
                rollouts.write_groups(directory / PENDING, self._sampled)
            atomic.write_text(directory / STATE, json.dumps(state) + "\n")

        self.run.save_checkpoint(progress.checkpoint, fill)
        self._tidy(progress)

    def load(self, number: int) -> Progress:
        """Be where a checkpoint is; metrics.jsonl is not touched."""
        directory = self.run.checkpoint_path(number)
        progress = Progress.from_record(read_state(directory)["progress"])
        self.policy.load(directory)
        if progress.is_inside:
            self.policy.block_size = self.config.stages[progress.stage].block_size
        if progress.passes_done:
            self._sampled = rollouts.read_groups(directory / PENDING, self.draw(progress.update_step))
        self._workforce.on_writer(lambda: self._tidy(progress))
        return progress

    def check_interrupt(self) -> None:
        """Raise InterruptedRunError if somebody asked for it."""
        self._workforce.check_interrupt(self._check_here)

    def _tidy(self, progress: Progress) -> None:
        """Export the best, and drop the checkpoints that nobody will ask for."""
        best = progress.stage_best
        kept = set(self.run.checkpoints[-self.config.checkpoints.keep_last :])
        if best is not None:
            kept.add(best.update_step)
            self._export(best.update_step, self.run.path / "best")
        self.run.prune(kept)

    def _export(self, number: int, directory: Path) -> None:
        """A checkpoint's model under a name of its own; its files are shared, not copied, where possible."""
        source = self.run.checkpoint_path(number) / MODEL
        if source.is_dir():  # it is not if a leave is said again after the next stage was saved
            with self.run.writing(directory):
                atomic.link_directory(source, directory)

    # -- private -------------------------------------------------------------------------------

    def _answer(
        self,
        problems: Sequence[Drawn],
        requests: Sequence[Request],
        asking: Asking,
        progress: Progress,
        phase: str,
    ) -> tuple[Group, ...]:
        """Decode and score."""
        began = time.perf_counter()
        trajectories = self._generate(requests, progress, phase)
        decoded = time.perf_counter()
        groups = asking.groups(problems, trajectories, self._scorer)
        self.check_interrupt()
        num_tokens = sum(t.stop_length for t in trajectories)
        self._sample_time = {
            "sample_seconds": decoded - began,
            "score_seconds": time.perf_counter() - decoded,
            "tokens_per_second": num_tokens / (decoded - began),
        }
        return groups

    def _generate(self, requests: Sequence[Request], progress: Progress, phase: str) -> list[Trajectory]:
        def on_finished(num_responses: int, num_tokens: int) -> None:
            self._check_here()
            done = {"phase": phase, "done": num_responses, "total": len(requests), "tokens": num_tokens}
            self._journal.show("phase", progress.update_step, done)

        self.check_interrupt()
        engine = self.policy.make_engine(progress.update_step)
        try:
            return self._workforce.generate(engine, requests, on_finished)
        except GenerationError as error:
            raise UserError(
                f"update {progress.update_step + 1}: the policy no longer gives probabilities ({error}); "
                f"lower trainer.optimizer.learning_rate and begin again, or resume from an earlier checkpoint"
            ) from error
        except ValueError as error:
            raise UserError(f"rollout: {error}") from error

    def _evaluate(self, stage: Stage, progress: Progress, policy: UnmaskPolicy, suffix: str) -> Evaluation:
        validation = self.config.validation
        sampling = SamplingParams(
            validation.max_tokens or self.config.rollout.max_tokens, validation.temperature, unmask=policy
        )
        settings = EvalSettings(stage.standard, sampling, validation.num_samples, self.config.seed)
        directory = self.run.evaluations / f"{progress.update_step:06}-b{stage.block_size}{suffix}"

        requests = requests_of(self.problems.validation, self.policy.tokenizer, settings)
        began = time.perf_counter()
        trajectories = self._generate(requests, progress, "evaluate")
        decoded = {r.seed: t for r, t in zip(requests, trajectories, strict=True)}
        evaluation = evaluate(
            self.policy.make_engine(progress.update_step),
            self.problems.validation,
            self.policy.tokenizer,
            settings,
            self._scorer,
            provenance=Provenance(model=str(self.run.path), update_step=progress.update_step),
            kept=Kept(decoded, time.perf_counter() - began),
        )
        self.check_interrupt()
        self._workforce.on_writer(lambda: self._write_evaluation(directory, evaluation))
        return evaluation

    def _write_evaluation(self, directory: Path, evaluation: Evaluation) -> None:
        with self.run.writing(directory):
            write_evaluation(directory, evaluation)

    def _cold_start(self, stage: Stage, progress: Progress) -> None:
        cold_start = stage.cold_start
        assert cold_start is not None
        source = self.config.stages[max(progress.stage - 1, 0)]
        policies = source.policies
        if cold_start.policy is not None:
            policies = (WeightedPolicy(**_fields(cold_start.policy)),)
        seed = key(self.config.seed, "cold start", progress.stage)
        problems = [
            Drawn(place, problem)
            for place, problem in enumerate(self.problems.training.draw(seed, 0, cold_start.num_problems))
        ]
        asking = replace(self._asking, num_samples=cold_start.num_samples)
        requests = asking.requests(problems, policies, source.standard, seed)
        groups = self._answer(problems, requests, asking, progress, "cold start")
        answers = [rollout for group in groups for rollout in group.rollouts]
        report = learn_from(self.policy, cold_start, answers, stage.standard, seed, self.check_interrupt)
        if not self.policy.is_sharded:
            self._workforce.share_weights(list(self.policy.model.parameters()))
        if report.num_correct == 0:
            raise UserError(
                f"curriculum.cold_start: none of {report.num_responses} responses is correct and finished: "
                f"nothing to learn at block size {stage.block_size}; give it more num_problems, or "
                "train the stage before for longer"
            )
        record = {
            **self._place(stage, progress),
            "num_responses": report.num_responses,
            "num_correct": report.num_correct,
            "num_steps": cold_start.num_steps,
            "first_loss": report.first_loss,
            "last_loss": report.last_loss,
        }
        self._journal.log("cold_start", progress.update_step, record, self._sample_time)
        self._sample_time = {}

    def _place(self, stage: Stage, progress: Progress) -> dict[str, object]:
        return {"stage": progress.stage, "block_size": stage.block_size}

    def _rollout_file(self, progress: Progress) -> Path:
        return self.run.rollouts / f"{progress.update_step + 1:06}.jsonl.gz"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says besides weights."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def _breakdowns(metrics: UpdateMetrics) -> dict[str, object]:
    """The objective by step within a block and by block of the response: a list for each of its numbers."""
    return {
        name: {column: [getattr(row, column) for row in rows] for column in _BREAKDOWN}
        for name, rows in (("by_step", metrics.by_step(_MAX_ROWS)), ("by_block", metrics.by_block(_MAX_ROWS)))
    }


def _health(progress: Progress, metrics: UpdateMetrics) -> Health:
    found = metrics.summary()
    return Health(
        progress.update_step,
        kl=found.get("kl_old"),
        ratio_max=found.get("ratio_max"),
        entropy=found.get("entropy"),
        grad_norm=found.get("grad_norm_max"),
        truncated=metrics.num_truncated / metrics.num_rollouts,
    )


def _train_time(metrics: UpdateMetrics) -> dict[str, float]:
    return {"prepare_seconds": metrics.prepare_seconds, "train_seconds": metrics.train_seconds}


def _numbers(summary: Summary) -> dict[str, float]:
    return {
        "accuracy": summary.accuracy.value,
        "accuracy_low": summary.accuracy.low,
        "accuracy_high": summary.accuracy.high,
        "tokens_per_forward": summary.tokens_per_forward.value,
        "local_strict": summary.local_strict.value,
        "response_length": summary.response_length.mean,
        "truncated": summary.truncated,
    }


def _fields(policy: UnmaskPolicy) -> dict[str, Any]:
    return {f.name: getattr(policy, f.name) for f in fields(UnmaskPolicy)}
