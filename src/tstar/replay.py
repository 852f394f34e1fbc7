"""Trajectories as packed training inputs: every token is scored again in the very context it was drawn in.

A trajectory costs its clean text once, and for each step one noisy copy of the block that the step worked
on, as the block stood before it: tokens of earlier steps visible, the others masked. The tokens that the
step finalised are its *actions*; their log-probs are read in that copy and nowhere else. With B = 4, a
prompt p, and ``unmask_step`` 0 1 0 1 | 2 3 3 2 of a response a b c d | e f g h::

    clean   pppp abcd            the last block's clean text is seen by nobody and left out
    copies  [____] -> a c        step 0
            [a_c_] -> b d        step 1
            [____] -> e h        step 2
            [e__h] -> f g        step 3

Actions are the tokens up to the stop. The terminal block is replayed whole: what it holds behind the stop
is context, as it was when the block was decoded, and no action.

Under another partition than the one it was decoded under, a trajectory is *re-cut*: a step is then a pair
(block, step as recorded), in this order, and τ(t) the tokens of this block that were recorded with this
step. Blocks are finished from left to right, and inside a block tokens come in the order in which they
were decoded; a recorded step whose tokens lie on both sides of a new boundary becomes two. A terminal
block that reaches beyond what was decoded ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from tstar.model.attention import Attention, prepare
from tstar.model.head import TargetScores, target_scores
from tstar.model.layout import NO_PARENT, PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.packing import pack
from tstar.partition import Partition, PartitionRule
from tstar.trajectory import Trajectory

_ALL_STEPS = np.iinfo(np.int64).max
"""As the step before which a copy stands: everything is visible, the clean text."""
_FIXED = -1
"""As a token's step: it was there before the first one, a prompt token."""


@dataclass(frozen=True, eq=False)
class ReplayedActions:
    """The tokens that a pack's steps finalised, in the order (trajectory, block, recorded step, position)."""

    read: Int64[np.ndarray, " actions"]
    """Index into the pack where the action is read: its own masked place in its step's copy."""
    labels: Int64[np.ndarray, " actions"]
    index: Int64[np.ndarray, " actions"]
    """Index into the response."""
    members: Int64[np.ndarray, " actions"]
    """Of which member of the pack: 0, 1, ..."""
    steps: Int64[np.ndarray, " actions"]
    """Among all steps of the pack: 0, 1, ...; one per copy."""
    blocks: Int64[np.ndarray, " actions"]
    """Among the blocks of the response that hold a response token: 0, 1, ..."""
    steps_in_block: Int64[np.ndarray, " actions"]
    """Among its block's steps that finalised an action: 0, 1, ..."""
    temperature: Float64[np.ndarray, " actions"]
    engine_log_probs: Float64[np.ndarray, " actions"]
    """As recorded when the token was drawn."""

    def __len__(self) -> int:
        return len(self.read)


@dataclass(frozen=True, eq=False)
class ReplayPack:
    """One forward's worth of trajectories."""

    layout: PackedLayout
    token_ids: Int64[np.ndarray, " tokens"]
    actions: ReplayedActions
    trajectories: Int64[np.ndarray, " members"]
    """The trajectory of each member, as an index into those that were given. A trajectory larger than the
    token budget is a member of several packs, with some of its copies in each."""


