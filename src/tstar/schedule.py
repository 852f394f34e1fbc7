"""In what order a model unmasks: LocalStrict (Eq. 8) and what else a decoding schedule shows.

Every number is over the tokens up to the stop. What is decoded behind it is nobody's answer: it is neither
an event nor a position that others could have gone to first. Forwards are the exception: a step that
only finalised tokens behind the stop was run and is counted.

A schedule is as much the sampler's as the model's. The unmask policy is not part of a trajectory, so
nothing here can tell static from dynamic decoding: compare only what was decoded with the same one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from tstar.errors import UserError
from tstar.trajectory import Trajectory

NUM_CONFIDENCE_BINS = 10


# -- responses ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodedResponse:
    """A trajectory, and what is known about it."""

    trajectory: Trajectory
    problem: str | None = None
    """Id of the problem; responses without one belong together where their prompts are equal."""
    is_correct: bool | None = None

    def to_json(self) -> str:
        """The trajectory's line with two more keys, where known; `Trajectory.from_json` reads it too."""
        known = {"problem": self.problem, "correct": self.is_correct}
        extra = json.dumps({key: value for key, value in known.items() if value is not None})
        return self.trajectory.to_json() if extra == "{}" else f"{self.trajectory.to_json()[:-1]},{extra[1:]}"

    @classmethod
    def from_json(cls, line: str) -> DecodedResponse:
        record: Any = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"a {type(record).__name__}, not an object; is it a trajectory?")
        problem, is_correct = record.get("problem"), record.get("correct")
        if not isinstance(problem, str | None):
            raise ValueError(f"problem: {problem!r} is no string")
        if not isinstance(is_correct, bool | None):
            raise ValueError(f"correct: {is_correct!r} is neither true nor false")
        return cls(Trajectory.from_record(record), problem, is_correct)

    @property
    def prompt_key(self) -> str | bytes:
        return self.trajectory.prompt_ids.tobytes() if self.problem is None else self.problem


def parse_response(line: bytes, where: str) -> DecodedResponse:
    """One line of a file; `where` names it in the error."""
    try:
        return DecodedResponse.from_json(line.decode())
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: is no JSON ({error.msg}); is it cut short?") from None
    except KeyError as error:
        raise UserError(f"{where}: {error.args[0]}: missing; is it a trajectory?") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{where}: {error}") from None


