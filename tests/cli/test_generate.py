"""`tstar generate` and `tstar chat`, as they are called."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from text_models import save_chain_model
from tstar import cli
from tstar.engine import Engine, reference
from tstar.generation.options import DecodingOptions
from tstar.generation.text_model import TextModel, keyed_seed
from tstar.model.checkpoint import load_model, save_model
from tstar.schedule import read_responses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain_model(tmp_path_factory.mktemp("models") / "b4", block_size=4)


@pytest.fixture(scope="module")
def ar_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain_model(tmp_path_factory.mktemp("models") / "ar", is_diffusion=False)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def type_in(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


# -- what comes out ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_diffusion", [True, False])
def test_text_is_what_the_reference_decodes(
    model: Path, ar_model: Path, is_diffusion: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """AR models by the same command, with blocks of one token."""
    directory = model if is_diffusion else ar_model
    assert cli.main(["generate", str(directory), "7+6=", "--max-tokens", "10", "--stop", "99"]) == 0
    streams = capsys.readouterr()
    text_model = TextModel.load(directory)
    options = DecodingOptions(max_tokens=10, stop=("99",))
    request = text_model.request(text_model.encode("7+6="), options, keyed_seed(0, 0, 0))
    expected = reference.generate(text_model.model, request)
    assert request.rule.block_size == (4 if is_diffusion else 1)
    assert streams.out == text_model.text(expected, ("99",)) + "\n"
    assert streams.err.startswith(f"1 response, {expected.stop_length} tokens, TPF ")


def test_every_flag_reaches_the_engine(model: Path, tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl", {"question": "7+6=", "id": 17}, {"prompt": "1+1=", "id": "b"}
    )
    output = tmp_path / "new" / "out.jsonl"
    flags = (
        "--block-size 8 --offset 3 --origin sequence --confidence-threshold 0.3 --steps-per-block 3 "
        "--confidence sampled --temperature 0.7 --top-k 9 --top-p 0.95 --min-p 0.01 --max-tokens 21 --seed 5 "
        "--num-samples 3 --ignore-eos --dtype float32 --device cpu"
    )
    arguments = ["generate", str(model), "--prompts", str(prompts), "--output", str(output), *flags.split()]
    assert cli.main(arguments) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {(line["problem"], line["sample"]) for line in lines} == {
        (p, s) for p in ("17", "b") for s in range(3)
    }
    text_model = TextModel.load(model)
    options = DecodingOptions(
        block_size=8, offset=3, origin="sequence", unmask="dynamic", steps_per_block=3,
        confidence_threshold=0.3, confidence="sampled", temperature=0.7, top_k=9, top_p=0.95, min_p=0.01,
        max_tokens=21, ignore_eos=True,
    )  # fmt: skip
    for line, response in zip(lines, read_responses(output), strict=True):
        prompt, index = ("7+6=", 0) if response.problem == "17" else ("1+1=", 1)
        seed = keyed_seed(5, index, line["sample"])
        expected = reference.generate(
            text_model.model, text_model.request(text_model.encode(prompt), options, seed)
        )
        np.testing.assert_array_equal(response.trajectory.response_ids, expected.response_ids)
        np.testing.assert_array_equal(response.trajectory.unmask_step, expected.unmask_step)
        assert response.trajectory.seed == seed
        assert line["text"] == text_model.text(expected)


def test_samples_differ_and_one_sample_is_greedy(model: Path, tmp_path: Path) -> None:
    texts = {}
    for name, flags in {"four": ["--num-samples", "4"], "one": [], "again": []}.items():
        output = tmp_path / f"{name}.jsonl"
        assert (
            cli.main(["generate", str(model), "7+6=", "--max-tokens", "12", "--output", str(output), *flags])
            == 0
        )
        texts[name] = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert len(set(texts["four"])) == 4
    assert texts["one"] == texts["again"]


@pytest.mark.parametrize("raw", [True, False])
def test_chat_template_or_raw(tmp_path: Path, raw: bool) -> None:
    directory = save_chain_model(tmp_path / "model", block_size=4)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    output = tmp_path / "out.jsonl"
    flags = ["--raw"] if raw else ["--system", "12"]
    assert (
        cli.main(["generate", str(directory), "7+6=", "--max-tokens", "4", "--output", str(output), *flags])
        == 0
    )
    (response,) = read_responses(output)
    prompt = TextModel.load(directory).decode(response.trajectory.prompt_ids)
    assert prompt == ("7+6=" if raw else "12;7+6=;")


def test_messages_are_a_conversation(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    prompts = write_lines(tmp_path / "in.jsonl", {"messages": [*turns, {"role": "user", "content": "3+3="}]})
    output = tmp_path / "out.jsonl"
    assert cli.main(["generate", str(model), "--prompts", str(prompts), "--output", str(output)]) == 0
    (response,) = read_responses(output)
    assert TextModel.load(model).decode(response.trajectory.prompt_ids) == "1+1=23+3="


def test_prompt_from_standard_input(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(model), "7+6=", "--max-tokens", "8"]) == 0
    expected = capsys.readouterr().out
    type_in(monkeypatch, b"7+6=\n")
    assert cli.main(["generate", str(model), "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == expected


def test_text_of_many_has_headings(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": "1+1=", "id": "x\n\x1b[2J"}, {"prompt": "2+2="})
    assert cli.main(["generate", str(model), "--prompts", str(prompts), "--max-tokens", "8"]) == 0
    output = capsys.readouterr().out
    assert '=== prompt "x\\n\\u001b[2J", sample 0, ' in output
    assert "=== prompt 1, sample 0, " in output


# -- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["7+6=", "--block-size", "0"], "block_size: 0 is too small"),
        (["7+6=", "--confidence-threshold", "1.5"], "confidence_threshold: 1.5 is out of range"),
        (["7+6=", "--unmask", "entropy"], "entropy_bound: missing"),
        (["7+6=", "--top-p", "0"], "top_p: 0.0 cannot be used"),
        (["7+6=", "--max-tokens", "9999"], "prompt: max_tokens: a prompt of 4 and 9999 new tokens pass"),
        (["7+6=", "--num-samples", "2", "--temperature", "0"], "temperature: at 0 all 2 samples"),
        (["7+6=", "--num-samples", "0"], "num_samples: 0 is too few"),
        (["7+6=", "--prompts", "x.jsonl"], "prompts: a file of prompts beside a prompt"),
        (["--prompts", "nowhere.jsonl"], "data: nowhere.jsonl cannot be read"),
        (["7+6=", "--show"], "show: standard output is no terminal"),
        (["7+6=", "--show", "--format", "jsonl"], "show: standard output gets the trajectories"),
        (["7+6=", "--output", "/dev/null/x"], "output: /dev/null/x cannot be written"),
        (["7+6=", "--raw", "--system", "x"], "system: --raw has no system message"),
        (["7+6=", "--stop", ""], "stop: an empty string"),
        (["", "--raw"], "prompt: is empty"),
        (["7+6=", "--device", "cuda"], "device: cuda is not there"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["generate", str(model), *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"tstar: error: {message}")
    assert streams.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1="', ":2: not valid JSON"),
        ('{"text": "1+1="}', ":2: holds no prompt (it has text); give prompt, question or messages"),
        ('{"prompt": ""}', ":2: holds no prompt"),
        ('{"prompt": 3}', ":2: holds no prompt"),
        ('{"messages": []}', ":2: messages: is no list of {role, content}"),
        ('{"messages": [{"role": "user"}]}', ":2: messages: is no list of {role, content}"),
        (json.dumps({"prompt": "1+" * 300}), ":2: max_tokens: a prompt of 600 and 1 new tokens pass"),
    ],
)
def test_a_bad_line_is_named(
    model: Path, tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "1+1="}\n' + line + "\n")
    assert cli.main(["generate", str(model), "--prompts", str(path)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert f"{path}{message}" in streams.err
    assert streams.err.count("\n") == 1


def test_an_output_is_never_lost(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    arguments = ["generate", str(model), "7+6=", "--max-tokens", "4", "--output", str(output)]
    assert cli.main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert output.read_text() == "precious\n"
    assert cli.main([*arguments, "--overwrite"]) == 0
    assert len(read_responses(output)) == 1


def test_ar_models_have_no_larger_blocks(ar_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(ar_model), "7+6=", "--block-size", "4"]) == 2
    assert capsys.readouterr().err.startswith("tstar: error: prompt: block_size: 4 cannot be used")


def test_a_model_without_numbers_fails_by_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = load_model(model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(3e38)
    save_model(broken, tmp_path / "broken", carry_from=model)
    assert cli.main(["generate", str(tmp_path / "broken"), "7+6="]) == 2
    assert "1 of 1 responses failed: prompt: the model's logits are not finite" in capsys.readouterr().err


def test_interrupted_runs_keep_what_they_have(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, num_steps = Engine.step, 0

    def interrupted(engine: Engine, wants_steps: bool = False) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 30:
            raise KeyboardInterrupt
        return step(engine, wants_steps)

    monkeypatch.setattr(Engine, "step", interrupted)
    rows = [{"prompt": "1+1="}] * 300  # more than are decoded at once
    prompts = write_lines(tmp_path / "in.jsonl", *rows)
    output = tmp_path / "out.jsonl"
    arguments = [
        "generate",
        str(model),
        "--prompts",
        str(prompts),
        "--output",
        str(output),
        "--max-tokens",
        "20",
    ]
    assert cli.main(arguments) == 130
    num_written = len(read_responses(output))
    assert 0 < num_written < 300
    assert f"tstar: interrupted: {output} holds {num_written} of 300 responses" in capsys.readouterr().err


# -- in a terminal -----------------------------------------------------------------------------


def in_terminal(arguments: list[str], *script: tuple[str, bytes]) -> tuple[int, str]:
    """Run tstar in a terminal of its own; when a text comes, type an answer (or ^C). Exit code, screen."""
    main_end, child_end = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    child = subprocess.Popen(
        [sys.executable, "-m", "tstar", *arguments],
        stdin=child_end, stdout=child_end, stderr=child_end, start_new_session=True, env=environment,
    )  # fmt: skip
    os.close(child_end)
    output, read_until, steps = "", 0, list(script)
    try:
        while select.select([main_end], [], [], 30)[0]:
            try:
                output += os.read(main_end, 4096).decode(errors="replace")
            except OSError:  # the child has left
                break
            while steps and (found := output.find(steps[0][0], read_until)) >= 0:
                read_until = found + len(steps[0][0])
                answer = steps.pop(0)[1]
                if answer == b"^C":
                    child.send_signal(signal.SIGINT)
                else:
                    os.write(main_end, answer)
        return child.wait(timeout=10), output
    finally:
        child.kill()
        child.wait()
        os.close(main_end)


def test_show_draws_masks_and_figures(model: Path) -> None:
    code, output = in_terminal(
        ["generate", str(model), "7+6=", "--show", "--max-tokens", "6", "--ignore-eos"]
    )
    assert code == 0
    assert "░" in output
    assert "\x1b[38;5;" in output
    assert "1 response, 6 tokens, TPF 1.00, " in output


def test_chat_in_a_terminal(model: Path) -> None:
    """Ctrl-C stops an answer, not the chat."""
    code, output = in_terminal(
        ["chat", str(model), "--max-tokens", "500", "--ignore-eos"],
        ("> ", b"7+6=\n"),
        ("░", b"^C"),
        ("> ", b"/reset\n"),
        ("> ", b"/nonsense\n"),
        ("no such command; /reset", b""),
        ("> ", b"/quit\n"),
    )
    assert code == 0
    assert "Traceback" not in output
    assert "500 tokens" not in output


# -- chat, piped -------------------------------------------------------------------------------


def test_chat_from_a_pipe_remembers(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    text_model = TextModel.load(model)
    submit = Engine.submit

    def spy(engine: Engine, request: Any) -> int:
        seen.append(text_model.decode(request.prompt_ids))
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", spy)
    type_in(monkeypatch, b"7+6=\n2+2=\n\n/reset\n3+3=\n/quit\nnever\n")
    assert cli.main(["chat", str(model), "--max-tokens", "6", "--ignore-eos", "--system", "1"]) == 0
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 3
    assert seen == ["17+6=", f"17+6={answers[0]}2+2=", "13+3="]


def test_chat_without_room_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, b"1" * 600 + b"\n")
    assert cli.main(["chat", str(model)]) == 2
    assert capsys.readouterr().err.startswith("tstar: error: max_tokens: a prompt of 600")
