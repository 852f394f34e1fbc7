"""Weighted sums of rewards over many answers at once: what evaluation and training call.

    specs = [RewardSpec("math"), RewardSpec("length", 0.2, {"max_tokens": 4096, "buffer": 512})]
    with Rewards(specs, num_workers=2) as rewards:      # starts the workers; once for the whole run
        scores = rewards.score(problems, responses)     # responses[i] answers problems[i]

    scores.rewards        float64, a response each: Σ weight · term
    scores.is_correct     bool: the first reward of the list is 1 or more
    scores.terms["math"]  float64: each reward by its name, without its weight
    scores.failures       what was killed, died or raised: (index, reward, cause, detail); it counts 0
    scores.num_failures   {"timeout": 0, "memory": 0, "crash": 0, "error": 0}

A response is a `tstar.rewards.Response`: a text that also knows its number of tokens, its tokens per
forward and its finish reason (``length``, ``parallelism`` and ``format`` read them). A plain `str` does for
the others. `score` may be called any number of times.
`default_reward` names the reward that suits a data source. Rewards given as ``module:function`` are imported
in the workers, with the parent's `sys.path`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from tstar.data import Problem
from tstar.errors import UserError
from tstar.rewards.response import Response
from tstar.rewards.worker import load
from tstar.rewards.workers import CAUSES, Call, Cause, Failure, WorkerPool


@dataclass(frozen=True)
class _Named:
    """A reward that has a name."""

    function: str
    is_isolated: bool = False
    """It runs in a worker process, like everything given as ``module:function``."""
    only_if_correct: bool = False


NAMED: Mapping[str, _Named] = MappingProxyType(
    {
        "math": _Named("tstar.rewards.mathematics:math", is_isolated=True),
        "exact": _Named("tstar.rewards.simple:exact"),
        "numeric": _Named("tstar.rewards.simple:numeric"),
        "format": _Named("tstar.rewards.simple:format"),
        "length": _Named("tstar.rewards.simple:length"),
        "parallelism": _Named("tstar.rewards.simple:parallelism", only_if_correct=True),
        "chain": _Named("tstar.tasks.chain:chain_reward"),
        "chain_answer": _Named("tstar.tasks.chain:chain_answer_reward"),
        "chain_steps": _Named("tstar.tasks.chain:chain_steps_reward"),
    }
)


def default_reward(source: str) -> str:
    """The name of the reward that decides what is correct for a data source, where none is given."""
    return "chain" if source.startswith("chain:") else "math"


@dataclass(frozen=True)
class RewardSpec:
    """One term of the weighted sum."""

    name: str
    """A name of `NAMED`, or ``module:function`` of a callable ``(problem, response) -> float``."""
    weight: float = 1.0
    """What it counts in the sum."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of the callable."""
    only_if_correct: bool | None = None
    """Count it for answers that the first reward calls correct. None: so for ``parallelism`` alone."""

    def __post_init__(self) -> None:
        if self.name not in NAMED and ":" not in self.name:
            raise UserError(
                f"rewards: {self.name!r} is unknown; use one of {', '.join(NAMED)}, or MODULE:FUNCTION"
            )
        if not np.isfinite(self.weight):
            raise UserError(f"rewards: {self.name}: weight {self.weight} is no finite number")

    @property
    def definition(self) -> _Named:
        return NAMED.get(self.name) or _Named(self.name, is_isolated=True)

    @property
    def needs_correctness(self) -> bool:
        return self.definition.only_if_correct if self.only_if_correct is None else self.only_if_correct


@dataclass(frozen=True)
class FailedCall:
    """A reward that an answer did not get: it counts 0."""

    index: int
    """Of the answer."""
    reward: str
    cause: Cause
    detail: str


@dataclass(frozen=True, eq=False)
class Scores:
    """What a batch of answers earned, in the order of the answers."""

    rewards: Float64[np.ndarray, " responses"]
    """The weighted sums."""
    terms: Mapping[str, Float64[np.ndarray, " responses"]]
    """Each reward by its name, without its weight."""
    is_correct: Bool[np.ndarray, " responses"]
    """The first reward is 1 or more."""
    failures: tuple[FailedCall, ...] = ()

    @property
    def num_failures(self) -> dict[str, int]:
        """Failed calls by cause."""
        counts = Counter(failure.cause for failure in self.failures)
        return {cause: counts[cause] for cause in CAUSES}