def replay(
    trajectories: Sequence[Trajectory],
    rule: PartitionRule,
    mask_token_id: int,
    token_budget: int,
    merge_steps: int = 1,
) -> list[ReplayPack]:
    """Every trajectory, cut by the rule, in packs of at most `token_budget` tokens each.

    Responses to the same prompt come together where they fit, and share its text. The copies of a
    trajectory that alone is larger are spread over several packs, each with the clean text that its copies
    see; where this text is more than half of the budget, a pack has as many tokens of copies as of text.
    merge_steps: so many neighbouring steps of a block are replayed as one, in the first one's copy: fewer
    copies, but tokens of the later steps are scored in a context with more masks than they were drawn in.
    """
    if merge_steps < 1:
        raise ValueError(f"merge_steps: {merge_steps} is no number of steps; use 1 (exact) or more")
    _check_labels(trajectories, mask_token_id)
    if not trajectories:
        return []
    cuts = [_Cut.of(t, rule.cut(len(t.prompt_ids), len(t.response_ids))) for t in trajectories]
    steps = _order_steps(trajectories, cuts, merge_steps)
    packs = _share_out(trajectories, cuts, steps, token_budget)
    return [_assemble(trajectories, steps, members, mask_token_id) for members in packs]


def score(
    model: LanguageModel,
    pack: ReplayPack,
    attention: Attention | None = None,
    recompute_activations: bool = False,
) -> TargetScores:
    """Log-prob and entropy of each action, from the distribution that the engine draws from: at its
    temperature, without the mask token. The LM head is computed for actions alone.

    attention: `prepare(pack.layout, model.device)`, where the caller has it already."""
    read, labels = (torch.from_numpy(x).to(model.device) for x in (pack.actions.read, pack.actions.labels))
    token_ids = torch.from_numpy(pack.token_ids).to(model.device)
    attention = attention or prepare(pack.layout, model.device)
    hidden = model(token_ids, attention, read, recompute_activations)
    temperature = pack.actions.temperature
    is_uniform = bool((temperature == temperature[0]).all())
    return target_scores(
        hidden,
        model.output_weight,
        labels,
        float(temperature[0]) if is_uniform else torch.from_numpy(temperature).to(hidden),
        excluded=model.config.mask_token_id,
    )


# -- cutting -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Cut:
    """Where one trajectory's text falls under a partition."""

    partition: Partition
    shared_stop: int
    """Positions before it lie in blocks that hold prompt tokens alone: the same for all responses."""
    clean_stop: int
    """Where the block of the last copy begins, the terminal one; no copy sees clean text from here on."""

    @classmethod
    def of(cls, trajectory: Trajectory, partition: Partition) -> _Cut:
        last_action = partition.prompt_length + trajectory.stop_length - 1
        terminal = partition.block(partition.block_id(last_action))
        return cls(partition, partition.blocks[0].start, terminal.start)


@dataclass(frozen=True, eq=False)
class _Steps:
    """The actions of some trajectories in order, and the copies that they are read in."""

    trajectory: Int64[np.ndarray, " actions"]
    index: Int64[np.ndarray, " actions"]
    block: Int64[np.ndarray, " actions"]
    copy: Int64[np.ndarray, " actions"]
    """Which of the copies below."""
    first_action: Int64[np.ndarray, " copies"]
    """Of each copy; trajectory and block are the copy's too."""
    before: Int64[np.ndarray, " copies"]
    """The recorded step that the copy stands before."""
    in_block: Int64[np.ndarray, " copies"]
    """Among the copies of its block: 0, 1, ..."""

    def of(self, pieces: Sequence[_Piece]) -> _Steps:
        """Those of some pieces alone, one piece after the other, each counted as a trajectory."""
        ends = np.append(self.first_action, len(self.index))
        first_copy, stop_copy = (np.array([getattr(p, n) for p in pieces]) for n in ("start", "stop"))
        piece_of_action, action = _runs(ends[stop_copy] - ends[first_copy])
        piece_of_copy, copy = _runs(stop_copy - first_copy)
        actions_before = _starts(ends[stop_copy] - ends[first_copy]) - ends[first_copy]
        copies_before = _starts(stop_copy - first_copy) - first_copy
        action += ends[first_copy][piece_of_action]
        copy += first_copy[piece_of_copy]
        return _Steps(
            trajectory=piece_of_action,
            index=self.index[action],
            block=self.block[action],
            copy=self.copy[action] + copies_before[piece_of_action],
            first_action=self.first_action[copy] + actions_before[piece_of_copy],
            before=self.before[copy],
            in_block=self.in_block[copy],
        )

    @property
    def copy_trajectory(self) -> Int64[np.ndarray, " copies"]:
        chosen: np.ndarray = self.trajectory[self.first_action]
        return chosen

    @property
    def copy_block(self) -> Int64[np.ndarray, " copies"]:
        chosen: np.ndarray = self.block[self.first_action]
        return chosen


