"""One update on very many devices, played out: who waits for whom, what must travel, what failures cost.

`plan_time` assumes that every device has its even share. Here groups go to ranks one by one as the work queue
of a run hands them out, response lengths are drawn, some devices are slow, every process gets all rollouts,
and devices break between checkpoints.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from tstar.plan.cost import ModelCost
from tstar.plan.device import Amount, Cluster
from tstar.plan.memory import plan_memory
from tstar.plan.timing import engine_forward, plan_time
from tstar.plan.workload import Workload

Handout = Literal["queue", "even"]
"""queue: a rank takes the next group when it has room, as runs do. even: each has its share beforehand."""


@dataclass(frozen=True)
class Conditions:
    """What large machines are like: measured, published, or assumed, as each says."""

    slow_share: Amount = 0.01
    """Of the devices that are slow (assumed)."""
    slow_speed: Amount = 0.7
    """What those reach of the others' speed (assumed)."""
    hours_between_failures: Amount = 54 * 24 * 16_384 / 419
    """Device-hours: 419 unexpected interruptions in 54 days on 16,384 H100s (The Llama 3 Herd of Models)."""
    restart_seconds: Amount = 600.0
    """From a failure to the next update step: noticed, started, loaded (assumed)."""
    storage: Amount = 100e9
    """Bytes/s that a shared file system takes from all nodes together (assumed)."""
    one_writer: Amount = 2e9
    """... and from one process (assumed)."""
    host_network: Amount = 1e9
    """Bytes/s of objects that one process gets from the others, over TCP (assumed)."""
    latency: Amount = 20e-6
    """Seconds of one message between nodes (assumed)."""
    response_bytes: Amount = 24.0
    """A token of a trajectory, pickled: measured, 17.0 kB for 700 tokens (docs/scaling.md)."""
    unpickle_seconds: Amount = 0.18e-6
    """A token of a trajectory: measured, 126 us for 700."""
    replay_seconds: Amount = 145e-9
    """To plan the replay of one token on the host: measured."""


@dataclass(frozen=True)
class Rollouts:
    """How the decoding of one batch went."""

    seconds: Amount
    """Until the last rank is done."""
    idle: Amount
    """Share of all ranks' time spent waiting for it."""


@dataclass(frozen=True)
class ScaledUpdate:
    """One update on so many devices; seconds unless they say otherwise."""

    num_devices: int
    num_problems: int
    rollouts: Rollouts
    even_rollouts: Rollouts
    """Had each rank got its share beforehand."""
    compute: Amount
    """Prefill, replay, frozen forwards, optimizer: shared out evenly."""
    exchange: Amount
    """All rollouts to all processes, and the planning of their replay in each: what does not get faster."""
    gradients: Amount
    """Sums between nodes."""
    weights: Amount
    """Whole weights to every engine, inside each node."""
    checkpoint: Amount
    """Of one, for its update."""
    save_every: int
    """Updates between checkpoints, that lose least here."""
    lost: Amount
    """To checkpoints, failures and what must be done again, for one update, on average."""
    tokens: Amount
    """Of responses."""
    separate: SeparateWeights

    @property
    def seconds(self) -> Amount:
        work = self.rollouts.seconds + self.compute + self.exchange + self.gradients + self.weights
        return work + self.lost

    @property
    def tokens_per_second(self) -> Amount:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class SeparateWeights:
    """How long new weights would take to devices that only decode, a copy for each node: three ways."""

    one_by_one: Amount
    """From one node to each, in turn."""
    chain: Amount
    """From node to node, in pieces."""
    storage: Amount
    """Written once and read by all."""

    @classmethod
    def of(cls, num_bytes: Amount, cluster: Cluster, conditions: Conditions) -> SeparateWeights:
        nodes = cluster.num_nodes
        link = (cluster.device.network or cluster.device.link or math.inf) * cluster.devices_per_node
        pieces = max(1.0, num_bytes / _PIECE)
        one_piece = num_bytes / pieces / link + conditions.latency
        return cls(
            one_by_one=nodes * num_bytes / link,
            chain=(pieces + nodes - 1) * one_piece,
            storage=num_bytes / conditions.one_writer + nodes * num_bytes / conditions.storage,
        )


_PIECE = 64e6
"""Bytes of a message in a chain of copies."""


