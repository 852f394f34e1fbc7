"""How fast the engine decodes, against the loops people use, in one process and on the same weights.

    python benchmarks/engine.py [--dtypes float32 bfloat16] [--threads N] [--only NAME ...]
    python benchmarks/engine.py --device cuda --shape 1.7b --dtypes bfloat16

Sections, each a name for --only:

    loops     64 requests, and one request, against the plain block-diffusion loop that people use (batch 1,
              a commit forward per block, logits and probabilities of the whole block) on transformers'
              model, and against the same loop on this model (`reference.plain_loop`)
    ar        one request that finalises 3 tokens a step, against transformers' AR `generate` on the
              same weights
    overhead  time that the engine adds to its denoising forwards, for the shape and for 1M parameters
    batch     tokens/s against requests at once
    blocks    tokens/s and peak memory against B, with a budget in bytes
    filters   tokens/s with temperature, top-k, top-p, min-p
    graphs    short forwards in fixed shapes (recorded, on a GPU) against forwards of the rows' own sizes
    kernels   one layer's attention to pages: ours, and torch's kernels over the same gathered pages; on a
              GPU each is a graph of 20, so that launches do not count

Weights are random: texts are noise, times are not. Unless said otherwise B = 4, a static policy of 2 tokens
a step, prompts of 64 tokens, no stops. Times are medians of rounds in which both sides take turns: compare
within a run only, a shared machine moves everything else.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
import torch.nn.functional as F
import transformers

from tstar.engine import Engine, EngineConfig, Request, SamplingParams, reference
from tstar.engine.plan import ForwardPlan
from tstar.model.attention.store import KVStore, StoreAttention, mix
from tstar.model.config import ModelConfig
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.process import keep_freed_memory
from tstar.unmask import UnmaskPolicy

SHAPES = {
    "1m": {
        "max_position_embeddings": 4096,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "45m": {
        "max_position_embeddings": 4096,
        "vocab_size": 32_000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "1.7b": {  # SDAR-1.7B, Qwen3-1.7B
        "max_position_embeddings": 4096,
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
TWO_A_STEP = UnmaskPolicy("static", tokens_per_step=2)
PROMPT_LENGTH = 64
GOALS = {"64 requests": {"float32": 10.0, "bfloat16": 20.0}, "one request": 1.5, "ar": 3.0}
MOST_OVERHEAD = {"1m": 0.40, "45m": 0.15}


@dataclass(frozen=True)
class Bench:
    """What every section is given."""

    shape: str
    dtype: torch.dtype
    device: str
    rounds: int
    num_tokens: int
    """Of a response."""

    def model(self, shape: str | None = None, is_diffusion: bool = True) -> LanguageModel:
        sizes = SHAPES[shape or self.shape]
        mask = {"mask_token_id": sizes["vocab_size"] - 1} if is_diffusion else {}
        kind = "sdar" if is_diffusion else "qwen3"
        with torch.device(self.device):
            model = LanguageModel(
                ModelConfig.from_hub({**sizes, **mask, "model_type": kind, "max_position_embeddings": 4096})
            )
        model.initialise(torch.Generator(self.device).manual_seed(0))
        return model.to(self.dtype)

    def engine(self, model: LanguageModel, **settings: int) -> Engine:
        return Engine(model, EngineConfig(**{"memory": 4 << 30, **settings}))

    def say(self, text: str) -> None:
        print(f"{str(self.dtype).removeprefix('torch.'):<9} {text}", flush=True)


def make_requests(
    count: int,
    num_tokens: int = 128,
    block_size: int = 4,
    policy: UnmaskPolicy = TWO_A_STEP,
    **sampling: float,
) -> list[Request]:
    rng = np.random.default_rng(0)
    params = SamplingParams(
        max_tokens=num_tokens, unmask=policy, ignore_eos=True, **{"temperature": 0.0, **sampling}
    )
    return [
        Request(rng.integers(0, 500, size=PROMPT_LENGTH), PartitionRule(block_size), params, seed)
        for seed in range(count)
    ]


def seconds(*runs: Callable[[], object], rounds: int) -> list[float]:
    """The median time of each; they take turns, after one round that is not counted."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, own in zip(runs, times, strict=True):
            synchronise()
            start = time.perf_counter()
            run()
            synchronise()
            if number:
                own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def verdict(value: float, goal: float | None, at_most: bool = False) -> str:
    if goal is None:
        return ""
    is_met = value <= goal if at_most else value >= goal
    return f"  goal {'<=' if at_most else '>='} {goal:g} {'met' if is_met else 'MISSED'}"


