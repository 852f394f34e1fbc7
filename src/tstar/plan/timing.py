"""Seconds of an update by phase."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

from tstar.plan.cost import EngineForward, ModelCost
from tstar.plan.device import Amount, Cluster
from tstar.plan.memory import plan_memory
from tstar.plan.workload import Workload

_NUM_SEGMENTS = 64
"""In how many pieces of time the decoding of a batch is added up."""


@dataclass(frozen=True)
class Phase:
    """A part of an update."""

    name: str
    seconds: Amount
    bound: str
    """What it waits for."""


@dataclass(frozen=True)
class Timing:
    """One update of a stage, and the stage."""

    phases: tuple[Phase, ...]
    response_tokens: Amount
    """Of an update."""
    num_updates: int

    @property
    def seconds(self) -> Amount:
        """Of one update."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def hours(self) -> Amount:
        """Of the stage."""
        return self.seconds * self.num_updates / 3600

    def seconds_of(self, *names: str) -> Amount:
        return sum(phase.seconds for phase in self.phases if phase.name in names)

    @property
    def rollout_tokens_per_second(self) -> Amount:
        """Response tokens, while sampling."""
        return self.response_tokens / max(self.seconds_of("prefill", "denoise"), 1e-12)

    @property
    def tokens_per_second(self) -> Amount:
        """Response tokens, over the whole update."""
        return self.response_tokens / self.seconds


def plan_time(workload: Workload, cluster: Cluster) -> Timing:
    """Every phase of an update, on the rank that ends last."""
    cost = ModelCost.of(workload.model)
    # As many requests at once as there are pages for.
    fitting = max(1, plan_memory(workload, cluster).num_requests)
    workload = replace(workload, max_requests=min(workload.max_requests, fitting))
    phases = [
        _prefill(workload, cluster, cost),
        _denoise(workload, cluster, cost, workload.num_responses, "denoise"),
        *_train(workload, cluster, cost),
        _optimizer(workload, cluster, cost),
        _sync(workload, cluster, cost),
    ]
    if workload.num_evaluated:
        phases.append(_denoise(workload, cluster, cost, workload.num_evaluated, "evaluate"))
    return Timing(tuple(phases), workload.num_responses * workload.response_length, workload.num_updates)


