"""How much of this CPU's matmul peak a forward and a training step reach, beside transformers.

    python benchmarks/model.py [--tokens 512 2048] [--rounds 5] [--threads N]

One model (hidden 512, 8 layers, vocabulary 32k, 41.5M parameters, the same weights in both), one causal
sequence: what transformers is best at. "forward" gives the logits of every position, "forward+backward"
the gradients of the mean cross-entropy. A second table packs [clean | noisy] block-diffusion sequences,
which transformers can only be given as a dense 4-D mask.

Share of peak = matmul FLOPs that the result needs / seconds / the fastest square matmul of the same run.
FLOPs count the visible (query, key) pairs alone; recomputation counts as time, not as work. Times are the
best of several rounds in which peak, tstar and transformers take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import transformers

from tstar.model.attention import prepare
from tstar.model.config import ModelConfig
from tstar.model.head import target_log_probs
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition
from tstar.process import keep_freed_memory

SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
GOALS = {  # share of peak that tstar should reach on the causal sequence
    (torch.float32, "forward"): 0.78,
    (torch.float32, "forward+backward"): 0.74,
    (torch.bfloat16, "forward"): 0.60,
    (torch.bfloat16, "forward+backward"): 0.55,
}


@dataclass
class Timing:
    """The best time of one piece of work, taken in turns with others."""

    name: str
    run: Callable[[], object]
    flops: float
    best: float = field(default=float("inf"))

    def take_turn(self) -> None:
        start = time.perf_counter()
        self.run()
        self.best = min(self.best, time.perf_counter() - start)

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.best


def matmul_timings(dtype: torch.dtype) -> list[Timing]:
    timings = []
    for size in (1024, 2048):
        left, right = torch.randn(2, size, size).to(dtype)
        timings.append(Timing(f"matmul {size}", lambda a=left, b=right: a @ b, 2.0 * size**3))
    return timings


def forward_flops(layout: PackedLayout, num_logits: int) -> float:
    hidden, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    kv_heads = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    per_token = hidden * (2 * heads + 2 * kv_heads + 3 * SHAPE["intermediate_size"])
    attention = 2 * layout.num_visible_pairs * heads
    body = SHAPE["num_hidden_layers"] * (layout.num_tokens * per_token + attention)
    return 2.0 * (body + num_logits * hidden * SHAPE["vocab_size"])


@dataclass(frozen=True)
class Case:
    title: str
    layout: PackedLayout
    is_causal: bool
    """transformers may use its causal path instead of a dense mask."""


def causal_case(num_tokens: int) -> Case:
    return Case(f"causal, 1 x {num_tokens}", PackedLayout.causal([num_tokens]), True)


def diffusion_case(num_tokens: int, block_size: int) -> Case:
    """Sequences of 64 prompt and 128 response tokens, each as [clean | noisy]: 320 tokens."""
    partition = Partition(prompt_length=64, response_length=128, block_size=block_size)
    layout = PackedLayout.clean_and_noisy([partition] * max(1, num_tokens // 320))
    return Case(f"[clean | noisy], B = {block_size}, {layout.num_tokens} tokens", layout, False)


def model_timings(case: Case, dtype: torch.dtype) -> dict[str, tuple[Timing, Timing]]:
    """(tstar's, transformers') timing of each kind of work."""
    torch.manual_seed(0)
    peer = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)).to(dtype)
    with torch.device("meta"):
        ours = LanguageModel(ModelConfig("qwen3", **SHAPE))
    ours.load_state_dict(peer.state_dict(), assign=True, strict=False)  # one set of weights
    layout, num_tokens = case.layout, case.layout.num_tokens
    token_ids = torch.randint(SHAPE["vocab_size"], (num_tokens,))
    targets = torch.randint(SHAPE["vocab_size"], (num_tokens,))
    peer_inputs = {"input_ids": token_ids[None], "use_cache": False}
    if not case.is_causal:
        hidden = torch.zeros(num_tokens, num_tokens, dtype=dtype)
        hidden.masked_fill_(~torch.from_numpy(layout.dense_mask()), torch.finfo(dtype).min)
        peer_inputs |= {
            "attention_mask": hidden[None, None],
            "position_ids": torch.from_numpy(layout.positions)[None],
        }

    def ours_forward() -> None:
        with torch.no_grad():
            ours.logits(ours(token_ids, prepare(layout)))

    def peer_forward() -> None:
        with torch.no_grad():
            peer(**peer_inputs)

    def ours_training() -> None:
        log_probs = target_log_probs(ours(token_ids, prepare(layout)), ours.output_weight, targets)
        (-log_probs.mean()).backward()
        ours.zero_grad()

    def peer_training() -> None:
        F.cross_entropy(peer(**peer_inputs).logits[0].float(), targets).backward()
        peer.zero_grad()

    flops = forward_flops(layout, num_tokens)
    return {
        "forward": (
            Timing("tstar", ours_forward, flops),
            Timing("transformers", peer_forward, flops),
        ),
        "forward+backward": (
            Timing("tstar", ours_training, 3 * flops),
            Timing("transformers", peer_training, 3 * flops),
        ),
    }


def measure(case: Case, dtype: torch.dtype, rounds: int) -> None:
    peaks = matmul_timings(dtype)
    for work, pair in model_timings(case, dtype).items():
        for _ in range(rounds):
            for timing in (*peaks, *pair, *peaks):
                timing.take_turn()
        peak = max(timing.flops_per_second for timing in peaks)
        ours, peer = (timing.flops_per_second / peak for timing in pair)
        goal = GOALS.get((dtype, work)) if case.is_causal else None
        verdict = "" if goal is None else f"  goal {goal:.0%} {'met' if ours >= goal else 'MISSED'}"
        print(
            f"{case.title:<38} {str(dtype).removeprefix('torch.'):<9} {work:<17}"
            f" tstar {ours:4.0%}  transformers {peer:4.0%}  speed-up {ours / peer:4.2f}x"
            f"  (peak {peak / 1e9:3.0f} GFLOP/s){verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[4, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # for both: they share the process
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads")
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens in arguments.tokens:
            cases = [causal_case(num_tokens)]
            cases += [diffusion_case(num_tokens, block_size) for block_size in arguments.block_sizes]
            for case in cases:
                measure(case, dtype, arguments.rounds)


if __name__ == "__main__":
    main()
