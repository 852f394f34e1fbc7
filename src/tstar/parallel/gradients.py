"""The gradient of a minibatch whose packs several processes compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tstar.parallel.processes import Parallel


class GradientSum:
    """Adds up what backward passes leave in the parameters' ``grad``, over packs and processes.

    Call `passed(number)` after each pack in turn, in all processes, and `finish` at the end; then every
    process has the whole sum. Under ``ordered`` a round is as many packs as there are processes: each
    computes one, then all add the round's gradients one by one in the order of the packs. That is the order
    in which one process adds them, so the sum has the same bits, whatever the number of processes.
    """

    def __init__(self, parallel: Parallel, parameters: Sequence[nn.Parameter], num_packs: int) -> None:
        self._parallel, self._parameters, self._num_packs = parallel, list(parameters), num_packs
        self._total: Tensor | None = None

    @torch.no_grad()
    def passed(self, number: int) -> None:
        """A pack is done, here or elsewhere."""
        parallel = self._parallel
        if parallel.is_alone or parallel.is_sharded or parallel.reduction == "sum":
            return
        is_round_over = (number + 1) % parallel.world_size == 0 or number + 1 == self._num_packs
        if not is_round_over:
            return
        own = self._take()
        first = number - number % parallel.world_size
        for rank in range(number - first + 1):
            gradient = own if rank == parallel.rank else torch.empty_like(own)
            with parallel.naming_the_lost():
                dist.broadcast(gradient, src=rank)
            if self._total is None:
                self._total = gradient.clone()
            else:
                self._total.add_(gradient)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the sum into every parameter's ``grad``."""
        parallel = self._parallel
        if parallel.is_alone or parallel.is_sharded:  # FSDP adds gradients up itself
            return
        if parallel.reduction == "sum":
            self._total = self._take()
            with parallel.naming_the_lost():
                dist.all_reduce(self._total)
        assert self._total is not None
        for parameter, part in zip(self._parameters, self._split(self._total), strict=True):
            parameter.grad = part.view_as(parameter)
        self._total = None

    def _take(self) -> Tensor:
        """All gradients in one row, and none left behind; 0 where there is none."""
        parts = [
            torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1)
            for p in self._parameters
        ]
        row = torch.cat(parts)
        for parameter in self._parameters:
            parameter.grad = None
        return row

    def _split(self, row: Tensor) -> tuple[Tensor, ...]:
        return torch.split(row, [p.numel() for p in self._parameters])


@torch.no_grad()
def broadcast_weights(parallel: Parallel, parameters: Sequence[Tensor]) -> None:
    """The main process's weights in all of them."""
    if parallel.is_alone or parallel.is_sharded:
        return
    for parameter in parameters:
        with parallel.naming_the_lost():
            dist.broadcast(parameter.data, src=0)
