"""Runs of seconds on the chain task, and what they left behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tstar.config import RunConfig, read_config
from tstar.config.overrides import apply_override
from tstar.experiment import Watch, resume, start

SETTINGS: Mapping[str, Any] = {
    "data": {"source": "chain:1"},
    "curriculum": {"initial_block_size": 4, "target_block_size": 8, "updates_per_stage": 2},
    "rollout": {
        "num_problems": 4,
        "num_samples": 4,
        "max_tokens": 24,
        "policies": [{"kind": "static", "tokens_per_step": 2}],
    },
    "rewards": {"terms": [{"name": "chain_answer"}]},
    "trainer": {"optimizer": {"learning_rate": 1e-3}, "token_budget": 512},
    "validation": {"every": 1, "num_problems": 6},
    "guard": {"action": "warn"},
    "checkpoints": {"save_every": 1},
}


class CrashError(Exception):
    """Stands for whatever ends a run."""


def tiny_config(base: Path, *overrides: str) -> RunConfig:
    values = {**json.loads(json.dumps(SETTINGS)), "model": str(base)}
    for override in overrides:
        apply_override(values, override)
    return read_config(values).check()


def crash_at(number: int, event: str = "") -> Callable[..., None]:
    """Raise at the Nth event, of a kind if one is given."""
    seen = 0

    def on_event(name: str, *_: object) -> None:
        nonlocal seen
        seen += event in ("", name)
        if seen == number and event in ("", name):
            raise CrashError

    return on_event


def finish(directory: Path, config: RunConfig | None = None, watch: Watch | None = None) -> Any:
    """Begin the run, or go on with it."""
    return resume(directory, watch) if config is None else start(config, directory, watch)


def read_events(directory: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what the clock says."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in e.items() if k != "time"} for e in lines if not kinds or e["event"] in kinds]


def digests(directory: Path) -> dict[str, str]:
    """Of every weight, optimizer state, rollout and response that a run holds."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.suffix in (".safetensors", ".gz") or path.name == "responses.jsonl"
    }


def assert_same_run(one: Path, other: Path) -> None:
    assert read_events(one) == read_events(other)
    assert digests(one) == digests(other)