def _order_steps(trajectories: Sequence[Trajectory], cuts: Sequence[_Cut], merge_steps: int) -> _Steps:
    """Actions by (trajectory, block, recorded step, position); each (trajectory, block, step) is a copy."""
    stops = np.array([t.stop_length for t in trajectories], dtype=np.int64)
    trajectory, index = _runs(stops)
    step = np.concatenate([t.unmask_step[: t.stop_length] for t in trajectories])
    block = np.concatenate(
        [
            c.partition.block_ids[len(t.prompt_ids) :][: t.stop_length]
            for t, c in zip(trajectories, cuts, strict=True)
        ]
    )
    order = np.lexsort((index, step, block, trajectory))
    trajectory, index, step, block = (x[order] for x in (trajectory, index, step, block))
    is_block = _is_new(trajectory, block)
    is_copy = is_block | _is_new(step)
    # Number the copies of each block from 0; those that are no multiple of merge_steps join the one before.
    is_copy &= _rank(np.cumsum(is_copy) - 1, is_block) % merge_steps == 0
    first_action, copy = np.flatnonzero(is_copy), np.cumsum(is_copy) - 1
    in_block = _rank(np.arange(len(first_action)), is_block[first_action])
    return _Steps(trajectory, index, block, copy, first_action, step[first_action], in_block)


