"""A small model that has learnt what a chain looks like, and short runs on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tstar.sft.options import SftOptions
from tstar.sft.training import SftRun

FORM = SftOptions(
    data="chain:1",
    block_sizes=(4, 8),
    hidden_size=32,
    num_layers=2,
    num_examples=200,
    num_validation=10,
    num_steps=150,
    batch_size=16,
    learning_rate=1e-2,
    warmup_steps=5,
    validate_every=1000,
    checkpoint_every=1000,
)
"""It writes chains with wrong results: right answers now and then, so there is something to learn."""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    run = SftRun.start(FORM, tmp_path_factory.mktemp("base") / "sft")
    assert run.train(lambda _: None)
    return run.model_directory
