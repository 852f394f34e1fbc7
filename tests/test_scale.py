"""Updates on very many devices, played out."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tstar.cli import main
from tstar.errors import UserError
from tstar.plan import DEVICES, Cluster, Conditions, Workload, scale, with_work_for
from tstar.plan.cost import ModelCost
from tstar.plan.scale import (
    SeparateWeights,
    best_interval,
    draw_lengths,
    draw_speeds,
    lost_seconds,
    play_failures,
    play_rollouts,
)
from tstar.plan.shapes import SHAPES
from tstar.plan.timing import engine_forward

H200 = DEVICES["h200"]


def workload(**changes: object) -> Workload:
    plain = Workload(SHAPES["sdar-1.7b"], block_size=8, tokens_per_forward=2.0, num_samples=4)
    return replace(plain, **changes)


def forward_seconds(plan: Workload, num_requests: int) -> float:
    forward = engine_forward(plan, num_requests)
    return ModelCost.of(plan.model).denoise_seconds(H200, plan.itemsize, plan.model.vocab_size, forward)


def test_one_rank_decodes_as_long_as_its_forwards_take() -> None:
    """Four requests, of which one is done after 10 forwards, one after 30, two after 50."""
    plan = workload(num_problems=1)
    found = play_rollouts(plan, Cluster(H200), np.array([[20.0, 60, 100, 100]]), np.ones(1), "even")
    expected = sum(count * forward_seconds(plan, n) for count, n in ((10, 4), (20, 3), (20, 2)))
    assert found.seconds == pytest.approx(expected)
    assert found.idle == 0
    slow = play_rollouts(plan, Cluster(H200), np.array([[20.0, 60, 100, 100]]), np.array([0.5]), "even")
    assert slow.seconds == pytest.approx(2 * expected)


def test_requests_above_the_limit_wait() -> None:
    plan = workload(num_problems=1, max_requests=2)
    found = play_rollouts(plan, Cluster(H200), np.full((1, 4), 100.0), np.ones(1), "even")
    assert found.seconds == pytest.approx(100 * forward_seconds(plan, 2))


def test_a_queue_gives_a_slow_rank_less() -> None:
    """16 groups on 4 ranks, one of half speed: an even share keeps the others waiting for it."""
    plan = workload(num_problems=16, max_requests=4)
    cluster, lengths, speeds = Cluster(H200, 4), np.full((16, 4), 100.0), np.array([0.5, 1, 1, 1])
    even = play_rollouts(plan, cluster, lengths, speeds, "even")
    queue = play_rollouts(plan, cluster, lengths, speeds, "queue")
    group = 50 * forward_seconds(plan, 4)
    assert even.seconds == pytest.approx(8 * group)
    assert even.idle == pytest.approx(1 - (8 + 3 * 4) / (4 * 8))
    assert queue.seconds == pytest.approx(6 * group)  # 3 of the slow one's, the last taken when others were
    assert queue.idle < even.idle


@pytest.mark.parametrize("handout", ["queue", "even"])
def test_nobody_is_faster_than_the_work_allows(handout: str) -> None:
    plan = workload(num_problems=64)
    cluster, lengths = Cluster(H200, 16), draw_lengths(plan, seed=1)
    found = play_rollouts(plan, cluster, lengths, np.ones(16), handout)  # type: ignore[arg-type]
    longest = lengths.max() / plan.tokens_per_forward * forward_seconds(plan, 1)
    work = lengths.sum() / plan.tokens_per_forward * forward_seconds(plan, 256) / 256
    assert found.seconds >= max(longest, work / 16)
    assert 0 <= found.idle < 1


def test_lengths_and_speeds_are_what_they_should_be() -> None:
    plan = workload(num_problems=2000)
    lengths = draw_lengths(plan, seed=0)
    assert lengths.mean() == pytest.approx(700, rel=0.02)
    assert lengths.max() <= 2048
    speeds = draw_speeds(200, Conditions(), seed=0)
    assert sorted(set(speeds.tolist())) == [0.7, 1.0]
    assert (speeds < 1).sum() == 2


def test_failures_cost_what_a_play_of_them_says() -> None:
    rate, update, checkpoint, restart = 1 / 5000, 100.0, 20.0, 600.0
    for save_every in (1, 10, 40):
        interval = save_every * update + checkpoint
        played = play_failures(interval, 40_000 // save_every, rate, restart, seed=save_every)
        lost = played / (40_000 // save_every) / save_every - update
        assert lost == pytest.approx(lost_seconds(update, checkpoint, save_every, rate, restart), rel=0.06)
    assert lost_seconds(update, checkpoint, 100_000, rate, restart) == math.inf


def test_the_best_interval_is_nearly_the_best_of_all() -> None:
    conditions = Conditions()
    for num_devices in (8, 512, 16_384):
        found, lost = best_interval(60.0, 20.0, num_devices, conditions)
        rate = num_devices / (conditions.hours_between_failures * 3600)
        every = [lost_seconds(60.0, 20.0, n, rate, conditions.restart_seconds) for n in range(1, 2000)]
        assert lost <= 1.02 * min(every), (num_devices, found)


def test_weights_stay_inside_nodes_and_gradients_do_not() -> None:
    few, many = (scale(workload(), Cluster(H200, n)) for n in (8, 128))
    assert many.weights == few.weights
    assert few.gradients == 0
    assert many.gradients > 0
    assert many.lost > few.lost
    assert many.seconds < few.seconds
    away = SeparateWeights.of(16e9, Cluster(H200, 4096), Conditions())
    assert away.chain < away.one_by_one / 50
    assert away.chain < away.storage


def test_a_batch_that_grows_shows_what_does_not_get_faster() -> None:
    grown = with_work_for(workload(num_problems=8), 64, 2)
    assert grown.num_problems == 128
    assert with_work_for(workload(num_problems=512), 64, 2).num_problems == 512
    small, large = scale(workload(num_problems=8), Cluster(H200, 4)), scale(grown, Cluster(H200, 64))
    assert large.exchange == pytest.approx(16 * small.exchange, rel=0.2)
    assert large.tokens_per_second / 64 < small.tokens_per_second / 4


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    one_stage = ("curriculum.target_block_size=4", "rollout.num_samples=2")
    arguments = ("plan", "sdar-8b-tstar", *one_stage, "--scale", "8", "64")
    assert main([*arguments, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["num_devices"] for record in records] == [8, 64]
    assert all(math.isfinite(record["seconds"]) for record in records)
    assert main([*arguments]) == 0
    assert "waiting for the last rank" in capsys.readouterr().out


def test_devices_whose_links_are_unknown_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_devices: 2, but how fast .* \(cpu\) exchange is not known"):
        Cluster(replace(H200, name="cpu", link=0.0), 2)
