"""A plan for people, and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tstar.plan.advice import Advice
from tstar.plan.device import Cluster
from tstar.plan.memory import Memory
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
