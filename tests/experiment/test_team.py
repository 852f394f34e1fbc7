"""Several processes give what one gives: updates bit for bit, and whole runs."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import team
from tiny_runs import digests, finish, read_events, tiny_config
from tstar.config import to_yaml
from tstar.model.checkpoint import load_model
from tstar.parallel import ALONE, owners_of
from tstar.run_dir import RunDir

SCRIPT = Path(team.__file__)


def launch(world_size: int, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(world_size), str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def succeed(world_size: int, out: Path, *arguments: str) -> None:
    done = launch(world_size, out, *arguments)
    assert f"exit codes {[0] * world_size}" in done.stdout, done.stdout + done.stderr


# -- the same run in one process ---------------------------------------------------------------


@pytest.fixture(scope="module")
def config(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T* from B = 4 to 8: five problems an update (3 and 2 of them a pass, for 4 processes an empty shard),
    several packs, a cold start, rewards of which some are not 0."""
    overrides = (
        *("rollout.num_problems=5", "trainer.token_budget=160", "curriculum.shifted_rollouts=sample"),
        "rewards.terms=[{name: chain_answer}, {name: length, options: {max_tokens: 24, buffer: 20}}]",
        "curriculum.cold_start={num_problems: 40, num_samples: 4, num_steps: 2, warmup_steps: 0}",
        "trainer.optimizer.learning_rate=2e-4",  # at 1e-3 two updates leave no right answer to learn from
    )
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(to_yaml(tiny_config(base, *overrides)))
    return path


@pytest.fixture(scope="module")
def one(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    from tstar.config import load_config

    directory = tmp_path_factory.mktemp("one") / "run"
    finish(directory, load_config(str(config)))
    return directory


def responses(directory: Path) -> list[dict[str, Any]]:
    """Of all updates, without the last digits of the engine's log-probs and the forwards for prompts, which
    depend on what was decoded beside them."""
    files = sorted((directory / "rollouts").glob("*.gz"))
    lines = [json.loads(line) for p in files for line in gzip.decompress(p.read_bytes()).splitlines()]
    for line in lines:
        line["log_probs"] = [round(p, 5) for p in line["log_probs"]]
        del line["forwards"]["prefill"]
    return lines


def assert_same_results(found: Path, expected: Path) -> None:
    """Weights, optimizer and events bit for bit, but for what the engine's log-probs are in."""
    assert responses(found) == responses(expected)
    weights = {name: digest for name, digest in digests(expected).items() if "safetensors" in name}
    assert weights
    assert {name: digest for name, digest in digests(found).items() if "safetensors" in name} == weights
    for theirs, ours in zip(read_events(found), read_events(expected), strict=True):
        assert theirs.keys() == ours.keys()
        for name, value in ours.items():
            assert theirs[name] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value), (
                name
            )


# -- updates and whole runs --------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes found: results of jobs, and a run."""
    out = tmp_path_factory.mktemp("two")
    jobs = ("with_value", "summed", "failing", "queue", "sharded", "read_shards", "run")
    succeed(2, out, *jobs, "--", "train", str(config), "--out", str(out / "run"))
    return out