@torch.no_grad()
def peer_loop(peer: transformers.Qwen3ForCausalLM, request: Request, mask_token: int) -> np.ndarray:
    """The plain loop on transformers' model and cache, as the public implementations have it; greedy."""
    block_size, device = request.rule.block_size, peer.device
    per_step, num_tokens = request.sampling.unmask.tokens_per_step, request.sampling.max_tokens
    prompt = torch.from_numpy(request.prompt_ids.copy())
    start, cache = len(prompt), transformers.DynamicCache()
    text = torch.cat([prompt, torch.full((num_tokens,), mask_token)])[None].to(device)

    def feed(start: int, stop: int, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(start, stop, device=device)[None]
        out = peer(text[:, start:stop], attention_mask=mask, past_key_values=cache, position_ids=positions)
        return out.logits[0]

    blocks = torch.arange(start, device=device) // block_size
    see_all = torch.zeros(1, 1, start, start, dtype=peer.dtype, device=device)
    feed(0, start, see_all.masked_fill(blocks[:, None] < blocks, -torch.inf))
    for first in range(start, start + num_tokens, block_size):
        stop = first + block_size
        see_all = torch.zeros(1, 1, block_size, stop, dtype=peer.dtype, device=device)
        while (is_masked := text[0, first:stop] == mask_token).any():
            logits = feed(first, stop, see_all)
            cache.crop(first - stop)
            logits[:, mask_token] = -torch.inf
            confidence, tokens = torch.softmax(logits.float(), dim=-1).max(-1)
            confidence = torch.where(is_masked, confidence, -1)
            surest = confidence.topk(min(per_step, int(is_masked.sum()))).indices
            text[0, first + surest] = tokens[surest]
        if stop < text.shape[1]:
            feed(first, stop, see_all)
    return text[0, start:].cpu().numpy()


def make_peer(bench: Bench, model: LanguageModel) -> transformers.Qwen3ForCausalLM:
    """transformers' model on the same weights."""
    peer = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPES[bench.shape]))
    peer = peer.to(bench.device, bench.dtype)
    peer.load_state_dict(model.state_dict(), assign=True, strict=False)
    peer.tie_weights()
    return peer


def measure_loops(bench: Bench) -> None:
    model = bench.model()
    engine, peer = bench.engine(model), make_peer(bench, model)
    mask_token = model.config.mask_token_id
    assert mask_token is not None
    name = str(bench.dtype).removeprefix("torch.")
    many = make_requests(64, bench.num_tokens)
    if bench.dtype == torch.float32:  # in 16 bits, texts of random weights part
        texts = peer_loop(peer, many[0], mask_token), engine.generate(many[:1])[0].response_ids
        assert (texts[0] == texts[1]).all(), "the loops do not decode the same text"
    theirs, plain, *ours = seconds(
        lambda: peer_loop(peer, many[0], mask_token),
        lambda: reference.plain_loop(model, many[0]),
        lambda: engine.generate(many),
        lambda: engine.generate(many[:1]),
        rounds=bench.rounds,
    )
    theirs, plain = bench.num_tokens / theirs, bench.num_tokens / plain
    for title, count, taken in (("64 requests", 64, ours[0]), ("one request", 1, ours[1])):
        own = count * bench.num_tokens / taken
        goal = GOALS[title] if not isinstance(GOALS[title], dict) else GOALS[title].get(name)
        bench.say(
            f"{title:<12} x {bench.num_tokens} tokens: engine {own:8.1f} tokens/s, transformers in the plain "
            f"loop {theirs:6.1f}: {own / theirs:5.2f}x"
            + verdict(own / theirs, goal if bench.device == "cpu" else None)
            + f"; this model in it {plain:6.1f}: {own / plain:5.2f}x"
        )


def measure_ar(bench: Bench) -> None:
    model = bench.model()
    peer = make_peer(bench, model)
    ar_model = bench.model(is_diffusion=False)
    ar_model.load_state_dict(model.state_dict(), assign=True)
    num_tokens = bench.num_tokens // 3 * 3
    settings = transformers.GenerationConfig(
        max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    three = make_requests(1, num_tokens, 3, UnmaskPolicy("static", tokens_per_step=3))
    one = make_requests(1, num_tokens, 1, UnmaskPolicy())
    ids = torch.from_numpy(three[0].prompt_ids)[None].to(bench.device)

    def of_peer() -> None:
        with torch.no_grad():
            peer.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)

    engine, ar_engine = bench.engine(model), bench.engine(ar_model)
    theirs, ours, ours_ar = seconds(
        of_peer, lambda: engine.generate(three), lambda: ar_engine.generate(one), rounds=bench.rounds
    )
    theirs, ours, ours_ar = (num_tokens / taken for taken in (theirs, ours, ours_ar))
    bench.say(
        f"one request at TPF 3: engine {ours:7.1f} tokens/s, transformers' AR generate {theirs:6.1f}: "
        f"{ours / theirs:4.2f}x" + verdict(ours / theirs, GOALS["ar"] if bench.device == "cpu" else None)
    )
    bench.say(
        f"one AR request: engine {ours_ar:7.1f} tokens/s, transformers {theirs:6.1f}: "
        f"{ours_ar / theirs:4.2f}x"
    )


