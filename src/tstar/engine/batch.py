"""The requests being decoded, as columns: what a forward is planned from, and what its result changes.

A request sits in a slot, a row of every array here, from admission to its end. Planning a forward and
applying its result are operations on these arrays, never a loop over requests or tokens.

Every forward feeds each slot's tokens from `written` (the first position without final keys and values) to
the end of its current block. While a block is denoised that is the block; after it was finished, it and
the next one, so its commit rides; at the beginning, the prompt and the first block. An AR model reads
each token from the position before it, so there the run ends where the block begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from tstar.engine.pages import Lease
from tstar.engine.request import Request
from tstar.partition import Partition
from tstar.unmask import PolicyColumns, UnmaskPolicy

NO_TOKEN = -1


@dataclass(eq=False)
class Running:
    """What a slot holds besides its columns."""

    request_id: int
    request: Request
    partition: Partition
    """Of the longest response it may get."""
    lease: Lease
    num_prefills: int = 0


class Batch:
    """Slots and their columns; widths grow to the longest request seen."""

    def __init__(self, num_slots: int, is_diffusion: bool) -> None:
        self.is_diffusion = is_diffusion
        self.running: list[Running | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: Int64[np.ndarray, " active"] | None = None
        # Per position of the sequence.
        self.text = np.zeros((num_slots, 0), dtype=np.int64)
        self.is_masked = np.zeros((num_slots, 0), dtype=np.bool_)
        self.unmask_step = np.zeros((num_slots, 0), dtype=np.int64)
        self.log_probs = np.zeros((num_slots, 0), dtype=np.float32)
        self.visible_stop = np.zeros((num_slots, 0), dtype=np.int64)
        self.page_table = np.zeros((num_slots, 0), dtype=np.int64)
        # Per request.
        numbers = np.zeros((9, num_slots), dtype=np.int64)
        self.prompt_length, self.length, self.written, self.block_start, self.block_stop = numbers[:5]
        self.step, self.block_step, self.top_k, self.block_size = numbers[5:]
        self.seeds = np.zeros(num_slots, dtype=np.uint64)
        self.temperature, self.top_p, self.min_p = np.zeros((3, num_slots))
        self.by_sampled = np.zeros(num_slots, dtype=np.bool_)
        self.policies = PolicyColumns.of([UnmaskPolicy()] * num_slots)
        self.stops = np.zeros((num_slots, 0), dtype=np.int64)

    # -- coming and going ------------------------------------------------------------------------

    @property
    def slots(self) -> Int64[np.ndarray, " active"]:
        """Slots in use, in order."""
        if self._slots is None:
            self._slots = np.array([i for i, r in enumerate(self.running) if r is not None], dtype=np.int64)
        return self._slots

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    @property
    def next_slot(self) -> int:
        return self._free[-1]

    def add(self, running: Running, mask_token: int, stops: tuple[int, ...]) -> None:
        """Put a request into `next_slot`."""
        slot = self._free.pop()
        self.running[slot], self._slots = running, None
        request, partition, lease = running.request, running.partition, running.lease
        sampling, length, prompt_length = (
            request.sampling,
            partition.sequence_length,
            partition.prompt_length,
        )
        self._widen(length, len(lease.pages), len(stops))
        self.text[slot, :prompt_length] = request.prompt_ids
        self.text[slot, prompt_length:length] = mask_token
        self.is_masked[slot] = False
        self.is_masked[slot, prompt_length:length] = True
        self.visible_stop[slot, :length] = partition.boundaries[1:][partition.block_ids]
        self.page_table[slot, : len(lease.pages)] = lease.pages
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(stops)] = stops
        first = partition.block(partition.num_prompt_blocks)
        self.prompt_length[slot], self.length[slot] = prompt_length, length
        self.block_start[slot], self.block_stop[slot] = first.start, first.stop
        self.written[slot] = 0 if lease.prompt is None else lease.prompt.length
        if lease.prompt is not None and lease.prompt.reader == slot:
            self.written[slot] = lease.prompt.num_read
        self.step[slot] = self.block_step[slot] = 0
        self.block_size[slot] = partition.block_size
        self.seeds[slot] = request.seed
        self.temperature[slot] = sampling.temperature
        self.top_k[slot], self.top_p[slot] = sampling.top_k or 0, sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.by_sampled[slot] = sampling.unmask.confidence == "sampled"
        self.policies.put(slot, sampling.unmask)

    def remove(self, slot: int) -> None:
        self.running[slot], self._slots = None, None
        self._free.append(slot)

    def _widen(self, num_positions: int, num_pages: int, num_stops: int) -> None:
        widths = dict.fromkeys(
            ("text", "is_masked", "unmask_step", "log_probs", "visible_stop"), num_positions
        )
        for name, width in (*widths.items(), ("page_table", num_pages), ("stops", num_stops)):
            values = getattr(self, name)
            if values.shape[1] < width:
                fill = NO_TOKEN if name == "stops" else 0
                more = max(width - values.shape[1], values.shape[1])
                setattr(self, name, np.pad(values, ((0, 0), (0, more)), constant_values=fill))

    # -- results ---------------------------------------------------------------------------------

    def unmask(
        self,
        slots: Int64[np.ndarray, " rows"],
        chosen: Bool[np.ndarray, "rows width"],
        tokens: Int64[np.ndarray, "rows width"],
        log_probs: Float64[np.ndarray, "rows width"],
    ) -> None:
        """Finalise the chosen positions of each slot's block: a denoising step is over."""
        rows, places = np.nonzero(chosen)
        at = slots[rows], self.block_start[slots][rows] + places
        self.text[at] = tokens[rows, places]
        self.log_probs[at] = log_probs[rows, places]
        self.unmask_step[at] = self.step[slots][rows]
        self.is_masked[at] = False
        self.step[slots] += 1
        self.block_step[slots] += 1
        self.written[slots] = self.block_start[slots]

    def find_stops(
        self, slots: Int64[np.ndarray, " rows"]
    ) -> tuple[Bool[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:
        """Of finished blocks: whether the response stops in it, and after which position."""
        start = np.maximum(self.block_start[slots], self.prompt_length[slots])
        positions, is_inside = _ranges(start, self.block_stop[slots])
        tokens = self.text[slots[:, None], positions]
        is_stop = (tokens[:, :, None] == self.stops[slots][:, None]).any(axis=2) & is_inside
        return is_stop.any(axis=1), start + is_stop.argmax(axis=1) + 1

    def advance(self, slots: Int64[np.ndarray, " rows"]) -> None:
        """On to the next block."""
        self.block_start[slots] = self.block_stop[slots]
        self.block_stop[slots] = self.visible_stop[slots, self.block_start[slots]]
        self.block_step[slots] = 0

    def block_masks(
        self, slots: Int64[np.ndarray, " rows"]
    ) -> tuple[Int64[np.ndarray, "rows width"], Bool[np.ndarray, "rows width"]]:
        """Positions of each slot's block, and which of them are masked."""
        positions, is_inside = _ranges(self.block_start[slots], self.block_stop[slots])
        return positions, self.is_masked[slots[:, None], positions] & is_inside


def _ranges(
    start: Int64[np.ndarray, " rows"], stop: Int64[np.ndarray, " rows"]
) -> tuple[Int64[np.ndarray, "rows width"], Bool[np.ndarray, "rows width"]]:
    """Each row's start, ..., stop - 1 side by side, and where they are real; short rows repeat their last."""
    steps = np.arange((stop - start).max(initial=0))
    positions = start[:, None] + steps
    return np.minimum(positions, stop[:, None] - 1), positions < stop[:, None]
