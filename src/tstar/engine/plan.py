"""What the next forward computes: which tokens of which request, and which of them are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from tstar.engine.batch import Batch
from tstar.engine.pages import Prompt
from tstar.model.attention.store import StoreRows


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One forward over the slots that take part."""

    rows: StoreRows
    token_ids: Int64[np.ndarray, " tokens"]
    feeding: Int64[np.ndarray, " rows"]
    """The slot of each row."""
    is_denoising: Bool[np.ndarray, " rows"]
    """Whether it takes a denoising step; the others only read their prompts."""
    denoising: Int64[np.ndarray, " denoising"]
    """The slots among them that take a denoising step."""
    is_masked: Bool[np.ndarray, "denoising width"]
    """Where the block of each of these is still masked."""
    reads: Int64[np.ndarray, " reads"]
    """Tokens of the forward whose distributions are read: one for each of `is_masked`, in order."""
    read_slots: Int64[np.ndarray, " reads"]
    read_places: Int64[np.ndarray, " reads"]
    """The response index that each of them predicts."""


def plan_forward(batch: Batch, prompts: list[Prompt], max_tokens: int, page_size: int) -> ForwardPlan:
    """Every slot whose prompt is read, or can be read now, takes its step; prompts that do not fit into
    `max_tokens` beside the others are read as far as they do. `prompts`: those not read to their end."""
    stops = _targets(batch, prompts, max_tokens)
    slots = batch.slots
    is_feeding = stops > batch.written[slots]
    feeding, stops = slots[is_feeding], stops[is_feeding]
    starts = batch.written[feeding]
    lengths = stops - starts
    first_tokens = np.cumsum(lengths) - lengths
    slot_of_token = np.repeat(feeding, lengths)
    positions = np.arange(len(slot_of_token)) - np.repeat(first_tokens - starts, lengths)

    shift = 0 if batch.is_diffusion else 1
    is_denoising = stops == (batch.block_stop if batch.is_diffusion else batch.block_start)[feeding]
    denoising = feeding[is_denoising]
    block_positions, is_masked = batch.block_masks(denoising)
    first_of_block = (first_tokens - starts)[is_denoising][:, None] + block_positions - shift
    rows_read = np.nonzero(is_masked)[0]
    tokens, slots_to = _mirror(batch, prompts, feeding, (starts, stops, first_tokens), page_size)
    return ForwardPlan(
        rows=StoreRows(
            starts,
            stops,
            batch.page_table[feeding, : -(-int(stops.max()) // page_size)],
            batch.visible_stop[slot_of_token, positions],
            tokens,
            slots_to,
        ),
        token_ids=batch.text[slot_of_token, positions],
        feeding=feeding,
        is_denoising=is_denoising,
        denoising=denoising,
        is_masked=is_masked,
        reads=first_of_block[is_masked],
        read_slots=denoising[rows_read],
        read_places=block_positions[is_masked] - batch.prompt_length[denoising][rows_read],
    )


def _targets(batch: Batch, prompts: list[Prompt], max_tokens: int) -> Int64[np.ndarray, " active"]:
    """Up to which position each slot is fed; nobody is fed less than a block, or is fed nothing."""
    slots = batch.slots
    full = (batch.block_stop if batch.is_diffusion else batch.block_start)[slots]
    targets: np.ndarray = full.copy()
    spare = max_tokens
    is_long = full - batch.written[slots] > 2 * batch.block_size[slots]
    if (full - batch.written[slots]).sum() > max_tokens and is_long.any():
        spare -= int((2 * batch.block_size[slots]).sum())  # everybody's by admission
        for index in np.flatnonzero(is_long):
            slot, wanted = slots[index], int(full[index] - batch.written[slots[index]])
            granted = min(wanted, int(2 * batch.block_size[slot]) + spare)
            spare -= max(0, granted - int(2 * batch.block_size[slot]))
            targets[index] = _last_boundary(batch, int(slot), int(batch.written[slot]) + granted)
    for prompt in prompts:
        # The others that have it go on with their own part in the forward that completes it.
        reader, *others = np.searchsorted(slots, prompt.slots)
        if targets[reader] < prompt.length:
            targets[others] = batch.written[slots[others]]
    return targets


def _last_boundary(batch: Batch, slot: int, position: int) -> int:
    """The last block boundary up to a position."""
    stop = int(batch.visible_stop[slot, position - 1])
    if stop == position:
        return position
    inside = batch.visible_stop[slot, :position] == stop
    return int(inside.argmax())


def _mirror(
    batch: Batch,
    prompts: list[Prompt],
    feeding: Int64[np.ndarray, " rows"],
    rows: tuple[Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]],
    page_size: int,
) -> tuple[Int64[np.ndarray, " mirrored"] | None, Int64[np.ndarray, " mirrored"] | None]:
    """The end of a shared prompt, in the page where responses begin, is written for all who share it.

    rows: their starts, their stops and their first tokens in the forward."""
    tokens, slots_to = [], []
    for prompt in prompts:
        row = int(np.searchsorted(feeding, prompt.slots[0]))
        start, stop, first_token = (int(values[row]) for values in rows)
        page = prompt.length // page_size
        tail = np.arange(max(start, page * page_size), min(stop, prompt.length))
        for other in prompt.slots[1:] if len(tail) else ():
            tokens.append(first_token + tail - start)
            slots_to.append(batch.page_table[other, page] * page_size + tail % page_size)
    if not tokens:
        return None, None
    return np.concatenate(tokens), np.concatenate(slots_to)
