"""Whole runs: what they do, what they leave, and that resuming changes nothing."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_runs import (
    CrashError,
    assert_same_run,
    crash_at,
    digests,
    finish,
    read_events,
    tiny_config,
)
from tstar.curriculum import InterruptedRunError
from tstar.errors import UserError
from tstar.evaluate import read_evaluation
from tstar.experiment import Interrupts, Watch, open_run
from tstar.experiment.run import _is_refusal
from tstar.model.checkpoint import load_config, load_model
from tstar.optimizer import NonFiniteGradientError
from tstar.parallel import LostProcessError
from tstar.run_dir import RunDir
from tstar.schedule import DecodedResponse
from tstar.trainer import Trainer


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T* from B = 4 to 8, never interrupted."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    finish(directory, tiny_config(base))
    return directory


# -- what a run leaves -------------------------------------------------------------------------


def test_the_events_of_a_run(whole: Path) -> None:
    events = [
        (e["event"], e["update_step"], e.get("block_size"), e.get("offset")) for e in read_events(whole)
    ]

    def one_update(step: int, b: int) -> list[Any]:
        passes = [("train", step, b, 0), ("train", step, b, b // 2)]
        return [*passes, ("validation", step, b, None)]

    assert events == [
        ("stage", 0, 4, None),
        ("validation", 0, 4, None),
        *one_update(1, 4),
        *one_update(2, 4),
        ("stage", 2, 8, None),
        ("validation", 2, 8, None),
        *one_update(3, 8),
        *one_update(4, 8),
        ("end", 4, None, None),
    ]
    train = read_events(whole, "train")[0]
    assert train["num_rollouts"] == 8  # half of 4 problems, 4 responses each
    assert train["num_failed_rewards"] == 0
    for name in (
        "reward_mean",
        "tokens_per_forward",
        "local_strict",
        "response_length",
        "grad_norm",
        "entropy",
    ):
        assert math.isfinite(train[name]), name
    for name in ("by_step", "by_block"):
        rows = train[name]
        assert sum(rows["num_actions"]) == train["num_actions"]
        assert sum(rows["policy_loss"]) == pytest.approx(train["policy_loss"], abs=1e-9)
        assert rows["index"] == sorted(rows["index"])
    assert sum(e["grad_norm"] for e in read_events(whole, "train")) > 0
    assert abs(train["rollout_train_kl"]) < 1e-6, "what was sampled is what is trained on"
    times = [json.loads(line)["time"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert {"sample_seconds", "train_seconds", "tokens_per_second"} <= times[2].keys()


def test_validation_is_an_evaluation_directory(whole: Path) -> None:
    names = sorted(path.name for path in (whole / "eval").iterdir())
    assert names == ["000000-b4", "000001-b4", "000002-b4", "000002-b8", "000003-b8", "000004-b8"]
    found = read_evaluation(whole / "eval" / "000003-b8").summary
    (event,) = (e for e in read_events(whole, "validation") if e["update_step"] == 3)
    assert found.accuracy.value == event["accuracy"]
    assert (found.conditions.block_size, found.conditions.update_step) == (8, 3)
    assert found.conditions.policy == event["policy"] == "static k=2"


def test_rollouts_are_kept_with_their_rewards(whole: Path) -> None:
    import gzip

    files = sorted((whole / "rollouts").iterdir())
    assert [file.name for file in files] == [f"00000{step}.jsonl.gz" for step in (1, 2, 3, 4)]
    lines = gzip.decompress(files[0].read_bytes()).decode().splitlines()
    responses = [DecodedResponse.from_json(line) for line in lines]
    assert len(responses) == 16
    rewards = [json.loads(line)["reward"] for line in lines]
    assert rewards == [float(r.is_correct) for r in responses]  # type: ignore[arg-type]
    first_half = sum(rewards[:8]) / 8
    assert first_half == read_events(whole, "train")[0]["reward_mean"]


def test_checkpoints_are_pruned_and_the_best_is_exported(whole: Path) -> None:
    run = RunDir.open(whole)
    best = max(
        (e for e in read_events(whole, "validation") if e["block_size"] == 8 and e["is_best"]),
        key=lambda e: e["accuracy"],
    )
    assert set(run.checkpoints) == {3, 4} | {best["update_step"]}
    for name, block_size in (("best", 8), ("stages/b4", 4), ("stages/b8", 8)):
        model = load_model(whole / name)
        assert load_config(whole / name).block_size == block_size
        assert (whole / name / "tokenizer.json").is_file()
        if name != "stages/b4":
            of_checkpoint = load_model(run.checkpoint_path(best["update_step"]) / "model")
            assert torch.equal(model.model.norm.weight, of_checkpoint.model.norm.weight)


def test_training_changes_the_weights(base: Path, whole: Path) -> None:
    before, after = (load_model(d) for d in (base, RunDir.open(whole).checkpoint_path(4) / "model"))
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    changes = [float((one - other).detach().abs().max()) for one, other in pairs]
    assert max(changes) > 1e-4


def test_the_configuration_is_kept_resolved(base: Path, whole: Path) -> None:
    _, config = open_run(whole)
    assert config.model.is_absolute()
    assert isinstance(config.engine.memory, int)
    assert config.rollout == tiny_config(base).rollout


# -- the same again ----------------------------------------------------------------------------


def test_a_run_repeats_itself_and_another_seed_does_not(base: Path, whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # nothing may depend on the process's own generator
    finish(tmp_path / "again", tiny_config(base))
    assert_same_run(whole, tmp_path / "again")
    finish(tmp_path / "other", tiny_config(base, "seed=1", "curriculum.target_block_size=4"))
    assert read_events(tmp_path / "other")[2] != read_events(whole)[2]


SHORT = ["curriculum.updates_per_stage=1", "checkpoints.keep_last=1", "validation.num_problems=3"]
MIXTURE = "rollout.policies=[{kind: static}, {kind: dynamic, confidence_threshold: 0.6, weight: 2}]"
COLD_START = "curriculum.cold_start={num_problems: 12, num_steps: 3, batch_size: 4, warmup_steps: 1}"
VARIANTS = {
    "sample, mixture, two rewards": [
        "curriculum.shifted_rollouts=sample",
        MIXTURE,
        "rewards.terms=[{name: chain_answer}, {name: chain_steps, weight: 0.5}]",
    ],
    "direct, new optimizer, kl to the base": [
        "curriculum.shifted_rollouts=off",
        "curriculum.keep_optimizer=false",
        "trainer.objective.kl_reference=base",
    ],
    "cold start": [COLD_START],
    "bf16, cold start": ["precision=bfloat16", COLD_START],
    "value model, minibatches": ["trainer.value={}", "trainer.num_minibatches=2", "trainer.num_passes=2"],
    "lora, kl to the base": ["lora={rank: 2}", "trainer.objective.kl_reference=base"],
    "sum over the length": ["trainer.objective.step_norm=length", "trainer.objective.kl_estimator=k1"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_that_crashed_anywhere_resumes_to_the_same_numbers(
    name: str, base: Path, tmp_path: Path
) -> None:
    config = tiny_config(base, *SHORT, *VARIANTS[name])
    finish(tmp_path / "whole", config)
    with pytest.raises(CrashError):
        finish(tmp_path / "crashed", config, Watch(crash_at(1, "train")))
    with pytest.raises(CrashError):
        finish(tmp_path / "crashed", watch=Watch(crash_at(2, "validation")))
    finish(tmp_path / "crashed")
    assert_same_run(tmp_path / "whole", tmp_path / "crashed")


def test_a_finished_run_stays_as_it_is(whole: Path) -> None:
    before = (read_events(whole), digests(whole))
    assert finish(whole).update_step == 4
    assert (read_events(whole), digests(whole)) == before


# -- interrupted -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, 30, 47, 60, 90])
def test_an_interrupted_run_saves_and_resumes_to_the_same_numbers(
    number: int, base: Path, whole: Path, tmp_path: Path
) -> None:
    """A signal between, in the middle of sampling, between two passes, in an evaluation."""
    interrupts = Interrupts()
    seen = 0

    def on_event(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            signal.raise_signal(signal.SIGTERM)

    with interrupts.listening(), pytest.raises(InterruptedRunError):
        finish(tmp_path / "run", tiny_config(base), Watch(on_event, interrupts.check))
    assert interrupts.received == signal.SIGTERM
    finish(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


def test_an_interrupt_between_passes_keeps_the_first_one(base: Path, whole: Path, tmp_path: Path) -> None:
    interrupts = Interrupts()

    def on_event(event: str, *_: object) -> None:
        if event == "train":
            interrupts.received = signal.SIGINT

    with pytest.raises(InterruptedRunError):
        finish(tmp_path / "run", tiny_config(base), Watch(on_event, interrupts.check))
    assert [e["pass"] for e in read_events(tmp_path / "run", "train")] == [0]
    assert RunDir.open(tmp_path / "run").latest_checkpoint == 1
    again = crash_at(1, "train")
    with pytest.raises(CrashError):
        finish(tmp_path / "run", watch=Watch(again))
    assert [e["pass"] for e in read_events(tmp_path / "run", "train")] == [0, 1]
    finish(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


HALVES = {
    "between passes": ("curriculum.shifted_rollouts=sample", "train", 1),
    "between policies": ("validation.extra_policies=[{kind: static}]", "phase", 4),
}
"""What is half done when the interrupt comes: after the first pass of the first update, or in the fourth
evaluation, which is the second one after that update."""


@pytest.mark.parametrize("name", HALVES)
def test_an_interrupt_in_the_middle_of_what_belongs_together(name: str, base: Path, tmp_path: Path) -> None:
    override, event, number = HALVES[name]
    config = tiny_config(base, *SHORT, "curriculum.target_block_size=4", override)
    finish(tmp_path / "whole", config)
    seen = 0

    def on_event(found: str, _step: int, record: Mapping[str, Any], _time: object) -> None:
        nonlocal seen
        begins = record.get("phase") == "evaluate" and record.get("done") == 1
        seen += found == event and (event == "train" or begins)

    def check() -> None:
        if seen >= number:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        finish(tmp_path / "run", config, Watch(on_event, check))
    finish(tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_an_interrupted_cold_start_has_changed_nothing(base: Path, tmp_path: Path) -> None:
    config = tiny_config(base, "curriculum.updates_per_stage=1", "precision=bfloat16", COLD_START)
    finish(tmp_path / "whole", config)
    is_decoded, calls = False, 0

    def on_event(event: str, _step: int, record: Mapping[str, Any], _time: object) -> None:
        nonlocal is_decoded
        is_cold_start = event == "phase" and record["phase"] == "cold start"
        is_decoded |= is_cold_start and record["done"] == record["total"]

    def check() -> None:
        nonlocal calls
        calls += is_decoded
        if calls == 3:  # after the decoding, before the first step, before the second
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        finish(tmp_path / "run", config, Watch(on_event, check))
    assert not read_events(tmp_path / "run", "cold_start")
    finish(tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_second_signal_leaves_at_once() -> None:
    interrupts = Interrupts()
    with interrupts.listening():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


# -- the guard ---------------------------------------------------------------------------------


def test_the_guard_catches_a_collapse_and_rolls_back(base: Path, tmp_path: Path) -> None:
    """A learning rate a hundred times too high; a roll-back makes it what it should be."""
    config = tiny_config(
        base,
        "curriculum={initial_block_size: 4, target_block_size: 4, updates_per_stage: 6}",
        "trainer.optimizer.learning_rate=0.1",
        "guard={action: roll_back, patience: 1, learning_rate_factor: 0.01, max_accuracy_drop: null}",
        "rewards.terms=[{name: chain_steps}, {name: chain_answer}]",
    )
    end = finish(tmp_path / "run", config)
    assert end.stop_reason is None
    alarms = read_events(tmp_path / "run", "guard")
    assert {alarm["action"] for alarm in alarms} == {"roll_back"}
    fallen = alarms[0]["update_step"]
    rates = {e["update_step"]: e["learning_rate"] for e in read_events(tmp_path / "run", "train")}
    assert rates[fallen] == pytest.approx(0.1)
    assert rates[fallen + 1] == pytest.approx(1e-3)
    entropies = {
        e["update_step"]: e["entropy"] for e in read_events(tmp_path / "run", "train") if e["pass"] == 0
    }
    assert entropies[fallen + 1] == pytest.approx(entropies[1], rel=0.3), "the policy is itself again"
    assert len(alarms) < 6


def test_a_hopeless_run_is_stopped(base: Path, tmp_path: Path) -> None:
    config = tiny_config(
        base,
        "trainer.optimizer.learning_rate=0.1",
        "guard={action: stop, patience: 1, max_accuracy_drop: null}",
        "curriculum.updates_per_stage=6",
    )
    end = finish(tmp_path / "run", config)
    assert end.stop_reason is not None
    assert read_events(tmp_path / "run", "end")[0]["reason"] == end.stop_reason
    assert finish(tmp_path / "run") == end, "resuming does not undo it"


def test_an_update_that_is_refused_is_told_and_left_out(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NonFiniteGradientError("rollouts[3]: its gradient is NaN")

    monkeypatch.setattr(Trainer, "update", refuse)
    config = tiny_config(base, "guard={action: stop, patience: 2}", "curriculum.target_block_size=4")
    end = finish(tmp_path / "run", config)
    assert "grad_norm nan is above" in str(end.stop_reason)
    assert "gradient is NaN" in read_events(tmp_path / "run", "train")[0]["refused"]


# -- refusals ----------------------------------------------------------------------------------


def test_two_processes_cannot_write_one_run(whole: Path) -> None:
    import subprocess
    import sys

    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(whole / "run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UserError, match="writes this run; stop it first"):
            finish(whole)
        other.communicate()


def test_nothing_is_begun_with_a_model_or_data_that_is_not_there(base: Path, tmp_path: Path) -> None:
    for override, message in (
        (f"model={tmp_path / 'none'}", "no such directory"),
        ("validation.source=none.jsonl", "none.jsonl"),
        ("data.levels=[1, 2]", "names its levels itself"),
        ("data.num_problems=3", "has 3 problems, an update draws 4"),
        ("rewards.terms=[{name: chain}, {name: parallelism}]", "its options do not fit"),
        ("tracking.trackers=[trackio]", r"trackio is not installed; pip install 'tstar\[trackio\]'"),
    ):
        with pytest.raises(UserError, match=message):
            finish(tmp_path / "run", tiny_config(base, override))
        assert not (tmp_path / "run").exists()


def test_a_full_disk_leaves_the_last_good_checkpoint(base: Path, whole: Path, tmp_path: Path) -> None:
    """The limit on file sizes stands in for the disk: the kernel refuses the write in the middle."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def on_event(event: str, update_step: int, *_: object) -> None:
        if event == "validation" and update_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))

    try:
        with pytest.raises(UserError) as caught:
            finish(tmp_path / "run", tiny_config(base), Watch(on_event))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    message = str(caught.value)
    assert "the checkpoint could not be written" in message
    assert "000001 is whole; make room, then go on with --resume" in message
    assert "\n" not in message
    assert RunDir.open(tmp_path / "run").latest_checkpoint == 1
    finish(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


def test_what_else_cannot_be_written_is_said_too(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tstar.experiment.rollouts.write_groups", refuse)
    with pytest.raises(UserError, match=r"000001.jsonl.gz: could not be written \(No space left .* --resume"):
        finish(tmp_path / "rollouts", tiny_config(base))
    monkeypatch.undo()
    monkeypatch.setattr("tstar.tracking.MetricsFile.append", refuse)
    with pytest.raises(UserError, match=r"metrics.jsonl: could not be written .* there is no checkpoint"):
        finish(tmp_path / "metrics", tiny_config(base))
    monkeypatch.undo()
    assert RunDir.open(tmp_path / "metrics").latest_checkpoint is None  # --resume can begin it anew

    def block(event: str, *_: object) -> None:
        if event == "stage":
            (tmp_path / "evaluations" / "eval").rmdir()
            (tmp_path / "evaluations" / "eval").touch()

    with pytest.raises(UserError, match=r"eval/000000-b4: could not be written \(File exists.* --resume"):
        finish(tmp_path / "evaluations", tiny_config(base), Watch(block))
    RunDir.open(tmp_path / "evaluations")


def test_a_run_that_can_go_on_is_no_refusal() -> None:
    full = UserError("run: could not be written")
    full.__cause__ = UserError("deeper")
    full.__cause__.__cause__ = OSError(28, "No space left on device")
    assert not _is_refusal(full)
    assert not _is_refusal(LostProcessError("another process of this job is gone; --resume"))
    assert _is_refusal(UserError("rewards: no module named nowhere"))


def test_rollouts_stay_within_their_limit(base: Path, tmp_path: Path) -> None:
    finish(tmp_path / "run", tiny_config(base, "rollout.max_stored_mb=0.004"))
    files = sorted((tmp_path / "run" / "rollouts").iterdir())
    assert files[-1].name == "000004.jsonl.gz"
    assert len(files) < 4
    assert sum(file.stat().st_size for file in files) <= 4000 or len(files) == 1


# -- tracking ----------------------------------------------------------------------------------


def test_dashboards_see_every_event(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    seen: list[dict[str, Any]] = []
    started: list[dict[str, Any]] = []

    class FakeRun:
        def log(self, metrics: dict[str, Any]) -> None:
            seen.append(metrics)

        def define_metric(self, name: str, step_metric: str) -> None:
            assert (name, step_metric) == ("*", "update_step")

        def finish(self) -> None:
            seen.append({"finished": True})

    module = types.ModuleType("wandb")
    module.init = lambda **settings: started.append(settings) or FakeRun()  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "wandb", module)
    config = tiny_config(
        base, "tracking.trackers=[wandb]", "tracking.project=mine", "curriculum.target_block_size=4"
    )
    finish(tmp_path / "run", config)
    assert started[0]["project"] == "mine"
    assert started[0]["config"]["rollout"]["num_samples"] == 4
    assert any("train/reward_mean" in metrics for metrics in seen)
    assert any("validation/accuracy" in metrics for metrics in seen)
    assert seen[-1] == {"finished": True}
    finish(tmp_path / "run")
    assert started[1]["id"] == started[0]["id"], "a resumed run goes on in the same curves"