def open_lines(path: Path) -> BufferedIOBase:
    """A file of lines, gzipped or not."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_responses(path: Path) -> list[DecodedResponse]:
    """The responses of a file of JSON lines, one trajectory each; keys that are not ours are ignored."""
    try:
        with open_lines(path) as lines:
            return [
                parse_response(line, f"{path}:{number}")
                for number, line in enumerate(lines, start=1)
                if not line.isspace()
            ]
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error}); is it cut short?") from None


# -- LocalStrict -------------------------------------------------------------------------------


def local_strict(unmask_step: Int64[np.ndarray, " tokens"]) -> float:
    """Eq. 8: of the events of one response, the share that decodes the leftmost token still masked.

    Tokens of one step count as decoded from left to right. So a token is the leftmost still masked exactly
    if none to its left has a later step, and no sorting is needed.
    """
    return float(np.mean(unmask_step == np.maximum.accumulate(unmask_step)))


@dataclass(frozen=True, eq=False)
class Schedules:
    """The schedules of some responses, one after the other, each up to its stop."""

    responses: Int64[np.ndarray, " tokens"]
    """Which response a token is of."""
    steps: Int64[np.ndarray, " tokens"]
    """Unmask step, counted through the response."""
    places: Int64[np.ndarray, " tokens"]
    """Position in the block; where the prompt's tail stands in it, that has the first places."""
    steps_in_block: Int64[np.ndarray, " tokens"]
    """Unmask step, counted from the block's first."""
    confidences: Float64[np.ndarray, " tokens"]
    """Probability of the token at its own step. It stands for the confidence that the policy ranked by
    (Eq. 1), which no trajectory records; in greedy decoding the two are equal."""
    block_steps: Int64[np.ndarray, " blocks"]
    """Steps that each block took, those behind the stop included: together, the forwards."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Schedules:
        if not trajectories:
            raise ValueError("trajectories: empty; an analysis needs at least one")
        lengths = np.array([len(t.response_ids) for t in trajectories])
        responses = np.repeat(np.arange(len(lengths)), lengths)
        steps = np.concatenate([t.unmask_step for t in trajectories])
        block_ids = np.concatenate([t.partition.block_ids[len(t.prompt_ids) :] for t in trajectories])
        is_first = (np.diff(responses, prepend=-1) != 0) | (np.diff(block_ids, prepend=-1) != 0)
        firsts, blocks = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        first_steps = np.minimum.reduceat(steps, firsts)
        starts = np.cumsum(lengths) - lengths
        tails = np.zeros(len(firsts), dtype=np.int64)
        tails[blocks[starts]] = [_tail(t) for t in trajectories]
        is_kept = np.arange(len(steps)) < (starts + [t.stop_length for t in trajectories])[responses]
        log_probs = np.concatenate([t.log_probs for t in trajectories])
        return cls(
            responses=responses[is_kept],
            steps=steps[is_kept],
            places=(np.arange(len(steps)) + (tails - firsts)[blocks])[is_kept],
            steps_in_block=(steps - first_steps[blocks])[is_kept],
            confidences=np.exp(log_probs[is_kept].astype(np.float64)),
            block_steps=np.maximum.reduceat(steps, firsts) - first_steps + 1,
        )

    @cached_property
    def is_leftmost(self) -> Bool[np.ndarray, " tokens"]:
        """Whether a token was the leftmost still masked when it was decoded: the events of Eq. 8."""
        keys = self.responses * (int(self.steps.max()) + 1) + self.steps  # a response is after all before it
        is_leftmost: np.ndarray = keys == np.maximum.accumulate(keys)
        return is_leftmost

    @property
    def local_strict(self) -> Float64[np.ndarray, " responses"]:
        """Eq. 8 of each response."""
        strict: np.ndarray = np.bincount(self.responses, self.is_leftmost) / np.bincount(self.responses)
        return strict

    @property
    def first_unmask(self) -> Int64[np.ndarray, "places steps"]:
        """Tokens by place and step in their block."""
        shape = (int(self.places.max()) + 1, int(self.steps_in_block.max()) + 1)
        cells = self.places * shape[1] + self.steps_in_block
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)

    @property
    def non_monotone(self) -> Int64[np.ndarray, " places"]:
        """Tokens by place in their block that were decoded while one to their left was masked."""
        return np.bincount(self.places[~self.is_leftmost], minlength=int(self.places.max()) + 1)


def _tail(trajectory: Trajectory) -> int:
    """Prompt tokens in the response's first block."""
    partition = trajectory.partition
    return partition.prompt_length - partition.block(partition.num_prompt_blocks).start


# -- everything at once ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Confidence:
    """How sure tokens were when they were decoded, in responses that turned out right and wrong."""

    correct: Int64[np.ndarray, " bins"]
    """Tokens of correct responses by confidence, in bins of equal width from 0 to 1."""
    wrong: Int64[np.ndarray, " bins"]
    mean_correct: float | None
    mean_wrong: float | None

    @classmethod
    def of(
        cls, confidences: Float64[np.ndarray, " tokens"], verdicts: Int64[np.ndarray, " tokens"]
    ) -> Confidence:
        """verdicts: 1 for a token of a correct response, 0 of a wrong one, -1 of one nobody judged."""
        bins = np.minimum((confidences * NUM_CONFIDENCE_BINS).astype(np.int64), NUM_CONFIDENCE_BINS - 1)
        correct, wrong = (np.bincount(bins[verdicts == v], minlength=NUM_CONFIDENCE_BINS) for v in (1, 0))
        means = [float(confidences[verdicts == v].mean()) if (verdicts == v).any() else None for v in (1, 0)]
        return cls(correct, wrong, *means)


