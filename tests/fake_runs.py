"""Runs and evaluations as they lie on disk, without anybody having trained."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tstar.partition import Partition
from tstar.schedule import DecodedResponse
from tstar.trajectory import ForwardCounts, Trajectory

EOS = 0
WORDS = [
    *("First", " the", " sum", " of", " both", " is", " so", " we", " get", " therefore", ",", ".", " ="),
    *(" +", " -", " x", " y", " 2", " 3", " 5", " 7", " 12", " 18", " 42", "\\boxed{", "}", " and", " then"),
    *(" add", " multiply", " by", " which", " gives", " Let", " be", " number", " answer", ":", "\n", "½"),
    *("é", " 数"),
]
PIECES = {EOS: "<|im_end|>", **dict(enumerate(WORDS, start=1))}
QUESTIONS = (
    "A train travels 42 km in 18 minutes. How far does it travel in an hour?",
    "What is the sum of the first 12 odd numbers?",
    "Solve 2x + 3 = 17 for x.",
    "How many ways are there to choose 2 of 7 books?",
)


@dataclass(frozen=True)
class Evaluated:
    """How an evaluation came out."""

    label: str
    block_size: int
    accuracy: float
    policy: str = "dynamic 0.9"
    data: str = "math500"
    num_problems: int = 8
    num_samples: int = 3
    update_step: int | None = None
    offset: int = 0
    eagerness: float = 0.35
    """How far decoding runs ahead of the leftmost masked token."""


def make_steps(rng: np.random.Generator, partition: Partition, eagerness: float) -> np.ndarray:
    """Roughly left to right in each block, several tokens a step."""
    steps, first = np.empty(partition.response_length, dtype=np.int64), 0
    for block in partition.response_slices:
        size = block.stop - block.start
        wish = np.arange(size) + rng.normal(0, eagerness * size, size)
        order = np.argsort(np.argsort(wish))
        group = np.cumsum(rng.random(size) < 0.45)
        steps[block] = first + np.unique(group[order], return_inverse=True)[1]
        first = int(steps[block].max()) + 1
    return steps


def make_response(  # noqa: PLR0913  (a test may care about any of it)
    rng: np.random.Generator,
    problem: str | None,
    is_correct: bool | None,
    block_size: int,
    *,
    num_tokens: int | None = None,
    eagerness: float = 0.35,
    offset: int = 0,
    ids: Sequence[int] | None = None,
    prompt: int = 11,
) -> DecodedResponse:
    stop = len(ids) if ids is not None else num_tokens or int(rng.integers(40, 110))
    padded = stop + (-(stop - offset) % block_size)
    partition = Partition(prompt, padded, block_size, offset)
    tokens = rng.integers(1, len(PIECES), size=padded)
    if ids is not None:
        tokens[:stop] = ids
    tokens[stop - 1 :] = EOS if ids is None else tokens[stop - 1 :]
    steps = make_steps(rng, partition, eagerness)
    doubt = 0.25 if is_correct else 0.6
    trajectory = Trajectory(
        prompt_ids=np.arange(1, prompt + 1),
        response_ids=tokens,
        unmask_step=steps,
        log_probs=-rng.exponential(doubt, size=padded).astype(np.float32),
        stop_length=stop,
        finish_reason="stop",
        partition=partition,
        forwards=ForwardCounts(int(steps.max()) + 1, len(partition.blocks), 1),
        weight_version=0,
        seed=0,
    )
    return DecodedResponse(trajectory, problem, is_correct)


def interval(value: float, width: float) -> dict[str, float]:
    return {"value": value, "low": max(value - width, 0.0), "high": value + width}


def write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def make_evaluation(
    path: Path,
    how: Evaluated,
    seed: int = 0,
    responses: Sequence[DecodedResponse] | None = None,
    pieces: dict[int, str] | None = None,
    questions: Sequence[str] = QUESTIONS,
    **changes: Any,
) -> Path:
    """An evaluation directory; changes replace fields of its summary."""
    rng = np.random.default_rng(seed)
    if responses is None:
        responses = [
            make_response(
                rng,
                f"{how.data}-{problem:04}",
                bool(rng.random() < how.accuracy),
                how.block_size,
                eagerness=how.eagerness,
                offset=how.offset,
            )
            for problem in range(how.num_problems)
            for _ in range(how.num_samples)
        ]
    tokens = sum(r.trajectory.stop_length for r in responses)
    forwards = sum(r.trajectory.forwards.denoise for r in responses)
    strict = float(np.mean([0.9 - 0.1 * how.eagerness for _ in responses]))
    names = dict.fromkeys(r.problem for r in responses)
    summary = {
        "version": 1,
        "label": how.label,
        "model": f"models/{how.label}",
        "data": how.data,
        "block_size": how.block_size,
        "offset": how.offset,
        "origin": "response",
        "policy": how.policy,
        "unmask": {"kind": "dynamic", "confidence_threshold": 0.9},
        "temperature": 1.0,
        "max_tokens": 256,
        "seed": seed,
        "num_problems": len(names),
        "num_samples": how.num_samples,
        "update_step": how.update_step,
        "accuracy": interval(how.accuracy, 0.021),
        "pass_at": {"1": interval(how.accuracy, 0.021), "3": interval(min(how.accuracy + 0.1, 1.0), 0.02)},
        "tokens_per_forward": interval(tokens / forwards, 0.06),
        "local_strict": interval(strict, 0.008),
        "response_length": {"mean": tokens / len(responses), "max": 120},
        "truncated": 0.0125,
        "forwards": {"denoise": forwards, "commit": 10, "prefill": 1},
        "num_worker_failures": 0,
        "time": {"seconds": 12.5, "tokens_per_second": 1834.0},
        **changes,
    }
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(summary))
    write_lines(path / "responses.jsonl", [r.to_json() for r in responses])
    write_lines(
        path / "problems.jsonl",
        [
            json.dumps({"id": name, "question": questions[i % len(questions)], "answer": "42", "level": 3})
            for i, name in enumerate(names)
        ],
    )
    used = {i for r in responses for i in r.trajectory.response_ids.tolist()}
    texts = {str(i): (pieces or PIECES).get(i, "?") for i in sorted(used)}
    (path / "pieces.json").write_text(json.dumps(texts))
    return path


def make_run(  # noqa: PLR0913
    path: Path,
    stages: Sequence[tuple[int, int]],
    *,
    start: float = 0.5,
    gain: float = 0.12,
    collapse_at: int | None = None,
    is_ended: bool = True,
    seed: int = 0,
    rollouts_every: int = 5,
    num_rollouts: int = 8,
    evaluate_every: int = 5,
) -> Path:
    """A run directory: stages are (block size, updates)."""
    rng = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []
    path.mkdir(parents=True)
    total, update, accuracy = sum(n for _, n in stages), 0, start
    best = -math.inf

    def validate(stage: int, block_size: int) -> None:
        nonlocal best
        value = accuracy + float(rng.normal(0, 0.008))
        events.append(
            {
                "event": "validation",
                "update_step": update,
                "stage": stage,
                "block_size": block_size,
                "accuracy": value,
                "accuracy_low": value - 0.022,
                "accuracy_high": value + 0.022,
                "tokens_per_forward": 2.5 + block_size / 20,
                "local_strict": 0.85,
                "truncated": 0.01,
                "is_best": value > best,
                "time": {"seconds": 3.2},
            }
        )
        best = max(best, value)

    for stage, (block_size, num_updates) in enumerate(stages):
        events.append(
            {
                "event": "stage",
                "update_step": update,
                "stage": stage,
                "block_size": block_size,
                "num_updates": num_updates,
                "learning_rate": 1e-6,
                "time": {},
            }
        )
        best = -math.inf
        accuracy -= 0.03 * stage
        validate(stage, block_size)
        for _ in range(num_updates):
            update += 1
            has_collapsed = collapse_at is not None and update >= collapse_at
            accuracy += -0.03 if has_collapsed else gain / total
            events += [
                train_event(rng, update, stage, block_size, number, accuracy, has_collapsed)
                for number in range(2)
            ]
            if has_collapsed and collapse_at == update:
                message = "kl 0.71 is above 0.5, 3 updates in a row"
                events.append(
                    {
                        "event": "guard",
                        "update_step": update,
                        "stage": stage,
                        "signal": "kl",
                        "message": message,
                        "action": "warn",
                        "time": {},
                    }
                )
            if update % evaluate_every == 0:
                validate(stage, block_size)
            if update % rollouts_every == 0:
                lines = [
                    json.dumps({**json.loads(response.to_json()), "reward": 1.0})
                    for response in (
                        make_response(rng, f"train-{i // 4}", bool(rng.random() < accuracy), block_size)
                        for i in range(num_rollouts)
                    )
                ]
                write_lines(path / "rollouts" / f"{update:06}.jsonl", lines)
    if is_ended:
        events.append({"event": "end", "update_step": update, "reason": None, "time": {}})
    write_lines(path / "metrics.jsonl", [json.dumps(event) for event in events])
    sizes = ", ".join(str(b) for b, _ in stages)
    (path / "config.yaml").write_text(
        f"model: models/tiny\ndata: chain:3\nseed: {seed}\ncurriculum:\n  block_sizes: [{sizes}]\n"
        "  learning_rate: 1.0e-6\nguard:\n  action: warn\n"
    )
    return path


def train_event(
    rng: np.random.Generator,
    update: int,
    stage: int,
    block_size: int,
    number: int,
    accuracy: float,
    has_collapsed: bool,
) -> dict[str, Any]:
    kl = 0.7 if has_collapsed else float(rng.lognormal(-6, 0.4))
    return {
        "event": "train",
        "update_step": update,
        "stage": stage,
        "block_size": block_size,
        "offset": number * block_size // 2,
        "pass": number,
        "reward_mean": accuracy + float(rng.normal(0, 0.02)),
        "accuracy": accuracy,
        "kl_old": kl,
        "ratio_mean": 1.0,
        "ratio_max": 1 + 40 * kl,
        "entropy": 0.5 * math.exp(-update / 80) + float(rng.normal(0, 0.01)),
        "grad_norm": float(rng.lognormal(-0.5, 0.2)) * (8 if has_collapsed else 1),
        "num_truncated": 4.0 + 20 * has_collapsed,
        "num_rollouts": 64.0,
        "tokens_per_forward": 2.2 + block_size / 20 + float(rng.normal(0, 0.03)),
        "local_strict": 0.88 + float(rng.normal(0, 0.01)),
        "response_length": 80 + float(rng.normal(0, 2)),
        "time": {"sample_seconds": 2.0, "train_seconds": 3.0},
    }


def make_world(path: Path) -> Path:
    """All that an experiment leaves behind: bases, direct runs, a curriculum, an AR model."""
    make_run(path / "tstar", [(4, 15), (8, 20), (16, 25)], start=0.55, gain=0.16, seed=1)
    make_run(path / "direct-b8", [(8, 30)], start=0.52, gain=0.05, seed=2)
    make_run(path / "direct-b16", [(16, 45)], start=0.48, gain=0.05, seed=3, collapse_at=38)
    evaluations = path / "eval"
    rows = [
        ("ar", Evaluated("AR", 1, 0.702, policy="one token a step", eagerness=0.0)),
        ("base-b4", Evaluated("base", 4, 0.614, eagerness=0.1)),
        ("base-b8", Evaluated("base", 8, 0.559, eagerness=0.2)),
        ("base-b16", Evaluated("base", 16, 0.524, eagerness=0.3)),
        ("tracerl-b8", Evaluated("TraceRL", 8, 0.602, eagerness=0.1)),
        ("tracerl-b16", Evaluated("TraceRL", 16, 0.544, eagerness=0.15)),
        ("tstar-b4", Evaluated("T*", 4, 0.625, eagerness=0.15)),
        ("tstar-b8", Evaluated("T*", 8, 0.634, eagerness=0.3)),
        ("tstar-b16", Evaluated("T*", 16, 0.598, eagerness=0.4)),
        ("gsm-base-b8", Evaluated("base", 8, 0.81, data="gsm8k")),
        ("gsm-tstar-b8", Evaluated("T*", 8, 0.824, data="gsm8k")),
        ("gsm-base-b16", Evaluated("base", 16, 0.794, data="gsm8k")),
        ("gsm-tstar-b16", Evaluated("T*", 16, 0.822, data="gsm8k")),
    ]
    for number, (name, how) in enumerate(rows):
        make_evaluation(evaluations / name, how, seed=number)
    for update, block_size, accuracy in ((15, 4, 0.62), (35, 8, 0.63), (60, 16, 0.6)):
        make_evaluation(
            path / "tstar" / "eval" / f"{update:06}-b{block_size}",
            Evaluated("T*", block_size, accuracy, update_step=update, data="math500"),
            seed=100 + update,
        )
    return path
