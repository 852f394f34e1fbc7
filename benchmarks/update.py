"""One TraceRL update beside the replicated-rows method of public code: time, memory, share of matmul peak.

    python benchmarks/update.py [--dtypes float32] [--block-sizes 4 8 16 32] [--rounds 2] [--threads N]
    python benchmarks/update.py --growth            how cost grows with L, B and steps per block
    python benchmarks/update.py --device cuda --shape 1.7b --dtypes bfloat16

One model (by default 51M parameters, vocabulary 32k); responses of 200 tokens on average and 512 at most,
three to a prompt, decoded with about four tokens a step (one to seven): as many as make some ten thousand
tokens to replay. Both methods do one update: forward, backward, AdamW.

- replicated rows: for each response as many rows as the most steps that one of its blocks took. Row r is
  [prompt | clean | noisy], each padded to the batch's longest, with every block as it stood before its r-th
  step; a dense mask, logits of every position. On transformers' Qwen3, one row a forward.
- tstar: `Trainer.update`, whose packs hold each clean text once and the noisy copies that were decoded from.

Both compute the same gradient; with --all-rows its norms are compared. By default a few rows are timed and
multiplied: all are padded to the same length and cost the same. Share of peak = matmul FLOPs that exact
replay needs (its tokens, log-probs at actions alone, in the last layer nothing behind the keys for tokens
that nobody reads) / seconds / the fastest square matmul of the same run. Times are the best of several
rounds in which peak, tstar and the rows take turns. On a machine that others use too, `--busy --threads 1`
counts this process's own CPU seconds, and takes the mean of the matmuls that run between the pieces of
work in place of the fastest: what the machine gave in those minutes. Memory is the highest resident size
of a process of its own during one update, above weights, optimizer state and what a first small update
left behind; malloc returns what is freed at once there, so that it is what tensors take and no more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from model import SHAPES, Timing, matmul_timings
from tstar.loss import TraceLossConfig
from tstar.model.config import ModelConfig
from tstar.model.transformer import LanguageModel
from tstar.optimizer import OptimizerConfig
from tstar.partition import PartitionRule
from tstar.process import keep_freed_memory
from tstar.replay import replay
from tstar.trainer import Rollout, Trainer, TrainerConfig
from tstar.trajectory import ForwardCounts, Trajectory

LENGTHS = (512, 272, 176, 120, 80, 40)
GOALS = {torch.float32: 0.65, torch.bfloat16: 0.45}
"""Share of peak on a CPU. Against the rows: at least 4x as fast, at most 1/3 of the memory."""
LEARNING_RATE = 1e-6


def shape_of(name: str) -> dict[str, Any]:
    shapes = {**SHAPES, "50m": {**SHAPES["40m"], "num_hidden_layers": 11}}
    return {**shapes[name], "vocab_size": shapes[name]["vocab_size"] + 1}  # the mask token


# -- what is replayed ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Responses to be replayed under the blocks they were decoded with."""

    block_size: int
    lengths: tuple[int, ...] = LENGTHS
    tokens_per_step: float = 4.0
    """On average: a step finalises between 1 and so many that this is the mean."""

    @property
    def rule(self) -> PartitionRule:
        return PartitionRule(self.block_size)

    def rollouts(self, vocab_size: int) -> list[Rollout]:
        """Groups of responses to prompts, right and wrong ones alike."""
        rng = np.random.default_rng(0)
        size = len(self.lengths) // 2 if len(self.lengths) < 6 else 3
        prompts = [
            rng.integers(vocab_size - 1, size=48 + 16 * (n % 2)) for n in range(len(self.lengths) // size)
        ]
        out = []
        for number, length in enumerate(self.lengths):
            group = number // size
            trajectory = self._draw(rng, prompts[group], length, vocab_size)
            out.append(Rollout(trajectory, float(number % 2), group, is_correct=number % 2 == 1))
        return out

    def _draw(self, rng: np.random.Generator, prompt: np.ndarray, length: int, vocab_size: int) -> Trajectory:
        padded = -(-length // self.block_size) * self.block_size
        partition = self.rule.cut(len(prompt), padded)
        steps, step = np.empty(padded, dtype=np.int64), 0
        for block in partition.response_slices:
            left = rng.permutation(np.arange(block.start, block.stop))
            while len(left):
                num = int(rng.integers(1, round(2 * self.tokens_per_step)))
                steps[left[:num]] = step
                left, step = left[num:], step + 1
        return Trajectory(
            prompt_ids=prompt,
            response_ids=rng.integers(vocab_size - 1, size=padded),
            unmask_step=steps,
            log_probs=np.full(padded, -1.0, dtype=np.float32),
            stop_length=length,
            finish_reason="stop",
            partition=partition,
            forwards=ForwardCounts(denoise=step),
            weight_version=0,
            seed=0,
        )


def needed_flops(
    shape: dict[str, Any], rollouts: Sequence[Rollout], rule: PartitionRule
) -> tuple[int, float]:
    """Tokens and matmul FLOPs, forward and backward, that the exact replay of all needs."""
    trajectories = [r.trajectory for r in rollouts]
    (pack,) = replay(trajectories, rule, shape["vocab_size"] - 1, token_budget=10**9)
    layout, read = pack.layout, pack.actions.read
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv_heads = shape["num_key_value_heads"] * shape["head_dim"]
    mlp = 3 * hidden * shape["intermediate_size"]
    keys_per_row = (layout.row_ranges[..., 1] - layout.row_ranges[..., 0]).sum(axis=1)
    keys = np.repeat(keys_per_row, np.diff(layout.row_starts))

    def layer(num_queries: int, num_pairs: int) -> float:
        keys_and_values = layout.num_tokens * hidden * 2 * kv_heads
        return keys_and_values + num_queries * (2 * hidden * heads + mlp) + 2 * num_pairs * heads

    body = (shape["num_hidden_layers"] - 1) * layer(layout.num_tokens, int(keys.sum()))
    body += layer(len(read), int(keys[read].sum()))
    return layout.num_tokens, 3 * 2.0 * (body + len(read) * hidden * shape["vocab_size"])


# -- the two methods ----------------------------------------------------------------------------


class ReplicatedRows:
    """The public method, written down straightforwardly."""

    def __init__(self, shape: dict[str, Any], dtype: torch.dtype, device: str, rows_per_forward: int) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.mask_token = shape["vocab_size"] - 1
        self.rows_per_forward = rows_per_forward
        self.num_rows = 0
        self.grad_norm = 0.0

    def update(self, rollouts: Sequence[Rollout], rule: PartitionRule, max_rows: int | None = None) -> None:
        rows = list(self._rows(rollouts, rule))
        self.num_rows, rows = len(rows), rows[:max_rows]
        for first in range(0, len(rows), self.rows_per_forward):
            self._forward_backward(rows[first : first + self.rows_per_forward], len(rollouts))
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _rows(self, rollouts: Sequence[Rollout], rule: PartitionRule) -> Iterator[dict[str, np.ndarray]]:
        """[prompt | clean | noisy], each padded to the batch's longest; -1 as a block is padding."""
        prompt_length = max(len(r.trajectory.prompt_ids) for r in rollouts)
        length = max(len(r.trajectory.response_ids) for r in rollouts)
        for rollout in rollouts:
            t = rollout.trajectory
            partition = rule.cut(len(t.prompt_ids), len(t.response_ids))
            size = len(t.response_ids)
            rank = np.empty(size, dtype=np.int64)
            for block in partition.response_slices:
                rank[block] = np.unique(t.unmask_step[block], return_inverse=True)[1].reshape(-1)
            acts = np.arange(size) < t.stop_length
            others = [r.reward for r in rollouts if r.group == rollout.group]
            advantage = (rollout.reward - np.mean(others)) / np.std(others)
            sizes = np.bincount(t.unmask_step[acts])
            for round_ in range(int(rank[acts].max()) + 1):
                noisy = np.where(rank < round_, t.response_ids, self.mask_token)
                own = acts & (rank == round_)
                row = {
                    "ids": (t.prompt_ids, t.response_ids, noisy),
                    "positions": (
                        np.arange(len(t.prompt_ids)),
                        *[np.arange(len(t.prompt_ids), len(t.prompt_ids) + size)] * 2,
                    ),
                    "blocks": (
                        partition.block_ids[: len(t.prompt_ids)],
                        *[partition.block_ids[len(t.prompt_ids) :]] * 2,
                    ),
                }
                filled = {
                    name: np.concatenate(
                        [
                            np.pad(part, (0, n - len(part)), constant_values=-1 if name == "blocks" else 0)
                            for part, n in zip(parts, (prompt_length, length, length), strict=True)
                        ]
                    )
                    for name, parts in row.items()
                }
                filled["labels"] = np.pad(t.response_ids, (0, length - size))
                weight = np.where(
                    own, advantage / sizes[t.unmask_step.clip(max=len(sizes) - 1)].clip(min=1), 0.0
                )
                yield {**filled, "weights": np.pad(weight, (0, length - size))}

    def _forward_backward(self, rows: Sequence[dict[str, np.ndarray]], num_responses: int) -> None:
        device, dtype = self.model.device, self.model.dtype
        batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])).to(device) for name in rows[0]}
        length = batch["labels"].shape[1]
        blocks = batch["blocks"]
        is_noisy = torch.arange(blocks.shape[1], device=device) >= blocks.shape[1] - length
        query, key = blocks[:, :, None], blocks[:, None, :]
        sees_clean = ~is_noisy & (torch.where(is_noisy[:, None], query > key, query >= key))
        visible = (key >= 0) & (sees_clean | (is_noisy[:, None] & is_noisy & (query == key)))
        visible |= (query < 0) & (key == blocks[:, :1, None])  # padding has to see something
        bias = torch.zeros(visible.shape, dtype=dtype, device=device)
        bias.masked_fill_(~visible, torch.finfo(dtype).min)
        logits = self.model(
            input_ids=batch["ids"],
            attention_mask=bias[:, None],
            position_ids=batch["positions"],
            use_cache=False,
        ).logits[:, -length:]
        logits[..., self.mask_token] = -torch.inf
        log_probs = torch.log_softmax(logits.float(), dim=-1).gather(2, batch["labels"][..., None])[..., 0]
        ratio = (log_probs - log_probs.detach()).exp()
        (-(ratio * batch["weights"]).sum() / num_responses).backward()


