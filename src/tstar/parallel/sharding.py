"""A model whose weights are spread over processes (PyTorch's FSDP2), and whole copies of it.

Every layer is one unit: its weights are gathered when it computes, in the compute dtype, and only then. The
shards themselves are fp32: they are the masters that the optimizer steps, and gradients are summed in fp32.
Across nodes the shards are replicated (HSDP), so that layers are gathered inside a node alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tstar.model.transformer import LanguageModel
from tstar.parallel.processes import Parallel


def make_mesh(parallel: Parallel, device: str) -> DeviceMesh:
    """(nodes, processes of a node): replicas across nodes, shards inside; one dimension on one node."""
    num_nodes, rest = divmod(parallel.world_size, parallel.local_world_size)
    if num_nodes == 1 or rest:
        return init_device_mesh(device, (parallel.world_size,), mesh_dim_names=("shard",))
    sizes = (num_nodes, parallel.local_world_size)
    return init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))


def shard(model: LanguageModel, parallel: Parallel, device: str, compute_dtype: torch.dtype) -> None:
    """Spread a model over the processes, in place; one on meta is filled afterwards.

    Gradients of all processes are added, not averaged: packs carry their share of the loss.
    """
    model.to(torch.float32)
    mesh = make_mesh(parallel, device)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    _set_divisor(model, 1.0)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo sums, and has no operation that divides on the way.
            module.set_force_sum_reduction_for_comms(True)


@contextmanager
def averaging(model: nn.Module, world_size: int) -> Iterator[None]:
    """For work that all processes do alike: the mean of their gradients, where packs are shared the sum."""
    _set_divisor(model, float(world_size))
    try:
        yield
    finally:
        _set_divisor(model, 1.0)


def _set_divisor(model: nn.Module, divisor: float) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(divisor)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, in every process (collective); one that is whole already as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(
    parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors, one at a time, on the device that the shards are on (collective).

    dtype: what they are converted to before they travel: bf16 is half of the way."""
    for name, parameter in parameters:
        detached = parameter.detach()
        yield name, whole(detached if dtype is None else detached.to(dtype))


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, the same in every process, spread as a parameter of its shape is."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    local = tensor.to(parameter.device)
    # Everyone has it: each takes its own part, and nothing travels.
    return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Let go of weights that a forward has gathered and no backward pass let go of."""
    if isinstance(model, FSDPModule):
        model.reshard()


@torch.no_grad()
def copy_into(target: LanguageModel, source: LanguageModel) -> None:
    """Fill a whole model, an engine's, from a sharded one, tensor by tensor (collective)."""
    own = dict(target.named_parameters())
    for name, tensor in gathered(source.named_parameters(), target.dtype):
        own[name].copy_(tensor)
