"""Forwards in fixed shapes give what others give; on a CPU they are run, on a GPU recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_requests import MASK, assert_all_same, assert_same, make_engine, make_request
from tiny_models import LLAMA3_SCALING, make_config, make_model, randomise
from tstar.engine import Engine, EngineConfig, GenerationError, Request, SamplingParams, reference
from tstar.engine.memory import MemoryPlan
from tstar.model.attention.padded import PaddedAttention, PaddedShape, choose_shape, pad_rows
from tstar.model.attention.store import GatherLimits, KVStore, StoreRows
from tstar.model.moe import Experts
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.unmask import UnmaskPolicy

B4 = PartitionRule(4)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model("sdar", num_hidden_layers=2, max_position_embeddings=2048)


def both_engines(model: LanguageModel, **settings: Any) -> tuple[Engine, Engine]:
    return make_engine(model, graphs=False, **settings), make_engine(model, graphs=True, **settings)


# -- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_at_once", [2, 12])
def test_decodes_the_same(model: LanguageModel, num_at_once: int) -> None:
    """Every block size, policy and way to draw in one batch, shifted and not; as many as fit at once, so
    that shapes come again; few pages."""
    rng = np.random.default_rng(0)
    rules = [PartitionRule(size, offset) for size in (1, 2, 4, 7, 16, 32) for offset in {0, size // 2}]
    requests = [
        make_request(rules[i % len(rules)], int(rng.integers(1, 60)), i, max_tokens=1 + i % 30)
        for i in range(24)
    ]
    plain, padding = both_engines(model, num_pages=900, max_requests=num_at_once)
    expected = plain.generate(requests)
    for _ in range(2):
        assert_all_same(padding.generate(requests), expected)
    assert padding.num_forwards == 2 * plain.num_forwards
    assert padding._padded is not None
    assert padding._padded.num_runs > padding.num_forwards / 2, "else this has shown nothing"
    assert plain._padded is None


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sdar_moe"])
def test_other_models_decode_the_same(kind: str) -> None:
    model = make_model(kind, num_hidden_layers=2)
    rule = B4 if model.config.is_diffusion else PartitionRule(1)
    changes = {} if model.config.is_diffusion else {"unmask": UnmaskPolicy()}
    requests = [make_request(rule, 1 + i % 9, i, max_tokens=20, **changes) for i in range(9)]
    plain, padding = both_engines(model)
    assert_all_same(padding.generate(requests), plain.generate(requests))
    assert padding._padded is not None
    assert padding._padded.num_runs > padding.num_forwards / 2


def test_padding_writes_to_no_page_but_the_scratch_page(model: LanguageModel) -> None:
    """After every forward the stores of both engines hold the same, in pages that are used and in pages that
    are not; the scratch page is written by padding alone."""
    plain, padding = both_engines(model, num_pages=60, max_requests=5)
    for number in range(7):
        for engine in (plain, padding):
            engine.submit(make_request(PartitionRule(3 + number % 3), 5 + number, number, max_tokens=20))
    while plain.num_unfinished:
        plain.step()
        padding.step()
        ours, theirs = padding._awake(), plain._awake()
        for got, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(got[:, :60], expected[:, :60], rtol=0, atol=1e-4)
            assert not expected[:, 60].any()
    assert ours.scratch_page == 60
    assert ours.keys[:, 60].any()
    assert not padding.num_unfinished


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    """Padding repeats tokens of the broken request; what it leaves in the scratch page reaches nobody, in
    this batch or a later one."""
    model = make_model("sdar", num_hidden_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = torch.nan
        model.output_weight[0] = model.output_weight[1]  # or every logit of token 0 would be NaN where tied
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=16, temperature=0.0)
    prompts = [rng.integers(2, MASK, size=n) for n in (3, 6, 9, 12, 15)]
    good = [Request(prompt, PartitionRule(3), sampling, n) for n, prompt in enumerate(prompts)]
    bad = Request(np.array([5, 0, 7]), PartitionRule(3), sampling)
    plain, padding = both_engines(model)
    expected = plain.generate(good)
    padding.generate(good)
    assert padding._padded is not None
    num_before = padding._padded.num_runs
    for _ in range(2):
        with pytest.raises(GenerationError) as error:
            padding.generate([*good, bad])
        assert_all_same([error.value.finished[i] for i in range(5)], expected)
    assert_all_same(padding.generate(good), expected)
    assert padding._padded.num_runs > num_before


def test_recorded_forwards_are_forgotten_when_weights_move_and_kept_when_they_change_in_place() -> None:
    own, trained = (make_model("sdar", num_hidden_layers=1) for _ in range(2))
    randomise(trained, seed=1)
    engine = make_engine(own, graphs=True)
    request = make_request(B4, 5, 3, max_tokens=20)
    assert engine._padded is not None

    def is_right(version: int) -> None:
        expected = reference.generate(trained, request, weight_version=version)
        assert_same(engine.generate([request])[0], expected)

    engine.generate([request])
    assert engine._padded.num_shapes > 0
    engine.load_weights(trained.named_parameters(), 1)
    assert engine._padded.num_shapes == 0
    is_right(1)
    num_shapes = engine._padded.num_shapes
    randomise(trained, seed=2)
    engine.load_weights(trained.named_parameters(), 2)
    assert engine._padded.num_shapes == num_shapes > 0
    is_right(2)
    engine.sleep()
    assert engine._padded is None
    engine.wake()
    is_right(2)


def test_no_more_is_recorded_once_its_memory_is_taken(model: LanguageModel) -> None:
    """What is recorded goes on being used, and other shapes are run as they are."""
    engine = make_engine(model, graphs=True)
    few = [make_request(B4, 5, i, max_tokens=12) for i in range(2)]
    many = [make_request(B4, 5, i, max_tokens=12) for i in range(20)]
    expected = make_engine(model).generate(many)
    engine.generate(few)
    padded = engine._padded
    assert padded is not None
    known = set(padded._graphs)
    padded._num_bytes = engine._memory.graph_bytes
    num_before = padded.num_runs
    assert_all_same(engine.generate(many), expected)
    engine.generate(few)
    assert set(padded._graphs) == known
    assert padded.num_runs > num_before


def test_the_memory_of_graphs_is_part_of_the_budget() -> None:
    model = make_config("sdar", max_position_embeddings=4096)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for device, graphs, is_on in (
        (cpu, None, False),
        (cpu, True, True),
        (gpu, None, True),
        (gpu, False, False),
    ):
        config = EngineConfig(memory=1 << 26, graphs=graphs, max_requests=10**4)
        plan = MemoryPlan.of(config, model, torch.float32, device)
        assert (plan.max_padded_tokens > 0, plan.graph_bytes > 0) == (is_on, is_on)
        assert plan.graph_bytes < plan.budget / 3
        without = MemoryPlan.of(
            EngineConfig(memory=1 << 26, graphs=False, max_requests=10**4), model, torch.float32, device
        )
        saved = (without.num_pages - plan.num_pages) * 16 * KVStore.num_bytes_per_token(model, torch.float32)
        saved += (without.max_forward_tokens - plan.max_forward_tokens) * 4000
        assert abs(saved - plan.graph_bytes) < 0.5 * plan.graph_bytes + 1


# -- shapes ---------------------------------------------------------------------------------------


def rows_of(lengths: list[int], starts: list[int], page_size: int, seed: int = 0) -> StoreRows:
    """Rows of one block each, in pages without order."""
    stops = [start + length for start, length in zip(starts, lengths, strict=True)]
    each = -(-max(stops) // page_size)
    pages = np.random.default_rng(seed).permutation(len(lengths) * each).reshape(len(lengths), each)
    return StoreRows.blocks(starts, stops, [tuple(row) for row in pages.tolist()])


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    start=st.integers(0, 400),
    page_size=st.sampled_from([1, 5, 16]),
)
def test_a_shape_holds_its_rows_and_little_more(lengths: list[int], start: int, page_size: int) -> None:
    store = KVStore(make_config("sdar"), 1, page_size)
    rows = rows_of(lengths, [start] * len(lengths), page_size)
    shape = choose_shape(store, rows, max_tokens=1024)
    if shape is None:
        assert 256 < 1.5**2 * len(lengths) * max(lengths) > 2 * sum(lengths), "mostly padding"
        return
    context = start + max(lengths)
    assert len(lengths) <= shape.num_rows <= 1.5 * len(lengths)
    assert max(lengths) <= shape.length <= 1.5 * max(lengths)
    assert context <= shape.num_pages * page_size <= 1.5 * (max(context, 256) + page_size)


def test_few_shapes_serve_all() -> None:
    store = KVStore(make_config("sdar"), 1, 16)
    shapes = {
        choose_shape(store, rows_of([4] * num_rows, [start] * num_rows, 16), 1024)
        for num_rows in range(1, 65)
        for start in range(0, 1020, 20)
    }
    assert len(shapes) == 12 * 5


@pytest.mark.parametrize(
    ("lengths", "start", "limits"),
    [
        ([300, 4], 0, None),  # a long row beside short ones: most would be padding
        ([8] * 200, 0, None),  # enough work for any GPU
        ([4], 0, GatherLimits(1 << 10, 1 << 20, 1)),  # more keys than may be gathered
        ([4] * 30, 0, GatherLimits(1 << 20, 1 << 14, 1)),  # more scores than there may be
    ],
)
def test_what_has_no_shape(lengths: list[int], start: int, limits: GatherLimits | None) -> None:
    store = KVStore(make_config("sdar"), 1, 16, limits=limits)
    assert choose_shape(store, rows_of(lengths, [start] * len(lengths), 16), 1024) is None


def test_prompts_that_are_written_twice_have_no_shape() -> None:
    rows = rows_of([4], [0], 16)
    mirrored = StoreRows(
        rows.starts, rows.stops, rows.page_table, rows.visible_stops, np.array([0]), np.array([77])
    )
    assert choose_shape(KVStore(make_config("sdar"), 9, 16), mirrored, 1024) is None


@given(data=st.data())
@settings(max_examples=15)
def test_hidden_states_are_those_of_the_rows(data: st.DataObject) -> None:
    """Rows of any lengths at any positions, over pages that hold something, computed at once or a row at a
    time; equal in what is read and in what is written."""
    model = make_model("sdar", num_hidden_layers=2)
    page_size = data.draw(st.sampled_from([1, 5, 16]))
    lengths = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=6))
    starts = [data.draw(st.integers(0, 60)) for _ in lengths]
    rows = rows_of(lengths, starts, page_size, seed=len(lengths))
    limits = data.draw(st.sampled_from([None, GatherLimits(1 << 14, 1 << 17, 1)]))
    token_ids = np.random.default_rng(0).integers(0, 97, size=sum(lengths))
    num_pages = rows.page_table.size
    plain, padded = (KVStore(model.config, num_pages, page_size, limits=limits) for _ in range(2))
    for store in (plain, padded):
        generator = torch.Generator().manual_seed(1)
        store.keys[:, :num_pages].normal_(generator=generator)
        store.values[:, :num_pages].normal_(generator=generator)
    shape = choose_shape(padded, rows, 1024)
    assert shape is not None
    inputs, places = pad_rows(padded, rows, token_ids, shape)
    with torch.no_grad():
        attention = PaddedAttention(padded, shape, torch.from_numpy(inputs))
        got = model(attention.token_ids, attention)[torch.from_numpy(places)]
        expected = model(torch.from_numpy(token_ids), plain.prepare(rows))
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(padded.keys[:, :num_pages], plain.keys[:, :num_pages], rtol=0, atol=5e-5)


def test_no_row_touches_the_pages_of_another() -> None:
    """Lists of pages may end in anything: here in a page that holds no numbers, and so does page 0, which
    an index of zeros would mean. Rows that are not there compute numbers too."""
    model = make_model("sdar", num_hidden_layers=2)
    store = KVStore(model.config, 40, 4)
    rows = StoreRows.blocks([0, 12, 3], [5, 15, 4], [(5, 6), (7, 8, 9, 10), (11,)])
    rows.page_table[0, 2:] = rows.page_table[2, 1:] = 39
    for page in (0, 39):
        store.keys[:, page] = store.values[:, page] = torch.nan
    token_ids = np.arange(9)
    assert choose_shape(store, rows, 1024) == (3, 6, 64)
    for shape in (PaddedShape(3, 6, 64), PaddedShape(4, 6, 64)):
        inputs, places = pad_rows(store, rows, token_ids, shape)
        with torch.no_grad():
            attention = PaddedAttention(store, shape, torch.from_numpy(inputs))
            hidden = model(attention.token_ids, attention)
            expected = model(torch.from_numpy(token_ids), store.prepare(rows))
        assert hidden.isfinite().all()
        torch.testing.assert_close(hidden[torch.from_numpy(places)], expected, rtol=0, atol=5e-5)


# -- what can be recorded -------------------------------------------------------------------------


class OnDeviceAlone(TorchDispatchMode):
    """Fails where an operation touches the host's memory. (Values cannot be asked for: a tensor on the meta
    device has none, so whatever depends on them fails by itself.)"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            assert not isinstance(value, torch.Tensor) or value.device.type == "meta", func
        return out


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("sdar", {}), ("llama", {"rope_parameters": LLAMA3_SCALING}), ("qwen2", {}), ("sdar_moe", {})],
)
def test_a_padded_forward_asks_the_device_for_nothing(
    kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could not be recorded. Experts one by one are the CPU's way, and do ask."""
    monkeypatch.setattr(Experts, "_one_by_one", lambda _, rows, counts: rows * counts.sum())
    model = make_model(kind, num_hidden_layers=2, **changes).to("meta")
    store = KVStore(model.config, 10, 16, device="meta")
    shape = PaddedShape(4, 6, 16)
    inputs = torch.zeros(shape.num_inputs, dtype=torch.int64, device="meta")
    with torch.no_grad(), OnDeviceAlone():
        attention = PaddedAttention(store, shape, inputs)
        assert model(attention.token_ids, attention).shape == (24, model.config.hidden_size)