class ExactReplay:
    """tstar's own update."""

    def __init__(
        self,
        shape: dict[str, Any],
        dtype: torch.dtype,
        device: str,
        token_budget: int,
        recompute_activations: bool = False,
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            peer = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).to(dtype)
        with torch.device("meta"):
            model = LanguageModel(ModelConfig("sdar", **shape, mask_token_id=shape["vocab_size"] - 1))
        model.load_state_dict(peer.state_dict(), assign=True, strict=False)
        model.requires_grad_(True)
        config = TrainerConfig(
            OptimizerConfig(learning_rate=LEARNING_RATE),
            TraceLossConfig(kl_beta=0.0),
            token_budget=token_budget,
            recompute_activations=recompute_activations,
        )
        self.trainer = Trainer(model, config)
        self.grad_norm = 0.0
        self.num_tokens = 0

    def update(self, rollouts: Sequence[Rollout], rule: PartitionRule) -> None:
        metrics = self.trainer.update(rollouts, rule)
        self.grad_norm = metrics.summary()["grad_norm"]
        self.num_tokens = metrics.num_tokens


Method = ReplicatedRows | ExactReplay


def build(name: str, options: argparse.Namespace, dtype: torch.dtype) -> Method:
    shape = shape_of(options.shape)
    if name == "rows":
        return ReplicatedRows(shape, dtype, options.device, options.rows_per_forward)
    return ExactReplay(shape, dtype, options.device, options.token_budget, options.recompute)