@dataclass(frozen=True, eq=False)
class ScheduleAnalysis:
    """Schedules of responses that were decoded in the same way."""

    num_prompts: int
    num_responses: int
    num_tokens: int
    num_forwards: int
    """Denoising forwards."""
    truncated: float
    """Share of responses that ran out of tokens."""
    accuracy: float | None
    """Of the responses that were judged."""
    local_strict: float
    """Eq. 8, the mean over responses."""
    steps_per_block: Int64[np.ndarray, " steps_plus_1"]
    """Blocks by the number of steps they took."""
    first_unmask: Int64[np.ndarray, "places steps"]
    """Tokens by place and step in their block: the heat map of first-unmask steps."""
    non_monotone: Int64[np.ndarray, " places"]
    """Tokens by place in their block that were decoded while one to their left was masked."""
    distinct_schedules: float | None
    """Of prompts with several responses, the mean of distinct schedules / responses; 1 is all different."""
    confidence: Confidence

    @property
    def tokens_per_forward(self) -> float:
        """TPF: all tokens over all forwards."""
        return self.num_tokens / self.num_forwards

    @property
    def mean_steps_per_block(self) -> float:
        return self.num_forwards / int(self.steps_per_block.sum())

    @property
    def non_monotone_share(self) -> tuple[float | None, ...]:
        """Per place; None where no response has a token."""
        tokens = self.first_unmask.sum(axis=1).tolist()
        return tuple(n / of if of else None for n, of in zip(self.non_monotone.tolist(), tokens, strict=True))


def analyze(responses: Sequence[DecodedResponse]) -> ScheduleAnalysis:
    """All of it. The responses should have been decoded in the same way; see the module's head."""
    trajectories = [response.trajectory for response in responses]
    schedules = Schedules.of(trajectories)
    verdicts = np.array([-1 if r.is_correct is None else int(r.is_correct) for r in responses])
    prompts = _number_prompts(responses)
    return ScheduleAnalysis(
        num_prompts=int(prompts.max()) + 1,
        num_responses=len(responses),
        num_tokens=len(schedules.steps),
        num_forwards=sum(t.forwards.denoise for t in trajectories),
        truncated=float(np.mean([t.finish_reason == "length" for t in trajectories])),
        accuracy=float((verdicts == 1).sum() / (verdicts >= 0).sum()) if (verdicts >= 0).any() else None,
        local_strict=float(schedules.local_strict.mean()),
        steps_per_block=np.bincount(schedules.block_steps),
        first_unmask=schedules.first_unmask,
        non_monotone=schedules.non_monotone,
        distinct_schedules=distinct_schedules(trajectories, prompts),
        confidence=Confidence.of(schedules.confidences, verdicts[schedules.responses]),
    )


def distinct_schedules(
    trajectories: Sequence[Trajectory], prompts: Int64[np.ndarray, " trajectories"]
) -> float | None:
    """Of prompts with several responses, the mean of distinct schedules / responses.

    Two schedules differ if a token has another step in them; they are compared as far as the shortest
    response of the prompt goes, since a different length alone is no different order. None: no prompt has
    several responses.
    """
    members: dict[int, list[Trajectory]] = {}
    for trajectory, prompt in zip(trajectories, prompts.tolist(), strict=True):
        members.setdefault(prompt, []).append(trajectory)
    shares = []
    for group in members.values():
        shortest = min(t.stop_length for t in group)
        if len(group) > 1:
            shares.append(len({t.unmask_step[:shortest].tobytes() for t in group}) / len(group))
    return float(np.mean(shares)) if shares else None


def _number_prompts(responses: Sequence[DecodedResponse]) -> Int64[np.ndarray, " responses"]:
    numbers: dict[str | bytes, int] = {}
    return np.array([numbers.setdefault(r.prompt_key, len(numbers)) for r in responses])
