"""How much of this machine's matmul peak a forward and a training step reach, beside transformers.

    python benchmarks/model.py [--tokens 512 2048] [--rounds 5] [--threads N]
    python benchmarks/model.py --device cuda --shape 1.7b --tokens 4096 16384 --dtypes bfloat16

One model (by default hidden 512, 8 layers, vocabulary 32k, 41.5M parameters; the same weights in both), one
causal sequence: what transformers is best at. "forward" gives the logits of every position,
"forward+backward" the gradients of the mean cross-entropy. A second table packs [clean | noisy]
block-diffusion sequences, which transformers can only be given as a dense 4-D mask.

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

SHAPES = {
    "40m": {
        "vocab_size": 32_000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "1.7b": {  # SDAR-1.7B, Qwen3-1.7B
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
GOALS = {  # share of peak that tstar should reach on the causal sequence, on a CPU
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
    clock: Callable[[], float] = time.perf_counter
    turns: list[float] = field(default_factory=list)
    """Seconds of each turn."""

    def take_turn(self) -> None:
        start = self.clock()
        self.run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.turns.append(self.clock() - start)
        self.best = min(self.turns)

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.best


def matmul_timings(dtype: torch.dtype, device: str) -> list[Timing]:
    timings = []
    for size in (1024, 2048) if device == "cpu" else (4096, 8192):
        left, right = torch.randn(2, size, size, device=device).to(dtype)
        timings.append(Timing(f"matmul {size}", lambda a=left, b=right: a @ b, 2.0 * size**3))
    return timings


def forward_flops(shape: dict[str, int], layout: PackedLayout, num_logits: int) -> float:
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv_heads = shape["num_key_value_heads"] * shape["head_dim"]
    per_token = hidden * (2 * heads + 2 * kv_heads + 3 * shape["intermediate_size"])
    attention = 2 * layout.num_visible_pairs * heads
    body = shape["num_hidden_layers"] * (layout.num_tokens * per_token + attention)
    return 2.0 * (body + num_logits * hidden * shape["vocab_size"])


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


def model_timings(
    shape: dict[str, int], case: Case, dtype: torch.dtype, device: str
) -> dict[str, tuple[Timing, Timing]]:
    """(tstar's, transformers') timing of each kind of work."""
    torch.manual_seed(0)
    with torch.device(device):
        peer = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).to(dtype)
    with torch.device("meta"):
        ours = LanguageModel(ModelConfig("qwen3", **shape))
    ours.load_state_dict(peer.state_dict(), assign=True, strict=False)  # one set of weights
    layout, num_tokens = case.layout, case.layout.num_tokens
    token_ids = torch.randint(shape["vocab_size"], (num_tokens,), device=device)
    targets = torch.randint(shape["vocab_size"], (num_tokens,), device=device)
    peer_inputs = {"input_ids": token_ids[None], "use_cache": False}
    if not case.is_causal:
        hidden = torch.zeros(num_tokens, num_tokens, dtype=dtype, device=device)
        hidden.masked_fill_(~torch.from_numpy(layout.dense_mask()).to(device), torch.finfo(dtype).min)
        peer_inputs |= {
            "attention_mask": hidden[None, None],
            "position_ids": torch.from_numpy(layout.positions)[None].to(device),
        }

    def ours_forward() -> None:
        with torch.no_grad():
            ours.logits(ours(token_ids, prepare(layout, device)))

    def peer_forward() -> None:
        with torch.no_grad():
            peer(**peer_inputs)

    def ours_training() -> None:
        log_probs = target_log_probs(ours(token_ids, prepare(layout, device)), ours.output_weight, targets)
        (-log_probs.mean()).backward()
        ours.zero_grad()

    def peer_training() -> None:
        F.cross_entropy(peer(**peer_inputs).logits[0].float(), targets).backward()
        peer.zero_grad()

    flops = forward_flops(shape, layout, num_tokens)
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


def measure(shape: dict[str, int], case: Case, dtype: torch.dtype, device: str, rounds: int) -> None:
    peaks = matmul_timings(dtype, device)
    for work, pair in model_timings(shape, case, dtype, device).items():
        for timing in (*peaks, *pair):
            timing.run()  # kernels are chosen, compiled and loaded
        for _ in range(rounds):
            for timing in (*peaks, *pair, *peaks):
                timing.take_turn()
        peak = max(timing.flops_per_second for timing in peaks)
        ours, peer = (timing.flops_per_second / peak for timing in pair)
        goal = GOALS.get((dtype, work)) if case.is_causal and device == "cpu" else None
        verdict = "" if goal is None else f"  goal {goal:.0%} {'met' if ours >= goal else 'MISSED'}"
        print(
            f"{case.title:<38} {str(dtype).removeprefix('torch.'):<9} {work:<17}"
            f" tstar {ours:4.0%}  transformers {peer:4.0%}  speed-up {ours / peer:4.2f}x"
            f"  (peak {peak / 1e9:3.0f} GFLOP/s){verdict}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="40m")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[4, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # for both: they share the process
    device, shape = arguments.device, SHAPES[arguments.shape]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads")
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        for num_tokens in arguments.tokens:
            cases = [causal_case(num_tokens)]
            cases += [diffusion_case(num_tokens, block_size) for block_size in arguments.block_sizes]
            for case in cases:
                measure(shape, case, dtype, device, arguments.rounds)


if __name__ == "__main__":
    main()
