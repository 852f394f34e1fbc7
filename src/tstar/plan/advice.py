"""What to change when it does not fit: each change tried, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tstar.plan.device import Cluster
from tstar.plan.memory import Memory, plan_memory
from tstar.plan.workload import Workload


@dataclass(frozen=True)
class Advice:
    """One change, alone."""

    change: str
    memory: Memory


def advise(workload: Workload, cluster: Cluster) -> list[Advice]:
    """Changes that make it fit, cheapest first; those that help and do not suffice where none does."""
    memory = plan_memory(workload, cluster)
    if memory.fits:
        return []
    tried = [Advice(text, plan_memory(w, c)) for text, w, c in _changes(workload, cluster)]
    enough = [a for a in tried if a.memory.fits]
    return enough or [a for a in tried if a.memory.peak < memory.peak]


def _changes(workload: Workload, cluster: Cluster) -> Iterator[tuple[str, Workload, Cluster]]:
    recomputing = replace(workload, recompute_activations=True)
    if not workload.recompute_activations:
        yield "recompute_activations: true", recomputing, cluster
    budget = workload.token_budget
    while budget > 1024:
        budget //= 2
        smaller = replace(workload, token_budget=budget)
        memory = plan_memory(smaller, cluster)
        if memory.training <= memory.available or budget <= 1024:
            yield f"token_budget: {budget}", smaller, cluster
            break
    both = replace(recomputing, token_budget=budget)
    yield f"recompute_activations: true, token_budget: {budget}", both, cluster
    if workload.has_value:
        yield "group advantages instead of a value model", replace(workload, has_value=False), cluster
    if workload.has_base:
        yield "kl_reference: old (no base model)", replace(workload, has_base=False), cluster
    if not workload.is_lora and not workload.has_value:
        adapters = replace(recomputing, is_lora=True, has_base=False)
        yield "lora: {rank: 32, alpha: 64} with recompute_activations: true", adapters, cluster
    if not workload.has_value and not workload.is_lora:  # neither can be sharded
        yield from _shardings(workload, recomputing, cluster)


def _shardings(
    workload: Workload, recomputing: Workload, cluster: Cluster
) -> Iterator[tuple[str, Workload, Cluster]]:
    devices = cluster.num_devices
    if devices > 1 and not cluster.is_sharded:
        yield "sharding: full", workload, replace(cluster, is_sharded=True)
        yield "sharding: full, recompute_activations: true", recomputing, replace(cluster, is_sharded=True)
    while devices < cluster.devices_per_node:
        devices = min(2 * devices, cluster.devices_per_node)
        more = replace(cluster, num_devices=devices, is_sharded=True)
        memory = plan_memory(recomputing, more)
        if memory.fits or devices == cluster.devices_per_node:
            yield f"--gpus {devices} with sharding: full, recompute_activations: true", recomputing, more
            break