# -- memory -------------------------------------------------------------------------------------


def peak_bytes(name: str, options: argparse.Namespace, dtype: torch.dtype, workload: Workload) -> int:
    """Of one update in this process, above what it holds before. Every row of the rows is as long as any
    other: a few show the peak."""
    torch.set_num_threads(options.threads)
    return_freed_memory()
    vocab_size = shape_of(options.shape)["vocab_size"]
    method, rollouts = build(name, options, dtype), workload.rollouts(vocab_size)
    method.update(Workload(workload.block_size, (8, 8, 8, 8)).rollouts(vocab_size), workload.rule)
    gc.collect()

    def run() -> None:
        if isinstance(method, ReplicatedRows):
            method.update(rollouts, workload.rule, max_rows=2 * options.rows_per_forward)
        else:
            method.update(rollouts, workload.rule)

    if options.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size starts anew
    before = resident_bytes("VmRSS")
    run()
    return resident_bytes("VmHWM") - before


def return_freed_memory() -> None:
    """Every block of 256 KiB or more by mmap, and given back when it is freed (glibc's M_MMAP_THRESHOLD)."""
    ctypes.CDLL(None).mallopt(-3, 1 << 18)


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_bytes_of_a_process(*arguments: Any) -> int:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_bytes, *arguments).result()


# -- the tables ---------------------------------------------------------------------------------