def scale(
    workload: Workload, cluster: Cluster, conditions: Conditions | None = None, seed: int = 0
) -> ScaledUpdate:
    """An update of this workload on this cluster."""
    conditions = conditions or Conditions()
    cost = ModelCost.of(workload.model)
    timing = plan_time(workload, cluster)
    lengths = draw_lengths(workload, seed)
    speeds = draw_speeds(cluster.num_devices, conditions, seed)
    queued = play_rollouts(workload, cluster, lengths, speeds, "queue")
    tokens = float(lengths.sum())
    gradients = _gradient_seconds(workload, cluster, cost, conditions)
    exchange = 0.0
    if cluster.num_devices > 1:
        exchange = tokens * (
            conditions.response_bytes / conditions.host_network + conditions.unpickle_seconds
        )
    exchange += workload.num_responses * workload.replay_tokens * conditions.replay_seconds
    weights = cluster.gather_seconds(cost.num_params * workload.itemsize)
    compute = timing.seconds_of("prefill", "replay", "old/base", "optimizer", "exposed communication")
    update = queued.seconds + compute + exchange + gradients + weights
    checkpoint = checkpoint_seconds(workload, cluster, conditions)
    save_every, lost = best_interval(update, checkpoint, cluster.num_devices, conditions)
    return ScaledUpdate(
        num_devices=cluster.num_devices,
        num_problems=workload.num_problems,
        rollouts=queued,
        even_rollouts=play_rollouts(workload, cluster, lengths, speeds, "even"),
        compute=compute,
        exchange=exchange,
        gradients=gradients,
        weights=weights,
        checkpoint=checkpoint,
        save_every=save_every,
        lost=lost,
        tokens=tokens,
        separate=SeparateWeights.of(cost.num_params * workload.itemsize, cluster, conditions),
    )


def with_work_for(workload: Workload, num_devices: int, groups_per_device: int) -> Workload:
    """The same, with at least so many problems for each device: a group is never split."""
    return replace(workload, num_problems=max(workload.num_problems, num_devices * groups_per_device))


# -- stragglers --------------------------------------------------------------------------------


def draw_lengths(workload: Workload, seed: int) -> Float64[np.ndarray, "problems samples"]:
    """Of all responses, by the law that `Workload.lengths` has."""
    rng = np.random.default_rng((seed, 0))
    power = workload.max_response_length / workload.response_length - 1
    drawn = rng.random((workload.num_problems, workload.num_samples)) ** power
    lengths: NDArray[np.float64] = np.maximum(1.0, workload.max_response_length * drawn)
    return lengths


def draw_speeds(num_devices: int, conditions: Conditions, seed: int) -> Float64[np.ndarray, " devices"]:
    """1, or less for the slow ones: exactly their share of the devices, rounded, wherever they are."""
    num_slow = round(conditions.slow_share * num_devices)
    speeds = np.ones(num_devices)
    speeds[:num_slow] = conditions.slow_speed
    return np.random.default_rng((seed, 1)).permutation(speeds)


@dataclass(eq=False)
class _Rank:
    """An engine at work: requests that it decodes, those that wait, and its clock."""

    speed: Amount
    max_requests: int
    clock: Amount = 0.0
    forwards: Amount = 0.0
    running: list[Amount] = field(default_factory=list)
    """The forward at which each request is done, the first one first."""
    waiting: deque[Amount] = field(default_factory=deque)
    """Forwards that each takes."""

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    def take(self, group: Sequence[Amount]) -> None:
        self.waiting.extend(group)
        self.admit()

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.max_requests:
            heapq.heappush(self.running, self.forwards + self.waiting.popleft())

    def next_end(self, seconds_of: Callable[[int], Amount]) -> Amount:
        """When its first request is done."""
        num_forwards = self.running[0] - self.forwards
        return self.clock + num_forwards * seconds_of(len(self.running)) / self.speed

    def advance(self, clock: Amount) -> None:
        self.clock, self.forwards = clock, self.running[0]
        while self.running and self.running[0] <= self.forwards:
            heapq.heappop(self.running)
        self.admit()