def _prefill(workload: Workload, cluster: Cluster, cost: ModelCost) -> Phase:
    """Each prompt once, on the rank that its group went to."""
    device = cluster.device
    prompts = -(-workload.num_problems // cluster.num_devices)
    tokens = prompts * workload.prompt_length
    flops = cost.flops(tokens, tokens * workload.prompt_length / 2, 0)
    seconds = flops / (device.matmul * device.forward_share)
    return Phase("prefill", seconds, "matmul")


def _denoise(workload: Workload, cluster: Cluster, cost: ModelCost, responses: Amount, name: str) -> Phase:
    """Decoding: as many requests at once as are allowed, the longest ones last alone."""
    count = max(1, round(-(-responses // cluster.num_devices)))
    forwards = simulate(workload, count)
    seconds, bound = 0.0, {"memory": 0.0, "matmul": 0.0, "overhead": 0.0}
    device = cluster.device
    for num_forwards, num_requests in forwards:
        forward = engine_forward(workload, num_requests)
        one = cost.denoise_seconds(device, workload.itemsize, workload.model.vocab_size, forward)
        seconds += num_forwards * one
        overhead = device.forward_overhead + cost.num_layers * device.layer_overhead
        flops = cost.flops(forward.num_tokens, forward.num_pairs, forward.num_logits)
        is_matmul = flops / (device.matmul * device.forward_share) > one - overhead - 1e-12
        work = "overhead" if overhead > one / 2 else "matmul" if is_matmul else "memory"
        bound[work] += num_forwards * one
    return Phase(name, seconds, max(bound, key=lambda key: bound[key]))


def engine_forward(workload: Workload, num_requests: Amount) -> EngineForward:
    """Each request's block, and at a block's first step the one before it, whose clean text is committed."""
    tokens = workload.block_size + workload.block_size / workload.steps_per_block
    context = workload.prompt_length + workload.response_length / 2
    step = workload.block_size / workload.steps_per_block
    return EngineForward(
        num_tokens=num_requests * tokens,
        num_pairs=num_requests * tokens * context,
        num_logits=num_requests * (workload.block_size + step) / 2,
        num_context_tokens=num_requests * context,
    )


def simulate(workload: Workload, count: int) -> list[tuple[Amount, Amount]]:
    """(forwards, requests in each) over a rank's rollouts: a slot takes the next one when it is free."""
    lengths = workload.lengths(count)
    # Nobody knows lengths beforehand: a fixed shuffle, so that the longest do not all come first.
    order = sorted(range(count), key=lambda i: (i * 2654435761) % 2**32)
    slots = [0.0] * min(workload.max_requests, count)
    spans = []
    for i in order:
        start = heapq.heappop(slots)
        stop = start + max(1.0, lengths[i] / workload.tokens_per_forward)
        spans.append((start, stop))
        heapq.heappush(slots, stop)
    total = max(stop for _, stop in spans)
    edges = [total * i / _NUM_SEGMENTS for i in range(_NUM_SEGMENTS + 1)]
    out = []
    for low, high in pairwise(edges):
        busy = sum(max(0.0, min(stop, high) - max(start, low)) for start, stop in spans)
        if busy > 0:
            out.append((high - low, max(1.0, busy / (high - low))))
    return out


def _train(workload: Workload, cluster: Cluster, cost: ModelCost) -> list[Phase]:
    """Replay: forward and backward over every pack, and forwards without gradient."""
    device = cluster.device
    share = 1.0 / cluster.num_devices
    responses = workload.num_responses * share
    tokens = responses * workload.replay_tokens
    forward = cost.flops(tokens, responses * workload.replay_pairs, responses * workload.response_length)
    num_packs = max(1.0, tokens / workload.token_budget)
    overhead = cost.num_layers * device.layer_overhead * num_packs
    trained = forward * workload.num_passes * (4 if workload.recompute_activations else 3)
    trained *= 2 if workload.has_value else 1
    seconds = trained / (device.matmul * device.training_share) + 3 * overhead * workload.num_passes
    num_frozen = workload.needs_old_forward + workload.has_base + workload.has_value
    frozen = num_frozen * (forward / (device.matmul * device.forward_share) + overhead)
    # Weights are gathered for each forward and backward, gradients scattered: beside the computation.
    moved = workload.num_passes * num_packs * cluster.gather_seconds(
        2 * workload.itemsize * cost.num_params
    ) + workload.num_passes * num_packs * cluster.gather_seconds(4 * cost.num_params)
    exposed = max(0.0, moved - seconds)
    phases = [Phase("replay", seconds, "matmul")]
    if frozen:
        phases.append(Phase("old/base", frozen, "matmul"))
    if exposed:
        phases.append(Phase("exposed communication", exposed, "link"))
    return phases


def _optimizer(workload: Workload, cluster: Cluster, cost: ModelCost) -> Phase:
    """AdamW: masters and both moments are read and written, gradients read twice (norm, step)."""
    per_param = 3 * 8 + 8 + (workload.itemsize if workload.itemsize < 4 else 0)
    num_trained = (0 if workload.is_lora else 1) + (1 if workload.has_value else 0)
    params = cost.num_params / cluster.shard_size * num_trained
    seconds = workload.num_optimizer_steps * params * per_param / cluster.device.bandwidth
    return Phase("optimizer", seconds, "memory")


def _sync(workload: Workload, cluster: Cluster, cost: ModelCost) -> Phase:
    """Gradients across nodes, and the whole weights to every rank's engine."""
    num_bytes = cost.num_params * workload.itemsize
    engine = cluster.gather_seconds(num_bytes)
    across = 0.0 if workload.is_lora else cluster.replica_seconds(4 * cost.num_params)
    return Phase("sync", engine + workload.num_optimizer_steps * across, "link")
