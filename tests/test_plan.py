"""The planner counts what the model, the replay and the engine really have and do."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny_models import PEERS, make_config
from tstar.cli import main
from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.errors import UserError
from tstar.model.attention import prepare, tiled
from tstar.model.attention.store import KVStore
from tstar.model.config import ModelConfig
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.plan import DEVICES, Cluster, Workload, advise, measure, plan_memory, plan_time
from tstar.plan.cost import ModelCost
from tstar.plan.measure import bytes_kept
from tstar.plan.memory import layer_numbers_per_token
from tstar.plan.shapes import SHAPES, shape_named
from tstar.plan.timing import simulate
from tstar.replay import replay
from tstar.trajectory import ForwardCounts, Trajectory
from tstar.unmask import UnmaskPolicy

H200 = DEVICES["h200"]


def workload(**changes: object) -> Workload:
    return replace(Workload(SHAPES["sdar-1.7b"], block_size=8, tokens_per_forward=2.0), **changes)


@pytest.mark.parametrize("name", PEERS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    changes = {key: value for key, value in PEERS[name][2].items() if key != "rope_parameters"}
    config = make_config(PEERS[name][0].model_type, **changes)
    with torch.device("meta"):
        model = LanguageModel(config)
    cost = ModelCost.of(config)
    assert cost.num_params == sum(p.numel() for p in model.parameters())
    assert cost.kv_numbers * 4 == KVStore.num_bytes_per_token(config, torch.float32)


def test_published_shapes_have_their_sizes() -> None:
    billions = {name: ModelCost.of(shape).num_params / 1e9 for name, shape in SHAPES.items()}
    expected = {"sdar-1.7b": 1.72, "sdar-4b": 4.02, "sdar-8b": 8.19, "sdar-30b-a3b": 30.53}
    assert billions == pytest.approx(expected, abs=0.005)
    assert shape_named("SDAR-30B-A3B-Chat-b16") is SHAPES["sdar-30b-a3b"]
    assert shape_named("gpt2") is None


def test_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from tstar.model.layout import PackedLayout

    config = make_config("qwen3", head_dim=16)
    model = LanguageModel(config)
    layout = PackedLayout.causal([64])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = model(torch.arange(64), prepare(layout, backend="sdpa"))
        model.logits(hidden)
    cost = ModelCost.of(config)
    # Torch counts no flops of this attention: a pair takes a product and a sum for q · k and for p · v each.
    assert cost.flops(64, 0, 64) == counter.get_total_flops()
    assert cost.flops(0, 100, 0) == 100 * 4 * config.num_attention_heads * 16 * config.num_hidden_layers


def test_replayed_tokens_and_forwards_are_those_of_a_decoded_batch() -> None:
    torch.manual_seed(0)
    config = make_config("sdar")
    model = LanguageModel(config)
    model.initialise(torch.Generator().manual_seed(0))
    plan = Workload(
        config, 4, 2.0, num_problems=3, num_samples=4, prompt_length=12, response_length=32,
        max_response_length=32, max_requests=12, dtype="float32",
    )  # fmt: skip
    engine = Engine(model, EngineConfig(memory=1 << 28, max_requests=12))
    sampling = SamplingParams(max_tokens=32, unmask=UnmaskPolicy(tokens_per_step=2), ignore_eos=True)
    rule = PartitionRule(4)
    prompts = [np.full(12, problem) for problem in range(3)]
    trajectories = engine.generate([Request(p, rule, sampling, seed=i) for i in range(4) for p in prompts])
    num_tokens = sum(pack.layout.num_tokens for pack in replay(trajectories, rule, 96, 1 << 20))
    assert num_tokens == plan.num_responses * plan.replay_tokens
    assert sum(n for n, _ in simulate(plan, 12)) == pytest.approx(16)
    assert engine.num_forwards == 16


@pytest.mark.parametrize("model_type", ["sdar", "llama"])
def test_activations_are_what_autograd_keeps(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "MAX_KEPT_WEIGHTS", 0)  # attention weights are a part of their own
    layout = PackedLayout.causal([16] * 32)

    def measure_kept(num_layers: int) -> tuple[ModelConfig, float]:
        """Numbers for each token."""
        sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 768}
        config = make_config(model_type, **sizes, num_hidden_layers=num_layers)
        model = LanguageModel(config)
        model.initialise(torch.Generator().manual_seed(0))
        token_ids, attention = torch.zeros(layout.num_tokens, dtype=torch.int64), prepare(layout)
        return config, bytes_kept(model, lambda: model(token_ids, attention)) / (4 * layout.num_tokens)

    config, less = measure_kept(2)
    _, more = measure_kept(3)
    assert layer_numbers_per_token(config) == pytest.approx(more - less, rel=0.01)


def test_no_pack_is_larger_than_is_planned() -> None:
    """However long a response is; `replay` spreads it over packs of its clean text and as much of copies."""
    rule = PartitionRule(8)
    for length, budget in ((24, 4096), (512, 256), (2048, 1024)):
        partition = rule.cut(48, length)
        steps = np.arange(length, dtype=np.int64)
        trajectory = Trajectory(
            prompt_ids=np.zeros(48, dtype=np.int64),
            response_ids=np.zeros(length, dtype=np.int64),
            unmask_step=steps,
            log_probs=np.zeros(length, dtype=np.float32),
            stop_length=length,
            finish_reason="length",
            partition=partition,
            forwards=ForwardCounts(denoise=length),
            weight_version=0,
            seed=0,
        )
        own = workload(prompt_length=48, response_length=24, max_response_length=length, token_budget=budget)
        packs = replay([trajectory] * 3, rule, 9, budget)
        assert max(pack.layout.num_tokens for pack in packs) <= own.pack_tokens


def test_memory_of_one_device_and_of_shards() -> None:
    num_params = ModelCost.of(SHAPES["sdar-1.7b"]).num_params
    alone = plan_memory(workload(), Cluster(H200))
    # bf16 weights, fp32 masters, two moments, fp32 gradients; the engine reads the trainer's weights.
    parts = ("weights", "fp32 masters", "Adam moments", "gradients")
    assert sum(alone.bytes_of(part) for part in parts) == num_params * 18
    assert alone.bytes_of("engine weights") == 0
    shards = plan_memory(workload(), Cluster(H200, 8))
    assert shards.bytes_of("Adam moments") == num_params
    assert shards.bytes_of("engine weights") == num_params * 2
    copies = plan_memory(workload(), Cluster(H200, 8, is_sharded=False))
    assert copies.training == alone.training
    assert plan_memory(workload(is_lora=True), Cluster(H200)).bytes_of("Adam moments") == 0


def test_requests_that_have_no_pages_wait() -> None:
    tight = Cluster(replace(H200, memory=60e9))
    memory = plan_memory(workload(max_requests=512), tight)
    assert 1 <= memory.num_requests < 512
    assert memory.sampling <= 60e9
    roomy = plan_time(workload(max_requests=512), Cluster(H200))
    assert plan_time(workload(max_requests=512), tight).seconds_of("denoise") > roomy.seconds_of("denoise")


def test_advice_is_given_where_it_does_not_fit_and_each_piece_is_true() -> None:
    assert advise(workload(), Cluster(H200)) == []
    large = workload(model=SHAPES["sdar-8b"])
    found = advise(large, Cluster(DEVICES["h100"]))
    assert found
    assert all(each.memory.fits for each in found)
    assert any("lora" in each.change for each in found)
    assert any("--gpus" in each.change for each in found)


def test_time_scales_as_the_work_does() -> None:
    one = plan_time(workload(num_updates=10), Cluster(H200))
    assert one.hours == pytest.approx(10 * one.seconds / 3600)
    eight = plan_time(workload(), Cluster(H200, 8))
    assert eight.seconds_of("replay") < one.seconds_of("replay") / 6
    assert eight.seconds_of("denoise") > one.seconds_of("denoise") / 8  # the longest response stays
    fewer_steps = plan_time(workload(tokens_per_forward=4.0), Cluster(H200))
    assert fewer_steps.seconds_of("denoise") < one.seconds_of("denoise")
    assert fewer_steps.seconds_of("replay") < one.seconds_of("replay")
    nodes = plan_time(workload(), Cluster(H200, 64))
    assert nodes.seconds_of("sync") > eight.seconds_of("sync")


def test_lengths_have_their_mean_and_their_longest() -> None:
    lengths = workload().lengths(4000)
    assert sum(lengths) / len(lengths) == pytest.approx(700, rel=0.01)
    assert max(lengths) == pytest.approx(2048, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_forward": 9.0}, "tokens_per_forward: 9.0 is impossible at block_size = 8"),
        ({"num_samples": 0}, "num_samples: 0"),
        ({"max_response_length": 10}, "max_response_length: 10 is below the mean"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        workload(**changes)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    """Memory by part of the first stage."""
    assert main(["plan", *arguments, "--gpus", "8", "--json"]) == 0
    memory: dict[str, int] = json.loads(capsys.readouterr().out.splitlines()[0])["memory"]
    return memory


def test_a_plan_is_of_the_run_that_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    """Sharded or not, adapters or all weights."""
    copies = planned(capsys, "sdar-1.7b-tstar")
    shards = planned(capsys, "sdar-1.7b-tstar", "sharding=full")
    assert "engine weights" not in copies
    assert copies["Adam moments"] == pytest.approx(8 * shards["Adam moments"], rel=1e-6)
    assert "engine weights" in shards
    adapters = planned(capsys, "sdar-8b-tstar-lora")
    assert "Adam moments" not in adapters
    assert "engine weights" not in adapters


def test_sharding_is_advised_where_copies_do_not_fit() -> None:
    large = workload(model=SHAPES["sdar-8b"])
    copies = Cluster(DEVICES["h100"], 8, is_sharded=False)
    assert not plan_memory(large, copies).fits
    assert any(each.change.startswith("sharding: full") for each in advise(large, copies))


def test_this_machine_is_measured() -> None:
    device = measure(torch.device("cpu"), torch.float32)
    assert device.is_measured
    assert device.matmul > 1e9
    assert device.bandwidth > 1e8
    assert 0 < device.training_share < 10  # of a peak that was measured a moment earlier: neighbours move it
    assert device.layer_overhead > 0


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no quickstart has left the recipe's model
    assert main(["plan", "sdar-1.7b-tstar", "--gpus", "8", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["block_size"] for record in records] == [4, 8, 16, 32]
    assert all(record["fits"] for record in records)
    assert all(math.isfinite(record["hours"]) for record in records)
    assert main(["plan", "sdar-8b-tstar", "--device", "h100", "--max-requests", "8"]) == 0
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "all stages" in out
    assert main(["plan", "quickstart-tstar"]) == 2
    assert "has no config.json" in capsys.readouterr().err
