"""Model directories: round trips, what transformers makes of ours, and every way a directory is broken."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tiny_models import PEERS, make_model, make_peer
from tstar import atomic
from tstar.cli import main
from tstar.errors import UserError
from tstar.model import checkpoint
from tstar.model.attention import prepare
from tstar.model.checkpoint import INDEX_FILE, SINGLE_FILE, load_config, load_model, save_model
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel


def parameters_of(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_identical(left: LanguageModel, right: LanguageModel) -> None:
    assert left.config == right.config
    ours, theirs = parameters_of(left), parameters_of(right)
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert parameter.dtype == theirs[name].dtype
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("model_type", ["sdar", "sdar_moe", "qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_round_trip_is_bit_identical(
    tmp_path: Path, model_type: str, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    model = make_model(model_type, dtype, hidden_size=48, tie_word_embeddings=model_type == "qwen2")
    save_model(model, tmp_path / "first", max_shard_bytes=max_shard_bytes)
    loaded = load_model(tmp_path / "first")
    # The written directory says in what it was written, which the model in memory does not.
    assert parameters_of(loaded).keys() == parameters_of(model).keys()
    for name, parameter in parameters_of(loaded).items():
        assert torch.equal(parameter, parameters_of(model)[name])
        assert parameter.dtype == dtype
    save_model(loaded, tmp_path / "second", max_shard_bytes=max_shard_bytes)
    assert_identical(load_model(tmp_path / "second"), loaded)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


def test_shards_hold_at_most_what_was_asked_for(tmp_path: Path) -> None:
    model = make_model("sdar")
    save_model(model, tmp_path / "model", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model" / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        tensors = load_file(tmp_path / "model" / file)
        assert sum(t.numel() * 4 for t in tensors.values()) <= 20_000 or len(tensors) == 1
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, "whoever may read one file may read all"


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_loads_what_we_write(tmp_path: Path, name: str, max_shard_bytes: int) -> None:
    peer = make_peer(name)
    peer.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    save_model(model, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(peer)
    token_ids = torch.randint(97, (1, 80))
    with torch.no_grad():
        assert torch.equal(again(input_ids=token_ids).logits, peer(input_ids=token_ids).logits)
        ours = model.logits(model(token_ids[0], prepare(PackedLayout.causal([80]))))
    torch.testing.assert_close(ours, peer(input_ids=token_ids).logits[0], rtol=0, atol=1e-4)


def test_dtype_is_converted_on_the_way_in_and_out(tmp_path: Path) -> None:
    model = make_model("sdar")
    save_model(model, tmp_path / "bf16", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    loaded = load_model(tmp_path / "bf16", torch.float32)
    for name, parameter in parameters_of(loaded).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameters_of(model)[name].bfloat16().float())


def test_loaded_parameters_can_be_trained_and_own_their_memory(tmp_path: Path) -> None:
    save_model(make_model("sdar"), tmp_path / "model")
    model = load_model(tmp_path / "model")
    before = (tmp_path / "model" / SINGLE_FILE).read_bytes()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.requires_grad
            parameter.zero_()
    assert (tmp_path / "model" / SINGLE_FILE).read_bytes() == before


def test_loading_needs_no_second_copy(tmp_path: Path) -> None:
    """A 96 MB model under a limit of memory that two copies would break."""
    model = make_model("sdar", hidden_size=512, vocab_size=40_000, num_hidden_layers=1, mask_token_id=3)
    save_model(model, tmp_path / "model", max_shard_bytes=200 * 10**6)
    size = sum(p.numel() * 4 for p in model.parameters())
    program = (
        "import resource, pathlib, torch, tstar.model.checkpoint as c\n"
        "from tstar.model.attention import prepare\n"
        "torch.set_num_threads(1)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"model = c.load_model(pathlib.Path({str(tmp_path / 'model')!r}))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    largest_tensor = 40_000 * 512 * 4
    # ru_maxrss counts pages of the mapped file too; a whole second copy would be 2 x size.
    assert int(done.stdout) * 1024 < size + 1.3 * largest_tensor
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


# -- carried files -----------------------------------------------------------------------------


def sdar_directory(path: Path) -> Path:
    """A directory as the Hub has it: tokenizer, template, generation config, remote code, and more."""
    save_model(make_model("sdar"), path)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling_sdar.py").write_text("raise SystemExit('remote code was run')\n")
    (path / "configuration_sdar.py").write_text("raise SystemExit('remote code was run')\n")
    (path / "generation_config.json").write_text('{"temperature": 0.6}\n')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "LICENSE").write_text("MIT")
    (path / "pytorch_model.bin").write_bytes(b"pickled")
    (path / ".cache").mkdir()
    return path


def test_other_files_are_carried_over_verbatim(tmp_path: Path) -> None:
    source = sdar_directory(tmp_path / "source")
    save_model(load_model(source), tmp_path / "out", carry_from=source)
    carried = {p.name for p in (tmp_path / "out").iterdir()}
    assert carried == {p.name for p in source.iterdir()} - {"pytorch_model.bin", ".cache"}
    for name in carried - {"config.json", SINGLE_FILE}:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == json.loads((source / "config.json").read_text())


def test_auto_map_goes_where_its_code_goes(tmp_path: Path) -> None:
    source = sdar_directory(tmp_path / "source")
    save_model(load_model(source), tmp_path / "without")
    assert "auto_map" not in json.loads((tmp_path / "without" / "config.json").read_text())
    save_model(make_model("sdar"), tmp_path / "with", code_from=source)
    assert (tmp_path / "with" / "modeling_sdar.py").exists()
    assert not (tmp_path / "with" / "LICENSE").exists()
    assert "AutoConfig" in json.loads((tmp_path / "with" / "config.json").read_text())["auto_map"]


def test_a_fresh_model_says_where_it_stops(tmp_path: Path) -> None:
    save_model(make_model("sdar", eos_token_id=[5, 6], pad_token_id=7), tmp_path / "model")
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [5, 6], "pad_token_id": 7}


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        ({"eos_token_id": [9, 5]}, (5, 9)),  # as SDAR's: the turn's end stands in this file alone
        ({"eos_token_id": 9}, (5, 9)),
        ({"eos_token_id": 5}, (5,)),
        ({"temperature": 0.6}, (5,)),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_too(
    tmp_path: Path, generation: dict[str, Any], ends: tuple[int, ...]
) -> None:
    save_model(make_model("sdar", eos_token_id=5), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path / "model").eos_token_ids == ends
    assert load_model(tmp_path / "model").config.eos_token_ids == ends
    (tmp_path / "model" / "generation_config.json").unlink()
    assert load_config(tmp_path / "model").eos_token_ids == (5,)


# -- atomic writing ----------------------------------------------------------------------------


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_existing_directory_is_left_alone_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic, "exchange", lambda _one, _other: False)
    save_model(make_model("sdar"), tmp_path / "model")
    with pytest.raises(UserError, match="exists already"):
        save_model(make_model("llama"), tmp_path / "model")
    assert load_model(tmp_path / "model").config.model_type == "sdar"
    save_model(make_model("llama"), tmp_path / "model", overwrite=True)
    assert load_model(tmp_path / "model").config.model_type == "llama"
    assert [p.name for p in tmp_path.iterdir()] == ["model"], "nothing temporary is left"


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_overwriting_leaves_no_moment_without_a_directory(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "new" / "weights").touch()
    assert atomic.exchange(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "weights").exists()
    assert not (tmp_path / "new" / "weights").exists()
    assert not atomic.exchange(tmp_path / "nowhere", tmp_path / "old")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    target = tmp_path / "model"
    if overwrite:
        save_model(make_model("sdar"), target)
    written: list[Path] = []

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device\); nothing was"):
        save_model(make_model("llama"), target, overwrite=True, max_shard_bytes=20_000)
    assert written, "the failure came in the middle"
    assert [p.name for p in tmp_path.iterdir()] == (["model"] if overwrite else [])
    if overwrite:
        assert load_model(target).config.model_type == "sdar"


# -- broken directories ------------------------------------------------------------------------


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        for file in path.glob("*.safetensors"):
            tensors = load_file(file)
            change(tensors)
            save_file(tensors, file)

    return edit


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    if "model.norm.weight" in tensors:
        tensors["model.norm.weight"][3] = torch.nan


def truncate(path: Path) -> None:
    file = path / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-100])


def only_pickles(path: Path) -> None:
    (path / SINGLE_FILE).rename(path / "pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda p: (p / "config.json").unlink(),
        "config.json is missing; this is no model directory",
    ),
    "broken config": (lambda p: (p / "config.json").write_text("{"), "config.json: not valid JSON"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), "holds list where an object"),
    "unknown model type": (edit_config(model_type="mamba"), "model_type: 'mamba' is not supported"),
    "unsupported rope": (
        edit_config(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        "rope_scaling: type 'yarn' is not supported",
    ),
    "wrong shape": (
        edit_config(intermediate_size=64),
        r"mlp.down_proj.weight: the checkpoint has shape \[32, 48\], config.json asks for \[32, 64\]",
    ),
    "NaN": (edit_weights(set_nan), "model.norm.weight holds NaN or infinite values"),
    "tensor missing": (
        edit_weights(lambda t: t.pop("model.norm.weight")),
        "model.norm.weight is missing from the weights",
    ),
    "layers too many": (edit_config(num_hidden_layers=2), "model.layers.2.* and 9 more are in the weights"),
    "layers too few": (edit_config(num_hidden_layers=4), "model.layers.3.* and 9 more are missing"),
    "truncated": (truncate, r"model.safetensors: not a whole safetensors file"),
    "integers": (
        edit_weights(lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
        "model.norm.weight is stored as torch.int8",
    ),
    "no weights": (lambda p: (p / SINGLE_FILE).unlink(), "no weights found"),
    "pickled weights": (only_pickles, r"weights are pickled \(\*.bin\), which is never opened"),
    "empty index": (lambda p: (p / INDEX_FILE).write_text("{}"), "weight_map is missing or empty"),
    "index points elsewhere": (
        lambda p: (p / INDEX_FILE).write_text('{"weight_map": {"a": "../other.safetensors"}}'),
        "'a' points to '../other.safetensors', no file beside it",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_directory_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], message: str
) -> None:
    save_model(make_model("sdar"), tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert line.startswith("tstar: error: ")
    assert line.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"], "nothing was half written"


def test_a_missing_shard_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(p.numel() * 4 for p in make_model("sdar").parameters())
    save_model(make_model("sdar"), tmp_path / "model", max_shard_bytes=size * 2 // 3)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 2
    assert "model-00002-of-00002.safetensors: this shard is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_path_that_is_no_directory(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["export", str(tmp_path / name), str(tmp_path / "out")]) == 2
    assert f"{tmp_path / name}: no such directory" in capsys.readouterr().err


def test_an_old_buffer_is_ignored(tmp_path: Path) -> None:
    save_model(make_model("llama"), tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(lambda t: t.update({name: torch.ones(4)}))(tmp_path / "model")
    load_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_real_small_models_load_and_write_back(shared: Path, tmp_path: Path, name: str) -> None:
    source = shared / "models" / name
    model = load_model(source)
    save_model(model, tmp_path / "out", carry_from=source)
    assert_identical(load_model(tmp_path / "out"), model)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    token_ids = torch.randint(500, (60,))
    with torch.no_grad():
        expected = peer(input_ids=token_ids[None]).logits[0]
        exact = load_model(source, torch.float32)
        logits = exact.logits(exact(token_ids, prepare(PackedLayout.causal([60]))))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
