"""Text in, text out: stop strings and the pieces of a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_models import make_tokenizer, save_chain_model
from tstar.engine import Engine, EngineConfig, reference
from tstar.errors import UserError
from tstar.generation.options import DecodingOptions
from tstar.generation.text import cut_at_stop, decode, stop_finder, token_pieces
from tstar.generation.text_model import TextModel, keyed_seed

PIECES = ("<unk>", "<eos>", "a", "b", "ab", " ", "ba", "<0xE2>", "<0x82>", "<0xAC>", "\n")
TOKENIZER = make_tokenizer(PIECES)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(save_chain_model(tmp_path_factory.mktemp("chain") / "model", block_size=8))


# -- stop strings ------------------------------------------------------------------------------


def first_stop(ids: list[int], strings: list[str], block_size: int) -> int | None:
    """Block by block, every beginning of the text decoded from its start."""
    for stop in range(block_size, len(ids) + block_size, block_size):
        for end in range(1, min(stop, len(ids)) + 1):
            if any(string in decode(TOKENIZER, ids[:end]) for string in strings):
                return end
    return None


@given(
    ids=st.lists(st.sampled_from([2, 3, 4, 5, 6, 10, 1]), min_size=1, max_size=40),
    strings=st.lists(st.sampled_from(["abba", "bb", "b a", "aaa", "a\nb", "<eos>", "ba ba ba"]), min_size=1),
    block_size=st.integers(1, 9),
)
def test_stops_are_found_in_the_block_that_completes_them(
    ids: list[int], strings: list[str], block_size: int
) -> None:
    find_stop = stop_finder(TOKENIZER, strings, block_size)
    assert find_stop is not None
    found = None
    for stop in range(block_size, len(ids) + block_size, block_size):
        found = find_stop(np.array(ids[:stop]))
        if found is not None:
            break
    assert found == first_stop(ids, strings, block_size)


def test_no_strings_no_search() -> None:
    assert stop_finder(TOKENIZER, (), 4) is None
    with pytest.raises(UserError, match="stop: an empty string"):
        stop_finder(TOKENIZER, ("a", ""), 4)


def test_text_ends_before_the_first_stop() -> None:
    assert cut_at_stop("one two three", ["three", "two"]) == "one "
    assert cut_at_stop("one", ["two"]) == "one"


@pytest.mark.parametrize(("block_size", "offset"), [(1, 0), (3, 2), (8, 0)])
def test_engine_stops_at_strings_as_the_reference_does(
    text_model: TextModel, block_size: int, offset: int
) -> None:
    free = DecodingOptions(block_size=block_size, offset=offset, max_tokens=30, ignore_eos=True)
    prompt = text_model.encode("7+6=")
    requests = [text_model.request(prompt, free, seed, 1.0) for seed in range(4)]
    engine = Engine(text_model.model, EngineConfig(memory=1 << 28))
    for seed, whole in enumerate(engine.generate(requests)):
        text = text_model.decode(whole.response_ids)
        stop = (text[12:15], "no such text")
        request = text_model.request(prompt, replace(free, stop=stop), seed, 1.0)
        (cut,) = engine.generate([request])
        expected = reference.generate(text_model.model, request)
        np.testing.assert_array_equal(cut.response_ids, whole.response_ids[: len(cut.response_ids)])
        np.testing.assert_array_equal(cut.response_ids, expected.response_ids)
        assert (cut.stop_length, cut.finish_reason) == (expected.stop_length, "stop")
        # The last token completes the string, which may have begun within an earlier one.
        assert stop[0] in text_model.decode(cut.response_ids[: cut.stop_length])
        assert stop[0] not in text_model.decode(cut.response_ids[: cut.stop_length - 1])
        assert stop[0] not in text_model.text(cut, stop)


def test_the_first_stop_of_a_block_counts(text_model: TextModel) -> None:
    """... be it a string or the model's own end token."""
    prompt = text_model.encode("7+6=")
    (eos,) = text_model.model.config.eos_token_ids
    engine = Engine(text_model.model, EngineConfig(memory=1 << 28))
    options = DecodingOptions(block_size=8, max_tokens=32, stop=("5", "6"))
    num_seen = {"string": 0, "token": 0}
    for cut in engine.generate([text_model.request(prompt, options, seed, 1.0) for seed in range(60)]):
        ids = cut.response_ids.tolist()
        stops = {eos, *text_model.encode("56")}
        places = [i for i, token in enumerate(ids) if token in stops]
        assert cut.stop_length == (places[0] + 1 if places else len(ids))
        num_seen["token" if ids[cut.stop_length - 1] == eos else "string"] += 1
    assert min(num_seen.values()) >= 3, num_seen


