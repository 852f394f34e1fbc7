"""Killed with SIGKILL at chosen points, in processes of its own, and resumed: the same run, bit for bit.

`python tests/experiment/crash.py CONFIG RUN --random 20 250 1` kills at random moments instead.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny_runs import assert_same_run, tiny_config
from tstar.config import to_yaml

POINTS = ("evaluate:2", "sample:9", "checkpoint:1", "step:1", "metrics:3", "stepped:2", "saved:1")


def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(base: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(tiny_config(base)))
    for name, points in (("whole", ()), ("killed", POINTS)):
        command = [
            sys.executable,
            str(Path(__file__).with_name("crash.py")),
            str(config),
            str(tmp_path / name),
        ]
        done = subprocess.run([*command, *points], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed").rglob("*.partial-*")), "what killed writers left is cleared"
