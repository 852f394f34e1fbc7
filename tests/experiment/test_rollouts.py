"""Groups of rollouts: what they earned, which rewards failed, and that files give back what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from trajectories import make_trajectory
from tstar.data import RAW_PROMPT, Problem
from tstar.experiment.rollouts import Asking, Drawn, describe, read_groups, write_groups
from tstar.partition import PartitionRule
from tstar.rewards import Rewards, RewardSpec
from tstar.tasks.chain_model import chain_tokenizer

OBEY = "misbehaving_rewards:obey"


@pytest.mark.parametrize("is_first", [True, False], ids=["it decides", "it adds"])
def test_rewards_that_fail_are_counted_and_kept(tmp_path: Path, is_first: bool) -> None:
    """Two problems with two responses each; the reward obeys `5` and `7` and raises on `+` and `-`."""
    tokenizer = chain_tokenizer()
    trajectories = [
        make_trajectory(
            PartitionRule(4).cut(2, 4),
            [0, 1, 2, 3],
            finish_reason="length",
            response_ids=tokenizer(text * 4, return_tensors="np").input_ids[0],
        )
        for text in "5+7-"
    ]
    drawn = [Drawn(place, Problem("1+", "5555", id=str(place))) for place in range(2)]
    specs = [RewardSpec(OBEY), RewardSpec("exact")]
    asking = Asking(tokenizer, RAW_PROMPT, num_samples=2, max_tokens=4, temperature=1.0)
    with Rewards(specs if is_first else specs[::-1], num_workers=1) as rewards:
        groups = asking.groups(drawn, trajectories, rewards)
    assert [group.failures for group in groups] == [({}, {OBEY: "error"}), ({}, {OBEY: "error"})]
    assert [r.reward for group in groups for r in group.rollouts] == [5556, 0, 7777, 0]
    assert describe(groups)["num_failed_rewards"] == 2

    write_groups(tmp_path / "rollouts.jsonl.gz", groups)
    again = read_groups(tmp_path / "rollouts.jsonl.gz", drawn)
    assert [group.failures for group in again] == [group.failures for group in groups]
    assert describe(again) == describe(groups)
