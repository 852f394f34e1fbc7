"""Constants of devices. Each says where it is from: measured by this project, or the vendor's sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tstar.errors import UserError

Amount = int | float
"""A count, or a mean of counts."""


@dataclass(frozen=True)
class Device:
    """What one accelerator (or this CPU) can do."""

    name: str
    memory: Amount
    """Bytes that a program can have."""
    matmul: Amount
    """FLOP/s of a large square matmul in the compute dtype (bf16 on GPUs)."""
    bandwidth: Amount
    """Bytes/s from its memory."""
    forward_share: Amount
    """Of `matmul`, what a packed forward reaches."""
    training_share: Amount
    """Of `matmul`, what forward and backward reach together."""
    layer_overhead: Amount
    """Seconds that a forward takes for each layer however few tokens it has: launches, Python."""
    forward_overhead: Amount
    """Seconds of an engine's forward outside its layers: choosing, planning, copies to the host."""
    logit_seconds: Amount
    """To turn one logit into what sampling reads, beyond its matmul."""
    link: Amount = 0.0
    """Bytes/s to another device of the node, one direction."""
    network: Amount = 0.0
    """Bytes/s to a device of another node, one direction."""
    overlaps: bool = True
    """It reads memory while it multiplies (a GPU), or does one after the other (a CPU's core)."""
    is_measured: bool = False
    """The constants are this machine's own, found a moment ago."""
    source: str = ""

    def work_seconds(self, flops: Amount, num_bytes: Amount) -> Amount:
        """A forward's arithmetic and what it reads."""
        multiplied, read = flops / (self.matmul * self.forward_share), num_bytes / self.bandwidth
        return max(multiplied, read) if self.overlaps else multiplied + read


_BYTES_PER_LOGIT = 20
"""Written in bf16, read for the maximum, written and read as an exponential in fp32, summed."""
_GPU_LAYER_OVERHEAD = 150e-6
"""About 25 kernels of 6 us each, launched one by one: assumed, no CUDA graphs."""
_GPU_FORWARD_OVERHEAD = 3e-3
"""Planning in numpy and one copy to the host: assumed, from what a CPU takes for the same code."""
_SHARES = (
    "shares of peak: forward 0.54 measured on an H200 (docs/log.md, 2026-11-19); training 0.48 = the 0.25 "
    "measured there with the LM head's old portions, at the head's new time; overheads assumed"
)


def _gpu(
    name: str,
    *,
    memory: Amount,
    matmul: Amount,
    bandwidth: Amount,
    link: Amount,
    network: Amount,
    source: str,
) -> Device:
    return Device(
        name=name,
        memory=memory,
        matmul=matmul,
        bandwidth=bandwidth,
        forward_share=0.54,
        training_share=0.48,
        layer_overhead=_GPU_LAYER_OVERHEAD,
        forward_overhead=_GPU_FORWARD_OVERHEAD,
        logit_seconds=_BYTES_PER_LOGIT / bandwidth,
        link=link,
        network=network,
        source=f"{source}; {_SHARES}",
    )


# Memory: what CUDA leaves of it, about 1.5 GB less. Bandwidth: 90 % of the sheet's, which a large copy
# reaches. Matmul: H200 measured, the others the same 0.78 of the sheet's dense bf16 figure.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "h200": _gpu(
            "h200",
            memory=139.5e9,
            matmul=773e12,
            bandwidth=0.9 * 4.8e12,
            link=450e9,
            network=50e9,
            source="matmul measured (773 TFLOP/s); 4.8 TB/s, NVLink 4, 400 Gb/s per GPU by the sheet",
        ),
        "h100": _gpu(
            "h100",
            memory=78.5e9,
            matmul=773e12,
            bandwidth=0.9 * 3.35e12,
            link=450e9,
            network=50e9,
            source="matmul as the H200's; 3.35 TB/s, NVLink 4, 400 Gb/s per GPU by the sheet (SXM)",
        ),
        "a100": _gpu(
            "a100",
            memory=78.5e9,
            matmul=0.78 * 312e12,
            bandwidth=0.9 * 2.04e12,
            link=300e9,
            network=25e9,
            source="312 TFLOP/s, 2.04 TB/s, NVLink 3 and 200 Gb/s per GPU by the sheet (SXM, 80 GB)",
        ),
    }
)


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, in nodes."""

    device: Device
    num_devices: int = 1
    devices_per_node: int = 8
    is_sharded: bool = True
    """Weights and optimizer are spread over the devices of a node (FSDP2); else each has all of them."""

    def __post_init__(self) -> None:
        for name in ("num_devices", "devices_per_node"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} is too few; use 1 or more")
        if self.num_devices > 1 and not self.device.link:
            raise UserError(
                f"num_devices: {self.num_devices}, but how fast two of this machine's devices "
                f"({self.device.name}) exchange is not known; use 1, or name a device like h200"
            )

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.devices_per_node)

    @property
    def shard_size(self) -> int:
        """Devices that share one set of weights: those of a node; nodes hold replicas (HSDP)."""
        return min(self.num_devices, self.devices_per_node) if self.is_sharded else 1

    def gather_seconds(self, num_bytes: Amount) -> Amount:
        """Every device of a node gets what all of them hold a part of."""
        size = self.shard_size
        return 0.0 if size == 1 else num_bytes * (size - 1) / size / self.device.link

    def replica_seconds(self, num_bytes: Amount) -> Amount:
        """Sums between replicas: each device's part of the weights with its peers of other nodes; without
        shards, everything inside the node first."""
        size, nodes = min(self.num_devices, self.devices_per_node), self.num_nodes
        seconds = (
            0.0 if self.is_sharded or size == 1 else 2 * num_bytes * (size - 1) / size / self.device.link
        )
        if nodes > 1:
            seconds += 2 * num_bytes / size * (nodes - 1) / nodes / self.device.network
        return seconds
