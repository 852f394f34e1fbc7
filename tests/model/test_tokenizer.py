"""Tokenizers from local files, chat templates as ids, and the mask token found or added."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase

from tstar.errors import UserError
from tstar.model.attention import prepare
from tstar.model.config import ModelConfig
from tstar.model.layout import PackedLayout
from tstar.model.tokenizer import (
    MASK_TOKEN,
    add_mask_token,
    find_mask_token,
    load_tokenizer,
    render_chat,
    save_tokenizer,
)
from tstar.model.transformer import LanguageModel

WORDS = ("<unk>", "<s>", "</s>", "user", "assistant", "hi", "there", "think", "no", "yes", ":")
VOCABULARY = {word: token_id for token_id, word in enumerate(WORDS)}
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ m.role + ' : ' + m.content + ' </s> ' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant :"
    "{% if enable_thinking is defined and enable_thinking is false %} no think{% endif %}{% endif %}"
)


def write_tokenizer(
    directory: Path,
    *,
    added: tuple[str, ...] = (),
    vocabulary: dict[str, int] = VOCABULARY,
    **settings: Any,
) -> Path:
    """A word-level tokenizer that begins every text with <s>, and its tokenizer_config.json."""
    directory.mkdir(exist_ok=True)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(list(added))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **settings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def small_config(**changes: Any) -> ModelConfig:
    config = ModelConfig(
        model_type="llama",
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return replace(config, **changes)


def last_hidden(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    attention = prepare(PackedLayout.causal([len(ids)]), "cpu", "sdpa")
    with torch.no_grad():
        return model(torch.tensor(ids), attention)


IDS = [1, 3, 10, 5, 6, 2, 4]


# -- files -------------------------------------------------------------------------------------


def test_a_directory_gives_its_fast_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, chat_template=TEMPLATE))
    assert tokenizer.is_fast
    assert len(tokenizer) == len(WORDS)
    assert tokenizer("hi there").input_ids == [1, 5, 6]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == TEMPLATE
    assert list(tokenizer("hi")) == ["input_ids", "attention_mask"]  # no token_type_ids


def test_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path)("hi there").input_ids == [1, 5, 6]


def test_remote_code_is_neither_run_nor_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        pytest.fail("transformers asked whether to run remote code")

    monkeypatch.setattr("builtins.input", refuse)
    auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    write_tokenizer(tmp_path, tokenizer_class="EvilTokenizer", auto_map=auto_map)
    config = {"model_type": "sdar", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "was_run"
    (tmp_path / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass EvilTokenizer: ...\n")
    assert load_tokenizer(tmp_path)("hi").input_ids == [1, 5]
    assert not trace.exists()


def remove_it(directory: Path) -> None:
    shutil.rmtree(directory)


def put_a_file_there(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("")


def leave_nothing(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def leave_a_slow_one(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(b"sentencepiece")


def truncate_it(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:200])


def write_binary(directory: Path) -> None:
    (directory / "tokenizer.json").write_bytes(bytes(range(256)))


def write_another_object(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


def truncate_the_settings(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"eos_token": ')


def write_a_list_as_settings(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("[]")


def write_a_number_as_token(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"eos_token": 5}')


def write_a_number_as_added_token(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"7": 5}}')


@pytest.mark.parametrize(
    ("damage", "fault", "fix"),
    [
        (remove_it, "is no directory", "give one"),
        (put_a_file_there, "is no directory", "give one"),
        (leave_nothing, "holds no tokenizer.json", "AutoTokenizer"),
        (leave_a_slow_one, "only a slow tokenizer (tokenizer.model)", "AutoTokenizer"),
        (truncate_it, "tokenizer.json cannot be read (", "copy the file again"),
        (write_binary, "tokenizer.json cannot be read (", "copy the file again"),
        (write_another_object, "tokenizer.json cannot be read (", "copy the file again"),
        (truncate_the_settings, "tokenizer_config.json cannot be read (", "copy the file again"),
        (write_a_list_as_settings, "holds no JSON object", "copy the file again"),
        (write_a_number_as_token, "eos_token: 5 is no token", "write its text"),
        (write_a_number_as_added_token, "`added_tokens_decoder`", "repair tokenizer_config.json"),
    ],
)
def test_a_broken_directory_is_one_clear_line(tmp_path: Path, damage: Any, fault: str, fix: str) -> None:
    directory = write_tokenizer(tmp_path / "model")
    damage(directory)
    with pytest.raises(UserError) as error:
        load_tokenizer(directory)
    message = str(error.value)
    assert message.startswith(f"tokenizer: {directory}")
    assert "\n" not in message
    assert fault in message
    assert fix in message


def test_what_is_written_loads_alike_and_suits_transformers_4(tmp_path: Path) -> None:
    source = write_tokenizer(
        tmp_path / "source",
        added=("<|im_end|>",),
        tokenizer_class="Qwen2Tokenizer",
        auto_map={"AutoTokenizer": ["evil.EvilTokenizer", None]},
        additional_special_tokens=["<|im_end|>"],
        chat_template=TEMPLATE,
    )
    tokenizer = load_tokenizer(source)
    add_mask_token(LanguageModel(small_config()), tokenizer)
    save_tokenizer(tokenizer, tmp_path / "written")
    again = load_tokenizer(tmp_path / "written")
    text = "hi <|im_end|> there <|MASK|>"
    assert again(text).input_ids == tokenizer(text).input_ids == [1, 5, 11, 6, 12]
    assert again.mask_token_id == 12
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.chat_template == TEMPLATE
    settings = json.loads((tmp_path / "written" / "tokenizer_config.json").read_text())
    # What transformers 4.51 cannot read: 'TokenizersBackend', a list under extra_special_tokens.
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|im_end|>"]
    assert not isinstance(settings.get("extra_special_tokens"), list)
    assert not {"auto_map", "backend", "is_local"} & settings.keys()


# -- chat --------------------------------------------------------------------------------------


def test_a_conversation_becomes_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, chat_template=TEMPLATE))
    messages = [{"role": "user", "content": "hi there"}]
    turn = [3, 10, 5, 6, 2]  # no <s>: the template alone decides what stands before the text
    assert render_chat(tokenizer, messages) == [*turn, 4, 10]
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == turn
    assert render_chat(tokenizer, messages, enable_thinking=True) == [*turn, 4, 10]
    assert render_chat(tokenizer, messages, enable_thinking=False) == [*turn, 4, 10, 8, 7]


def test_without_a_chat_template_the_fix_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    with pytest.raises(UserError, match=f"{tmp_path} has no chat template; use a raw prompt"):
        render_chat(tokenizer, [{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(UserError, match=r"refuses these messages \(no such role\); change their"):
        render_chat(tokenizer, [{"role": "system", "content": "hi"}])


# -- the mask token found ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "named", "configured", "found"),
    [
        ((), None, None, None),  # an AR model
        ((), None, 7, 7),  # SDAR's weights beside Qwen3's tokenizer
        ((MASK_TOKEN,), None, None, 11),
        ((MASK_TOKEN,), MASK_TOKEN, None, 11),
        ((MASK_TOKEN,), MASK_TOKEN, 11, 11),
        (("[MASK]",), "[MASK]", None, 11),
        (("[MASK]",), "[MASK]", 11, 11),
        ((MASK_TOKEN, "[MASK]"), "[MASK]", 12, 12),  # the config decides between the tokenizer's two
        ((MASK_TOKEN, "<MASK>"), "<MASK>", 11, 11),
        ((MASK_TOKEN, "<MASK>"), "<MASK>", None, 11),
    ],
)
def test_the_mask_token_is_found(
    tmp_path: Path,
    added: tuple[str, ...],
    named: str | None,
    configured: int | None,
    found: int | None,
) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, added=added, mask_token=named))
    config = small_config(vocab_size=16, mask_token_id=configured)
    assert find_mask_token(tokenizer, config) == found


def test_config_and_tokenizer_that_disagree_are_both_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, added=(MASK_TOKEN,)))
    expected = r"config.json says 7, the tokenizer says '<\|MASK\|>' = 11; set mask_token_id in"
    with pytest.raises(UserError, match=expected):
        find_mask_token(tokenizer, small_config(vocab_size=16, mask_token_id=7))


def test_a_mask_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, added=(MASK_TOKEN,)))
    with pytest.raises(UserError, match=r"= 11 lies beyond the model's vocabulary of 11; use"):
        find_mask_token(tokenizer, small_config())


@pytest.mark.parametrize("place", ["special_tokens_map.json", "tokenizer_config.json"])
def test_sdars_stray_spelling_does_not_win(tmp_path: Path, place: str) -> None:
    write_tokenizer(tmp_path, added=(MASK_TOKEN,))
    path = tmp_path / place
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, "mask_token": "<MASK>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.mask_token_id == 12  # transformers adds the stray token behind the others
    for configured in (None, 11):
        config = small_config(vocab_size=16, mask_token_id=configured)
        assert find_mask_token(tokenizer, config) == 11


# -- the mask token added ----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ar_model_grows_by_the_mean_row(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    model = LanguageModel(small_config(tie_word_embeddings=tied)).to(dtype)
    before = copy.deepcopy(model)
    assert add_mask_token(model, tokenizer) == 11
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == (MASK_TOKEN, 11)
    assert model.config == replace(before.config, vocab_size=12, mask_token_id=11)
    assert model.model.config is model.config
    assert find_mask_token(tokenizer, model.config) == 11

    tables = [(model.model.embed_tokens, before.model.embed_tokens)]
    if not tied:
        tables.append((model.lm_head, before.lm_head))
    for table, old in tables:
        assert table.weight.dtype == dtype
        assert table.weight.requires_grad
        assert torch.equal(table.weight[:11], old.weight)
        mean = sum(row.double() for row in old.weight) / 11
        torch.testing.assert_close(table.weight[11], mean.to(dtype), rtol=0, atol=0)
    assert model.model.embed_tokens.num_embeddings == 12
    assert tied or model.lm_head.out_features == 12


@pytest.mark.parametrize("tied", [True, False])
def test_grown_models_say_the_same_of_old_tokens(tmp_path: Path, tied: bool) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    model = LanguageModel(small_config(tie_word_embeddings=tied))
    hidden, old_head = last_hidden(model, IDS), model.output_weight
    before = model.logits(hidden).detach()
    mask_id = add_mask_token(model, tokenizer)
    assert torch.equal(last_hidden(model, IDS), hidden)
    after = model.logits(hidden)
    # Bit for bit, once both sides multiply by 12 rows: BLAS sums 11 and 12 columns in another order.
    twelve_rows = torch.cat([old_head, torch.zeros(1, 16)])
    assert torch.equal(after[:, :mask_id], (hidden @ twelve_rows.T)[:, :mask_id])
    torch.testing.assert_close(after[:, :mask_id], before, rtol=1e-6, atol=1e-6)
    # The mean of the logits: whoever does not exclude the mask token gives it at most 1 / vocabulary.
    torch.testing.assert_close(after[:, mask_id], before.mean(dim=1), rtol=1e-5, atol=1e-5)
    assert (after.softmax(dim=1)[:, mask_id] <= 1 / len(WORDS)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_models_with_padded_rows_keep_old_logits_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    model = LanguageModel(small_config(vocab_size=16, tie_word_embeddings=tied))
    before = model.logits(last_hidden(model, IDS))
    mask_id = add_mask_token(model, tokenizer)
    after = model.logits(last_hidden(model, IDS))
    others = [i for i in range(16) if i != mask_id]
    assert torch.equal(after[:, others], before[:, others])


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    model = LanguageModel(small_config())
    mask_id = add_mask_token(model, tokenizer)
    with torch.no_grad():
        model.model.embed_tokens.weight[mask_id] = 7.0  # training moved it
    config, state, size = model.config, copy.deepcopy(model.state_dict()), len(tokenizer)
    assert add_mask_token(model, tokenizer) == mask_id
    assert (model.config, len(tokenizer)) == (config, size)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_the_same_input_gives_the_same_row(tmp_path: Path) -> None:
    model = LanguageModel(small_config())
    rows = []
    for twin in (model, copy.deepcopy(model)):
        torch.rand(3)  # nothing is drawn from global state
        add_mask_token(twin, load_tokenizer(write_tokenizer(tmp_path)))
        rows.append(twin.model.embed_tokens.weight[11])
    assert torch.equal(*rows)


@pytest.mark.parametrize("added", [(), (MASK_TOKEN,)])
def test_padded_rows_hold_the_mask_token_and_do_not_count(tmp_path: Path, added: tuple[str, ...]) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, added=added))
    model = LanguageModel(small_config(model_type="qwen3", vocab_size=16))
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[11:] = 1e6  # nobody trained these: they may hold anything
    before = copy.deepcopy(model)
    assert add_mask_token(model, tokenizer) == 11
    assert (model.config.model_type, model.config.vocab_size) == ("sdar", 16)
    assert tokenizer.mask_token == MASK_TOKEN
    for table, old in (
        (model.model.embed_tokens, before.model.embed_tokens),
        (model.lm_head, before.lm_head),
    ):
        torch.testing.assert_close(table.weight[11], old.weight[:11].mean(dim=0))
        assert torch.equal(table.weight[:11], old.weight[:11])
        assert torch.equal(table.weight[12:], old.weight[12:])


def test_a_mask_token_that_the_tokenizer_has_is_used(tmp_path: Path) -> None:
    own = "[MASK]"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, added=(own,), mask_token=own))
    model = LanguageModel(small_config())
    assert add_mask_token(model, tokenizer) == 11
    assert model.config.vocab_size == 12
    assert tokenizer.mask_token == own
    assert MASK_TOKEN not in tokenizer.get_vocab()


def test_a_row_that_a_diffusion_model_trained_is_kept(tmp_path: Path) -> None:
    """An SDAR directory whose config.json merely does not name the mask token."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, added=(MASK_TOKEN,)))
    model = LanguageModel(small_config(model_type="sdar", vocab_size=16))
    before = copy.deepcopy(model.state_dict())
    assert add_mask_token(model, tokenizer) == 11
    assert model.config.mask_token_id == 11
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_vocabulary_with_gaps_is_refused(tmp_path: Path) -> None:
    """`tokenizers` numbers a new token by the count of the others, which here is the id of "hi"."""
    tokenizer = load_tokenizer(
        write_tokenizer(tmp_path, vocabulary={"<unk>": 0, "<s>": 1, "</s>": 2, "hi": 4})
    )
    model = LanguageModel(small_config())
    before = model.model.embed_tokens.weight.clone()
    with pytest.raises(UserError, match=r"have gaps, so '<\|MASK\|>' would take the id .* \(4\)"):
        add_mask_token(model, tokenizer)
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert not model.config.is_diffusion


