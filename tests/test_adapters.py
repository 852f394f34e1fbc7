"""Other people's engines, played by ours behind a server of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from tiny_models import make_model
from tstar.adapters import LmdeployServer, ResponseSource, SglangServer, follow
from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.errors import UserError
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.trajectory import Trajectory
from tstar.unmask import UnmaskPolicy

RULE = PartitionRule(4, origin="sequence")
STOP = 7
Reply = Callable[[dict[str, Any], Trajectory], Any]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return make_model("sdar")


def requests(temperature: float = 0.0, policy: UnmaskPolicy | None = None, **changes: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(18, temperature, unmask=policy or UnmaskPolicy(tokens_per_step=2), **changes)
    return [
        Request(rng.integers(0, 90, size=int(length)), RULE, sampling, seed=i)
        for i, length in enumerate((3, 4, 9, 6))
    ]


def decode(model: LanguageModel, asked: list[Request]) -> list[Trajectory]:
    return Engine(model, EngineConfig(memory=1 << 27)).generate(asked)


def server_of(model: LanguageModel, asked: list[Request], reply: Reply) -> Any:
    """Answers each prompt with what our engine made of it."""
    known = {tuple(t.prompt_ids.tolist()): t for t in decode(model, asked)}
    return serving(lambda body: reply(body, known[tuple(body["input_ids"])]))


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/generate"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = answer(body)
            status = 400 if isinstance(found, str) else 200
            data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def cut(t: Trajectory, **meta: Any) -> dict[str, Any]:
    """As servers answer: nothing after the stop."""
    ids = t.response_ids[: t.stop_length].tolist()
    return {"text": "", "output_ids": ids, "meta_info": {"finish_reason": {"type": t.finish_reason}, **meta}}


def with_steps(t: Trajectory, from_block: bool = False) -> dict[str, Any]:
    """Steps counted from 1; through the response, or anew in each block."""
    steps = t.unmask_step + 1
    if from_block:
        steps = np.concatenate([steps[b] - steps[b].min() + 1 for b in t.partition.response_slices])
    return cut(t, step_maps=steps[: t.stop_length].tolist())


@pytest.mark.parametrize("from_block", [False, True])
def test_sglang_with_step_maps_gives_the_trajectories(model: LanguageModel, from_block: bool) -> None:
    asked = requests(temperature=1.0)
    with server_of(model, asked, lambda _, t: [with_steps(t, from_block)]) as url:
        source = SglangServer(url, block_size=4, weight_version=5)
        found = source.generate(asked)
    assert isinstance(source, ResponseSource)
    assert source.step_source == "recorded"
    for theirs, ours in zip(found, decode(model, asked), strict=True):
        assert theirs.response_ids.tolist() == ours.response_ids.tolist()
        assert theirs.unmask_step.tolist() == ours.unmask_step.tolist()
        assert theirs.tokens_per_forward == ours.tokens_per_forward
        assert theirs.weight_version == 5


POLICIES = {
    "static": UnmaskPolicy(tokens_per_step=2),
    "dynamic": UnmaskPolicy("dynamic", confidence_threshold=0.3),
    "steps": UnmaskPolicy(steps_per_block=3),
    "sequential": UnmaskPolicy("sequential"),
    "entropy": UnmaskPolicy("entropy", entropy_bound=1.0),
}


@pytest.mark.parametrize("name", POLICIES)
def test_greedy_responses_without_steps_are_followed_exactly(model: LanguageModel, name: str) -> None:
    asked = requests(policy=POLICIES[name])
    with server_of(model, asked, lambda _, t: cut(t)) as url:
        source = SglangServer(url, block_size=4, model=model)
        found = source.generate(asked)
    assert source.step_source == "replayed"
    for theirs, ours in zip(found, decode(model, asked), strict=True):
        assert theirs.unmask_step.tolist() == ours.unmask_step.tolist()
        np.testing.assert_allclose(theirs.log_probs, ours.log_probs, atol=1e-5)


def test_a_sampled_text_is_scored_as_it_was_drawn(model: LanguageModel) -> None:
    """Static decoding by rank: what was drawn changes nothing about where the model is sure first."""
    asked = requests(temperature=0.7, policy=UnmaskPolicy("sequential"))
    drawn = decode(model, asked)
    followed = follow(model, asked, [t.response_ids for t in drawn])
    for theirs, ours in zip(followed, drawn, strict=True):
        assert theirs.unmask_step.tolist() == ours.unmask_step.tolist()
        np.testing.assert_allclose(theirs.log_probs, ours.log_probs, atol=1e-5)


def test_sglang_without_steps_refuses_to_sample(model: LanguageModel) -> None:
    asked = requests(temperature=1.0)
    with server_of(model, asked, lambda _, t: cut(t)) as url:
        with pytest.raises(UserError, match=r"sglang: temperature 1\.0, .* use temperature 0"):
            SglangServer(url, block_size=4, model=model).generate(asked)
        with pytest.raises(UserError, match="returns no step maps, and there is no model"):
            SglangServer(url, block_size=4).generate(requests())


def test_lmdeploy_is_asked_in_its_own_words_and_samples(model: LanguageModel) -> None:
    bodies: list[dict[str, Any]] = []

    def reply(body: dict[str, Any], t: Trajectory) -> Any:
        bodies.append(body)
        return cut(t)

    asked = requests(temperature=0.7, top_k=5)
    with server_of(model, asked, reply) as url:
        source = LmdeployServer(url, block_size=4, model=model)
        found = source.generate(asked)
        LmdeployServer(url, block_size=4, model=model).generate(
            [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in asked]
        )
    assert source.step_source == "replayed"
    assert all(t.temperature == 0.7 for t in found)
    assert {(b["temperature"], b["top_k"], b["max_tokens"]) for b in bodies[:4]} == {(0.7, 5, 18)}
    assert {(b["temperature"], b["top_k"]) for b in bodies[4:]} == {(1.0, 1)}


def test_a_stop_that_the_server_cuts_off_is_put_back(model: LanguageModel) -> None:
    def reply(_: dict[str, Any], t: Trajectory) -> Any:
        return {"output_ids": t.response_ids[:5].tolist(), "meta_info": {"finish_reason": {"type": "stop"}}}

    asked = requests()
    with server_of(model, asked, reply) as url:
        found = LmdeployServer(url, block_size=4, model=model, stop_token_id=STOP).generate(asked)
    assert all(t.response_ids[-1] == STOP and t.stop_length == 6 for t in found)
    assert all(t.finish_reason == "stop" for t in found)


def test_other_blocks_are_refused() -> None:
    request = replace(requests()[0], rule=PartitionRule(4))
    with pytest.raises(
        UserError, match=r"requests\[0\]\.rule: .* origin response; sglang cuts at multiples of 4"
    ):
        SglangServer("http://127.0.0.1:9", block_size=4).generate([request])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("no such model", r"refuses a request \(400: no such model\)"),
        ({"text": "x"}, "answers without output_ids"),
        (
            {"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort"}}},
            r"gave a response up \(abort\)",
        ),
        ({"output_ids": [], "meta_info": {"finish_reason": {"type": "stop"}}}, "empty response"),
        (
            {"output_ids": [1, 2], "meta_info": {"finish_reason": {"type": "stop"}, "step_maps": [1]}},
            "1 steps for 2 output_ids",
        ),
    ],
)
def test_what_a_server_gets_wrong_is_said(answer: Any, message: str) -> None:
    with serving(lambda _: answer) as url, pytest.raises(UserError, match=message):
        SglangServer(url, block_size=4).generate(requests()[:1])


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"sglang: http://127.0.0.1:9 does not answer .* start the server"):
        SglangServer("http://127.0.0.1:9", block_size=4).generate(requests()[:1])
    with pytest.raises(UserError, match="url: 'file:///etc' is no address"):
        SglangServer("file:///etc", block_size=4).generate(requests()[:1])


def test_no_gradient_is_kept(model: LanguageModel) -> None:
    asked = requests()[:1]
    follow(model, asked, [np.arange(3)])
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
