"""What is replayed: copies, actions and who shares what, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajectories import MASK, make_trajectory, partition_rules, random_rollouts, random_trajectory
from tstar.model.layout import NO_PARENT
from tstar.partition import Partition, PartitionRule
from tstar.replay import ReplayPack, replay
from tstar.trajectory import Trajectory


def only_pack(trajectories: list[Trajectory], rule: PartitionRule, merge_steps: int = 1) -> ReplayPack:
    (pack,) = replay(trajectories, rule, MASK, 10**6, merge_steps)
    return pack


def show(pack: ReplayPack) -> list[str]:
    """Each row as text: segment, copy, then its tokens, _ for a mask."""
    rows = []
    layout = pack.layout
    for start, stop in zip(layout.row_starts[:-1], layout.row_starts[1:], strict=True):
        tokens = " ".join("_" if i == MASK else str(i) for i in pack.token_ids[start:stop])
        rows.append(f"{layout.segment_ids[start]}.{layout.copy_ids[start]}: {tokens}")
    return rows


def actions_by_step(pack: ReplayPack) -> list[list[int]]:
    """Labels of each step."""
    actions = pack.actions
    return [actions.labels[actions.steps == s].tolist() for s in range(actions.steps.max() + 1)]


def test_the_example_of_the_module() -> None:
    trajectory = make_trajectory(Partition(4, 8, 4), [0, 1, 0, 1, 2, 3, 3, 2])
    pack = only_pack([trajectory], PartitionRule(4))
    assert show(pack) == [
        "0.0: 1 2 3 4",
        "1.0: 5 6 7 8",
        "1.1: _ _ _ _",
        "1.2: 5 _ 7 _",
        "1.3: _ _ _ _",
        "1.4: 9 _ _ 12",
    ]
    assert actions_by_step(pack) == [[5, 7], [6, 8], [9, 12], [10, 11]]
    assert pack.actions.blocks.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert pack.actions.steps_in_block.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert pack.layout.segment_parents == (NO_PARENT, 0)


def test_the_terminal_block_is_replayed_whole_but_acts_up_to_the_stop() -> None:
    """Token 8, behind the stop, is context of step 2; its own step has no action and no copy."""
    trajectory = make_trajectory(Partition(2, 6, 4), [0, 0, 1, 1, 3, 2], stop_length=5)
    pack = only_pack([trajectory], PartitionRule(4))
    assert show(pack) == ["0.0: 1 2", "1.0: 3 4 5 6", "1.1: _ _ _ _", "1.2: 3 4 _ _", "1.3: _ 8"]
    assert actions_by_step(pack) == [[3, 4], [5, 6], [7]]


def test_under_origin_sequence_the_prompt_tail_stands_in_the_copy() -> None:
    partition = Partition(6, 5, 4, origin="sequence")
    pack = only_pack([make_trajectory(partition, [1, 0, 3, 2, 2])], PartitionRule(4, origin="sequence"))
    assert show(pack) == [
        "0.0: 1 2 3 4",
        "1.0: 5 6 7 8",
        "1.1: 5 6 _ _",
        "1.2: 5 6 _ 8",
        "1.3: _ _ _",
        "1.4: _ 10 11",
    ]


def test_a_recut_orders_by_block_then_by_recorded_step() -> None:
    """Blocks 1234|5678 decoded as 4 2 | 1 3 | 8 5 | 6 7, replayed as 12|3456|78: step 0, with tokens on
    both sides of the first boundary, becomes two; 56 come after 34, 78 after all of these."""
    trajectory = make_trajectory(Partition(0, 8, 4), [1, 0, 1, 0, 2, 3, 3, 2])
    pack = only_pack([trajectory], PartitionRule(4, offset=2))
    assert show(pack) == [
        "1.0: 1 2",
        "1.0: 3 4 5 6",
        "1.1: _ _",
        "1.2: _ 2",
        "1.3: _ _ _ _",
        "1.4: _ 4 _ _",
        "1.5: 3 4 _ _",
        "1.6: 3 4 5 _",
        "1.7: _ _",
        "1.8: _ 8",
    ]
    assert actions_by_step(pack) == [[2], [1], [4], [3], [5], [6], [8], [7]]


def test_a_recut_leaves_out_what_lies_behind_the_new_terminal_block() -> None:
    trajectory = make_trajectory(Partition(0, 8, 4), [0, 0, 0, 0, 1, 2, 3, 4], stop_length=5)
    pack = only_pack([trajectory], PartitionRule(4, offset=2))
    assert pack.token_ids.max() == MASK
    assert not np.isin([7, 8], pack.token_ids).any()
    assert actions_by_step(pack) == [[1, 2], [3, 4], [5]]


def test_merged_steps_are_read_in_the_first_ones_copy() -> None:
    trajectory = make_trajectory(Partition(0, 7, 4), [0, 1, 2, 3, 4, 6, 5], stop_length=7)
    pack = only_pack([trajectory], PartitionRule(4), merge_steps=2)
    assert show(pack)[1:] == ["1.1: _ _ _ _", "1.2: 1 2 _ _", "1.3: _ _ _", "1.4: 5 _ 7"]
    assert actions_by_step(pack) == [[1, 2], [3, 4], [5, 7], [6]]


def test_merging_more_steps_than_a_block_has_leaves_one_copy_per_block() -> None:
    rng = np.random.default_rng(0)
    partition = Partition(3, 29, 8)
    pack = only_pack([random_trajectory(rng, partition, 29)], PartitionRule(8), merge_steps=99)
    assert pack.actions.steps.max() + 1 == len(partition.blocks)


@given(
    seed=st.integers(0, 2**32),
    decoded=partition_rules(),
    rule=partition_rules(),
    budget=st.sampled_from([1, 40, 150, 10**6]),
)
@settings(max_examples=60)
def test_every_action_stands_once_at_its_masked_place(
    seed: int, decoded: PartitionRule, rule: PartitionRule, budget: int
) -> None:
    """Under any partition, whatever the packs: labels, positions and visibility from the definition."""
    trajectories = random_rollouts(seed, decoded)
    seen = []
    for pack in replay(trajectories, rule, MASK, budget):
        layout, actions = pack.layout, pack.actions
        assert layout.num_tokens <= budget or len(pack.trajectories) == 1
        assert (pack.token_ids[actions.read] == MASK).all()
        for i in range(len(actions)):
            number = int(pack.trajectories[actions.members[i]])
            trajectory, read = trajectories[number], actions.read[i]
            prompt_length, index = len(trajectory.prompt_ids), int(actions.index[i])
            assert actions.labels[i] == trajectory.response_ids[index]
            assert layout.positions[read] == prompt_length + index
            assert actions.temperature[i] == trajectory.temperature
            own = trajectory.unmask_step[index]
            in_row = (layout.segment_ids == layout.segment_ids[read]) & (
                layout.copy_ids == layout.copy_ids[read]
            )
            visible = pack.token_ids[in_row] != MASK
            step_of = np.concatenate([np.full(prompt_length, -1), trajectory.unmask_step])
            assert (visible == (step_of[layout.positions[in_row]] < own)).all()
            seen.append((number, index))
    assert sorted(seen) == [(n, i) for n, t in enumerate(trajectories) for i in range(t.stop_length)]


@given(seed=st.integers(0, 2**32), decoded=partition_rules(), rule=partition_rules(), merge=st.integers(1, 3))
@settings(max_examples=30)
def test_steps_are_dense_and_ordered(
    seed: int, decoded: PartitionRule, rule: PartitionRule, merge: int
) -> None:
    actions = only_pack(random_rollouts(seed, decoded), rule, merge).actions
    keys = np.stack([actions.members, actions.blocks, actions.steps_in_block])
    assert (np.diff(actions.steps) >= 0).all()
    assert set(actions.steps.tolist()) == set(range(np.unique(keys, axis=1).shape[1]))
    same_step = np.diff(actions.steps) == 0
    assert (np.diff(keys, axis=1) == 0).all(axis=0).tolist() == same_step.tolist()
    assert merge > 1 or (np.diff(actions.index)[same_step] > 0).all()


def test_responses_of_a_prompt_share_its_whole_blocks() -> None:
    prompt = np.arange(10, dtype=np.int64)
    for origin, shared in (("response", 10), ("sequence", 8)):
        rule = PartitionRule(4, origin=origin)  # type: ignore[arg-type]
        rng = np.random.default_rng(0)
        group = [random_trajectory(rng, rule.cut(10, 6), 6, prompt_ids=prompt) for _ in range(3)]
        other = random_trajectory(rng, rule.cut(10, 6), 6)
        pack = only_pack([group[0], other, *group[1:]], rule)
        is_prompt = (pack.layout.copy_ids == 0) & (pack.layout.positions < shared)
        assert is_prompt.sum() == 2 * shared
        assert sorted(pack.layout.segment_parents) == [NO_PARENT, NO_PARENT, 0, 0, 0, 1]


def test_packs_keep_to_their_budget() -> None:
    rng = np.random.default_rng(1)
    rule = PartitionRule(4)
    prompt = np.arange(9, dtype=np.int64)
    lengths = (4, 8, 4, 8, 16, 4)
    group = [random_trajectory(rng, rule.cut(9, n), n, prompt_ids=prompt) for n in lengths]
    packs = replay(group, rule, MASK, 70)
    assert all(pack.layout.num_tokens <= 70 for pack in packs)
    assert sorted(i for pack in packs for i in pack.trajectories) == list(range(6))
    assert len(packs) < 5


def test_a_trajectory_above_the_budget_is_spread_over_packs_with_the_text_that_each_sees() -> None:
    trajectory = make_trajectory(Partition(2, 12, 4), [0, 1, 0, 1, 2, 3, 3, 2, 4, 5, 6, 7])
    packs = replay([trajectory], PartitionRule(4), MASK, 18)
    assert [show(pack) for pack in packs] == [
        ["0.0: 1 2", "1.0: 3 4 5 6", "1.1: _ _ _ _", "1.2: 3 _ 5 _", "1.3: _ _ _ _"],
        ["0.0: 1 2", "1.0: 3 4 5 6", "1.0: 7 8 9 10", "1.1: 7 _ _ 10", "1.2: _ _ _ _"],
        ["0.0: 1 2", "1.0: 3 4 5 6", "1.0: 7 8 9 10", "1.1: 11 _ _ _", "1.2: 11 12 _ _"],
        ["0.0: 1 2", "1.0: 3 4 5 6", "1.0: 7 8 9 10", "1.1: 11 12 13 _"],
    ]
    assert [pack.actions.steps_in_block.tolist() for pack in packs] == [
        [0, 0, 1, 1, 0, 0], [1, 1, 0], [1, 2], [3]
    ]  # fmt: skip
    assert [set(pack.trajectories) for pack in packs] == [{0}] * 4


def test_text_that_fills_the_budget_leaves_as_much_room_for_copies() -> None:
    """No budget is so small that each copy gets a forward, and the whole text before it, of its own."""
    rng = np.random.default_rng(1)
    partition = Partition(10, 200, 4)
    packs = replay([random_trajectory(rng, partition, 200)], PartitionRule(4), MASK, 50)
    num_copied = sum(int((p.layout.copy_ids > 0).sum()) for p in packs)
    assert sum(p.layout.num_tokens for p in packs) < 3 * num_copied
    assert len(packs) > 1


def test_no_trajectories_are_no_packs() -> None:
    assert replay([], PartitionRule(4), MASK, 100) == []


def test_a_mask_token_in_the_response_is_refused_by_name() -> None:
    good = make_trajectory(Partition(2, 4, 4), [0, 0, 0, 0])
    bad = replace(good, response_ids=np.array([3, MASK, 5, 6]))
    with pytest.raises(ValueError, match=r"trajectories\[1\].response_ids\[1\]: 96 is the mask token"):
        replay([good, bad], PartitionRule(4), MASK, 100)


def test_merging_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="merge_steps: 0 is no number of steps"):
        replay([], PartitionRule(4), MASK, 100, merge_steps=0)