@dataclass(frozen=True)
class BareForwards:
    """The model calls of an engine's run once more, on the same rows, and nothing else."""

    model: LanguageModel
    inputs: list[tuple[torch.Tensor, StoreAttention, torch.Tensor]]

    @classmethod
    def of(cls, engine: Engine, requests: Sequence[Request]) -> BareForwards:
        plans: list[ForwardPlan] = []
        forward = engine._forward

        def kept(store: KVStore, plan: ForwardPlan) -> np.ndarray:
            plans.append(plan)
            return forward(store, plan)

        engine._forward = kept  # type: ignore[method-assign]
        engine.generate(requests)
        del engine._forward
        device, store = engine.model.device, engine._awake()
        inputs = [
            (
                torch.from_numpy(plan.token_ids).to(device),
                store.prepare(plan.rows),
                torch.from_numpy(plan.reads).to(device),
            )
            for plan in plans
        ]
        return cls(engine.model, inputs)

    @torch.inference_mode()
    def run(self) -> None:
        """With the logits of the positions that are read."""
        for token_ids, attention, reads in self.inputs:
            self.model.logits(self.model(token_ids, attention, reads)).argmax(-1)


def measure_overhead(bench: Bench) -> None:
    for shape in dict.fromkeys(("1m", bench.shape)):
        for count in (1, 64):
            engine, requests = bench.engine(bench.model(shape)), make_requests(count, 64)
            bare = BareForwards.of(engine, requests)
            # Prompts are remembered: no run reads them again but the recorded one.
            bare = BareForwards.of(engine, requests)
            whole, alone = seconds(
                lambda engine=engine, requests=requests: engine.generate(requests),
                bare.run,
                rounds=2 * bench.rounds,
            )
            overhead, num = whole / alone - 1, len(bare.inputs) / 1e3
            bench.say(
                f"overhead, {shape:>4}, {count:2d} requests: {whole / num:7.2f} ms a forward, "
                f"the model alone {alone / num:7.2f}: {overhead:+.0%}"
                + verdict(overhead, MOST_OVERHEAD.get(shape) if bench.device == "cpu" else None, True)
            )


def measure_batch(bench: Bench) -> None:
    model = bench.model()
    engine = bench.engine(model)
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        requests = make_requests(count, 32)
        (taken,) = seconds(lambda requests=requests: engine.generate(requests), rounds=1)
        bench.say(f"batch {count:4d}: {count * 32 / taken:8.1f} tokens/s")


