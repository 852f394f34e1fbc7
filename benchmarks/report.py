"""How long schedules and a report take.

    python benchmarks/report.py [--tokens 1000000] [--trajectories 100000]

First, everything that `tstar analyze` computes, over a million tokens in responses of 100 to 2000 tokens; the
goal is one second, without reading them from disk, which is measured beside it. Second, the page of a run
with 200 updates and 100 000 stored trajectories of 200 tokens; the goals are 20 seconds and 10 MB. All is in
seconds of this process's CPU time on one thread, since others may use the machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from tstar.partition import Partition
from tstar.report.content import build
from tstar.report.page import render
from tstar.schedule import DecodedResponse, analyze
from tstar.trajectory import ForwardCounts, Trajectory

NUM_UPDATES = 200


def make_response(
    generator: np.random.Generator, length: int, block_size: int, problem: int
) -> DecodedResponse:
    """Each block in a random order, up to a third of it at a step."""
    partition = Partition(20, length, block_size)
    steps, first = np.empty(length, dtype=np.int64), 0
    for block in partition.response_slices:
        drawn = generator.integers(0, max(block_size // 3, 1), size=block.stop - block.start)
        steps[block] = first + np.unique(drawn, return_inverse=True)[1]
        first = int(steps[block].max()) + 1
    trajectory = Trajectory(
        prompt_ids=generator.integers(0, 1000, 20),
        response_ids=generator.integers(0, 1000, length),
        unmask_step=steps,
        log_probs=-generator.exponential(size=length).astype(np.float32),
        stop_length=length,
        finish_reason="stop",
        partition=partition,
        forwards=ForwardCounts(first),
        weight_version=0,
        seed=0,
    )
    return DecodedResponse(trajectory, str(problem), bool(generator.random() < 0.5))


def measure_analysis(generator: np.random.Generator, num_tokens: int, length: int) -> str:
    responses = [make_response(generator, length, 8, i // 4) for i in range(num_tokens // length)]
    began = time.process_time()
    analyze(responses)
    analysed = time.process_time() - began
    lines = [response.to_json() for response in responses]
    began = time.process_time()
    for line in lines:
        DecodedResponse.from_json(line)
    read = time.process_time() - began
    return (
        f"{num_tokens:,} tokens in responses of {length:4}: {analysed:.2f} s, and {read:.2f} s to read them"
    )


def write_run(path: Path, generator: np.random.Generator, num_trajectories: int) -> None:
    (path / "rollouts").mkdir(parents=True)
    (path / "config.yaml").write_text("seed: 0\n")
    events: list[dict[str, object]] = [{"event": "stage", "update_step": 0, "stage": 0, "block_size": 8}]
    per_update = num_trajectories // NUM_UPDATES
    responses = [make_response(generator, 200, 8, i // 16) for i in range(per_update)]
    lines = "".join(f"{response.to_json()}\n" for response in responses)
    for update in range(1, NUM_UPDATES + 1):
        (path / "rollouts" / f"{update:06}.jsonl").write_text(lines)
        metrics = dict(
            zip(("reward_mean", "kl_old", "entropy", "grad_norm"), generator.random(4), strict=True)
        )
        events.append({"event": "train", "update_step": update, "block_size": 8, **metrics})
        if update % 5 == 0:
            events.append({"event": "validation", "update_step": update, "block_size": 8, "accuracy": 0.5})
    (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--trajectories", type=int, default=100_000)
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    for length in (100, 1000, 2000):
        print(measure_analysis(generator, arguments.tokens, length))
    with tempfile.TemporaryDirectory() as directory:
        write_run(Path(directory, "run"), generator, arguments.trajectories)
        began = time.process_time()
        page = render(build([Path(directory, "run")]))
        seconds = time.process_time() - began
    print(
        f"{NUM_UPDATES} updates, {arguments.trajectories:,} trajectories: "
        f"{seconds:.1f} s, {len(page.encode()) / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
