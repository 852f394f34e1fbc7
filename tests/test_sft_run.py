"""SFT runs: data in, checkpoints, exact resume, adapters, every kind of start, the command line."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from tiny_models import make_config, randomise
from tstar import cli
from tstar.errors import UserError
from tstar.lora import merged_copy
from tstar.model.attention import prepare
from tstar.model.checkpoint import load_config, load_model, save_model
from tstar.model.layout import PackedLayout
from tstar.model.tokenizer import load_tokenizer
from tstar.model.transformer import LanguageModel
from tstar.sft import training
from tstar.sft.examples import load_examples, load_sft_data
from tstar.sft.objective import NextToken
from tstar.sft.options import SftOptions
from tstar.sft.training import SftRun, StepReport
from tstar.tasks.chain_model import chain_tokenizer

TINY = SftOptions(
    data="chain:1",
    hidden_size=32,
    num_layers=2,
    num_examples=40,
    num_validation=8,
    num_steps=7,
    batch_size=4,
    token_budget=128,
    learning_rate=1e-3,
    warmup_steps=2,
    validate_every=3,
    checkpoint_every=3,
)


class CrashError(Exception):
    """Stands for whatever ends a run."""


def crash_at(optimizer_step: int) -> Callable[[StepReport], None]:
    def on_step(report: StepReport) -> None:
        if report.optimizer_step == optimizer_step:
            raise CrashError

    return on_step


def ignore(report: StepReport) -> None:
    pass


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what the clock says."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def make_start(directory: Path, model_type: str) -> Path:
    """A small model directory with the chain's tokenizer."""
    tokenizer = chain_tokenizer()
    config = make_config(model_type, vocab_size=len(tokenizer), mask_token_id=None, eos_token_id=1)
    if model_type == "sdar":
        config = replace(config, mask_token_id=tokenizer.mask_token_id)
    model = LanguageModel(config)
    randomise(model)
    save_model(model, directory, tokenizer=tokenizer)
    return directory


def some_hidden(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 19), prepare(PackedLayout.causal([16])))


# -- resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"objective": "ar"},
        {"precision": "bfloat16", "block_sizes": (4, 8), "offsets": (0, 2)},
        {"lora_rank": 2},
    ],
    ids=["diffusion", "ar", "bf16-mixed", "lora"],
)
@pytest.mark.parametrize("crash", [2, 5], ids=["before-checkpoint", "after-checkpoint"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, change: dict[str, Any], crash: int) -> None:
    options = replace(TINY, **change)
    if options.lora_rank is not None:
        options = replace(options, model=make_start(tmp_path / "start", "qwen3"))
    assert SftRun.start(options, tmp_path / "whole").train(ignore)
    with pytest.raises(CrashError):
        SftRun.start(options, tmp_path / "killed").train(crash_at(crash))
    torch.manual_seed(99)  # nothing may depend on the process's own generator
    resumed = SftRun.resume(tmp_path / "killed")
    assert resumed.optimizer_step == (3 if crash == 5 else 0)
    assert resumed.train(ignore)

    whole, killed = (load_model(tmp_path / name / "model") for name in ("whole", "killed"))
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, killed.get_parameter(name)), name
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "killed")
    assert [line["optimizer_step"] for line in read_metrics(tmp_path / "killed")] == list(range(1, 8))


def test_a_checkpoint_is_a_model_directory_and_the_latest_is_kept(tmp_path: Path) -> None:
    run = SftRun.start(replace(TINY, num_steps=4), tmp_path / "run")
    run.train(ignore)
    assert run.run.checkpoints == (4,)
    checkpoint = run.run.checkpoint_path(4)
    for name, parameter in load_model(checkpoint / "model").named_parameters():
        assert torch.equal(parameter, run.model.get_parameter(name))
    config = load_config(run.model_directory)
    assert (config.model_type, config.block_size) == ("sdar", 4)
    assert load_tokenizer(run.model_directory).mask_token_id == config.mask_token_id


def test_resume_refuses_other_data(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"{i}+1=", "solution": f"{i}+1={i + 1};#{i + 1}"} for i in range(9)]
    data.write_text("\n".join(map(json.dumps, rows)))
    options = replace(TINY, data=str(data), model=make_start(tmp_path / "start", "qwen3"))
    with pytest.raises(CrashError):
        SftRun.start(options, tmp_path / "run").train(crash_at(4))
    data.write_text("\n".join(map(json.dumps, rows[1:])))
    with pytest.raises(UserError, match=r"^data: .* is not what this run began with"):
        SftRun.resume(tmp_path / "run")


