"""`tstar eval`: every combination once, in directories, on screen and as JSON; and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import make_config, randomise
from tstar import cli
from tstar.errors import UserError
from tstar.evaluate import Summary, read_evaluation
from tstar.evaluate.journal import JOURNAL_FILE
from tstar.evaluate.sweep import find_curves, fingerprint, open_models, parse_policy
from tstar.model.checkpoint import save_model
from tstar.model.transformer import LanguageModel
from tstar.tasks.chain_model import chain_tokenizer
from tstar.unmask import UnmaskPolicy


def make_model(directory: Path, is_diffusion: bool = True, block_size: int | None = 4) -> Path:
    tokenizer = chain_tokenizer()
    config = make_config("qwen3", vocab_size=len(tokenizer), eos_token_id=1, num_hidden_layers=2)
    if is_diffusion:
        config = config.as_diffusion(tokenizer.mask_token_id, block_size)
    model = LanguageModel(config)
    randomise(model)
    save_model(model, directory, tokenizer=tokenizer)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """b4 (says its block size), plain (does not), ar."""
    path = tmp_path_factory.mktemp("models")
    make_model(path / "b4")
    make_model(path / "plain", block_size=None)
    make_model(path / "ar", is_diffusion=False)
    return path


def tstar(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["eval", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def common(out: Path) -> tuple[object, ...]:
    return ("--data", "chain:1@test", "--limit", 3, "--samples", 2, "--out", out, "--device", "cpu")


# -- everything at once ------------------------------------------------------------------------


def test_every_combination_has_a_directory_and_a_row(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"AR={models / 'ar'}", models / "b4", "--block-size", 4, 8, "--policy", "static:2"]
    arguments += ["--threshold", 0.3, 0.9, *common(tmp_path)]
    code, out, err = tstar(capsys, *arguments)
    assert (code, err) == (0, "")
    names = ["AR", *(f"b4-b{b}-{p}" for b in (4, 8) for p in ("static-k2", "dynamic-0.3", "dynamic-0.9"))]
    directory = tmp_path / "chain-1-test"
    assert sorted(p.name for p in directory.iterdir()) == sorted(names)

    results = json.loads((tmp_path / "results.json").read_text())
    assert [e["directory"] for e in results["evaluations"]] == [f"chain-1-test/{name}" for name in names]
    for record, name in zip(results["evaluations"], names, strict=True):
        evaluation = read_evaluation(directory / name)
        assert Summary.from_json(json.dumps(record)) == evaluation.summary
        assert len(evaluation.responses) == 3 * 2
        conditions = evaluation.summary.conditions
        assert {r.trajectory.partition.block_size for r in evaluation.responses} == {conditions.block_size}
        assert conditions.max_tokens == 15  # the longest response of level 1
    ar = results["evaluations"][0]
    assert (ar["policy"], ar["block_size"]) == ("next token", 1)
    assert ar["tokens_per_forward"]["value"] == ar["local_strict"]["value"] == 1

    assert [(c["label"], c["block_size"]) for c in results["curves"]] == [("b4", 4), ("b4", 8)]
    assert [p["threshold"] for p in results["curves"][0]["points"]] == [0.3, 0.9]
    tpf = [p["tokens_per_forward"]["value"] for p in results["curves"][0]["points"]]
    assert tpf[0] > tpf[1]  # a lower threshold unmasks more at once

    table = out[out.index("3 problems, 2 samples each") :]
    assert "avg@2" in table
    assert "pass@2" in table
    rows = [line.split("│")[1:4] for line in table.splitlines() if line.startswith("│")]
    shown = [tuple(cell.strip() for cell in row) for row in rows]
    assert shown[:7] == [
        ("AR", "1", "next token"),
        *(("b4", str(b), p) for b in (4, 8) for p in ("static k=2", "dynamic 0.3", "dynamic 0.9")),
    ]

    code, out, _ = tstar(capsys, *arguments)
    assert code == 0
    assert "7 of 7 evaluations are done already" in out
    assert json.loads((tmp_path / "results.json").read_text()) == results  # their clocks too


def test_a_models_own_block_size_is_the_default_and_json_is_alone_on_stdout(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = tstar(
        capsys, models / "b4", "--json", "--samples", 1, *common(tmp_path)[:4], "--out", tmp_path
    )
    assert code == 0
    (record,) = json.loads(out)["evaluations"]
    assert (record["block_size"], record["policy"]) == (4, "dynamic 0.9")
    assert list(record["pass_at"]) == ["1"]
    assert record["label"] == "b4"
    assert record["reward"] == "chain"


def test_options_reach_the_engine(tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = tstar(
        capsys, models / "b4", *common(tmp_path), "--offset", 2, "--origin", "sequence", "--max-tokens", 9,
        "--temperature", 0.5, "--top-k", 1, "--top-p", 0.9, "--seed", 7, "--prompt", "{question}",
        "--dtype", "bfloat16", "--max-requests", 2, "--memory", 0.2, "--reward", "chain_answer",
        "--policy", "static:S=2",
    )  # fmt: skip
    assert code == 0
    (directory,) = (tmp_path / "chain-1-test").iterdir()
    assert directory.name == "b4-b4-o2-sequence-static-S2"
    evaluation = read_evaluation(directory)
    conditions = evaluation.summary.conditions
    assert (conditions.seed, conditions.top_p, conditions.top_k, conditions.dtype) == (7, 0.9, 1, "bfloat16")
    assert conditions.prompt["is_chat"]
    assert conditions.reward == "chain_answer"
    for response in evaluation.responses:
        assert response.trajectory.partition.offset == 2
        assert response.trajectory.partition.origin == "sequence"
        assert response.trajectory.temperature == 0.5
        assert len(response.trajectory.response_ids) <= 9


def test_a_run_of_sft_stands_for_its_model(tmp_path: Path, models: Path) -> None:
    shutil.copytree(models / "b4", tmp_path / "b4-run" / "model")
    found = open_models([str(tmp_path / "b4-run"), f"x={tmp_path / 'b4-run'}", str(models / "ar")])
    assert [model.label for model in found] == ["b4-run", "x", "ar"]
    assert [model.path.name for model in found] == ["model", "model", "ar"]
    (inner,) = open_models([str(tmp_path / "b4-run" / "model")])
    assert inner.label == "b4-run"


def test_real_data_and_real_weights(tmp_path: Path, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shared / "data"
    code, out, err = tstar(
        capsys, f"AR={shared / 'models/stories260K'}", "--data", f"math500:{data / 'math500.jsonl'}",
        f"aime24:{data / 'aime24.jsonl'}", "--limit", 2, "--samples", 2, "--max-tokens", 12,
        "--prompt", "raw", "--out", tmp_path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    for name in ("math500", "aime24"):
        done = read_evaluation(tmp_path / name / "AR")
        assert done.summary.accuracy.value == 0
        assert done.summary.accuracy.high == pytest.approx(1 - 0.025**0.5)
        assert done.summary.num_worker_failures == 0
        assert len({r.trajectory.response_ids.tobytes() for r in done.responses}) == 4
        known = set(done.pieces)
        assert all(set(r.trajectory.response_ids.tolist()) <= known for r in done.responses)
    assert "aime24: 2 problems, 2 samples each" in out


# -- killed ------------------------------------------------------------------------------------


def test_a_killed_call_goes_on_to_the_same_numbers(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(models / "b4"), "--data", "chain:4@test", "--limit", "25", "--policy", "static:1"]
    arguments += ["--device", "cpu", "--out"]
    directory = tmp_path / "killed" / "chain-4-test" / "b4-b4-static-k1"
    journal = directory / JOURNAL_FILE
    process = subprocess.Popen(
        [sys.executable, "-m", "tstar", "eval", "--max-requests", "3", *arguments, str(tmp_path / "killed")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (journal.is_file() and journal.read_bytes().count(b"\n") > 6):
        assert process.poll() is None, "it ended before it could be killed; give it more to do"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_kept = journal.read_bytes().count(b"\n") - 1
    assert 6 <= num_kept < 75
    assert not (directory / "summary.json").exists()

    for name in ("killed", "whole"):
        assert tstar(capsys, *arguments, tmp_path / name)[0] == 0
    killed, whole = (
        read_evaluation(tmp_path / name / "chain-4-test" / "b4-b4-static-k1") for name in ("killed", "whole")
    )
    for one, other in zip(killed.responses, whole.responses, strict=True):
        assert one.trajectory.response_ids.tolist() == other.trajectory.response_ids.tolist()
        assert one.trajectory.unmask_step.tolist() == other.trajectory.unmask_step.tolist()
    assert replace(killed.summary, time=whole.summary.time) == whole.summary


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tstar.evaluate.evaluate_into", interrupt)
    code, _, err = tstar(capsys, models / "b4", *common(tmp_path))
    assert code == 130
    assert err.endswith(f"what has finished is kept in {tmp_path}; the same command goes on\n")


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["M/none", "--data", "chain:1"], "none: no such directory"),
        (["--data", "chain:1"], "models: none given"),
        (["M/b4", "--data"], "data"),
        (["M/b4", "--data", "chain:99"], "there is no level 99"),
        (["M/b4", "--data", "maths500"], "did you mean 'math500'"),
        (["M/b4", "--data", "chain:1", "chain:1"], "2 combinations would be written here"),
        (["M/b4", "M/b4", "--data", "chain:1"], "models: 2 of them are called 'b4'; name them, LABEL=MODEL"),
        (["x=M/b4", "x=M/plain", "--data", "chain:1"], "are called 'x'"),
        (["x=", "--data", "chain:1"], "'x=' has an empty half"),
        (["=M/b4", "--data", "chain:1"], "has an empty half"),
        (["M/plain", "--data", "chain:1"], "block_size: .*plain does not say .*give --block-size"),
        (["M/b4", "--data", "chain:1", "--block-size", "0"], "block_size: 0 is out of range; use 1 to 256"),
        (["M/b4", "--data", "chain:1", "--block-size", "257"], "block_size: 257"),
        (["M/b4", "--data", "chain:1", "--block-size", "4", "4"], "2 combinations would be written here"),
        (["M/b4", "--data", "chain:1", "--offset", "4"], "offset: 4"),
        (["M/b4", "--data", "chain:1", "--policy", "clever"], "policy: 'clever': .*is unknown"),
        (["M/b4", "--data", "chain:1", "--policy", "static:0"], "policy: 'static:0': .*no budget"),
        (["M/b4", "--data", "chain:1", "--policy", "static:2,S=2"], "give one of the two"),
        (["M/b4", "--data", "chain:1", "--policy", "dynamic"], "needs it: use 0 to 1"),
        (["M/b4", "--data", "chain:1", "--policy", "static 2"], "is not understood; write one like"),
        (["M/b4", "--data", "chain:1", "--policy", "dynamic:0.9.9"], "policy: 'dynamic:0.9.9'"),
        (["M/b4", "--data", "chain:1", "--threshold", "1.5"], "out of range; use 0 to 1"),
        (["M/b4", "--data", "chain:1", "--samples", "0"], "samples: 0 is too few; use 1 or more"),
        (["M/b4", "--data", "chain:1", "--seed", "-1"], "seed: -1 is too few; use 0 or more"),
        (["M/b4", "--data", "chain:1", "--limit", "0"], "limit: 0 problems are too few"),
        (["M/b4", "--data", "chain:1", "--temperature", "-1"], "temperature: -1.0 cannot be used"),
        (["M/b4", "--data", "chain:1", "--temperature", "0"], "3 at temperature 0 are one response repeated"),
        (["M/b4", "--data", "chain:1", "--top-p", "0"], "top_p: 0.0 cannot be used"),
        (["M/b4", "--data", "chain:1", "--top-k", "0"], "top_k: 0 cannot be used"),
        (["M/b4", "--data", "chain:1", "--max-tokens", "0"], "max_tokens: 0 cannot be used"),
        (
            ["M/b4", "--data", "chain:1", "--max-tokens", "600"],
            "max_tokens: 600: .*512 positions.*at most 50",
        ),
        (["M/b4", "--data", "chain:1", "--prompt", "maths"], "prompt: 'maths' is unknown"),
        (["M/b4", "--data", "chain:1", "--reward", "chains"], "rewards: 'chains' is unknown"),
        (["M/b4", "--data", "chain:1", "--reward", "parallelism"], "cannot come first"),
        (["M/b4", "--data", "chain:1", "--max-requests", "0"], "max_requests: 0 cannot be used"),
        (["M/b4", "--data", "chain:1", "--memory", "2"], "memory: 2.0 cannot be used"),
        (["M/b4", "--data", "chain:1", "--memory", "1e-7"], "memory: .*give more"),
        (["M/b4", "--data", "chain:1", "--device", "tpu"], "invalid choice"),
        (["M/b4", "--data", "chain:1", "--no-such-option"], "no-such-option"),
    ],
)
def test_a_mistake_is_one_line_and_2(
    arguments: list[str], message: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.replace("M/", f"{models}/") for argument in arguments]
    code, out, err = tstar(capsys, *given, "--out", tmp_path / "out")
    assert code == 2
    assert out == ""
    is_usage_error = "--help" in err  # tyro's own, in a box
    assert is_usage_error or (err.startswith("tstar: error: ") and err.count("\n") == 1), err
    assert re.search(message, " ".join(err.replace("│", " ").split())), err
    assert not list(tmp_path.rglob("summary.json"))


def test_no_gpu_is_said(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = tstar(capsys, models / "b4", *common(tmp_path)[:-1], "cuda")
    assert code == 2
    assert "device: cuda is not there" in err


def test_other_conditions_in_the_same_place_are_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tstar(capsys, models / "b4", *common(tmp_path))[0] == 0
    code, _, err = tstar(capsys, models / "b4", *common(tmp_path), "--seed", 1)
    assert code == 2
    assert "seed: was evaluated with 0, asked for is 1; choose another --out, or remove it" in err
    copied = tmp_path / "copy" / "b4"
    shutil.copytree(models / "b4", copied)
    code, out, _ = tstar(capsys, copied, *common(tmp_path))  # the same weights elsewhere are the same model
    assert code == 0
    assert "1 of 1 evaluations are done already" in out
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    code, _, err = tstar(capsys, copied, *common(tmp_path))
    assert code == 2
    assert "weights: was evaluated with" in err


def test_weights_that_are_no_numbers_are_no_wrong_answers(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models / "b4", broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    code, _, err = tstar(capsys, broken, *common(tmp_path))
    assert code == 2
    assert "broken: requests[0]: the model's logits are not finite" in err


# -- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("static", UnmaskPolicy()),
        ("static:4", UnmaskPolicy(tokens_per_step=4)),
        ("static:k=4", UnmaskPolicy(tokens_per_step=4)),
        ("static:S=2,sampled", UnmaskPolicy(steps_per_block=2, confidence="sampled")),
        ("dynamic:0.9", UnmaskPolicy("dynamic", confidence_threshold=0.9)),
        ("dynamic:1", UnmaskPolicy("dynamic", confidence_threshold=1.0)),
        ("dynamic:.9,k=2", UnmaskPolicy("dynamic", 2, confidence_threshold=0.9)),
        ("entropy:0.5", UnmaskPolicy("entropy", entropy_bound=0.5)),
        ("sequential:3", UnmaskPolicy("sequential", tokens_per_step=3)),
        ("random", UnmaskPolicy("random")),
    ],
)
def test_policies_as_they_are_written(text: str, policy: UnmaskPolicy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text", ["", ":", "static:", "static:4,", "static:1.5", "static:4,k=3", "dynamic:0.9.9", "static:k"]
)
def test_other_writings_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="policy: "):
        parse_policy(text)


def test_a_fingerprint_is_of_weights_and_tokenizer(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "b4", tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text("a copy")
    assert fingerprint(tmp_path / "m") == fingerprint(models / "b4")
    path = tmp_path / "m" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert fingerprint(tmp_path / "m") != fingerprint(models / "b4")


def test_a_curve_needs_two_thresholds_of_one_kind(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ("dynamic:0.2", "dynamic:0.8,k=2", "dynamic:0.6", "static:1")
    assert tstar(capsys, models / "b4", *common(tmp_path), "--policy", *policies)[0] == 0
    records: list[dict[str, Any]] = json.loads((tmp_path / "results.json").read_text())["evaluations"]
    (curve,) = find_curves([Summary.from_json(json.dumps(record)) for record in records])
    thresholds = [point.conditions.unmask["confidence_threshold"] for point in curve.points]
    assert thresholds == [0.2, 0.6]