def compare_times(options: argparse.Namespace, dtype: torch.dtype, workload: Workload) -> str:
    shape = shape_of(options.shape)
    rollouts, rule = workload.rollouts(shape["vocab_size"]), workload.rule
    num_needed, flops = needed_flops(shape, rollouts, rule)
    exact, rows = build("exact", options, dtype), build("rows", options, dtype)
    assert isinstance(rows, ReplicatedRows)
    max_rows = None if options.all_rows else 2 * options.rows_per_forward
    peaks = matmul_timings(dtype, options.device)
    ours = Timing("tstar", lambda: exact.update(rollouts, rule), flops)
    public = Timing("rows", lambda: rows.update(rollouts, rule, max_rows), flops)
    for timing in (*peaks, ours, public):
        timing.clock = clock_of(options)
    small = Workload(workload.block_size, (8, 8, 8, 8)).rollouts(shape["vocab_size"])
    for method in (exact, rows):
        method.update(small, rule)
    for timing in peaks:
        timing.take_turn()
        timing.turns.clear()
    for round_ in range(options.rounds):
        matmuls = peaks * (10 if options.busy else 1)
        for timing in (*matmuls, ours, *matmuls, *([public] if round_ == 0 or not options.all_rows else [])):
            timing.take_turn()
        if round_ == 0:
            norms = f"  gradient norms {exact.grad_norm:.5f} {rows.grad_norm:.5f}" if options.all_rows else ""
    peak = max(
        timing.flops / np.mean(timing.turns) if options.busy else timing.flops_per_second for timing in peaks
    )
    seconds = public.best * (rows.num_rows / (max_rows or rows.num_rows))
    share, speed_up, goal = ours.flops_per_second / peak, seconds / ours.best, GOALS[dtype]
    return (
        f" {num_needed:6d} tokens needed  tstar {ours.best:6.2f} s = {share:4.0%} of peak"
        f" {peak / 1e9:3.0f} GFLOP/s (goal {goal:.0%} {verdict(share >= goal)})"
        f"  {rows.num_rows} rows {seconds:6.1f} s: {speed_up:5.1f}x (goal 4x {verdict(speed_up >= 4)}){norms}"
    )


def compare_memory(options: argparse.Namespace, dtype: torch.dtype, workload: Workload) -> str:
    exact, rows = (peak_bytes_of_a_process(name, options, dtype, workload) for name in ("exact", "rows"))
    return (
        f"  memory {exact / 1e6:5.0f} / {rows / 1e6:5.0f} MB = {exact / rows:4.2f}"
        f" (goal 0.33 {verdict(exact <= rows / 3)})"
    )


def clock_of(options: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if options.busy else time.perf_counter


def verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def show_growth(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Seconds of one update as L, B and steps per block grow, the others held."""
    shape = shape_of(options.shape)
    exact = build("exact", options, dtype)
    assert isinstance(exact, ExactReplay)

    def measure(title: str, workload: Workload) -> None:
        rollouts = workload.rollouts(shape["vocab_size"])
        exact.update(rollouts, workload.rule)
        best = float("inf")
        for _ in range(options.rounds):
            clock = clock_of(options)
            start = clock()
            exact.update(rollouts, workload.rule)
            best = min(best, clock() - start)
        num_needed, _ = needed_flops(shape, rollouts, workload.rule)
        num_actions = sum(workload.lengths)
        print(
            f"{title:<48} {num_needed:6d} tokens needed, {exact.num_tokens:6d} computed"
            f"  {best:6.2f} s  {1e3 * best / num_actions:6.2f} ms per response token",
            flush=True,
        )

    print("cost with L (B = 16, 4 tokens a step)")
    for length in (64, 128, 256, 512):
        measure(f"  L = {length}", Workload(16, (length, length)))
    print("cost with B (L = 256, 4 tokens a step)")
    for block_size in (4, 8, 16, 32, 64):
        measure(f"  B = {block_size}", Workload(block_size, (256, 256)))
    print("cost with steps per block (L = 256, B = 16)")
    for tokens_per_step in (16, 8, 4, 2, 1):
        workload = Workload(16, (256, 256), tokens_per_step)
        steps = sum(r.trajectory.num_steps for r in workload.rollouts(shape["vocab_size"])) / 32
        measure(f"  {steps:4.1f} steps per block", workload)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="50m")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--recompute", action="store_true", help="tstar recomputes activations")
    parser.add_argument("--rows-per-forward", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="others use the machine too")
    parser.add_argument("--all-rows", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--measure", nargs="+", choices=["time", "memory"], default=["time", "memory"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # for both: they share the process
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} threads")
    for dtype in (getattr(torch, name) for name in options.dtypes):
        if options.growth:
            show_growth(options, dtype)
            continue
        for block_size in options.block_sizes:
            workload = Workload(block_size, LENGTHS * max(1, 16 // block_size))
            title = f"B = {block_size:<3} {str(dtype).removeprefix('torch.'):<9}"
            columns = [compare_times] * ("time" in options.measure)
            columns += [compare_memory] * ("memory" in options.measure)
            print(title + "".join(column(options, dtype, workload) for column in columns), flush=True)


if __name__ == "__main__":
    main()