def test_a_run_that_diverges_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SftRun.start(TINY, tmp_path / "run")
    with torch.no_grad():
        run.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"^learning_rate: 0.001 made the training diverge .*step 0"):
        run.train(ignore)


# -- learning ----------------------------------------------------------------------------------


def test_validation_loss_falls_and_its_masks_stay(tmp_path: Path) -> None:
    options = replace(TINY, num_steps=60, batch_size=16, learning_rate=4e-3, validate_every=60)
    run = SftRun.start(options, tmp_path / "run")
    before = run.validate()
    assert run.validate() == before
    reports: list[StepReport] = []
    run.train(reports.append)
    after = reports[-1].validation
    assert after is not None
    assert after.num_read == before.num_read
    assert after.cross_entropy < 0.75 * before.cross_entropy


def test_only_adapters_learn_and_the_written_model_is_the_merged_one(tmp_path: Path) -> None:
    start = make_start(tmp_path / "start", "qwen3")
    options = replace(TINY, model=start, lora_rank=4, learning_rate=1e-2)
    run = SftRun.start(options, tmp_path / "run")
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train(ignore)
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(moved) == 2 * 7 * 3  # A and B of seven layers in each of three blocks

    written = load_model(run.model_directory)
    assert not any("lora" in name for name, _ in written.named_parameters())
    unmerged = some_hidden(run.model)
    torch.testing.assert_close(some_hidden(written), unmerged, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(some_hidden(merged_copy(run.model)), unmerged, rtol=1e-4, atol=1e-5)
    assert (unmerged - some_hidden(load_model(start))).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "sdar"])
def test_every_kind_of_directory_becomes_a_block_diffusion_model(tmp_path: Path, model_type: str) -> None:
    start = make_start(tmp_path / "start", model_type)
    run = SftRun.start(replace(TINY, model=start, num_steps=2, warmup_steps=1), tmp_path / "run")
    run.train(ignore)
    config = load_config(run.model_directory)
    assert config.is_diffusion
    assert config.model_type == {"qwen3": "sdar"}.get(model_type, model_type)
    again = SftRun.start(
        replace(TINY, model=run.model_directory, num_steps=1, warmup_steps=0), tmp_path / "again"
    )
    again.train(ignore)


def test_the_next_token_is_not_for_a_diffusion_model(tmp_path: Path) -> None:
    options = replace(TINY, model=make_start(tmp_path / "start", "sdar"), objective="ar")
    with pytest.raises(UserError, match=r"^objective: .* cannot be trained on the next token"):
        SftRun.start(options, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- data --------------------------------------------------------------------------------------


def write_lines(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_a_solution_goes_before_the_answer_and_every_response_ends(tmp_path: Path) -> None:
    tokenizer = chain_tokenizer()
    source = write_lines(
        tmp_path / "data.jsonl",
        {"question": "1+2=", "answer": "3", "solution": "1+2=3;#3"},
        {"question": "1+3=", "answer": "1+3=4;#4"},
    )
    examples = load_examples(source, tokenizer)
    texts = [tokenizer.decode(example.response_ids) for example in examples]
    assert texts == ["1+2=3;#3<eos>", "1+3=4;#4<eos>"]
    assert len(load_examples(source, tokenizer, limit=1)) == 1


def test_sft_learns_solutions_that_nobody_can_check(tmp_path: Path) -> None:
    rows = [{"question": "1+2=", "solution": "1+2=3;#3"}, {"question": "1+3=", "answer": ""}]
    (example,) = load_examples(write_lines(tmp_path / "data.jsonl", *rows), chain_tokenizer())
    assert chain_tokenizer().decode(example.response_ids) == "1+2=3;#3<eos>"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("raw", "1+2="), ("chat", "1+2="), ("={question}#", "=1+2=#"), (None, "1+2=<unk>")],
)
def test_the_prompt_is_a_choice(tmp_path: Path, prompt: str | None, text: str) -> None:
    source = write_lines(tmp_path / "data.jsonl", *[{"question": "1+2=", "answer": "3"}] * 20)
    options = replace(TINY, data=source, prompt=prompt, num_examples=None)
    data = load_sft_data(options, chain_tokenizer(), NextToken())
    for example in (*data.examples, *data.validation):
        assert chain_tokenizer().decode(example.prompt_ids).startswith(text)


