"""What the engine hands the trainer: one decoded response, with the step at which each token was finalised.

It is the contract between the two and the only thing that passes. Ids never travel through text, tokens
after the stop stay (earlier steps attended to them), and a trajectory that contradicts itself is refused
by field and index before anybody trains on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int64

from tstar.partition import Partition

FORMAT_VERSION = 1

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ForwardCounts:
    """Model forwards that one request took part in, by what they were for."""

    denoise: int
    """Denoising steps: what tokens per forward divides by."""
    commit: int = 0
    """Extra forwards that only wrote clean keys and values."""
    prefill: int = 0
    """Extra forwards that only read the prompt."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One response as it was decoded (the paper's τ)."""

    prompt_ids: Int64[np.ndarray, " prompt"]
    response_ids: Int64[np.ndarray, " response"]
    """Every token up to the end of the terminal block, those after the stop included."""
    unmask_step: Int64[np.ndarray, " response"]
    """The step at which each token was finalised, counted through the whole response: τ(t) is
    ``unmask_step == t``."""
    log_probs: Float32[np.ndarray, " response"]
    """Each token's log-prob at its own step: temperature-scaled, without the mask token, before
    top-k/top-p."""
    stop_length: int
    """Tokens up to and including the stop."""
    finish_reason: FinishReason
    partition: Partition
    forwards: ForwardCounts
    weight_version: int
    seed: int
    temperature: float = 1.0
    """What the logits were divided by before ``log_probs`` were read; replay reads them the same way."""

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_steps()
        self._check_values()

    @property
    def num_steps(self) -> int:
        """T."""
        return int(self.unmask_step.max()) + 1

    @property
    def tokens_per_forward(self) -> float:
        """Response tokens up to the stop / denoising forwards (TPF)."""
        return self.stop_length / self.forwards.denoise

    # -- checks --------------------------------------------------------------------------------

    def _check_lengths(self) -> None:
        if len(self.response_ids) == 0:
            raise ValueError("response_ids: empty; a trajectory has at least one token")
        for name in ("unmask_step", "log_probs"):
            if len(getattr(self, name)) != len(self.response_ids):
                raise ValueError(
                    f"{name}: {len(getattr(self, name))} entries for {len(self.response_ids)} response_ids"
                )
        for name, ids in (("prompt_length", self.prompt_ids), ("response_length", self.response_ids)):
            if getattr(self.partition, name) != len(ids):
                raise ValueError(
                    f"partition.{name}: {getattr(self.partition, name)} where there are {len(ids)} tokens"
                )
        if not 1 <= self.stop_length <= len(self.response_ids):
            raise ValueError(
                f"stop_length: {self.stop_length} is not within 1 to {len(self.response_ids)} response tokens"
            )

    def _check_steps(self) -> None:
        if (self.unmask_step < 0).any():
            raise ValueError(f"unmask_step[{_first(self.unmask_step < 0)}]: never unmasked")
        counts = np.bincount(self.unmask_step)
        if (counts == 0).any():
            raise ValueError(f"unmask_step: no token has step {_first(counts == 0)} of {len(counts)}")
        bounds = self.partition.boundaries[self.partition.num_prompt_blocks :] - len(self.prompt_ids)
        starts = np.maximum(bounds[:-1], 0)
        latest = np.maximum.accumulate(np.maximum.reduceat(self.unmask_step, starts))[:-1]
        is_early = np.minimum.reduceat(self.unmask_step, starts)[1:] <= latest
        if is_early.any():
            number = _first(is_early)
            start = int(starts[number + 1])
            index = start + _first(self.unmask_step[start:] <= latest[number])
            raise ValueError(
                f"unmask_step[{index}]: step {self.unmask_step[index]} is not after step {latest[number]}, "
                "the last of the block before"
            )
        if self.forwards.denoise != self.num_steps:
            raise ValueError(
                f"forwards.denoise: {self.forwards.denoise} where unmask_step has {self.num_steps} steps"
            )

    def _check_values(self) -> None:
        for name in ("prompt_ids", "response_ids"):
            is_wrong = getattr(self, name) < 0
            if is_wrong.any():
                raise ValueError(
                    f"{name}[{_first(is_wrong)}]: {getattr(self, name)[_first(is_wrong)]} is no id"
                )
        is_wrong = ~np.isfinite(self.log_probs) | (self.log_probs > 1e-5)  # rounding may pass 0
        if is_wrong.any():
            index = _first(is_wrong)
            raise ValueError(f"log_probs[{index}]: {self.log_probs[index]} is no log-probability")
        if self.finish_reason not in ("stop", "length"):
            raise ValueError(f"finish_reason: {self.finish_reason!r} is unknown; use 'stop' or 'length'")
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                f"temperature: {self.temperature} divides no logits; greedy decoding records 1.0"
            )

    # -- JSON ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line; `from_json` gives the same trajectory back, bit for bit."""
        record = {
            "version": FORMAT_VERSION,
            "prompt_ids": self.prompt_ids.tolist(),
            "response_ids": self.response_ids.tolist(),
            "unmask_step": self.unmask_step.tolist(),
            "log_probs": [float(str(p)) for p in self.log_probs],  # shortest digits that read back equal
            "stop_length": self.stop_length,
            "finish_reason": self.finish_reason,
            "partition": asdict(self.partition),
            "forwards": asdict(self.forwards),
            "weight_version": self.weight_version,
            "seed": self.seed,
            "temperature": self.temperature,
        }
        return json.dumps(record, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Trajectory:
        return cls.from_record(json.loads(line))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """What `from_json` does once the line is read; keys that are not ours are ignored."""
        if record.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"version: {record.get('version')!r} is not this program's {FORMAT_VERSION}; "
                "write the trajectories again with it"
            )
        return cls(
            prompt_ids=np.array(record["prompt_ids"], dtype=np.int64),
            response_ids=np.array(record["response_ids"], dtype=np.int64),
            unmask_step=np.array(record["unmask_step"], dtype=np.int64),
            log_probs=np.array(record["log_probs"], dtype=np.float32),
            stop_length=record["stop_length"],
            finish_reason=record["finish_reason"],
            partition=Partition(**record["partition"]),
            forwards=ForwardCounts(**record["forwards"]),
            weight_version=record["weight_version"],
            seed=record["seed"],
            temperature=record["temperature"],
        )


def _first(is_wrong: np.ndarray) -> int:
    return int(np.flatnonzero(is_wrong)[0])