class Rewards:
    """A weighted sum of rewards. The first one decides what is correct.

    Cheap rewards are computed at once, the others in worker processes that live until `close`; use it as a
    context manager. ``with`` starts them, and they import what they need while the caller goes on.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        num_workers: int | None = None,
        time_limit: float = 5.0,
        memory_limit: int = 1 << 30,
    ) -> None:
        self.specs = tuple(specs)
        _check(self.specs)
        isolated = [spec for spec in self.specs if spec.definition.is_isolated]
        functions = [(spec.definition.function, spec.options) for spec in isolated]
        self._pool = WorkerPool(functions, num_workers, time_limit, memory_limit)
        self._function_index = {spec.name: index for index, spec in enumerate(isolated)}
        try:
            self._local = {
                spec.name: load(spec.definition.function, dict(spec.options))
                for spec in self.specs
                if not spec.definition.is_isolated
            }
        except ValueError as error:
            raise UserError(f"rewards: {error}") from error

    def __enter__(self) -> Rewards:
        if self._function_index:
            self._pool.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._pool.close()

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> Scores:
        """Score ``responses[i]`` as an answer to ``problems[i]``."""
        if len(problems) != len(responses):
            raise ValueError(f"responses: {len(responses)} for {len(problems)} problems")
        answers = [each if isinstance(each, Response) else Response(each) for each in responses]
        terms = {
            name: np.array(
                [function(*pair) for pair in zip(problems, answers, strict=True)], dtype=np.float64
            )
            for name, function in self._local.items()
        }
        isolated, failures = self._score_isolated(problems, answers)
        terms = {spec.name: (terms | isolated)[spec.name] for spec in self.specs}
        is_correct = terms[self.specs[0].name] >= 1
        rewards = np.zeros(len(answers))
        for spec in self.specs:
            counts = is_correct if spec.needs_correctness else True
            rewards += spec.weight * np.where(counts, terms[spec.name], 0.0)
        return Scores(rewards, terms, is_correct, failures)

    def _score_isolated(
        self, problems: Sequence[Problem], responses: Sequence[Response]
    ) -> tuple[dict[str, Float64[np.ndarray, " responses"]], tuple[FailedCall, ...]]:
        pairs = [(_problem_json(p), _response_json(r)) for p, r in zip(problems, responses, strict=True)]
        calls = [Call(index, *pair) for index in self._function_index.values() for pair in pairs]
        results = self._pool.run(calls) if calls else []
        terms, failures = {}, []
        for name, position in self._function_index.items():
            own = results[position * len(pairs) : (position + 1) * len(pairs)]
            terms[name] = np.array([0.0 if isinstance(each, Failure) else each for each in own])
            failed = [(i, each) for i, each in enumerate(own) if isinstance(each, Failure)]
            failures += [FailedCall(i, name, each.cause, each.detail) for i, each in failed]
            _refuse_broken(name, len(own), [each for _, each in failed])
        return terms, tuple(failures)


def _check(specs: tuple[RewardSpec, ...]) -> None:
    if not specs:
        raise UserError("rewards: none given; name at least one, math for example")
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"rewards: {name!r} stands there {names.count(name)} times; name it once")
    if specs[0].needs_correctness:
        raise UserError(
            f"rewards: {specs[0].name!r} counts for correct answers only and cannot come first; "
            "put the reward that decides what is correct before it"
        )


def _refuse_broken(name: str, num_calls: int, failures: Sequence[Failure]) -> None:
    """A reward that raises on every answer is a mistake in it, not in the answers."""
    errors = [failure for failure in failures if failure.cause == "error"]
    if len(errors) == num_calls >= 2:
        raise UserError(
            f"rewards: {name!r} raised on all {num_calls} answers ({errors[0].detail}); repair it"
        )


def _problem_json(problem: Problem) -> dict[str, Any]:
    return {**vars(problem), "fields": dict(problem.fields)}


def _response_json(response: Response) -> dict[str, Any]:
    return {
        "text": str(response),
        "num_tokens": response.num_tokens,
        "tokens_per_forward": response.tokens_per_forward,
        "finish_reason": response.finish_reason,
    }