def test_a_level_filter(tmp_path: Path) -> None:
    tokenizer = chain_tokenizer()
    rows = [{"question": f"{n}=", "answer": str(n), "level": n} for n in range(1, 10)]
    source = write_lines(tmp_path / "data.jsonl", *rows)
    options = replace(TINY, data=source, prompt="raw", num_examples=None, levels=(3, 5))
    data = load_sft_data(options, tokenizer, NextToken())
    assert [tokenizer.decode(example.prompt_ids) for example in data.examples] == ["3=", "4=", "5="]
    (first,) = load_sft_data(replace(options, num_examples=1), tokenizer, NextToken()).examples
    assert tokenizer.decode(first.prompt_ids) == "3="
    texts = write_lines(tmp_path / "text.jsonl", {"text": "1"})
    for other, message in ((texts, "leave the filter out"), ("chain:1-4", "write chain:3-5")):
        with pytest.raises(UserError, match=rf"^levels: .* has no rows with a level; {message}"):
            load_sft_data(replace(options, data=other), tokenizer, NextToken())
    with pytest.raises(UserError, match=r"^levels: \[5, 3\] is empty"):
        replace(options, levels=(5, 3))


def test_a_conversation_teaches_its_last_message(tmp_path: Path) -> None:
    tokenizer = chain_tokenizer()
    turns = [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "3+4="},
        {"role": "assistant", "content": "7"},
    ]
    (example,) = load_examples(write_lines(tmp_path / "chat.jsonl", {"messages": turns}), tokenizer)
    assert tokenizer.decode(example.prompt_ids) == "1+2=33+4="
    assert tokenizer.decode(example.response_ids) == "7<eos>"
    for row in ({"messages": turns[:3]}, {"text": "1"}):
        broken = write_lines(tmp_path / "broken.jsonl", {"messages": turns}, row)
        with pytest.raises(UserError, match=r"broken.jsonl:2: messages: not a conversation"):
            load_examples(broken, tokenizer)


def test_plain_text_is_learnt_whole(tmp_path: Path) -> None:
    tokenizer = chain_tokenizer()
    source = write_lines(tmp_path / "text.jsonl", {"text": "1+2=3;#3"}, {"text": "7", "answer": "?"})
    first, second = load_examples(source, tokenizer)
    assert (len(first.prompt_ids), len(second.prompt_ids)) == (0, 0)
    assert tokenizer.decode(first.response_ids) == "1+2=3;#3<eos>"
    assert tokenizer.decode(second.response_ids) == "7<eos>"
    options = replace(TINY, data=source, model=make_start(tmp_path / "start", "qwen3"), num_examples=None)
    for objective in ("ar", "diffusion"):
        run = SftRun.start(replace(options, objective=objective, num_steps=3), tmp_path / objective)
        assert run.train(ignore)
    for row in ({"text": ""}, {"text": 7}, {"txt": "1"}):
        broken = write_lines(tmp_path / "broken.jsonl", {"text": "1"}, row)
        with pytest.raises(UserError, match=r"broken.jsonl:2: text: is missing, empty or no text"):
            load_examples(broken, tokenizer)


def test_plain_text_begins_as_the_tokenizer_has_it(tmp_path: Path) -> None:
    tokenizer = chain_tokenizer()
    tokenizer.bos_token = "<pad>"  # noqa: S105  (a token of text)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.bos_token_id)]
    )
    (example,) = load_examples(write_lines(tmp_path / "text.jsonl", {"text": "1+2"}), tokenizer)
    assert tokenizer.decode(example.prompt_ids) == "<pad>"
    assert tokenizer.decode(example.response_ids) == "1+2<eos>"


def test_a_tokenizer_without_eos_is_named() -> None:
    tokenizer = chain_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"^tokenizer: .* names no eos_token"):
        load_examples("chain:1", tokenizer, limit=1)


def test_examples_beyond_the_budget_are_left_out_and_counted(tmp_path: Path) -> None:
    tokenizer = chain_tokenizer()
    rows = [{"question": "1=", "answer": "1" * (4 * n)} for n in range(1, 21)]
    source = write_lines(tmp_path / "data.jsonl", *rows)
    options = replace(TINY, data=source, token_budget=45, num_examples=None, prompt="raw")
    data = load_sft_data(options, tokenizer, NextToken())
    assert data.num_left_out == 10  # of 4, 8, ..., 80 tokens with 3 around them, those above 42
    assert len(data.examples) + len(data.validation) == 10
    with pytest.raises(UserError, match=r"^token_budget: 5 holds none of 18 examples .* shortest needs"):
        load_sft_data(replace(options, token_budget=5), tokenizer, NextToken())


