"""What holds for every schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trajectories import partition_rules, random_rollouts
from tstar.partition import PartitionRule
from tstar.schedule import DecodedResponse, Schedules, analyze, local_strict
from tstar.trajectory import ForwardCounts, Trajectory


def equation_8(unmask_step: list[int]) -> float:
    """LocalStrict, symbol by symbol, in O(n²)."""
    n = len(unmask_step)
    pi = sorted(range(n), key=lambda position: (unmask_step[position], position))
    return sum(pi[k] == min(pi[j] for j in range(k, n)) for k in range(n)) / n


def rollouts(seed: int, rules: list[PartitionRule]) -> list[Trajectory]:
    """Any responses under any partitions, with any confidence and stop."""
    rng = np.random.default_rng(seed)
    batch = [t for rule in rules for t in random_rollouts(int(rng.integers(10**6)), rule)]
    return [
        replace(
            t,
            log_probs=-rng.exponential(size=len(t.log_probs)).astype(np.float32),
            stop_length=int(rng.integers(1, len(t.response_ids) + 1)),
        )
        for t in batch
    ]


seeds, rules = st.integers(0, 10**6), st.lists(partition_rules(), min_size=1, max_size=3)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_local_strict_equals_equation_8(unmask_step: list[int]) -> None:
    assert local_strict(np.array(unmask_step)) == equation_8(unmask_step)


@given(seeds, rules)
def test_of_many_responses_each_has_its_own(seed: int, rules: list[PartitionRule]) -> None:
    batch = rollouts(seed, rules)
    found = Schedules.of(batch).local_strict.tolist()
    assert found == [equation_8(t.unmask_step[: t.stop_length].tolist()) for t in batch]


@given(seeds, rules)
def test_left_to_right_is_1(seed: int, rules: list[PartitionRule]) -> None:
    in_order = [
        replace(t, unmask_step=np.arange(len(t.response_ids)), forwards=ForwardCounts(len(t.response_ids)))
        for t in rollouts(seed, rules)
    ]
    assert analyze([DecodedResponse(t) for t in in_order]).local_strict == 1.0


@given(seeds, rules)
def test_what_is_behind_the_stop_changes_no_event(seed: int, rules: list[PartitionRule]) -> None:
    """Cut at the stop, the terminal block with it, the same tokens tell the same."""

    def cut(trajectory: Trajectory) -> Trajectory:
        stop = trajectory.stop_length
        steps = np.unique(trajectory.unmask_step[:stop], return_inverse=True)[1]
        return replace(
            trajectory,
            response_ids=trajectory.response_ids[:stop],
            unmask_step=steps,
            log_probs=trajectory.log_probs[:stop],
            partition=trajectory.partition.resized(stop),
            forwards=ForwardCounts(denoise=int(steps.max()) + 1),
        )

    batch = rollouts(seed, rules)
    whole, parts = Schedules.of(batch), Schedules.of([cut(t) for t in batch])
    for name in ("responses", "places", "is_leftmost", "confidences"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


@given(seeds, rules)
def test_tables_count_each_token_and_each_forward_once(seed: int, rules: list[PartitionRule]) -> None:
    batch = rollouts(seed, rules)
    found = analyze([DecodedResponse(t, is_correct=i % 2 == 0) for i, t in enumerate(batch)])
    num_tokens = sum(t.stop_length for t in batch)
    assert found.num_tokens == found.first_unmask.sum() == num_tokens
    assert found.confidence.correct.sum() + found.confidence.wrong.sum() == num_tokens
    assert (found.non_monotone <= found.first_unmask.sum(axis=1)).all()
    assert found.num_forwards == np.arange(len(found.steps_per_block)) @ found.steps_per_block
    assert found.steps_per_block.sum() == sum(len(t.partition.blocks) for t in batch)
    assert found.tokens_per_forward == num_tokens / sum(t.forwards.denoise for t in batch)


@given(seeds, rules)
def test_tables_equal_a_walk_over_the_tokens(seed: int, rules: list[PartitionRule]) -> None:
    batch = rollouts(seed, rules)
    first_unmask: dict[tuple[int, int], int] = {}
    non_monotone: dict[int, int] = {}
    for trajectory, block in itertools.chain.from_iterable(
        zip(itertools.repeat(t), t.partition.blocks, strict=False) for t in batch
    ):
        at = {p: p - trajectory.partition.prompt_length for p in range(block.start, block.stop)}
        steps = {p: int(trajectory.unmask_step[index]) for p, index in at.items() if index >= 0}
        for position, step in steps.items():
            if at[position] >= trajectory.stop_length:
                continue
            place = position - block.start
            cell = (place, step - min(steps.values()))
            first_unmask[cell] = first_unmask.get(cell, 0) + 1
            if any(steps[left] > step for left in steps if left < position):
                non_monotone[place] = non_monotone.get(place, 0) + 1
    found = Schedules.of(batch)
    cells = {(int(p), int(s)): int(found.first_unmask[p, s]) for p, s in np.argwhere(found.first_unmask)}
    assert cells == first_unmask
    assert {int(p): int(found.non_monotone[p]) for p in np.flatnonzero(found.non_monotone)} == non_monotone