def _block_bounds(
    cuts: Sequence[_Cut], trajectory: Int64[np.ndarray, " n"], block: Int64[np.ndarray, " n"]
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """[start, stop) of each named block of each named trajectory."""
    bounds = np.concatenate([c.partition.boundaries for c in cuts])
    at = _starts([len(c.partition.boundaries) for c in cuts])[trajectory] + block
    return bounds[at], bounds[at + 1]


# -- packing -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Piece:
    """What a pack holds of a trajectory: copies [start, stop) of all, and the clean text that they see."""

    trajectory: int
    start: int
    stop: int
    cut: _Cut
    num_tokens: int
    """Without the shared prompt."""


def _share_out(
    trajectories: Sequence[Trajectory], cuts: Sequence[_Cut], steps: _Steps, token_budget: int
) -> list[list[_Piece]]:
    """What goes into which pack: the responses to a prompt together, as far as the budget goes."""
    start, stop = _block_bounds(cuts, steps.copy_trajectory, steps.copy_block)
    first_copy = np.searchsorted(steps.copy_trajectory, np.arange(len(cuts) + 1))
    groups: dict[bytes, list[_Piece]] = {}
    for number, (trajectory, cut) in enumerate(zip(trajectories, cuts, strict=True)):
        copies = slice(int(first_copy[number]), int(first_copy[number + 1]))
        room = token_budget - cut.shared_stop
        pieces = _cut_pieces(number, cut, copies.start, start[copies], stop[copies], room)
        groups.setdefault(trajectory.prompt_ids.tobytes(), []).extend(pieces)
    parts, costs = [], []
    for group in groups.values():
        shared, sizes = group[0].cut.shared_stop, [piece.num_tokens for piece in group]
        for part in pack(sizes, max(1, token_budget - shared), oversized="alone"):
            parts.append([group[i] for i in part])
            costs.append(shared + sum(sizes[i] for i in part))
    return [
        [piece for i in together for piece in parts[i]]
        for together in pack(costs, token_budget, oversized="alone")
    ]


def _cut_pieces(
    number: int,
    cut: _Cut,
    first_copy: int,
    start: Int64[np.ndarray, " copies"],
    stop: Int64[np.ndarray, " copies"],
    room: int,
) -> list[_Piece]:
    """A trajectory's copies, given the blocks [start, stop) that they are of, as few pieces of at most
    `room` tokens."""
    clean = start - cut.shared_stop
    copied = np.cumsum(stop - start)
    room = max(room, 2 * int(clean[-1]))
    pieces, done = [], 0
    while done < len(start):
        before = int(copied[done - 1]) if done else 0
        until = max(done + 1, int(np.searchsorted(clean + copied, room + before, side="right")))
        last = until - 1
        size = int(clean[last] + copied[last]) - before
        own_cut = replace(cut, clean_stop=int(start[last]))
        pieces.append(_Piece(number, first_copy + done, first_copy + until, own_cut, size))
        done = until
    return pieces


def _assemble(
    trajectories: Sequence[Trajectory], all_steps: _Steps, members: Sequence[_Piece], mask_token_id: int
) -> ReplayPack:
    """One pack. Everything in it is a run of positions of one trajectory, as it stood before some step."""
    chosen, chosen_cuts = [trajectories[m.trajectory] for m in members], [m.cut for m in members]
    steps = all_steps.of(members)
    runs, first_copy = _lay_out(chosen, chosen_cuts, steps)
    run, offset = _runs(runs.stop - runs.start)
    position = runs.start[run] + offset

    lengths = [c.partition.sequence_length for c in chosen_cuts]
    at = _starts(lengths)[runs.trajectory[run]] + position
    ids = np.concatenate([x for t in chosen for x in (t.prompt_ids, t.response_ids)])
    step = np.concatenate([x for t in chosen for x in (np.full_like(t.prompt_ids, _FIXED), t.unmask_step)])
    layout = PackedLayout(
        positions=position,
        segment_ids=runs.segment[run],
        block_ids=np.concatenate([c.partition.block_ids for c in chosen_cuts])[at],
        copy_ids=runs.copy[run],
        segment_parents=runs.parents,
    )
    token_ids = np.where(step[at] < runs.before[run], ids[at], mask_token_id)
    own_run = first_copy[steps.copy]
    prompt_length = np.array([len(t.prompt_ids) for t in chosen])[steps.trajectory]
    read = _starts(runs.stop - runs.start)[own_run] + prompt_length + steps.index - runs.start[own_run]
    actions = _actions(chosen, chosen_cuts, steps, read)
    return ReplayPack(layout, token_ids, actions, np.array([m.trajectory for m in members]))


@dataclass(frozen=True, eq=False)
class _RunsOfPositions:
    """What a pack consists of, in the order of the pack: [start, stop) of each trajectory."""

    trajectory: Int64[np.ndarray, " runs"]
    start: Int64[np.ndarray, " runs"]
    stop: Int64[np.ndarray, " runs"]
    before: Int64[np.ndarray, " runs"]
    segment: Int64[np.ndarray, " runs"]
    copy: Int64[np.ndarray, " runs"]
    parents: tuple[int, ...]


def _lay_out(
    trajectories: Sequence[Trajectory], cuts: Sequence[_Cut], steps: _Steps
) -> tuple[_RunsOfPositions, Int64[np.ndarray, " copies"]]:
    """The prompts, each once; then each response's clean text and its copies. Also each copy's run."""
    prompts: dict[bytes, int] = {}
    prompt_of = np.array(
        [prompts.setdefault(t.prompt_ids.tobytes(), len(prompts)) for t in trajectories], dtype=np.int64
    )
    holder = np.unique(prompt_of, return_index=True)[1]  # the first trajectory of each prompt
    everyone = np.arange(len(trajectories))
    shared_stop = np.array([c.shared_stop for c in cuts], dtype=np.int64)
    clean_stop = np.array([c.clean_stop for c in cuts], dtype=np.int64)
    copy_start, copy_stop = _block_bounds(cuts, steps.copy_trajectory, steps.copy_block)
    copies_before = np.searchsorted(steps.copy_trajectory, everyone)
    copy = np.arange(len(copy_start)) - copies_before[steps.copy_trajectory] + 1
    trajectory = np.concatenate([holder, everyone, steps.copy_trajectory])
    segment = np.concatenate(
        [np.arange(len(holder)), len(holder) + everyone, len(holder) + steps.copy_trajectory]
    )
    copies = np.concatenate([np.zeros(len(holder) + len(everyone), dtype=np.int64), copy])
    order = np.lexsort((copies, segment))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    runs = _RunsOfPositions(
        trajectory=trajectory[order],
        start=np.concatenate([np.zeros_like(holder), shared_stop, copy_start])[order],
        stop=np.concatenate([shared_stop[holder], clean_stop, copy_stop])[order],
        before=np.concatenate([np.full(len(holder) + len(everyone), _ALL_STEPS), steps.before])[order],
        segment=segment[order],
        copy=copies[order],
        parents=(NO_PARENT,) * len(holder) + tuple(prompt_of.tolist()),
    )
    return runs, place[len(holder) + len(everyone) :]


def _actions(
    trajectories: Sequence[Trajectory],
    cuts: Sequence[_Cut],
    steps: _Steps,
    read: Int64[np.ndarray, " actions"],
) -> ReplayedActions:
    starts = _starts([len(t.response_ids) for t in trajectories])
    at = starts[steps.trajectory] + steps.index
    num_prompt_blocks = np.array([c.partition.num_prompt_blocks for c in cuts])
    return ReplayedActions(
        read=read,
        labels=np.concatenate([t.response_ids for t in trajectories])[at],
        index=steps.index,
        members=steps.trajectory,
        steps=steps.copy,
        blocks=steps.block - num_prompt_blocks[steps.trajectory],
        steps_in_block=steps.in_block[steps.copy],
        temperature=np.array([t.temperature for t in trajectories])[steps.trajectory],
        engine_log_probs=np.concatenate([t.log_probs for t in trajectories])[at].astype(np.float64),
    )


def _check_labels(trajectories: Sequence[Trajectory], mask_token_id: int) -> None:
    for number, trajectory in enumerate(trajectories):
        is_mask = trajectory.response_ids == mask_token_id
        if is_mask.any():
            raise ValueError(
                f"trajectories[{number}].response_ids[{np.argmax(is_mask)}]: {mask_token_id} is the mask "
                "token; it is never drawn, so this response was not decoded to its end"
            )


# -- index arithmetic --------------------------------------------------------------------------


def _runs(
    lengths: Int64[np.ndarray, " runs"],
) -> tuple[Int64[np.ndarray, " items"], Int64[np.ndarray, " items"]]:
    """For runs of these lengths, one after the other: each item's run, and its number in it."""
    run = np.repeat(np.arange(len(lengths)), lengths)
    return run, np.arange(len(run)) - _starts(lengths)[run]


def _starts(lengths: Sequence[int] | Int64[np.ndarray, " runs"]) -> Int64[np.ndarray, " runs"]:
    """Where each of these runs begins when they stand one after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts: np.ndarray = ends - lengths
    return starts


def _is_new(*columns: Int64[np.ndarray, " items"]) -> Bool[np.ndarray, " items"]:
    """True where an item differs from the one before it in one of the columns."""
    is_new = np.ones(len(columns[0]), dtype=np.bool_)
    is_new[1:] = np.any([np.diff(column) != 0 for column in columns], axis=0)
    return is_new


def _rank(
    number: Int64[np.ndarray, " items"], is_first: Bool[np.ndarray, " items"]
) -> Int64[np.ndarray, " items"]:
    """Each item's number counted from the last first item at or before it."""
    rank: np.ndarray = number - np.maximum.accumulate(np.where(is_first, number, 0))
    return rank