def measure_blocks(bench: Bench) -> None:
    """A fixed budget: what B needs beyond it waits."""
    model = bench.model()
    budget = 1 << 30
    for block_size in (4, 8, 16, 32, 64, 128, 256):
        engine = bench.engine(model, memory=budget)
        policy = UnmaskPolicy("static", tokens_per_step=block_size // 2)
        requests = make_requests(32, 256, block_size, policy)
        peak = PeakMemory(bench.device)
        with peak:
            (taken,) = seconds(lambda engine=engine, requests=requests: engine.generate(requests), rounds=1)
        bench.say(
            f"B = {block_size:3d}, B/2 tokens a step: {32 * 256 / taken:8.1f} tokens/s, "
            f"{peak.num_bytes / 2**20:6.0f} MiB above the model"
            + verdict(peak.num_bytes, budget, at_most=True)
        )


def measure_filters(bench: Bench) -> None:
    model = bench.model()
    engine = bench.engine(model)
    for name, settings in {
        "greedy": {},
        "temperature 1": {"temperature": 1.0},
        "temperature 0.8, top_k 50": {"temperature": 0.8, "top_k": 50},
        "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
        "temperature 0.8, min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    }.items():
        requests = make_requests(64, 32, **settings)
        (taken,) = seconds(lambda requests=requests: engine.generate(requests), rounds=1)
        bench.say(f"{name:<28} {64 * 32 / taken:8.1f} tokens/s")


def measure_graphs(bench: Bench) -> None:
    """Alone, few and many requests; shapes are recorded in the round that is not counted."""
    model = bench.model()
    engines = [bench.engine(model, graphs=graphs) for graphs in (False, True)]
    padded = engines[1]._padded
    assert padded is not None
    for block_size, counts in ((4, (1, 4, 16, 64, 128)), (16, (1, 4, 16, 64))):
        policy = UnmaskPolicy("static", tokens_per_step=block_size // 2)
        for count in counts:
            requests = make_requests(count, bench.num_tokens, block_size, policy)
            num_before = engines[1].num_forwards, padded.num_runs
            plain, ours = seconds(
                *(lambda e=engine, r=requests: e.generate(r) for engine in engines),
                rounds=bench.rounds,
            )
            share = (padded.num_runs - num_before[1]) / (engines[1].num_forwards - num_before[0])
            plain, ours = (count * bench.num_tokens / taken for taken in (plain, ours))
            bench.say(
                f"B = {block_size:2d}, {count:3d} requests: {ours:8.1f} tokens/s with graphs, {plain:8.1f} "
                f"without: {ours / plain:5.2f}x ({share:.0%} of forwards; {padded.num_shapes} shapes so far, "
                f"{padded.num_bytes / 2**20:.0f} MiB)"
            )


def measure_kernels(bench: Bench) -> None:
    config = bench.model().config
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    page_size, shared = 16, heads // kv_heads
    for num_rows, length, context in (
        (1, 8, 1024),
        (1, 8, 4096),
        (16, 8, 1024),
        (64, 8, 1024),
        (16, 32, 1024),
    ):
        made = {"device": bench.device, "dtype": bench.dtype}
        num_pages = num_rows * context // page_size
        store = [torch.randn(num_pages, kv_heads, page_size, head_dim, **made) for _ in range(2)]
        query = torch.randn(num_rows * length, heads, head_dim, **made)
        pages = torch.randperm(num_pages, device=bench.device).view(num_rows, 1, -1)
        contexts = (pages * kv_heads + torch.arange(kv_heads, device=bench.device)[:, None]).reshape(-1)
        bias = torch.zeros(num_rows, length, context, **made)
        wide_bias = torch.zeros(num_rows, 1, length * shared, context, **made)

        def gathered(
            store: list[torch.Tensor] = store, contexts: torch.Tensor = contexts, num_rows: int = num_rows
        ) -> list[torch.Tensor]:
            return [
                x.view(-1, page_size * head_dim)
                .index_select(0, contexts)
                .view(num_rows, kv_heads, -1, head_dim)
                for x in store
            ]

        def of_sdpa(
            query: torch.Tensor = query, mask: torch.Tensor = wide_bias, gathered: Callable = gathered
        ) -> torch.Tensor:
            q = query.view(len(mask), -1, kv_heads, shared, head_dim).transpose(1, 2).flatten(2, 3)
            return F.scaled_dot_product_attention(q, *gathered(), attn_mask=mask)

        runs = {
            "matmuls": lambda query=query, store=store, contexts=contexts, bias=bias: mix(
                query, *store, contexts, bias
            ),
            "SDPA": of_sdpa,
            "the gathering alone": gathered,
        }
        if bench.device == "cuda":
            runs = {name: repeated(run, 20) for name, run in runs.items()}
        taken = seconds(*runs.values(), rounds=5 * bench.rounds)
        repeats = 20 if bench.device == "cuda" else 1
        bench.say(
            f"{num_rows:2d} rows of {length:2d} tokens, context {context}: "
            + ", ".join(f"{name} {t / repeats * 1e6:.0f} us" for name, t in zip(runs, taken, strict=True))
        )


def repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    """So many runs as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            run()
    return graph.replay


class PeakMemory:
    """The most memory of the process (or on the device) above what it had at the beginning."""

    def __init__(self, device: str) -> None:
        self.num_bytes = 0
        self._device = device
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._start = self._now()
        self._watcher.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()
        if self._device == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated() - self._start

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self._device == "cuda" else psutil.Process().memory_info().rss

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.num_bytes = max(self.num_bytes, self._now() - self._start)


SECTIONS = {
    "loops": measure_loops,
    "ar": measure_ar,
    "overhead": measure_overhead,
    "batch": measure_batch,
    "blocks": measure_blocks,
    "filters": measure_filters,
    "graphs": measure_graphs,
    "kernels": measure_kernels,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="45m")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="of a response, for loops and ar")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads")
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        bench = Bench(arguments.shape, dtype, arguments.device, arguments.rounds, arguments.tokens)
        for name in arguments.only:
            SECTIONS[name](bench)


if __name__ == "__main__":
    main()
