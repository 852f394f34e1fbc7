"""What to watch while a policy or a value model trains: sums over actions that add up over packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor


@dataclass(frozen=True)
class Breakdown:
    """The actions of one step within a block, or of one block of the response: sums and means."""

    index: int
    """The step or block; where neighbours are put together, the first of them."""
    num_actions: int
    policy_loss: float
    clip_fraction: float
    ratio_mean: float
    kl_old: float
    entropy: float
    advantage_mean: float


@dataclass(frozen=True, eq=False)
class TraceLossMetrics:
    """Sums and extremes over a pack's actions; ``a + b`` is what both packs in one would have had."""

    columns: tuple[str, ...]
    """Of the two tables, a sum over actions each; what was not given (base, engine) has none."""
    steps: Float64[Tensor, "steps columns"]
    """A row for each step within a block."""
    blocks: Float64[Tensor, "blocks columns"]
    """A row for each block of the response."""
    extremes: tuple[str, ...]
    largest: Float64[Tensor, " extremes"]

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Tensor],
        largest: Mapping[str, Tensor],
        steps_in_block: Int64[Tensor, " actions"],
        block_indices: Int64[Tensor, " actions"],
    ) -> TraceLossMetrics:
        table = torch.stack([column.double() for column in columns.values()], dim=1)
        return cls(
            tuple(columns),
            _sum_rows(table, steps_in_block),
            _sum_rows(table, block_indices),
            tuple(largest),
            torch.stack([column.max().double() for column in largest.values()]),
        )

    def __add__(self, other: TraceLossMetrics) -> TraceLossMetrics:
        if self.columns != other.columns:
            odd = sorted(set(self.columns) ^ set(other.columns))
            raise ValueError(f"metrics: {', '.join(odd)} measured in one pack and not in the other")
        return TraceLossMetrics(
            self.columns,
            _add_rows(self.steps, other.steps),
            _add_rows(self.blocks, other.blocks),
            self.extremes,
            torch.maximum(self.largest, other.largest),
        )

    def on_host(self) -> TraceLossMetrics:
        """The same in the host's memory, to be sent to another process."""
        return replace(self, steps=self.steps.cpu(), blocks=self.blocks.cpu(), largest=self.largest.cpu())

    def summary(self) -> dict[str, float]:
        """By name: losses as they add up to the minibatch's, the rest as means over actions and extremes."""
        sums = dict(zip(self.columns, self.blocks.sum(dim=0).tolist(), strict=True))
        largest = dict(zip(self.extremes, self.largest.tolist(), strict=True))
        num_actions = sums.pop("num_actions")
        policy_loss, kl_loss = sums.pop("policy_loss"), sums.pop("kl_loss")
        means = {name: total / num_actions for name, total in sums.items()}
        variance = means.pop("advantage_squared") - means["advantage_mean"] ** 2
        return {
            "loss": policy_loss + kl_loss,
            "policy_loss": policy_loss,
            "kl_loss": kl_loss,
            **means,
            "advantage_std": max(variance, 0.0) ** 0.5,
            **{f"{name}_max": value for name, value in largest.items() if name[0] != "-"},
            **{f"{name[1:]}_min": -value for name, value in largest.items() if name[0] == "-"},
            "num_actions": num_actions,
        }

    def by_step(self, at_most: int | None = None) -> tuple[Breakdown, ...]:
        """By step within the block; with `at_most`, in so many rows, each of equally many neighbours."""
        return self._break_down(self.steps, at_most)

    def by_block(self, at_most: int | None = None) -> tuple[Breakdown, ...]:
        """By block of the response, likewise."""
        return self._break_down(self.blocks, at_most)

    def _break_down(self, table: Tensor, at_most: int | None) -> tuple[Breakdown, ...]:
        width = 1 if at_most is None else -(-len(table) // at_most)
        bins = torch.arange(len(table), device=table.device) // width
        found = []
        for number, row in enumerate(_sum_rows(table, bins).tolist()):
            index = number * width
            sums = dict(zip(self.columns, row, strict=True))
            if not sums["num_actions"]:
                continue
            num = int(sums["num_actions"])
            found.append(
                Breakdown(
                    index=index,
                    num_actions=num,
                    policy_loss=sums["policy_loss"],
                    clip_fraction=(sums["clip_fraction_low"] + sums["clip_fraction_high"]) / num,
                    ratio_mean=sums["ratio_mean"] / num,
                    kl_old=sums["kl_old"] / num,
                    entropy=sums["entropy"] / num,
                    advantage_mean=sums["advantage_mean"] / num,
                )
            )
        return tuple(found)


@dataclass(frozen=True, eq=False)
class ValueLossMetrics:
    """Sums over a pack's actions; ``a + b`` is what both packs in one would have had."""

    sums: Float64[Tensor, 8]
    """Actions, loss, clipped, values, returns and their squares, errors R - V and their squares."""

    @classmethod
    def of(cls, losses: Tensor, is_clipped: Tensor, values: Tensor, returns: Tensor) -> ValueLossMetrics:
        error = (returns - values).double()
        columns = (torch.ones_like(error), losses, is_clipped, values, returns, returns.double() ** 2, error)
        return cls(torch.stack([column.double().sum() for column in (*columns, error**2)]))

    def __add__(self, other: ValueLossMetrics) -> ValueLossMetrics:
        return ValueLossMetrics(self.sums + other.sums)

    def on_host(self) -> ValueLossMetrics:
        """The same in the host's memory, to be sent to another process."""
        return ValueLossMetrics(self.sums.cpu())

    def summary(self) -> dict[str, float]:
        """``explained_variance`` is 1 - Var(R - V) / Var(R): 1 is perfect, 0 as good as a constant; absent
        where all returns are equal."""
        num, loss, *sums = self.sums.tolist()
        clip, value, of_return, return2, error, error2 = (total / num for total in sums)
        found = {
            "value_loss": loss,
            "value_clip_fraction": clip,
            "value_mean": value,
            "return_mean": of_return,
        }
        variance = return2 - of_return**2
        if variance > 1e-12 * return2:
            found["explained_variance"] = 1 - (error2 - error**2) / variance
        return found


def _sum_rows(table: Tensor, rows: Tensor) -> Tensor:
    return table.new_zeros(int(rows.max()) + 1, table.shape[1]).index_add_(0, rows, table)


def _add_rows(one: Tensor, other: Tensor) -> Tensor:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.clone()
    total[: len(shorter)] += shorter
    return total
