"""LMDeploy and SGLang as sources of trajectories, over the ``/generate`` route that both have.

Ids go in and ids come out; text is never tokenised again. What a server cannot say is not made up: without a
step map the steps are `follow`ed with the weights at hand and marked ``replayed``, or the request is refused.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from tstar.adapters.following import Followed, follow
from tstar.engine import Request
from tstar.errors import UserError
from tstar.model.transformer import LanguageModel
from tstar.trajectory import ForwardCounts, Trajectory

StepSource = Literal["recorded", "replayed"]


@runtime_checkable
class ResponseSource(Protocol):
    """What gives trajectories: our engine, or somebody else's."""

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """Decode requests to their ends; trajectories in their order."""
        ...


@dataclass(frozen=True, eq=False)
class Answer:
    """What a server says about one response."""

    response_ids: Int64[np.ndarray, " response"]
    is_stopped: bool
    step_map: Int64[np.ndarray, " response"] | None


@dataclass(eq=False)
class _Server:
    """What both have in common."""

    url: str
    """Like http://127.0.0.1:30000."""
    block_size: int
    """What the server was started with; it cannot be chosen by request."""
    model: LanguageModel | None = None
    """The same weights here, to follow responses that come without steps."""
    stop_token_id: int | None = None
    """Put back where the server cuts a response before its stop token."""
    weight_version: int = 0
    num_connections: int = 64
    """Requests under way at once: the server batches them."""
    timeout: float = 3600.0
    """Seconds for one response."""

    name = "server"

    def __post_init__(self) -> None:
        self.step_source: StepSource | None = None
        """Where the steps of the last `generate` are from."""

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """Decode requests to their ends; trajectories in their order."""
        for number, request in enumerate(requests):
            self._check(request, f"requests[{number}]")
        with ThreadPoolExecutor(self.num_connections) as pool:
            answers = list(pool.map(self._ask, requests))
        for request, answer in zip(requests, answers, strict=True):
            self._check_answer(request, answer)
        if all(answer.step_map is not None for answer in answers):
            self.step_source = "recorded"
            steps = [_recorded(q, a) for q, a in zip(requests, answers, strict=True)]
        elif self.model is None:
            raise UserError(
                f"{self.name}: {self.url} returns no step maps, and there is no model to follow its "
                "responses with; give the same weights as `model`, or run a server that returns step maps"
            )
        else:
            self.step_source = "replayed"
            steps = follow(self.model, requests, [answer.response_ids for answer in answers])
        return [self._trajectory(f, a) for f, a in zip(steps, answers, strict=True)]

    # -- what differs --------------------------------------------------------------------------

    def _body(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def _check_answer(self, request: Request, answer: Answer) -> None:
        """Refuse what must not be trained or evaluated on."""

    # -- private -------------------------------------------------------------------------------

    def _check(self, request: Request, place: str) -> None:
        rule = request.rule
        if (rule.block_size, rule.offset, rule.origin) != (self.block_size, 0, "sequence"):
            raise UserError(
                f"{place}.rule: block size {rule.block_size}, offset {rule.offset}, origin {rule.origin}; "
                f"{self.name} cuts at multiples of {self.block_size}: use block_size {self.block_size}, "
                "offset 0 and origin sequence"
            )

    def _ask(self, request: Request) -> Answer:
        body = json.dumps(self._body(request)).encode()
        headers = {"Content-Type": "application/json"}
        # The address is the user's own; nothing but http(s) may be opened.
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"url: {self.url!r} is no address; write http://HOST:PORT")
        http = urllib.request.Request(f"{self.url.rstrip('/')}/generate", body, headers)  # noqa: S310
        try:
            with urllib.request.urlopen(http, timeout=self.timeout) as reply:  # noqa: S310
                return self._read(json.load(reply))
        except urllib.error.HTTPError as error:
            detail = error.read(300).decode(errors="replace")
            raise UserError(f"{self.name}: {self.url} refuses a request ({error.code}: {detail})") from error
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(
                f"{self.name}: {self.url} does not answer ({reason}); start the server"
            ) from error

    def _read(self, record: Any) -> Answer:
        if isinstance(record, list) and len(record) == 1:
            record = record[0]
        try:
            meta: Mapping[str, Any] = record["meta_info"]
            ids = np.array(record["output_ids"], dtype=np.int64)
            reason = meta["finish_reason"]["type"]
            steps = meta.get("step_maps", meta.get("step_map"))
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{self.name}: {self.url} answers without output_ids and meta_info.finish_reason; "
                "use a version whose /generate returns them"
            ) from error
        if reason not in ("stop", "length"):
            raise UserError(f"{self.name}: {self.url} gave a response up ({reason}); look at its log")
        step_map = None if steps is None else np.array(steps, dtype=np.int64)
        if step_map is not None and len(step_map) != len(ids):
            raise UserError(
                f"{self.name}: {len(step_map)} steps for {len(ids)} output_ids; they must be as many"
            )
        if (
            reason == "stop"
            and self.stop_token_id is not None
            and (not len(ids) or ids[-1] != self.stop_token_id)
        ):
            ids = np.append(ids, self.stop_token_id)
            step_map = None  # nobody knows when the stop token was unmasked
        if not len(ids):
            raise UserError(
                f"{self.name}: {self.url} gave an empty response; give stop_token_id, which it cuts off"
            )
        return Answer(ids, reason == "stop", step_map)

    def _trajectory(self, followed: Followed, answer: Answer) -> Trajectory:
        """The terminal block ends where the server cut it."""
        request = followed.request
        return Trajectory(
            prompt_ids=request.prompt_ids,
            response_ids=followed.response_ids,
            unmask_step=followed.unmask_step,
            log_probs=followed.log_probs,
            stop_length=len(followed.response_ids),
            finish_reason="stop" if answer.is_stopped else "length",
            partition=followed.partition,
            forwards=ForwardCounts(denoise=int(followed.unmask_step.max()) + 1),
            weight_version=self.weight_version,
            seed=request.seed,
            temperature=request.sampling.scoring_temperature,
        )


