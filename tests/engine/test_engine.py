"""What an engine promises beside the right tokens: counts, memory, failures, weights, events."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_requests import MASK, assert_all_same, assert_same, make_engine, make_request
from tiny_models import make_model, randomise
from tstar.engine import (
    Engine,
    EngineConfig,
    GenerationError,
    Request,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokensUnmasked,
    reference,
)
from tstar.errors import UserError
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.unmask import UnmaskPolicy

B4 = PartitionRule(4)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model("sdar", num_hidden_layers=1)


class Calls:
    """How often a model is called, on how many tokens, and how many positions are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: LanguageModel) -> None:
        self.num_tokens: list[int] = []
        self.num_reads: list[int] = []
        forward = LanguageModel.forward

        def counted(own: LanguageModel, token_ids: Any, attention: Any, read: Any = None, **more: Any) -> Any:
            if own is model:
                self.num_tokens.append(len(token_ids))
                self.num_reads.append(len(token_ids) if read is None else len(read))
            return forward(own, token_ids, attention, read, **more)

        monkeypatch.setattr(LanguageModel, "forward", counted)

    def __len__(self) -> int:
        return len(self.num_tokens)


def pages_in_use(engine: Engine) -> int:
    return engine._pages.pool.num_pages - engine._pages.pool.num_free


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MASK, size=length)


# -- counts ---------------------------------------------------------------------------------------