def play_rollouts(
    workload: Workload,
    cluster: Cluster,
    lengths: Float64[np.ndarray, "problems samples"],
    speeds: Float64[np.ndarray, " devices"],
    handout: Handout,
) -> Rollouts:
    """Decode whole groups on ranks, event by event: an event is the end of a response on one of them.

    With a queue a rank holds no more requests than half its even share (`tstar.experiment.team`)."""
    cost, world_size = ModelCost.of(workload.model), len(speeds)
    fitting = max(1, plan_memory(workload, cluster).num_requests)
    most = min(workload.max_requests, fitting)
    held = min(most, -(-lengths.size // (2 * world_size))) if handout == "queue" else lengths.size

    @cache
    def seconds_of(num_requests: int) -> Amount:
        forward = engine_forward(workload, num_requests)
        return cost.denoise_seconds(cluster.device, workload.itemsize, workload.model.vocab_size, forward)

    groups = deque(np.maximum(1.0, lengths / workload.tokens_per_forward).tolist())
    ranks = [_Rank(float(speed), most) for speed in speeds]
    if handout == "even":
        for number, group in enumerate(groups):
            ranks[number % world_size].take(group)
        groups.clear()
    # All begin at once: the queue goes round until nobody has room.
    is_open = True
    while groups and is_open:
        is_open = False
        for rank in ranks:
            if groups and rank.num_unfinished < held:
                rank.take(groups.popleft())
                is_open = True
    events = [(rank.next_end(seconds_of), number) for number, rank in enumerate(ranks) if rank.running]
    heapq.heapify(events)
    while events:
        clock, number = heapq.heappop(events)
        rank = ranks[number]
        rank.advance(clock)
        while groups and rank.num_unfinished < held:
            rank.take(groups.popleft())
        if rank.running:
            heapq.heappush(events, (rank.next_end(seconds_of), number))
    clocks = np.array([rank.clock for rank in ranks])
    seconds = float(clocks.max())
    return Rollouts(seconds, 1.0 - float(clocks.mean()) / seconds)


# -- what travels ------------------------------------------------------------------------------


def _gradient_seconds(
    workload: Workload, cluster: Cluster, cost: ModelCost, conditions: Conditions
) -> Amount:
    """Between replicas, layer by layer, as a tree: bytes over the network, and a message for each level."""
    if workload.is_lora:
        return 0.0
    levels = math.ceil(math.log2(cluster.num_nodes)) if cluster.num_nodes > 1 else 0
    messages = 2 * levels * (cost.num_layers + 1) * conditions.latency
    return workload.num_optimizer_steps * (cluster.replica_seconds(4 * cost.num_params) + messages)


# -- checkpoints and failures ------------------------------------------------------------------


def checkpoint_seconds(workload: Workload, cluster: Cluster, conditions: Conditions) -> Amount:
    """fp32 weights and both moments, by all processes of a node or by one; the model directory, by one."""
    num_params = ModelCost.of(workload.model).num_params
    model = num_params * workload.itemsize / conditions.one_writer
    if workload.is_lora:
        return model
    writers = min(cluster.shard_size * conditions.one_writer, conditions.storage)
    return model + 12 * num_params / writers


def best_interval(
    update: Amount, checkpoint: Amount, num_devices: int, conditions: Conditions
) -> tuple[int, Amount]:
    """The updates between checkpoints that cost least, and what an update loses to them then."""
    rate = num_devices / (conditions.hours_between_failures * 3600)
    young = math.sqrt(2 * checkpoint / rate) / update  # Young's rule, as the middle of the search
    tried = sorted({max(1, round(young * factor)) for factor in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)})
    losses = {n: lost_seconds(update, checkpoint, n, rate, conditions.restart_seconds) for n in tried}
    best = min(losses, key=lambda n: losses[n])
    return best, losses[best]


def lost_seconds(
    update: Amount, checkpoint: Amount, save_every: int, failure_rate: Amount, restart: Amount
) -> Amount:
    """For one update, on average: the checkpoint's share, and failures at a constant rate that undo what has
    happened since the last one. An interval of n updates is begun anew until it is through; that takes
    (1/λ + R)(e^{λT} - 1) for T = n updates and a checkpoint."""
    interval = save_every * update + checkpoint
    exponent = failure_rate * interval
    if exponent > _HOPELESS:
        return math.inf
    expected = (1 / failure_rate + restart) * math.expm1(exponent)
    return expected / save_every - update


_HOPELESS = 50.0
"""Failures expected in an interval beyond which it never ends."""


def play_failures(
    interval: Amount, num_intervals: int, failure_rate: Amount, restart: Amount, seed: int
) -> Amount:
    """Seconds that so many intervals take, failures drawn one by one: what `lost_seconds` has on average."""
    rng = np.random.default_rng(seed)
    clock = 0.0
    for _ in range(num_intervals):
        while (failure := rng.exponential(1 / failure_rate)) < interval:
            clock += failure + restart
        clock += interval
    return clock