class SglangServer(_Server):
    """SGLang, started with ``--dllm-algorithm LowConfidence``. It decodes greedily, whatever the temperature,
    except in builds that return step maps: so without these a temperature above 0 is refused."""

    name = "sglang"

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        params = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        }
        return {"input_ids": request.prompt_ids.tolist(), "sampling_params": params, "return_step_maps": True}

    def _check_answer(self, request: Request, answer: Answer) -> None:
        if request.sampling.temperature > 0 and answer.step_map is None:
            raise UserError(
                f"sglang: temperature {request.sampling.temperature}, but {self.url} returns no step maps, "
                "and builds without them decode greedily; use temperature 0 (evaluation), or a build with "
                "return_step_maps"
            )


class LmdeployServer(_Server):
    """LMDeploy's api_server with a PyTorch engine and ``dllm_block_length``. It samples as it is asked to."""

    name = "lmdeploy"

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        # A temperature of 0 is not taken; the likeliest of one is the same.
        greedy = {"temperature": 1.0, "top_k": 1}
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0}
        return {
            "input_ids": request.prompt_ids.tolist(),
            "max_tokens": sampling.max_tokens,
            **(drawn if sampling.temperature > 0 else greedy),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        }


def _recorded(request: Request, answer: Answer) -> Followed:
    """Steps as the server tells them, counted from 0 or 1, through the response or anew in each block.

    Log-probs are unknown and stand at 0: the trainer computes them again."""
    assert answer.step_map is not None
    found = Followed.of(request, answer.response_ids)
    done = 0
    for block in found.partition.response_slices:
        steps, ranks = np.unique(answer.step_map[block], return_inverse=True)
        found.unmask_step[block] = done + ranks
        done += len(steps)
    return found
