"""The constants of the machine at hand, in some seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.engine.memory import free_bytes
from tstar.model.attention import prepare
from tstar.model.config import ModelConfig
from tstar.model.head import target_log_probs
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition, PartitionRule
from tstar.plan.cost import ModelCost
from tstar.plan.device import Device
from tstar.unmask import UnmaskPolicy

_VOCABULARY = 1 << 15


Clock = Callable[[], float]


def bytes_kept(model: LanguageModel, forward: Callable[[], object]) -> int:
    """What autograd keeps of a forward for its backward pass, weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()  # held until the end: storage that is freed may be given out again
    del result
    return sum(kept.values())


def measure(device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter) -> Device:
    """Matmul peak, memory bandwidth, and what a forward costs beside its arithmetic.

    clock: `time.process_time` tells one thread's share of a busy machine."""
    best = partial(_best, device=device, clock=clock)
    is_cpu = device.type == "cpu"
    matmul = _matmul_flops(device, dtype, best)
    forward, training = (flops / matmul for flops in _model_flops(device, dtype, best))
    layer, rest = _engine_overhead(device, dtype, clock)
    return Device(
        name=device.type,
        memory=float(free_bytes(device)),
        matmul=matmul,
        bandwidth=_bandwidth(device, best),
        forward_share=forward,
        training_share=training,
        layer_overhead=layer,
        forward_overhead=rest,
        logit_seconds=_logit_seconds(device, dtype, best),
        overlaps=not is_cpu,
        is_measured=True,
        source="measured now",
    )


Best = Callable[[Callable[[], object]], float]
"""Seconds of a piece of work, the best of some rounds."""


def _best(run: Callable[[], object], *, device: torch.device, clock: Clock) -> float:
    best = float("inf")
    for _ in range(6):  # the first one chooses and loads kernels
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
    return best


def _matmul_flops(device: torch.device, dtype: torch.dtype, best: Best) -> float:
    size = 1536 if device.type == "cpu" else 8192
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    seconds: float = best(lambda: left @ right)
    return 2 * size**3 / seconds


def _model_flops(device: torch.device, dtype: torch.dtype, best: Best) -> tuple[float, float]:
    """FLOP/s of a packed forward, and of forward and backward, on sequences as replay packs them."""
    width, num_sequences = (512, 6) if device.type == "cpu" else (2048, 64)
    config = ModelConfig(
        model_type="sdar",
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        mask_token_id=0,
    )
    model = LanguageModel(config).to(device, dtype)
    model.initialise(torch.Generator(device).manual_seed(0))
    layout = PackedLayout.clean_and_noisy([Partition(32, 64, 8)] * num_sequences)
    token_ids = torch.zeros(layout.num_tokens, dtype=torch.int64, device=device)
    read = torch.from_numpy(np.flatnonzero(layout.copy_ids)).to(device)
    targets = torch.ones(len(read), dtype=torch.int64, device=device)

    def forward() -> Tensor:
        hidden = model(token_ids, prepare(layout, device), read)
        return target_log_probs(hidden, model.output_weight, targets, excluded=0)

    def frozen() -> None:
        with torch.no_grad():
            forward()

    def train() -> None:
        forward().sum().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    flops = ModelCost.of(config).flops(layout.num_tokens, layout.num_visible_pairs, len(read))
    forward_seconds: float = best(frozen)
    training_seconds: float = best(train)
    return flops / forward_seconds, 3 * flops / training_seconds


def _bandwidth(device: torch.device, best: Best) -> float:
    """One large tensor is added to another: two are read, one is written."""
    left, right = torch.ones(2, 1 << (24 if device.type == "cpu" else 28), device=device)
    seconds: float = best(lambda: left.add_(right))
    return 3 * int(left.nbytes) / seconds


def _logit_seconds(device: torch.device, dtype: torch.dtype, best: Best) -> float:
    from tstar.engine.sampling import Draws, read_distribution

    num_reads, hidden = 128, 8
    states = torch.randn(num_reads, hidden, device=device).to(dtype)
    weight = torch.randn(_VOCABULARY, hidden, device=device).to(dtype)
    ones = np.ones(num_reads)
    zeros = np.zeros(num_reads)
    draws = Draws.of(device, 0.5 * ones, ones, zeros.astype(np.int64), ones, zeros, wants_entropy=False)
    seconds: float = best(lambda: read_distribution(states, weight, draws, 0, 1 << 23))
    return seconds / (num_reads * _VOCABULARY)


@torch.inference_mode()
def _engine_overhead(device: torch.device, dtype: torch.dtype, clock: Clock) -> tuple[float, float]:
    """Seconds per layer and per forward of an engine whose model computes next to nothing."""
    shallow, deep = 2, 8
    few, many = (_seconds_per_forward(device, dtype, layers, clock) for layers in (shallow, deep))
    per_layer = max(0.0, (many - few) / (deep - shallow))
    return per_layer, max(0.0, few - shallow * per_layer)


def _seconds_per_forward(device: torch.device, dtype: torch.dtype, num_layers: int, clock: Clock) -> float:
    config = ModelConfig(
        model_type="sdar",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        mask_token_id=63,
    )
    model = LanguageModel(config).to(device, dtype)
    model.initialise(torch.Generator(device).manual_seed(0))
    engine = Engine(model, EngineConfig(memory=1 << 28, max_requests=16))
    sampling = SamplingParams(max_tokens=32, unmask=UnmaskPolicy(tokens_per_step=2), ignore_eos=True)
    requests = [Request(np.arange(1, 9), PartitionRule(8), sampling, seed=i) for i in range(16)]
    best = float("inf")
    for _ in range(4):
        start_forwards, start = engine.num_forwards, clock()
        engine.generate(requests)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (clock() - start) / (engine.num_forwards - start_forwards))
    return best
