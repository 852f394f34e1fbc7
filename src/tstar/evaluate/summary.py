"""What an evaluation says: under which conditions it was made, and its numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from tstar.data import Problem, ProblemSet, PromptTemplate
from tstar.engine import SamplingParams
from tstar.evaluate.estimates import Estimate, pass_at_k, ratio_estimates, widened
from tstar.partition import PartitionRule
from tstar.schedule import DecodedResponse, local_strict
from tstar.trajectory import ForwardCounts
from tstar.unmask import UnmaskPolicy

VERSION = 1


# -- conditions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provenance:
    """Which model it is; a model in memory may say nothing."""

    label: str = ""
    """The method: base, TraceRL, T*, AR, ..."""
    model: str = ""
    """Path of the model."""
    weights: str | None = None
    """Fingerprint of its files, where it was read from some (`tstar.evaluate.sweep.fingerprint`)."""
    dtype: str | None = None
    """What its weights were converted to when they were read; None: as stored."""
    update_step: int | None = None
    """Of the run that made it."""


@dataclass(frozen=True)
class EvalSettings:
    """How the problems are answered."""

    rule: PartitionRule
    sampling: SamplingParams
    num_samples: int = 1
    """Responses to each problem: the k of avg@k."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples: {self.num_samples} are too few; use 1 or more")
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed} is negative; use 0 or more")


@dataclass(frozen=True)
class Conditions:
    """Everything that `summary.json` says besides the numbers; equal conditions give equal numbers."""

    label: str
    model: str
    data: str
    block_size: int
    offset: int
    origin: str
    policy: str
    """The unmask policy for people: ``static k=4``, ``dynamic 0.9``."""
    unmask: Mapping[str, Any]
    temperature: float
    max_tokens: int
    seed: int
    num_problems: int
    num_samples: int
    update_step: int | None
    top_k: int | None
    top_p: float
    min_p: float
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    reward: str
    """What decides that a response is correct."""
    prompt: Mapping[str, Any]
    problems: str
    """Fingerprint of the problems."""
    weights: str | None
    """Fingerprint of the model's files."""
    dtype: str | None

    @classmethod
    def of(
        cls,
        provenance: Provenance,
        settings: EvalSettings,
        problems: ProblemSet,
        reward: str,
        is_diffusion: bool,
    ) -> Conditions:
        sampling, rule = settings.sampling, settings.rule
        return cls(
            label=provenance.label,
            model=provenance.model,
            data=problems.name,
            block_size=rule.block_size,
            offset=rule.offset,
            origin=rule.origin,
            policy=describe_policy(sampling.unmask) if is_diffusion else NEXT_TOKEN,
            unmask=asdict(sampling.unmask),
            temperature=float(sampling.temperature),
            max_tokens=sampling.max_tokens,
            seed=settings.seed,
            num_problems=len(problems),
            num_samples=settings.num_samples,
            update_step=provenance.update_step,
            top_k=sampling.top_k,
            top_p=float(sampling.top_p),
            min_p=float(sampling.min_p),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            reward=reward,
            prompt=asdict(problems.prompt),
            problems=_digest(problems.problems),
            weights=provenance.weights,
            dtype=provenance.dtype,
        )

    @property
    def template(self) -> PromptTemplate:
        return PromptTemplate(**self.prompt)


NEXT_TOKEN = "next token"  # noqa: S105  (a policy's name)
"""What takes the place of an unmask policy in an AR model."""


def describe_policy(policy: UnmaskPolicy) -> str:
    """``static k=4``, ``static S=2``, ``dynamic 0.9``, ``dynamic 0.9 k=2 sampled``, ``entropy 0.5``, ..."""
    parts: list[str] = [policy.kind]
    if policy.confidence_threshold is not None:
        parts.append(f"{policy.confidence_threshold:g}")
    if policy.entropy_bound is not None:
        parts.append(f"{policy.entropy_bound:g}")
    if policy.steps_per_block is not None:
        parts.append(f"S={policy.steps_per_block}")
    elif policy.tokens_per_step is not None or policy.kind in ("static", "sequential", "random"):
        parts.append(f"k={policy.tokens_per_step or 1}")
    if policy.confidence != "max":
        parts.append(policy.confidence)
    return " ".join(parts)


def _digest(problems: Sequence[Problem]) -> str:
    content = json.dumps([[p.id, p.question, p.answer] for p in problems])
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


# -- numbers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Tokens up to and including the stop."""

    mean: float
    max: int


@dataclass(frozen=True)
class Time:
    """What the clock said; nothing else in a summary depends on it."""

    seconds: float
    """Decoding alone, over all calls that it took."""
    tokens_per_second: float


