"""How far `tstar plan` is from the truth on this machine: predicted and measured, phase by phase.

    python benchmarks/plan.py [--device cpu] [--dtypes float32 bfloat16] [--block-sizes 4 16]

A model of 45M parameters (hidden 512, 8 layers, vocabulary 32k) decodes rollouts and takes one TraceRL
update on them. The constants of the machine (matmul peak, bandwidth, overheads) are measured first, on
other shapes; nothing is fitted to the model. Activations are counted by what autograd keeps.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.model.config import ModelConfig
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.plan import Cluster, Timing, Workload, measure, plan_memory, plan_time
from tstar.plan.measure import Clock, bytes_kept
from tstar.process import keep_freed_memory
from tstar.replay import replay, score
from tstar.trainer import Rollout, Trainer, TrainerConfig
from tstar.unmask import UnmaskPolicy

MODEL = ModelConfig(
    model_type="sdar",
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    mask_token_id=31_999,
)


def make_workload(block_size: int, dtype: torch.dtype, num_tokens_per_step: int, is_large: bool) -> Workload:
    return Workload(
        model=MODEL,
        block_size=block_size,
        tokens_per_forward=num_tokens_per_step,
        num_problems=64 if is_large else 4,
        num_samples=8 if is_large else 4,
        prompt_length=64,
        response_length=64,
        max_response_length=64,
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        token_budget=16_384 if is_large else 2048,
        num_optimizer_steps=1,
        max_requests=256 if is_large else 16,
    )


def make_requests(workload: Workload) -> list[Request]:
    rng = np.random.default_rng(0)
    policy = UnmaskPolicy(tokens_per_step=int(workload.tokens_per_forward))
    sampling = SamplingParams(max_tokens=workload.response_length, unmask=policy, ignore_eos=True)
    requests = []
    for problem in range(workload.num_problems):
        prompt = rng.integers(0, MODEL.vocab_size - 1, size=workload.prompt_length)
        rule = PartitionRule(workload.block_size)
        requests += [
            Request(prompt, rule, sampling, seed=problem * workload.num_samples + i)
            for i in range(workload.num_samples)
        ]
    return requests


def show(name: str, predicted: float, measured: float, unit: str) -> None:
    print(f"  {name:<22} predicted {predicted:9.3f} {unit}  measured {measured:9.3f} {unit}"
          f"  ratio {predicted / measured:5.2f}", flush=True)  # fmt: skip


def compare(cluster: Cluster, block_size: int, dtype: torch.dtype, k: int, clock: Clock) -> None:
    device = torch.device(cluster.device.name)
    workload = make_workload(block_size, dtype, k, device.type == "cuda")
    predicted: Timing = plan_time(workload, cluster)
    model = LanguageModel(MODEL).to(device, dtype)
    model.initialise(torch.Generator(device).manual_seed(0))
    engine = Engine(model, EngineConfig(memory=4 << 30, max_requests=workload.max_requests))
    engine.generate(make_requests(workload)[:1])  # allocations, kernels
    start = clock()
    trajectories = engine.generate(make_requests(workload))
    sampled = clock() - start
    engine.sleep()
    rng = np.random.default_rng(1)
    rollouts = [
        Rollout(t, float(rng.random()), i // workload.num_samples, is_correct=False)
        for i, t in enumerate(trajectories)
    ]
    trainer = Trainer(model, TrainerConfig(token_budget=workload.token_budget))
    rule = PartitionRule(block_size)
    start = clock()
    update = trainer.update(rollouts, rule)
    trained = clock() - start
    for parameter in trainer.optimizer._trained.values():
        parameter.grad = torch.zeros_like(parameter)
    start = clock()
    trainer.optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    stepped = clock() - start

    print(f"B = {block_size}, k = {k}, {workload.dtype}: {workload.num_problems} x "
          f"{workload.num_samples} responses of {workload.response_length} tokens")  # fmt: skip
    show("prefill + denoise", predicted.seconds_of("prefill", "denoise"), sampled, "s ")
    show("rollout tokens/s", predicted.rollout_tokens_per_second, predicted.response_tokens / sampled, "/s")
    show("replay", predicted.seconds_of("replay"), trained - stepped, "s ")
    show("optimizer", predicted.seconds_of("optimizer"), stepped, "s ")
    tokens = workload.num_responses * workload.replay_tokens
    show("replayed tokens", tokens / 1e3, update.num_tokens / 1e3, "k ")
    pack = replay(trajectories, rule, MODEL.vocab_size - 1, workload.token_budget)[0]
    num_bytes = bytes_kept(model, lambda: score(model, pack))  # the head keeps its logits itself
    memory = plan_memory(workload, cluster)
    share = pack.layout.num_tokens / workload.pack_tokens
    show("activations", memory.bytes_of("activations") * share / 2**20, num_bytes / 2**20, "MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--tokens-per-step", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    # One thread's own time: what others do on the machine counts less than by the wall clock.
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    print(f"torch {torch.__version__}")
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        device = measure(torch.device(arguments.device), dtype, clock)
        print(
            f"{device.name} {dtype}: matmul {device.matmul / 1e9:.0f} GFLOP/s (forward "
            f"{device.forward_share:.0%}, training {device.training_share:.0%}), "
            f"{device.bandwidth / 1e9:.1f} GB/s, {device.layer_overhead * 1e6:.0f} us a layer, "
            f"{device.forward_overhead * 1e6:.0f} us a forward, {device.logit_seconds * 1e9:.2f} ns a logit"
        )
        for block_size in arguments.block_sizes:
            compare(Cluster(device), block_size, dtype, arguments.tokens_per_step, clock)


if __name__ == "__main__":
    main()