# -- the real thing ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdar_directory(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SDAR-1.7B's directory as on the Hub, without its weights."""
    directory = tmp_path_factory.mktemp("sdar")
    for path in (shared / "tokenizers" / "sdar").iterdir():
        shutil.copyfile(path, directory / path.name)
    (directory / "config.1dot7B.json").rename(directory / "config.json")
    return directory


@pytest.fixture(scope="module")
def sdar_tokenizer(sdar_directory: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(sdar_directory)


@pytest.mark.parametrize("size", ["1dot7B", "4B"])
def test_sdars_vocabulary(
    sdar_directory: Path, sdar_tokenizer: PreTrainedTokenizerBase, shared: Path, size: str
) -> None:
    source = json.loads((shared / "tokenizers" / "sdar" / f"config.{size}.json").read_text())
    config = ModelConfig.from_hub(source)
    assert (config.vocab_size, config.mask_token_id) == (151936, 151669)
    assert len(sdar_tokenizer) == 151670
    assert find_mask_token(sdar_tokenizer, config) == 151669
    assert find_mask_token(sdar_tokenizer, replace(config, mask_token_id=None)) == 151669
    assert sdar_tokenizer.convert_ids_to_tokens(151669) == MASK_TOKEN
    # The tokenizer ends a text, the generation config a chat turn too: 151645 is <|im_end|>.
    assert sdar_tokenizer.eos_token_id == config.eos_token_id == 151643
    generation = json.loads((sdar_directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [151645, 151643]
    assert sdar_tokenizer.convert_tokens_to_ids("<|im_end|>") == 151645


def test_sdars_chat_template(sdar_tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    for options, end in (
        ({}, "<|im_start|>assistant\n"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"add_generation_prompt": False}, ""),
    ):
        ids = render_chat(sdar_tokenizer, messages, **options)
        assert sdar_tokenizer.decode(ids) == turns + end
        assert ids[0] == 151644  # <|im_start|>: one token, and nothing before it


def test_qwen3_gets_the_mask_token_where_sdar_has_it(sdar_directory: Path, tmp_path: Path) -> None:
    """Qwen3's tokenizer is SDAR's without ``<|MASK|>``; no row is added for it."""
    source = json.loads((sdar_directory / "tokenizer.json").read_text())
    source["added_tokens"] = [t for t in source["added_tokens"] if t["content"] != MASK_TOKEN]
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == 151669
    model = LanguageModel(small_config(model_type="qwen3", vocab_size=151936, hidden_size=2))
    assert add_mask_token(model, tokenizer) == 151669
    assert (model.config.model_type, model.config.vocab_size) == ("sdar", 151936)
    mean = model.model.embed_tokens.weight[:151669].double().mean(dim=0)
    torch.testing.assert_close(model.model.embed_tokens.weight[151669].double(), mean, rtol=1e-6, atol=0)
