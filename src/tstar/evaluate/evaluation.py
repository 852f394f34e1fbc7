"""Decode answers to problems, judge them, count."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from tstar.data import Problem, ProblemSet
from tstar.engine import Engine, GenerationError, Request, RequestFailed, RequestFinished
from tstar.evaluate.summary import Conditions, EvalSettings, Evaluation, Provenance, Summary
from tstar.evaluate.text import text_pieces, to_response
from tstar.rewards import RewardSpec, Scores
from tstar.schedule import DecodedResponse
from tstar.trajectory import Trajectory

if TYPE_CHECKING:
    import transformers


@runtime_checkable
class Scorer(Protocol):
    """What judges responses: `tstar.rewards.Rewards`."""

    specs: tuple[RewardSpec, ...]

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> Scores:
        """responses[i] answers problems[i]."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What an earlier call that was killed had decoded."""

    trajectories: Mapping[int, Trajectory] = field(default_factory=dict)
    """By seed: it tells problem and sample."""
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Progress:
    """A response has come to its end."""

    response: DecodedResponse
    """Not judged yet."""
    num_finished: int
    num_responses: int
    num_tokens: int
    """Of all finished responses, up to their stops."""
    seconds: float
    """Spent on decoding, by earlier calls too."""


def request_seed(seed: int, problem_index: int, sample: int) -> int:
    """The seed of one response: it follows from nothing else, whatever is decoded beside it."""
    key = f"evaluate/{seed}/{problem_index}/{sample}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def evaluate(
    engine: Engine,
    problems: ProblemSet,
    tokenizer: transformers.PreTrainedTokenizerBase,
    settings: EvalSettings,
    scorer: Scorer,
    *,
    provenance: Provenance | None = None,
    kept: Kept | None = None,
    on_progress: Callable[[Progress], object] | None = None,
) -> Evaluation:
    """Answer every problem `settings.num_samples` times with the engine's model, and judge the answers.

    The first reward of the scorer decides what is correct. An AR model takes a rule of block size 1.
    However this ends, nothing of it stays in the engine.

        settings = EvalSettings(PartitionRule(8), SamplingParams(max_tokens=512), num_samples=3)
        with Rewards([RewardSpec("math")]) as rewards:
            evaluation = evaluate(engine, problems, tokenizer, settings, rewards)
        evaluation.summary.accuracy.value
        write_evaluation(run.evaluations / "000040-b8", evaluation)
    """
    kept = kept or Kept()
    requests = requests_of(problems, tokenizer, settings)
    trajectories, seconds = _decode(engine, problems, requests, settings.num_samples, kept, on_progress)
    responses, num_failures = _judge(problems, tokenizer, trajectories, settings.num_samples, scorer)
    conditions = conditions_of(engine, problems, settings, scorer, provenance)
    return Evaluation(
        summary=Summary.of(conditions, responses, num_failures, seconds),
        problems=problems.problems,
        responses=responses,
        pieces=text_pieces(tokenizer, trajectories),
    )


def conditions_of(
    engine: Engine,
    problems: ProblemSet,
    settings: EvalSettings,
    scorer: Scorer,
    provenance: Provenance | None,
) -> Conditions:
    """Those of a call of `evaluate`."""
    is_diffusion = engine.model.config.is_diffusion
    return Conditions.of(provenance or Provenance(), settings, problems, scorer.specs[0].name, is_diffusion)


def prompts_of(
    problems: ProblemSet, tokenizer: transformers.PreTrainedTokenizerBase
) -> list[Int64[np.ndarray, " prompt"]]:
    """The prompt of each problem."""
    rendered = (problems.prompt.render(tokenizer, problem.question) for problem in problems.problems)
    return [np.array(ids, dtype=np.int64) for ids in rendered]


def requests_of(
    problems: ProblemSet, tokenizer: transformers.PreTrainedTokenizerBase, settings: EvalSettings
) -> list[Request]:
    """In the order of (problem, sample): samples of a problem share its prompt's keys and values."""
    out = []
    for index, prompt_ids in enumerate(prompts_of(problems, tokenizer)):
        for sample in range(settings.num_samples):
            seed = request_seed(settings.seed, index, sample)
            out.append(Request(prompt_ids, settings.rule, settings.sampling, seed))
    return out


def _decode(
    engine: Engine,
    problems: ProblemSet,
    requests: Sequence[Request],
    num_samples: int,
    kept: Kept,
    on_progress: Callable[[Progress], object] | None,
) -> tuple[list[Trajectory], float]:
    """The trajectory of every request, and the seconds that decoding took."""
    done = {i: kept.trajectories[r.seed] for i, r in enumerate(requests) if r.seed in kept.trajectories}
    open_requests = [index for index in range(len(requests)) if index not in done]
    num_tokens = sum(t.stop_length for t in done.values())
    failed: dict[int, str] = {}
    started = time.perf_counter() - kept.seconds
    for event in engine.stream([requests[i] for i in open_requests], wants_steps=False):
        index = open_requests[event.request_id]
        if isinstance(event, RequestFailed):
            failed[index] = event.reason
        elif isinstance(event, RequestFinished):
            done[index] = event.trajectory
            num_tokens += event.trajectory.stop_length
            if on_progress is not None:
                response = DecodedResponse(event.trajectory, problems.problems[index // num_samples].id)
                seconds = time.perf_counter() - started
                on_progress(Progress(response, len(done), len(requests), num_tokens, seconds))
    if failed:
        raise GenerationError(failed, done)
    return [done[index] for index in range(len(requests))], time.perf_counter() - started


def _judge(
    problems: ProblemSet,
    tokenizer: transformers.PreTrainedTokenizerBase,
    trajectories: Sequence[Trajectory],
    num_samples: int,
    scorer: Scorer,
) -> tuple[tuple[DecodedResponse, ...], int]:
    """The responses with their verdicts, and how many of these are a worker's failure."""
    asked = [problem for problem in problems.problems for _ in range(num_samples)]
    scores = scorer.score(asked, [to_response(tokenizer, t) for t in trajectories])
    responses = tuple(
        DecodedResponse(trajectory, problem.id, bool(is_correct))
        for trajectory, problem, is_correct in zip(trajectories, asked, scores.is_correct, strict=True)
    )
    return responses, sum(scores.num_failures.values())