@dataclass(frozen=True)
class Summary:
    """`summary.json`. Intervals are 95 %, by bootstrap over problems."""

    conditions: Conditions
    accuracy: Estimate
    """avg@k: the share of all samples that are correct."""
    pass_at: Mapping[int, Estimate]
    """Unbiased pass@k: the chance that at least one of k samples is correct."""
    tokens_per_forward: Estimate
    """All tokens up to the stop / all denoising forwards."""
    local_strict: Estimate
    """Eq. 8, the mean over responses."""
    response_length: Lengths
    truncated: float
    """Share of responses that ran into max_tokens."""
    forwards: ForwardCounts
    num_worker_failures: int
    """Responses whose scoring was killed, died or raised; they count as wrong."""
    time: Time

    @classmethod
    def of(
        cls,
        conditions: Conditions,
        responses: Sequence[DecodedResponse],
        num_worker_failures: int,
        seconds: float,
    ) -> Summary:
        """responses: judged, in the order of (problem, sample)."""
        trajectories = [response.trajectory for response in responses]
        lengths = np.array([t.stop_length for t in trajectories])
        forwards = np.array([t.forwards.denoise for t in trajectories])
        strict = np.array([local_strict(t.unmask_step[: t.stop_length]) for t in trajectories])
        is_correct = np.array([bool(response.is_correct) for response in responses])

        num_problems, num_samples = conditions.num_problems, conditions.num_samples
        ones = np.ones(num_problems)
        per_response = np.stack([is_correct, strict, lengths, forwards, np.ones(len(responses))])
        correct, strict, tokens, steps, samples = per_response.reshape(5, num_problems, -1).sum(axis=2)
        ks = _ks(num_samples)
        passes = [np.array([pass_at_k(num_samples, int(c), k) for c in correct]) for k in ks]
        ratios = [(correct, samples), (strict, samples), (tokens, steps), *((p, ones) for p in passes)]
        numerators, denominators = (np.stack(columns, axis=1) for columns in zip(*ratios, strict=True))
        accuracy, strictness, tokens_per_forward, *pass_at = ratio_estimates(numerators, denominators)
        return cls(
            conditions=conditions,
            accuracy=widened(accuracy, num_problems),
            pass_at={k: widened(share, num_problems) for k, share in zip(ks, pass_at, strict=True)},
            tokens_per_forward=tokens_per_forward,
            local_strict=strictness,
            response_length=Lengths(float(lengths.mean()), int(lengths.max())),
            truncated=float(np.mean([t.finish_reason == "length" for t in trajectories])),
            forwards=_total([t.forwards for t in trajectories]),
            num_worker_failures=num_worker_failures,
            time=Time(seconds, float(lengths.sum() / seconds) if seconds > 0 else 0.0),
        )

    def to_json(self) -> str:
        record = asdict(self)
        record = {"version": VERSION, **record.pop("conditions"), **record}
        record["pass_at"] = {str(k): estimate for k, estimate in record["pass_at"].items()}
        return json.dumps(record, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Summary:
        record = json.loads(text)
        if record.get("version") != VERSION:
            raise ValueError(f"version: {record.get('version')!r} is not this program's {VERSION}")
        return cls(
            conditions=Conditions(**{f.name: record[f.name] for f in fields(Conditions)}),
            accuracy=Estimate(**record["accuracy"]),
            pass_at={int(k): Estimate(**estimate) for k, estimate in record["pass_at"].items()},
            tokens_per_forward=Estimate(**record["tokens_per_forward"]),
            local_strict=Estimate(**record["local_strict"]),
            response_length=Lengths(**record["response_length"]),
            truncated=record["truncated"],
            forwards=ForwardCounts(**record["forwards"]),
            num_worker_failures=record["num_worker_failures"],
            time=Time(**record["time"]),
        )


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An evaluation in full: what an evaluation directory holds."""

    summary: Summary
    problems: tuple[Problem, ...]
    responses: tuple[DecodedResponse, ...]
    """In the order of (problem, sample)."""
    pieces: Mapping[int, str] = field(default_factory=dict)
    """The text of every token id that occurs."""


def _ks(num_samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    powers = [1 << i for i in range(num_samples.bit_length())]
    return sorted({k for k in powers if k <= num_samples} | {num_samples})


def _total(counts: Sequence[ForwardCounts]) -> ForwardCounts:
    return ForwardCounts(
        denoise=sum(c.denoise for c in counts),
        commit=sum(c.commit for c in counts),
        prefill=sum(c.prefill for c in counts),
    )