def test_a_response_costs_its_denoising_steps_and_no_forward_more(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 blocks: prefill rides with the first step, each commit with the next block's first one, and the
    last block is not committed. Only masked positions are read."""
    sampling = SamplingParams(max_tokens=20, unmask=UnmaskPolicy("static", steps_per_block=2))
    calls = Calls(monkeypatch, model)
    (trajectory,) = make_engine(model).generate([Request(ids(6), B4, sampling)])
    assert len(calls) == trajectory.num_steps == trajectory.forwards.denoise == 10
    assert trajectory.forwards.commit == trajectory.forwards.prefill == 0
    assert calls.num_tokens == [6 + 4, 4] + [8, 4] * 4
    assert calls.num_reads == [4, 2] * 5


def test_a_batch_costs_as_many_forwards_as_its_longest_response(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(PartitionRule(2 + i % 7), 3 + i, i) for i in range(30)]
    calls = Calls(monkeypatch, model)
    engine = make_engine(model)
    trajectories = engine.generate(requests)
    assert len(calls) == engine.num_forwards == max(t.forwards.denoise for t in trajectories)


def test_a_prompt_is_read_once_for_all_its_samples(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By requests that come together, by one that comes later, and by one that comes after all are gone."""
    calls = Calls(monkeypatch, model)
    prompt, sampling = ids(30), SamplingParams(max_tokens=4)
    engine = make_engine(model)
    group = [Request(prompt, B4, sampling, seed) for seed in range(8)]
    trajectories = engine.generate(group)
    assert calls.num_tokens == [30 + 8 * 4, *[8 * 4] * 3]
    more = Request(prompt, B4, sampling, 8)
    (late,) = engine.generate([more])
    assert calls.num_tokens[4:] == [4] * 4
    monkeypatch.undo()
    assert_all_same([*trajectories, late], [reference.generate(model, r) for r in (*group, more)])


def test_a_long_prompt_is_read_in_pieces_beside_the_others(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, model)
    requests = [Request(ids(n, n), B4, SamplingParams(max_tokens=12), n) for n in (3, 100, 4)]
    got = make_engine(model, max_forward_tokens=40).generate(requests)
    assert max(calls.num_tokens) <= 40
    assert [t.forwards.prefill for t in got] == [0, 3, 0]
    assert len(calls) == max(t.forwards.denoise + t.forwards.prefill for t in got)
    monkeypatch.undo()
    assert_all_same(got, [reference.generate(model, request) for request in requests])


def test_memory_for_responses_of_a_group_is_shared(model: LanguageModel) -> None:
    engine = make_engine(model, page_size=4)
    for seed in range(5):
        engine.submit(Request(ids(40), B4, SamplingParams(max_tokens=8), seed))
    engine.step()
    assert pages_in_use(engine) == 40 // 4 + 5 * 2


# -- stops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["response", "sequence"])
@pytest.mark.parametrize("place", range(6))
def test_a_stop_anywhere_in_a_block_ends_the_response_with_its_whole_block(
    model: LanguageModel, origin: Any, place: int
) -> None:
    """Found by decoding without stops first; the prompt holds the stop too and nothing comes of it."""
    rule = PartitionRule(6, 0, origin)
    free = Request(ids(8), rule, SamplingParams(max_tokens=30, ignore_eos=True), seed=3)
    (whole,) = make_engine(model).generate([free])
    at = 6 + place
    stop = int(whole.response_ids[at])
    first = int(np.flatnonzero(whole.response_ids == stop)[0])
    prompt = np.where(np.arange(8) == 2, stop, free.prompt_ids)
    again = Request(prompt, rule, SamplingParams(max_tokens=30, stop_token_ids=(stop,)), seed=3)
    (stopped,) = make_engine(model).generate([again])
    assert_same(stopped, reference.generate(model, again))
    if (prompt == free.prompt_ids).all():
        assert stopped.stop_length == first + 1
    assert stopped.response_ids[stopped.stop_length - 1] == stop or stopped.finish_reason == "length"
    assert len(stopped.response_ids) in {s.stop for s in rule.cut(8, 30).response_slices}


def test_the_models_own_end_tokens_stop_unless_ignored() -> None:
    model = make_model("sdar", num_hidden_layers=1, eos_token_id=list(range(0, 96, 3)))
    request = Request(ids(5), B4, SamplingParams(max_tokens=40))
    ignoring = Request(ids(5), B4, SamplingParams(max_tokens=40, ignore_eos=True))
    stopped, whole = make_engine(model).generate([request, ignoring])
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids[stopped.stop_length - 1] % 3 == 0
    assert (whole.finish_reason, whole.stop_length) == ("length", 40)
    assert_all_same([stopped, whole], [reference.generate(model, r) for r in (request, ignoring)])


def test_a_request_may_find_stops_of_its_own(model: LanguageModel) -> None:
    seen: list[int] = []

    def find(response: np.ndarray) -> int | None:
        seen.append(len(response))
        return 7 if len(response) >= 7 else None

    request = Request(ids(5), B4, SamplingParams(max_tokens=40), find_stop=find)
    (trajectory,) = make_engine(model).generate([request])
    assert (trajectory.stop_length, len(trajectory.response_ids), seen) == (7, 8, [4, 8])
    assert_same(trajectory, reference.generate(model, request))


# -- invariants -----------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=15)
def test_every_request_ends_and_nothing_leaks(model: LanguageModel, data: st.DataObject) -> None:
    """Random arrivals, lengths, block sizes, budgets and aborts."""
    engine = make_engine(
        model,
        num_pages=data.draw(st.integers(15, 60)),
        max_requests=data.draw(st.integers(1, 6)),
        max_forward_tokens=data.draw(st.integers(32, 100)),
        page_size=data.draw(st.integers(4, 7)),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rules = [PartitionRule(4), PartitionRule(7, 3), PartitionRule(16, 8, "sequence"), PartitionRule(1)]
    arrivals = Counter(rng.integers(0, 12, size=int(rng.integers(1, 9))).tolist())
    requests: dict[int, Request] = {}
    ended: dict[int, Any] = {}
    for now in range(10**4):
        for _ in range(arrivals.pop(now, 0)):
            request = make_request(
                rules[rng.integers(4)], int(rng.integers(1, 30)), int(rng.integers(5)), max_tokens=20
            )
            requests[engine.submit(request)] = request
        if requests and rng.random() < 0.1:
            gone = int(rng.choice(list(requests)))
            engine.abort(gone)
            ended.setdefault(gone, None)
        for event in engine.step():
            assert isinstance(event, RequestFinished)
            assert event.request_id not in ended
            ended[event.request_id] = event.trajectory
        if not arrivals and not engine.num_unfinished:
            break
    assert ended.keys() == requests.keys()
    for number, trajectory in ended.items():
        if trajectory is None:
            continue
        assert MASK not in trajectory.response_ids
        np.testing.assert_array_equal(trajectory.prompt_ids, requests[number].prompt_ids)
        assert len(trajectory.response_ids) <= 20
    engine._pages.forget_unused()
    assert pages_in_use(engine) == 0
    assert not engine._unread


def test_what_else_is_in_the_batch_changes_nothing(model: LanguageModel) -> None:
    request = make_request(PartitionRule(8), 11, 4, max_tokens=30)
    (alone,) = make_engine(model).generate([request])
    crowd = [make_request(PartitionRule(1 + i % 9), 3 + i, i) for i in range(20)]
    together = make_engine(model).generate([*crowd, request])[-1]
    assert_same(together, alone)


def test_a_model_that_wants_the_mask_token_does_not_get_it() -> None:
    """Its logit is by far the largest; neither a draw nor the likeliest token may be it."""
    model = make_model("sdar", num_hidden_layers=1)
    with torch.no_grad():
        model.output_weight[MASK] = 50 * model.output_weight[:MASK].abs().sum(0)
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_tokens=24, temperature=temperature)
        for trajectory in make_engine(model).generate([Request(ids(6), B4, sampling, s) for s in range(4)]):
            assert MASK not in trajectory.response_ids
            assert np.isfinite(trajectory.log_probs).all()


# -- failures -------------------------------------------------------------------------------------


def spoiled_model(token: int) -> LanguageModel:
    """NaN wherever this token is seen."""
    model = make_model("sdar", num_hidden_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
    return model


def clean_ids(length: int, seed: int = 0) -> np.ndarray:
    """Without tokens 0 and 1."""
    return np.random.default_rng(seed).integers(2, MASK, size=length)


@pytest.mark.parametrize("prompt_length", [5, 90])
def test_logits_that_are_no_numbers_fail_their_request_alone(prompt_length: int) -> None:
    """Also where the prompt is read in several forwards, and where pages of the failed one are used
    again by others."""
    model, sound = spoiled_model(0), make_model("sdar", num_hidden_layers=1)
    model.output_weight.data[0] = sound.output_weight.data[0]
    bad_prompt = clean_ids(prompt_length)
    bad_prompt[2] = 0
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    bad = [Request(bad_prompt, B4, sampling, seed) for seed in range(2)]
    good = [Request(clean_ids(7, n), B4, sampling, n) for n in range(6)]
    engine = make_engine(model, num_pages=60, max_forward_tokens=48)
    expected = [reference.generate(sound, request) for request in good]
    assert not any(0 in t.response_ids[:-4] for t in expected)
    for _ in range(2):
        with pytest.raises(
            GenerationError, match=r"requests\[1\]: the model's logits are not finite at"
        ) as error:
            engine.generate([good[0], *bad, *good[1:]])
        assert set(error.value.failed) == {1, 2}
        assert "step 0" in error.value.failed[1]
        assert f"prompt of {prompt_length} tokens, seed 0" in error.value.failed[1]
        assert_all_same([error.value.finished[i] for i in (0, 3, 4, 5, 6, 7)], expected)
    engine._pages.forget_unused()
    assert pages_in_use(engine) == 0
    assert_all_same(engine.generate(good), expected)


def test_aborting_what_is_no_number_yet_spoils_nobody() -> None:
    """Half a prompt is read, NaN lies in its pages, and nothing was read of them: the next owner is sound."""
    model = spoiled_model(0)
    engine = make_engine(model, num_pages=28, max_forward_tokens=32)
    prompt = clean_ids(90)
    prompt[1] = 0
    request_id = engine.submit(Request(prompt, B4, SamplingParams(max_tokens=4)))
    engine.step()
    engine.abort(request_id)
    good = Request(clean_ids(60, 1), PartitionRule(16), SamplingParams(max_tokens=16, temperature=0.0))
    (got,) = engine.generate([good])
    assert np.isfinite(got.log_probs).all()


@pytest.mark.parametrize("where", ["model", "sampling"])
def test_an_exception_in_a_forward_leaks_nothing(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    requests = [make_request(PartitionRule(4), 20 + i, i) for i in range(5)]
    engine = make_engine(model)

    def explode(*_arguments: Any, **_named: Any) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        if where == "model":
            patch.setattr(LanguageModel, "forward", explode)
        else:
            patch.setattr("tstar.engine.engine.read_distribution", explode)
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.generate(requests)
    assert engine.num_unfinished == 0
    assert pages_in_use(engine) == 0
    assert_all_same(engine.generate(requests), [reference.generate(model, r) for r in requests])


# -- streams and aborts ---------------------------------------------------------------------------


def test_a_stream_tells_every_step_of_every_request(model: LanguageModel) -> None:
    requests = [make_request(PartitionRule(3 + i), 4 + i, i, max_tokens=15) for i in range(4)]
    events = list(make_engine(model).stream(requests))
    finished = {e.request_id: e.trajectory for e in events if isinstance(e, RequestFinished)}
    assert_all_same([finished[i] for i in range(4)], make_engine(model).generate(requests))
    for index, trajectory in finished.items():
        steps = [e for e in events if isinstance(e, TokensUnmasked) and e.request_id == index]
        assert [e.step for e in steps] == list(range(trajectory.num_steps))
        for event in steps:
            np.testing.assert_array_equal(
                event.positions, np.flatnonzero(trajectory.unmask_step == event.step)
            )
            np.testing.assert_array_equal(event.token_ids, trajectory.response_ids[event.positions])
            assert ((event.confidence > 0) & (event.confidence <= 1)).all()


def test_leaving_a_stream_ends_its_requests_and_no_others(model: LanguageModel) -> None:
    engine = make_engine(model)
    other = make_request(B4, 9, 5, max_tokens=20)
    other_id = engine.submit(other)
    stream = engine.stream([make_request(B4, 20, 1, max_tokens=50)])
    next(stream)
    assert engine.num_unfinished == 2
    stream.close()
    assert engine.num_unfinished == 1
    events = []
    while engine.num_unfinished:
        events += engine.step()
    (event,) = events
    assert event.request_id == other_id
    assert_same(event.trajectory, reference.generate(model, other))


def test_what_ends_while_others_are_served_is_told_by_the_next_step(model: LanguageModel) -> None:
    engine = make_engine(model)
    short, long = make_request(B4, 5, 1, max_tokens=1), make_request(B4, 6, 2, max_tokens=20)
    short_id = engine.submit(short)
    engine.generate([long])
    (event,) = engine.step()
    assert event.request_id == short_id
    assert engine.step() == []


def test_aborting_twice_or_too_late_is_no_mistake(model: LanguageModel) -> None:
    engine = make_engine(model, max_requests=1)
    running, waiting = (engine.submit(make_request(B4, 5, i, max_tokens=9)) for i in range(2))
    engine.step()
    engine.abort(waiting)
    engine.abort(waiting)
    assert engine.num_unfinished == 1
    engine.abort(running)
    engine.abort(running)
    assert engine.num_unfinished == 0
    assert engine.step() == []


# -- weights and memory ---------------------------------------------------------------------------


def test_new_weights_are_shared_and_remembered_prompts_forgotten(model: LanguageModel) -> None:
    own = make_model("sdar", num_hidden_layers=1)
    trained = make_model("sdar", num_hidden_layers=1)
    randomise(trained, seed=1)
    engine = make_engine(own)
    request = make_request(B4, 20, 3, max_tokens=9)
    (before,) = engine.generate([request])
    engine.load_weights(trained.named_parameters(), version=7)
    assert pages_in_use(engine) == 0
    (after,) = engine.generate([request])
    assert (before.weight_version, after.weight_version) == (0, 7)
    assert_same(after, reference.generate(trained, request, weight_version=7))
    for mine, theirs in zip(own.parameters(), trained.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
    randomise(trained, seed=2)
    engine.load_weights(dict(trained.named_parameters()), version=8)
    assert_same(engine.generate([request])[0], reference.generate(trained, request, weight_version=8))


def test_weights_of_another_dtype_are_copied() -> None:
    own, trained = (
        make_model("sdar", num_hidden_layers=1),
        make_model("sdar", torch.float64, num_hidden_layers=1),
    )
    randomise(trained, seed=1)
    make_engine(own).load_weights(trained.named_parameters(), version=1)
    torch.testing.assert_close(own.output_weight.data, trained.output_weight.data.float())
    assert own.dtype == torch.float32


def test_weights_that_do_not_fit_are_refused_before_any_is_taken(model: LanguageModel) -> None:
    engine = make_engine(model)
    weights = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    cut = dict(weights, **{"model.norm.weight": torch.zeros(5)})
    missing = {name: w for name, w in weights.items() if name != "lm_head.weight"}
    with pytest.raises(UserError, match=r"model.norm.weight has shape \(5,\), the model \(32,\)"):
        engine.load_weights(cut, 1)
    with pytest.raises(UserError, match=r"lm_head\.weight is missing"):
        engine.load_weights(missing, 1)
    with pytest.raises(UserError, match=r"value\.weight is not in the model"):
        engine.load_weights({**weights, "value.weight": torch.zeros(1)}, 1)
    assert engine.weight_version == 0
    assert all(p.any() for p in model.parameters())


def test_sleeping_gives_the_memory_back_and_waking_takes_it_again(model: LanguageModel) -> None:
    engine = make_engine(model)
    request = make_request(B4, 20, 3, max_tokens=9)
    (before,) = engine.generate([request])
    store = weakref.ref(engine._store)
    engine.sleep()
    gc.collect()
    assert store() is None
    with pytest.raises(RuntimeError, match=r"the engine sleeps; call wake\(\) first"):
        engine.generate([request])
    engine.wake()
    engine.wake()
    assert_same(engine.generate([request])[0], before)


@pytest.mark.parametrize("what", ["sleep", "load_weights"])
def test_neither_sleep_nor_weights_come_in_the_middle_of_a_response(model: LanguageModel, what: str) -> None:
    engine = make_engine(model)
    engine.submit(make_request(B4, 5, 1, max_tokens=9))
    with pytest.raises(RuntimeError, match=f"{what}: 1 requests are not finished; finish or abort them"):
        engine.sleep() if what == "sleep" else engine.load_weights(model.named_parameters(), 1)


def test_a_budget_is_bytes_or_a_share_of_what_is_free(model: LanguageModel) -> None:
    small, large = (Engine(model, EngineConfig(memory=m))._memory for m in (16 << 20, 18 << 20))
    assert small.num_pages < large.num_pages
    share = Engine(model, EngineConfig(memory=0.25, max_requests=4))._memory
    assert share.budget > 18 << 20
    assert share.num_pages == 4 * 512 // 16, "no more than the requests can use"
    with pytest.raises(UserError, match=r"memory: 1,000 bytes hold no keys and values beside .*; give more"):
        Engine(model, EngineConfig(memory=1000))


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request(np.array([], dtype=np.int64), B4), "prompt_ids: empty"),
        (lambda: Request(np.array([[1]]), B4), "prompt_ids: 2 dimensions"),
        (lambda: Request(np.array([3, -1]), B4), r"prompt_ids\[1\]: -1 is no token id"),
        (lambda: Request(np.array([0.5]), B4), "prompt_ids: float64 numbers are no token ids"),
        (lambda: Request(ids(3), B4, seed=-1), "seed: -1 cannot be used"),
        (lambda: Request(ids(3), B4, seed=2**64), "seed: .* use less than 2"),
        (lambda: PartitionRule(0), "block_size: 0 is too small"),
        (lambda: PartitionRule(4, 4), "offset: 4 does not fit block_size 4"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens: 0 cannot be used"),
        (lambda: SamplingParams(temperature=-1.0), "temperature: -1.0 cannot be used"),
        (lambda: SamplingParams(temperature=float("nan")), "temperature: nan cannot be used"),
        (lambda: SamplingParams(temperature=1e-9), "temperature: 1e-09 cannot be used; use 0, or"),
        (lambda: SamplingParams(top_k=0), "top_k: 0 cannot be used"),
        (lambda: SamplingParams(top_p=0.0), "top_p: 0.0 cannot be used; use 0 < top_p <= 1"),
        (lambda: SamplingParams(top_p=1.5), "top_p: 1.5 cannot be used"),
        (lambda: SamplingParams(min_p=-0.1), "min_p: -0.1 cannot be used"),
        (lambda: SamplingParams(stop_token_ids=(3, -2)), r"stop_token_ids\[1\]: -2 cannot be used"),
        (
            lambda: UnmaskPolicy("dynamic", confidence_threshold=1.5),
            "confidence_threshold: 1.5 is out of range",
        ),
        (lambda: EngineConfig(memory=1.5), "memory: 1.5 cannot be used"),
        (lambda: EngineConfig(memory=0), "memory: 0 cannot be used"),
        (lambda: EngineConfig(max_requests=0), "max_requests: 0 cannot be used"),
        (lambda: EngineConfig(page_size=0), "page_size: 0 cannot be used"),
    ],
)
@pytest.mark.usefixtures("types_unchecked")
def test_what_makes_no_sense_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("request_", "settings_", "message"),
    [
        (
            Request(np.array([1, 97]), B4),
            {},
            r"requests\[1\].prompt_ids\[1\]: 97 is outside the vocabulary of 97",
        ),
        (
            Request(ids(3), B4, SamplingParams(max_tokens=600)),
            {},
            r"requests\[1\].max_tokens: a prompt of 3 and 600 new tokens pass the model's 512 positions",
        ),
        (
            Request(ids(30), B4, SamplingParams(max_tokens=30)),
            {"num_pages": 14},
            r"need 15 pages of 4; the engine's memory of [\d,]+ bytes has 14",
        ),
        (
            Request(ids(3), PartitionRule(64), SamplingParams(max_tokens=9)),
            {"max_forward_tokens": 100},
            r"requests\[1\].rule.block_size: 64 needs forwards of 128 tokens; the engine's are lim",
        ),
    ],
)
def test_what_can_never_run_is_refused_at_once_and_leaves_nothing(
    model: LanguageModel, request_: Request, settings_: Any, message: str
) -> None:
    engine = make_engine(model, **settings_)
    with pytest.raises(ValueError, match=message):
        engine.generate([make_request(B4, 3, 1, max_tokens=4), request_])
    assert engine.num_unfinished == 0
    assert pages_in_use(engine) == 0


def test_an_ar_model_takes_blocks_of_one_token() -> None:
    engine = make_engine(make_model("llama", num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"rule\.block_size: 4 cannot be used; this model has no mask token"):
        engine.submit(Request(ids(3), B4))


def test_a_trajectory_changed_by_hand_is_refused(model: LanguageModel) -> None:
    (t,) = make_engine(model).generate([make_request(B4, 5, 3, max_tokens=9)])
    fields = {name: getattr(t, name) for name in t.__dataclass_fields__}
    steps = t.unmask_step.copy()
    steps[-1] = 0
    with pytest.raises(ValueError, match=r"unmask_step\[\d+\]: step 0 is not after step"):
        type(t)(**{**fields, "unmask_step": steps})
    probs = t.log_probs.copy()
    probs[3] = np.nan
    with pytest.raises(ValueError, match=r"log_probs\[3\]"):
        type(t)(**{**fields, "log_probs": probs})


def test_a_failure_is_an_event(model: LanguageModel) -> None:
    engine = make_engine(spoiled_model(0))
    request_id = engine.submit(Request(np.array([0, 1]), B4))
    (event,) = engine.step()
    assert isinstance(event, RequestFailed)
    assert event.request_id == request_id
    assert engine.num_unfinished == 0