def test_held_out_examples_are_not_learnt(tmp_path: Path) -> None:
    tokenizer = chain_tokenizer()
    rows = [{"question": f"{n}=", "answer": f"{n}"} for n in range(40)]
    options = replace(TINY, data=write_lines(tmp_path / "data.jsonl", *rows), num_examples=None, prompt="raw")
    data = load_sft_data(options, tokenizer, NextToken())
    texts = [tokenizer.decode(example.prompt_ids) for example in (*data.examples, *data.validation)]
    assert len(data.validation) == 4
    assert sorted(texts) == sorted(f"{n}=" for n in range(40))
    generated = load_sft_data(TINY, tokenizer, NextToken())
    assert len(generated.validation) == 8
    learnt = {tuple(example.prompt_ids) for example in generated.examples}
    assert not learnt & {tuple(example.prompt_ids) for example in generated.validation}


# -- the command -------------------------------------------------------------------------------

ARGUMENTS = [
    "--data=chain:1",
    "--hidden-size=32",
    "--num-layers=2",
    "--num-examples=40",
    "--num-validation=8",
    "--batch-size=4",
    "--warmup-steps=2",
    "--learning-rate=1e-3",
]


def test_from_a_fresh_ar_model_to_block_diffusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ar, b4 = str(tmp_path / "ar"), str(tmp_path / "b4")
    assert cli.main(["sft", "--out", ar, "--objective", "ar", "--num-steps", "3", *ARGUMENTS]) == 0
    assert cli.main(["sft", "--out", b4, "--model", f"{ar}/model", "--num-steps", "3", *ARGUMENTS]) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"{b4}/model: written" in out
    assert "step 3: validation loss" in out
    assert load_config(Path(b4) / "model").is_diffusion
    assert not load_config(Path(ar) / "model").is_diffusion
    peer = transformers.Qwen3ForCausalLM.from_pretrained(f"{ar}/model")
    assert peer.config.hidden_size == 32


def test_ctrl_c_saves_and_leaves_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = str(tmp_path / "whole"), str(tmp_path / "stopped")
    assert cli.main(["sft", "--out", whole, "--num-steps", "6", *ARGUMENTS]) == 0
    capsys.readouterr()
    plain_loss = training.batch_loss

    def interrupted_loss(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            signal.raise_signal(signal.SIGINT)
        return plain_loss(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "batch_loss", interrupted_loss)
        assert cli.main(["sft", "--out", stopped, "--num-steps", "6", *ARGUMENTS]) == 130
    assert capsys.readouterr().err == (
        f"tstar: interrupted: step 1 is saved; tstar sft --resume {stopped} goes on\n"
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert cli.main(["sft", "--resume", stopped]) == 0
    one, other = (load_model(Path(run) / "model") for run in (whole, stopped))
    assert all(torch.equal(p, other.get_parameter(name)) for name, p in one.named_parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "out: give --out RUN"),
        (["--out", "RUN"], "data: none is given"),
        (["--resume", "RUN", "--seed", "3"], "seed: the options of RUN are its own"),
        (["--resume", "RUN"], "is no run"),
        (["--out", "RUN", "--data", "x.jsonl"], "model: none is given"),
        (["--out", "RUN", "--data", "chain:77"], "levels: there is no level 77"),
        (["--out", "RUN", "--data", "chain:1", "--num-steps", "0"], "num_steps: 0 is too small"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sft", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_config_changed_by_hand_is_checked(tmp_path: Path) -> None:
    place = tmp_path / "config.yaml"
    assert SftOptions.from_yaml(TINY.to_yaml(), place) == TINY
    with pytest.raises(UserError, match=r"config.yaml: num_stepz: "):
        SftOptions.from_yaml(TINY.to_yaml() + "num_stepz: 4\n", place)
    with pytest.raises(UserError, match=r"config.yaml: seed: "):
        SftOptions.from_yaml(TINY.to_yaml().replace("seed: 0", "seed: x"), place)
    with pytest.raises(UserError, match="not valid YAML"):
        SftOptions.from_yaml("a: [", place)
