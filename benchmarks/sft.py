"""How many tokens a second SFT trains on, and what share of this machine's matmul peak that is.

    python benchmarks/sft.py [--dtypes float32 bfloat16] [--block-sizes 4 32] [--rounds 4] [--threads 2]
    python benchmarks/sft.py --busy --threads 1           on a machine that others use too

A whole optimizer step of `tstar sft` on a model of 41.5M parameters (the one of benchmarks/model.py): masks
drawn, sequences packed to the token budget, forward and backward of every pack, gradients clipped, AdamW.
The examples have 64 prompt and 256 response tokens, so B = 4 and B = 32 give packs of the same size.

Share of peak = matmul FLOPs that the loss needs / seconds / the fastest square matmul of the same run. FLOPs
count visible (query, key) pairs alone and logits at masked positions alone; drawing, packing, clipping and
AdamW count as time, not as work. Times are the best of several rounds, in turns with the peak's. --busy
counts this process's own CPU seconds, and takes the mean of the matmuls that run between the steps in place
of the fastest: what the machine gave in those minutes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from model import SHAPES, Timing, forward_flops, matmul_timings
from tstar.model.config import ModelConfig
from tstar.model.transformer import LanguageModel
from tstar.optimizer import Optimizer, OptimizerConfig
from tstar.partition import PartitionRule
from tstar.process import keep_freed_memory
from tstar.sft.gradient import batch_loss, draw_sequences
from tstar.sft.objective import BlockDiffusion, Example, NextToken, Objective, pack_sequences

GOALS = {torch.float32: 0.68, torch.bfloat16: 0.50}
PROMPT, RESPONSE = 64, 256
MASK, EOS = 1, 2


@dataclass
class Steps:
    """Optimizer steps of one objective, always the same batch."""

    objective: Objective
    dtype: torch.dtype
    batch_size: int
    token_budget: int
    shape: dict[str, int] = field(default_factory=lambda: SHAPES["40m"])

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(ModelConfig("qwen3", **self.shape))
        self.model.initialise(torch.Generator().manual_seed(0))
        self.model = self.model.to(self.dtype)
        self.optimizer = Optimizer(
            self.model.named_parameters(), OptimizerConfig(learning_rate=1e-5, lr_schedule="constant")
        )
        ids = np.random.default_rng(0).integers(3, 30_000, size=(self.batch_size, PROMPT + RESPONSE))
        self.examples = [Example(row[:PROMPT], row[PROMPT:]) for row in ids]

    def step(self) -> None:
        sequences = draw_sequences(self.objective, self.examples, (0, 0))
        batch_loss(self.model, self.objective, sequences, self.token_budget)
        self.optimizer.step()

    def work(self) -> tuple[int, float]:
        """Tokens through the model and matmul FLOPs of a step."""
        packs = pack_sequences(draw_sequences(self.objective, self.examples, (0, 0)), self.token_budget)
        flops = [3 * forward_flops(self.shape, pack.layout, len(pack.read)) for pack in packs]
        return sum(len(pack.token_ids) for pack in packs), sum(flops)


def measure(title: str, steps: Steps, rounds: int, is_busy: bool) -> None:
    peaks = matmul_timings(steps.dtype, "cpu")
    num_tokens, flops = steps.work()
    ours = Timing("tstar", steps.step, flops)
    for timing in (*peaks, ours, ours):  # memory is mapped until the second step
        timing.clock = time.process_time if is_busy else time.perf_counter
        timing.run()
    matmuls = peaks * (10 if is_busy else 1)
    for _ in range(rounds):
        for timing in (*matmuls, ours, *matmuls):
            timing.take_turn()
    peak = max(
        timing.flops / float(np.mean(timing.turns)) if is_busy else timing.flops_per_second
        for timing in peaks
    )
    share = ours.flops_per_second / peak
    goal = GOALS[steps.dtype]
    print(
        f"{title:<24} {str(steps.dtype).removeprefix('torch.'):<9} {num_tokens:6d} tokens a step"
        f"  {num_tokens / ours.best:7,.0f} tokens/s  {share:4.0%} of peak ({peak / 1e9:3.0f} GFLOP/s)"
        f"  goal {goal:.0%} {'met' if share >= goal else 'MISSED'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[4, 32])
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="others use the machine too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    began = time.perf_counter()
    print(f"torch {torch.__version__}, {arguments.threads} threads")
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        objectives: dict[str, Objective] = {"next token": NextToken()}
        for block_size in arguments.block_sizes:
            rules = (PartitionRule(block_size),)
            objectives[f"block diffusion, B = {block_size}"] = BlockDiffusion(MASK, EOS, rules)
        for title, objective in objectives.items():
            steps = Steps(objective, dtype, arguments.batch_size, arguments.token_budget)
            measure(title, steps, arguments.rounds, arguments.busy)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
