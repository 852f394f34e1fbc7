"""Pages: counted, shared, never lost; and the two ways in which sharing once went wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_requests import assert_same, make_engine, make_request
from tiny_models import make_model
from tstar.engine import Request, SamplingParams, reference
from tstar.engine.pages import PagePool, PageTable
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model("sdar", num_hidden_layers=1)


def test_a_page_is_free_when_its_last_reference_goes() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.share(pages[:1])
    assert pool.num_free == 1
    assert pool.release(pages) == pages[1:]
    assert not pool.is_last_reference(pages[1])
    assert pool.is_last_reference(pages[0])
    assert pool.release(pages[:1]) == pages[:1]
    assert pool.num_free == 3


def test_a_prompt_is_shared_in_full_pages_and_its_end_copied() -> None:
    table = PageTable(10, page_size=4)
    first = table.admit(0, ("a",), prompt_length=6, length=11)
    assert first is not None
    assert first.prompt is not None
    assert (len(first.pages), first.page_to_copy) == (3, None)
    first.prompt.num_read = 6
    second = table.admit(1, ("a",), prompt_length=6, length=16)
    assert second is not None
    assert second.pages[0] == first.pages[0]
    assert not {*second.pages[1:]} & {*first.pages}
    assert second.page_to_copy == (first.pages[1], second.pages[1])
    other = table.admit(2, ("b",), prompt_length=6, length=11)
    assert other is not None
    assert not {*other.pages} & {*first.pages, *second.pages}
    assert table.admit(3, ("b",), prompt_length=6, length=17) is None, "no page is left"


def test_a_remembered_prompt_makes_room_for_the_request_that_needs_every_page() -> None:
    """Its own prompt is remembered with the page in which it ends: one page more than there are."""
    table = PageTable(4, page_size=4)
    for _ in range(3):
        lease = table.admit(0, ("a",), prompt_length=6, length=16)
        assert lease is not None
        assert lease.prompt is not None
        lease.prompt.num_read = 6
        table.release(0, lease)
    assert table.pool.num_free == 2, "the prompt is remembered in two pages"


def test_the_same_request_again_and_again_in_a_store_that_just_holds_it(model: LanguageModel) -> None:
    request = make_request(PartitionRule(4), 6, 1, max_tokens=10)
    engine = make_engine(model, num_pages=4)
    for _ in range(3):
        assert_same(engine.generate([request])[0], reference.generate(model, request))


@pytest.mark.parametrize("rule", [PartitionRule(4), PartitionRule(8, 4, "sequence")])
def test_who_shares_a_prompt_reads_on_when_its_reader_leaves(
    model: LanguageModel, rule: PartitionRule
) -> None:
    """The reader goes in the middle of the prompt; a third request comes in later still and copies the
    prompt's end from the second, not from the page of the one that is gone."""
    ids = np.random.default_rng(0).integers(0, 96, size=54)
    group = [Request(ids, rule, SamplingParams(max_tokens=9), seed) for seed in range(3)]
    for steps_before in range(4):
        engine = make_engine(model, max_forward_tokens=48)
        first, second = engine.submit(group[0]), engine.submit(group[1])
        for _ in range(steps_before):
            assert engine.step() == []
        engine.abort(first)
        engine.step()
        third = engine.submit(group[2])
        finished = {}
        while engine.num_unfinished:
            finished |= {event.request_id: event.trajectory for event in engine.step()}
        assert_same(finished[second], reference.generate(model, group[1]))
        assert_same(finished[third], reference.generate(model, group[2]))


@given(data=st.data())
def test_pages_are_conserved(data: st.DataObject) -> None:
    """Whatever is admitted, read, released or forgotten: each page is free or counted, never both."""
    table = PageTable(data.draw(st.integers(1, 12)), page_size=data.draw(st.integers(1, 5)))
    running = {}
    for slot in range(data.draw(st.integers(1, 25))):
        if running and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(running)))
            lease = running.pop(gone)
            if lease.prompt is not None and data.draw(st.booleans()):
                lease.prompt.num_read = lease.prompt.length
            table.release(gone, lease)
        elif data.draw(st.integers(0, 5)) == 0:
            table.forget_unused()
        prompt = data.draw(st.integers(0, 9))
        length = prompt + data.draw(st.integers(1, 9))
        lease = table.admit(slot, (prompt,), prompt, length)
        if lease is not None:
            assert len(lease.pages) == table.num_pages_for(length)
            running[slot] = lease
        elif not running:
            assert table.num_pages_for(length) > table.pool.num_pages, "what fits is admitted in the end"
        held = [page for lease in running.values() for page in lease.pages]
        held += [page for prompt in table._prompts.values() for page in prompt.pages]
        np.testing.assert_array_equal(table.pool._counts, np.bincount(held, minlength=table.pool.num_pages))
        assert sorted(table.pool._free) == np.flatnonzero(table.pool._counts == 0).tolist()
    for slot, lease in running.items():
        table.release(slot, lease)
    table.forget_unused()
    assert table.pool.num_free == table.pool.num_pages