# -- pieces ------------------------------------------------------------------------------------


@given(
    context=st.lists(st.integers(0, 10), max_size=6),
    ids=st.lists(st.integers(0, 10), min_size=1, max_size=30),
)
def test_pieces_make_the_text(context: list[int], ids: list[int]) -> None:
    ids = [*ids, 2]  # what is incomplete before it comes out with it
    pieces = list(token_pieces(TOKENIZER, context, ids))
    assert len(pieces) == len(ids)
    if not {7, 8, 9} & {*context, *ids}:
        assert "".join(pieces) == "".join(PIECES[i] for i in ids)


def test_a_character_stands_with_its_last_token() -> None:
    assert list(token_pieces(TOKENIZER, [2], [3, 7, 8, 9, 2])) == ["b", "", "", "€", "a"]


def test_real_tokenizer_puts_spaces_where_they_are(shared: Path) -> None:
    from tstar.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(shared / "models" / "stories15M")
    text = "Lily said: “héllo” 🙂, 日本.\n  Then\tshe went"
    ids = tokenizer(text).input_ids
    context = tokenizer("Once upon").input_ids
    assert "".join(token_pieces(tokenizer, context, ids)) == f" {text}"
    # A token in the middle is written with the space before it, as it will stand.
    assert list(token_pieces(tokenizer, context, ids[1:2])) == [tokenizer.convert_ids_to_tokens(ids[1])]


# -- requests ----------------------------------------------------------------------------------


def test_defaults_follow_the_model(text_model: TextModel, tmp_path: Path) -> None:
    prompt = text_model.encode("1+1=")
    assert text_model.request(prompt, DecodingOptions(), 0).rule.block_size == 8
    assert text_model.request(prompt, DecodingOptions(block_size=2), 0).rule.block_size == 2
    unnamed = TextModel.load(save_chain_model(tmp_path / "b"))
    assert unnamed.request(prompt, DecodingOptions(), 0).rule.block_size == 4
    ar = TextModel.load(save_chain_model(tmp_path / "ar", is_diffusion=False))
    request = ar.request(prompt, DecodingOptions(), 0)
    assert request.rule.block_size == 1
    assert request.sampling.max_tokens == 512 - len(prompt)  # the model has 512 positions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DecodingOptions(block_size=0), "block_size: 0"),
        (DecodingOptions(block_size=257), "block_size: 257 is too large; use 1 to 256"),
        (DecodingOptions(offset=8), "offset: 8 does not fit block_size 8"),
        (DecodingOptions(top_p=0.0), "top_p: 0"),
        (DecodingOptions(temperature=-1.0), "temperature: -1"),
        (DecodingOptions(max_tokens=0), "max_tokens: 0"),
        (DecodingOptions(unmask="dynamic"), "confidence_threshold: missing"),
        (
            DecodingOptions(unmask="static", confidence_threshold=0.5),
            "confidence_threshold: 0.5 changes nothing",
        ),
        (DecodingOptions(tokens_per_step=0), "tokens_per_step: 0"),
    ],
)
def test_bad_options_name_the_field(text_model: TextModel, options: DecodingOptions, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        text_model.request([5], options, 0)


def test_policy_follows_from_its_number() -> None:
    assert DecodingOptions(confidence_threshold=0.9).policy().kind == "dynamic"
    assert DecodingOptions(entropy_bound=0.1).policy().kind == "entropy"
    assert DecodingOptions().policy().kind == "static"


def test_seeds_of_different_keys_differ() -> None:
    seeds = {
        keyed_seed(seed, prompt, sample) for seed in range(5) for prompt in range(5) for sample in range(5)
    }
    assert len(seeds) == 125
    assert keyed_seed(1, 2, 3) == keyed_seed(1, 2, 3)
