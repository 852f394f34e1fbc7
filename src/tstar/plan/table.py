"""A plan for people, and for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tstar.plan.advice import Advice
from tstar.plan.device import Cluster
from tstar.plan.memory import Memory
from tstar.plan.scale import ScaledUpdate
from tstar.plan.timing import Timing
from tstar.plan.workload import Workload

_GIB = 2.0**30


def to_table(
    workload: Workload, cluster: Cluster, memory: Memory, timing: Timing, advice: Sequence[Advice]
) -> RenderableType:
    """One stage."""
    gpus = f"{cluster.num_devices} x {cluster.device.name}"
    title = (
        f"B = {workload.block_size}, {workload.num_updates} updates of {workload.num_problems} x "
        f"{workload.num_samples} responses, {workload.response_length} tokens each at TPF "
        f"{workload.tokens_per_forward:g}, on {gpus}"
    )
    return Group(
        Text(title, style="bold"),
        _memory_table(memory),
        _time_table(timing),
        *_verdict(workload, memory, advice),
    )


def _memory_table(memory: Memory) -> Table:
    table = Table("memory of one device, GiB", "sampling", "training")
    for part in memory.parts:
        size = f"{part.num_bytes / _GIB:.2f}"
        table.add_row(part.name, size if part.while_sampling else "", size if part.while_training else "")
    table.add_section()
    table.add_row("in all", f"{memory.sampling / _GIB:.1f}", f"{memory.training / _GIB:.1f}")
    table.add_row("there is", f"{memory.available / _GIB:.1f}", f"{memory.available / _GIB:.1f}")
    return table


def _time_table(timing: Timing) -> Table:
    table = Table("time of an update", "seconds", "share", "bound by")
    for phase in timing.phases:
        share = phase.seconds / timing.seconds
        table.add_row(phase.name, f"{phase.seconds:.2f}", f"{share:.0%}", phase.bound)
    table.add_section()
    table.add_row("update", f"{timing.seconds:.2f}", "", f"{timing.tokens_per_second:,.0f} tokens/s")
    sampling = f"{timing.rollout_tokens_per_second:,.0f} tokens/s while sampling"
    table.add_row("stage", f"{timing.hours:.2f} h", "", sampling)
    return table


def _verdict(workload: Workload, memory: Memory, advice: Sequence[Advice]) -> list[Text]:
    if memory.fits:
        lines = [Text(f"fits: {(memory.available - memory.peak) / _GIB:.1f} GiB are left")]
        if memory.num_requests < workload.max_requests:
            waiting = f"{memory.num_requests} of {workload.max_requests} requests are decoded at once"
            lines.append(Text(f"{waiting}: there are no pages for more"))
        return [*lines, Text("")]
    lines = [
        Text(f"does not fit: {(memory.peak - memory.available) / _GIB:.1f} GiB too much", style="bold red")
    ]
    for each in advice:
        left = (each.memory.available - each.memory.peak) / _GIB
        verdict = f"leaves {left:.1f} GiB" if left >= 0 else f"still {-left:.1f} GiB too much"
        lines.append(Text(f"  {each.change}: {verdict}"))
    return [*lines, Text("")]


def to_scale_table(workload: Workload, device: str, updates: Sequence[ScaledUpdate]) -> RenderableType:
    """One stage on more and more devices, a column each; seconds of an update unless a row says otherwise."""
    title = f"B = {workload.block_size} at TPF {workload.tokens_per_forward:g}: seconds of an update"
    table = Table(device, title=title, title_justify="left")
    for each in updates:
        table.add_column(f"{each.num_devices:,}", justify="right")
    rows: list[tuple[str, Callable[[ScaledUpdate], str]]] = [
        ("problems", lambda u: f"{u.num_problems:,}"),
        ("decoding", lambda u: f"{u.rollouts.seconds:.1f}"),
        ("  of it waiting for the last rank", lambda u: f"{u.rollouts.idle:.0%}"),
        ("  (with even shares in place of a queue)", lambda u: f"{u.even_rollouts.seconds:.1f}"),
        ("training", lambda u: f"{u.compute:.1f}"),
        ("rollouts to all, replay planned by all", lambda u: f"{u.exchange:.2f}"),
        ("gradients between nodes", lambda u: f"{u.gradients:.2f}"),
        ("weights to engines", lambda u: f"{u.weights:.2f}"),
        ("lost to checkpoints and failures", lambda u: f"{u.lost:.2f}"),
        ("  a checkpoint", lambda u: f"{u.checkpoint:.1f}"),
        ("  best: one in so many updates", lambda u: f"{u.save_every}"),
        ("update", lambda u: f"{u.seconds:.1f}"),
        ("response tokens/s", lambda u: f"{u.tokens_per_second:,.0f}"),
        ("  of each device", lambda u: f"{u.tokens_per_second / u.num_devices:,.0f}"),
        ("weights to decoding devices: one by one", lambda u: f"{u.separate.one_by_one:.2f}"),
        ("  in a chain", lambda u: f"{u.separate.chain:.2f}"),
        ("  through storage", lambda u: f"{u.separate.storage:.2f}"),
    ]
    for name, show in rows:
        if name == "weights to decoding devices: one by one":
            table.add_section()  # not a mode of tstar: what another design would pay
        table.add_row(name, *map(show, updates))
    return Group(table, Text(""))


def to_scale_record(workload: Workload, device: str, update: ScaledUpdate) -> dict[str, Any]:
    """One stage on so many devices."""
    sums = {"seconds": update.seconds, "tokens_per_second": update.tokens_per_second}
    return {"block_size": workload.block_size, "device": device, **asdict(update), **sums}


def to_record(
    workload: Workload, cluster: Cluster, memory: Memory, timing: Timing, advice: Sequence[Advice]
) -> dict[str, Any]:
    """One stage, in bytes and seconds."""
    return {
        "block_size": workload.block_size,
        "num_updates": workload.num_updates,
        "device": cluster.device.name,
        "num_devices": cluster.num_devices,
        "memory": {p.name: round(p.num_bytes) for p in memory.parts},
        "memory_sampling": round(memory.sampling),
        "memory_training": round(memory.training),
        "memory_available": round(memory.available),
        "num_requests": memory.num_requests,
        "fits": memory.fits,
        "seconds": {p.name: p.seconds for p in timing.phases},
        "seconds_per_update": timing.seconds,
        "hours": timing.hours,
        "rollout_tokens_per_second": timing.rollout_tokens_per_second,
        "tokens_per_second": timing.tokens_per_second,
        "advice": [{"change": a.change, "fits": a.memory.fits, "peak": round(a.memory.peak)} for a in advice],
    }