@pytest.fixture(scope="module")
def four(config: Path, two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("four")
    shutil.copytree(two / "shards-2", out / "shards-2")
    # Sharded they are two nodes of two: shards inside a node, replicas across.
    jobs = ("ordered", "few", "read_shards", "sharded:2", "run")
    succeed(4, out, *jobs, "--", "train", str(config), "--out", str(out / "run"))
    return out


@pytest.mark.parametrize(
    ("team_name", "job"), [("four", "ordered"), ("two", "with_value"), ("four", "few"), ("two", "failing")]
)
def test_an_update_has_the_same_bits(team_name: str, job: str, request: pytest.FixtureRequest) -> None:
    found, expected = load_file(request.getfixturevalue(team_name) / job), team.alone(job)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_summed_gradients_are_equal_up_to_rounding(two: Path) -> None:
    found, expected = load_file(two / "summed"), team.alone("summed")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("team_name", ["two", "four"])
def test_sharded_updates_are_equal_up_to_rounding(team_name: str, request: pytest.FixtureRequest) -> None:
    """FSDP2 on one node, HSDP on two: losses, gradient norms, weights, moments."""
    found, expected = load_file(request.getfixturevalue(team_name) / "sharded"), team.alone("sharded")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("team_name", ["alone", "two", "four"])
def test_any_number_of_processes_reads_what_two_wrote(
    team_name: str, two: Path, request: pytest.FixtureRequest
) -> None:
    written = {n: v for n, v in load_file(two / "sharded").items() if n.startswith("weights.")}
    if team_name == "alone":
        team.OUT[:] = [two]
        found = team.alone("read_shards")
    else:
        found = load_file(request.getfixturevalue(team_name) / "read_shards")
    assert found.keys() == written.keys()
    for name, value in written.items():
        assert torch.equal(found[name], value), name


def test_work_goes_to_whoever_is_free(two: Path) -> None:
    counts = load_file(two / "queue")["counts"].tolist()
    assert sum(counts) == 20
    assert counts[0] < counts[1]


@pytest.mark.parametrize("team_name", ["two", "four"])
def test_a_run_gives_the_same(team_name: str, one: Path, request: pytest.FixtureRequest) -> None:
    assert_same_results(request.getfixturevalue(team_name) / "run", one)
    trained = [e for e in read_events(one, "train") if e["grad_norm"] > 0]
    assert len(trained) >= 4, "the runs must differ from a run that learns nothing"


def test_a_killed_process_ends_the_job_and_any_number_goes_on(
    config: Path, one: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    began = time.monotonic()
    done = launch(2, tmp_path, "die2", "--", "train", str(config), "--out", str(run))
    assert "exit codes [2, -9]" in done.stdout, done.stdout + done.stderr
    assert "another process of this job is gone" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 120, "it ended, and did not wait for the timeout of 30 minutes"
    succeed(3, tmp_path, "run", "--", "train", "--resume", str(run))
    assert_same_results(run, one)


def test_a_sharded_run_that_lost_a_process_goes_on_in_one(config: Path, one: Path, tmp_path: Path) -> None:
    """Killed in its last stage, after a cold start. Sums are ordered by process, so equal up to rounding."""
    run, settings = tmp_path / "run", tmp_path / "sharded.yaml"
    settings.write_text(config.read_text().replace("sharding: none", "sharding: full"))
    done = launch(2, tmp_path, "die8", "--", "train", str(settings), "--out", str(run))
    assert "exit codes [2, -9]" in done.stdout, done.stdout + done.stderr
    assert "another process of this job is gone" in done.stderr
    assert "Traceback" not in done.stderr
    saved = RunDir.open(run).latest_checkpoint
    assert saved is not None
    assert saved >= 2
    assert len(list((run / "checkpoints" / f"{saved:06}" / "shards").iterdir())) == 2
    finish(run)
    theirs, ours = responses(run), responses(one)
    for name in ("response_ids", "unmask_step", "reward"):
        assert [line[name] for line in theirs] == [line[name] for line in ours]
    model = load_model(run / "best")
    peer = transformers.Qwen3ForCausalLM.from_pretrained(run / "best")
    reloaded = dict(peer.named_parameters())
    for name, parameter in load_model(one / "best").named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-5, atol=2e-6, msg=name)
        assert torch.equal(reloaded[name], model.get_parameter(name)), name


# -- pieces ------------------------------------------------------------------------------------


def test_owners() -> None:
    assert owners_of([5, 1, 1, 1, 1, 1], 2, "ordered") == [0, 1, 0, 1, 0, 1]
    balanced = owners_of([5, 1, 1, 1, 1, 1], 2, "sum")
    assert balanced == [0, 1, 1, 1, 1, 1]
    assert owners_of([], 3, "sum") == []


def test_one_process_needs_no_others() -> None:
    assert ALONE.gather(1) == [1]
    assert ALONE.on_main(lambda: 2) == 2
    assert ALONE.map([1, 1], lambda n: n * 10) == [0, 10]
    assert not ALONE.any(False)
