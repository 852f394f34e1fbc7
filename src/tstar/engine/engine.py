"""The engine: requests in, trajectories out, continuously batched.

One `step` admits what fits, runs one forward over everything that is running, and lets go of what has
ended. docs/engine.md says what a forward saves and why nothing can dead-lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tstar.engine.batch import Batch, Running
from tstar.engine.graphs import PaddedForwards
from tstar.engine.memory import MemoryPlan, max_inputs
from tstar.engine.pages import PageTable, Prompt
from tstar.engine.plan import ForwardPlan, plan_forward
from tstar.engine.randomness import keyed_uniforms
from tstar.engine.request import (
    EngineConfig,
    Event,
    GenerationError,
    RefusedError,
    Request,
    RequestFailed,
    RequestFinished,
    TokensUnmasked,
    check_rule,
)
from tstar.engine.sampling import Draws, read_distribution
from tstar.errors import UserError
from tstar.model.attention.store import KVStore
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition
from tstar.trajectory import ForwardCounts, Trajectory
from tstar.unmask import KINDS, choose

_RANDOM, _ENTROPY = KINDS.index("random"), KINDS.index("entropy")


@dataclass(frozen=True, slots=True)
class _Waiting:
    request_id: int
    request: Request
    partition: Partition


class Engine:
    """Decodes with a model whose weights it may share with a trainer."""

    def __init__(
        self, model: LanguageModel, config: EngineConfig | None = None, weight_version: int = 0
    ) -> None:
        self.model = model
        self.config = config or EngineConfig()
        self.weight_version = weight_version
        self.num_forwards = 0
        """Calls of the model so far."""
        self._ids = itertools.count()
        self._waiting: deque[_Waiting] = deque()
        self._batch = Batch(self.config.max_requests, model.config.is_diffusion)
        self._slot_of: dict[int, int] = {}
        self._unread: list[Prompt] = []
        self._undelivered: list[Event] = []
        """How other requests ended while a `generate` or `stream` was served."""
        self._store: KVStore | None = None
        self._padded: PaddedForwards | None = None
        self.wake()

    # -- requests ----------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._slot_of)

    def submit(self, request: Request) -> int:
        """Queue a request; the id that its events carry. One that could never run is refused at once."""
        check_rule(self.model.config, request)
        self._check_ids(request)
        partition = request.rule.cut(len(request.prompt_ids), request.sampling.max_tokens)
        self._check_size(partition)
        request_id = next(self._ids)
        self._waiting.append(_Waiting(request_id, request, partition))
        return request_id

    def abort(self, request_id: int) -> None:
        """Forget a request, waiting or running; one that has ended already is no mistake."""
        if request_id in self._slot_of:
            self._leave(self._slot_of[request_id])
        else:
            self._waiting = deque(w for w in self._waiting if w.request_id != request_id)

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """Decode requests to their ends; trajectories in their order."""
        finished: dict[int, Trajectory] = {}
        failed: dict[int, str] = {}
        for event in self._events(requests, wants_steps=False):
            if isinstance(event, RequestFinished):
                finished[event.request_id] = event.trajectory
            elif isinstance(event, RequestFailed):
                failed[event.request_id] = event.reason
        if failed:
            raise GenerationError(failed, finished)
        return [finished[index] for index in range(len(requests))]

    def stream(self, requests: Sequence[Request], wants_steps: bool = True) -> Iterator[Event]:
        """Decode requests and tell every step, or their ends alone, as they happen; a request's id is its
        index here."""
        return self._events(requests, wants_steps)

    def _events(self, requests: Sequence[Request], wants_steps: bool) -> Iterator[Event]:
        """The events of these requests, which end with the iterator, however it ends."""
        index_of: dict[int, int] = {}
        unfinished: set[int] = set()
        try:
            for index, request in enumerate(requests):
                try:
                    index_of[self.submit(request)] = index
                except ValueError as error:
                    raise RefusedError(f"requests[{index}].{error}") from None
            unfinished = set(index_of)
            while unfinished:
                for event in self._step(wants_steps):
                    if event.request_id not in index_of:
                        if not isinstance(event, TokensUnmasked):
                            self._undelivered.append(event)
                        continue
                    if not isinstance(event, TokensUnmasked):
                        unfinished.discard(event.request_id)
                    yield replace(event, request_id=index_of[event.request_id])
        finally:
            for request_id in index_of:
                self.abort(request_id)

    # -- one forward -------------------------------------------------------------------------------

    def step(self, wants_steps: bool = False) -> list[Event]:
        """Admit what fits, run one forward, and tell what came of it: requests that ended, and each
        denoising step if `wants_steps`."""
        events = self._step(wants_steps)
        undelivered, self._undelivered = self._undelivered, []
        return undelivered + events

    @torch.inference_mode()
    def _step(self, wants_steps: bool) -> list[Event]:
        store = self._awake()
        self._admit(store)
        if not self._slot_of:
            assert not self._waiting, (
                "nothing runs, so everything is free, and what could never fit was refused"
            )
            return []
        limit = self._memory.max_forward_tokens
        plan = plan_forward(self._batch, self._unread, limit, self.config.page_size)
        result = self._forward(store, plan)
        self._count_reading(plan)
        return self._apply(plan, result, wants_steps)

    def _admit(self, store: KVStore) -> None:
        """First come, first served: as long as the next one's worst case fits."""
        batch = self._batch
        while self._waiting and batch.has_free_slot:
            waiting = self._waiting[0]
            request, partition = waiting.request, waiting.partition
            reserved = 2 * int(batch.block_size[batch.slots].sum())
            if reserved + 2 * partition.block_size > self._memory.max_forward_tokens:
                return
            first_block = partition.block(partition.num_prompt_blocks)
            shared_length = first_block.start - (0 if batch.is_diffusion else 1)
            key = (request.prompt_ids[:shared_length].tobytes(), request.rule)
            slot = batch.next_slot
            lease = self._pages.admit(slot, key, shared_length, partition.sequence_length)
            if lease is None:
                return
            self._waiting.popleft()
            if lease.page_to_copy is not None:
                store.copy_page(*lease.page_to_copy)
            mask_token = self.model.config.mask_token_id
            own_stops = () if request.sampling.ignore_eos else self.model.config.eos_token_ids
            batch.add(
                Running(waiting.request_id, request, partition, lease),
                0 if mask_token is None else mask_token,
                (*own_stops, *request.sampling.stop_token_ids),
            )
            self._slot_of[waiting.request_id] = slot
            if lease.prompt is not None and lease.prompt.reader == slot:
                self._unread.append(lease.prompt)

    def _forward(self, store: KVStore, plan: ForwardPlan) -> np.ndarray:
        """The answer at each read position: token, log-prob, the likeliest one's log-prob, entropy."""
        model, batch, slots = self.model, self._batch, plan.read_slots
        device = model.device
        reads = (
            plan.reads if len(plan.reads) else np.zeros(1, dtype=np.int64)
        )  # a model wants something to do
        hidden = None
        if self._padded is not None:
            hidden = self._padded.run(plan.token_ids, plan.rows, reads)
        if hidden is None:
            hidden = model(
                torch.from_numpy(plan.token_ids).to(device),
                store.prepare(plan.rows),
                torch.from_numpy(reads).to(device),
            )
        hidden = hidden[: len(plan.reads)]
        self.num_forwards += 1
        temperature = batch.temperature[slots]
        key = batch.seeds[slots], batch.step[slots], plan.read_places
        draws = Draws.of(
            device,
            keyed_uniforms("token", *key) if temperature.any() else np.zeros(len(slots)),
            temperature,
            batch.top_k[slots],
            batch.top_p[slots],
            batch.min_p[slots],
            wants_entropy=bool((batch.policies.kind[plan.denoising] == _ENTROPY).any()),
        )
        excluded = model.config.mask_token_id
        scores = read_distribution(hidden, model.output_weight, draws, excluded, self._memory.max_logits)
        result: np.ndarray = scores.cpu().numpy()  # the forward's one copy to the host
        return result

    def _count_reading(self, plan: ForwardPlan) -> None:
        """Forwards that only read a prompt, and how far each prompt is read."""
        batch, is_reading = self._batch, ~plan.is_denoising
        for slot, stop in zip(plan.feeding[is_reading], plan.rows.stops[is_reading], strict=True):
            running = batch.running[slot]
            assert running is not None
            running.num_prefills += 1
            batch.written[slot] = stop
        for prompt in self._unread:
            row = int(np.searchsorted(plan.feeding, prompt.slots[0]))
            prompt.num_read = min(int(plan.rows.stops[row]), prompt.length)
        self._unread = [prompt for prompt in self._unread if not prompt.is_read]

    def _apply(self, plan: ForwardPlan, result: np.ndarray, wants_steps: bool) -> list[Event]:
        batch, slots, is_masked = self._batch, plan.denoising, plan.is_masked
        tokens = np.zeros(is_masked.shape, dtype=np.int64)
        log_probs, confidence, entropy, noise = np.zeros((4, *is_masked.shape))
        tokens[is_masked] = result[:, 0]
        log_probs[is_masked] = result[:, 1]
        confidence[is_masked] = np.where(batch.by_sampled[plan.read_slots], result[:, 1], result[:, 2])
        entropy[is_masked] = result[:, 3]
        if (batch.policies.kind[slots] == _RANDOM).any():
            key = batch.seeds[plan.read_slots], batch.step[plan.read_slots], plan.read_places
            noise[is_masked] = keyed_uniforms("order", *key)
        policies = batch.policies.at(slots)
        chosen = choose(policies, is_masked, batch.block_step[slots], confidence, entropy, noise)

        events: list[Event] = []
        is_broken = ~np.isfinite(log_probs + confidence).all(axis=1)
        if is_broken.any():
            events += [self._fail(int(slot)) for slot in slots[is_broken]]
            slots, chosen, is_masked = slots[~is_broken], chosen[~is_broken], is_masked[~is_broken]
            tokens, log_probs, confidence = tokens[~is_broken], log_probs[~is_broken], confidence[~is_broken]
        if wants_steps:
            events += self._step_events(slots, chosen, tokens, confidence)
        batch.unmask(slots, chosen, tokens, log_probs)
        finished = slots[(chosen == is_masked).all(axis=1)]
        return events + self._finish_blocks(finished)

    def _finish_blocks(self, slots: np.ndarray) -> list[Event]:
        """A stop is looked for once a block is complete; what goes on, goes on to the next."""
        batch = self._batch
        if len(slots) == 0:
            return []
        has_stop, after_stop = batch.find_stops(slots)
        self._ask_for_stops(slots, has_stop, after_stop)
        is_last = batch.block_stop[slots] == batch.length[slots]
        batch.advance(slots[~has_stop & ~is_last])
        events: list[Event] = []
        for index in np.flatnonzero(has_stop | is_last):
            slot = int(slots[index])
            running = batch.running[slot]
            assert running is not None
            trajectory = self._trajectory(running, slot, int(after_stop[index]) if has_stop[index] else None)
            self._leave(slot)
            events.append(RequestFinished(running.request_id, trajectory))
        return events

    def _ask_for_stops(self, slots: np.ndarray, has_stop: np.ndarray, after_stop: np.ndarray) -> None:
        """Let requests find stops of their own, in place; the first stop of a block counts."""
        batch = self._batch
        for index, slot in enumerate(slots):
            running = batch.running[slot]
            assert running is not None
            if running.request.find_stop is None:
                continue
            start = len(running.request.prompt_ids)
            stop = int(after_stop[index] if has_stop[index] else batch.block_stop[slot])
            length = running.request.find_stop(batch.text[slot, start:stop].copy())
            if length is not None:
                has_stop[index], after_stop[index] = True, start + length

    def _trajectory(self, running: Running, slot: int, after_stop: int | None) -> Trajectory:
        batch, request = self._batch, running.request
        start, stop = len(request.prompt_ids), int(batch.block_stop[slot])
        return Trajectory(
            prompt_ids=request.prompt_ids,
            response_ids=batch.text[slot, start:stop].copy(),
            unmask_step=batch.unmask_step[slot, start:stop].copy(),
            log_probs=batch.log_probs[slot, start:stop].copy(),
            stop_length=(stop if after_stop is None else after_stop) - start,
            finish_reason="length" if after_stop is None else "stop",
            partition=running.partition.resized(stop - start),
            forwards=ForwardCounts(denoise=int(batch.step[slot]), prefill=running.num_prefills),
            weight_version=self.weight_version,
            seed=request.seed,
            temperature=request.sampling.scoring_temperature,
        )

    def _step_events(
        self, slots: np.ndarray, chosen: np.ndarray, tokens: np.ndarray, confidence: np.ndarray
    ) -> list[Event]:
        batch = self._batch
        events: list[Event] = []
        for row, slot in enumerate(slots):
            running = batch.running[slot]
            assert running is not None
            places = np.flatnonzero(chosen[row])
            events.append(
                TokensUnmasked(
                    running.request_id,
                    int(batch.step[slot]),
                    places + int(batch.block_start[slot] - batch.prompt_length[slot]),
                    tokens[row, places],
                    np.exp(confidence[row, places]),
                )
            )
        return events

    # -- leaving -----------------------------------------------------------------------------------

    def _leave(self, slot: int) -> None:
        """A running request ends: its pages go back, and who shares its prompt reads on."""
        batch, running = self._batch, self._batch.running[slot]
        assert running is not None
        prompt = running.lease.prompt
        was_reader = prompt is not None and prompt.reader == slot
        freed = self._pages.release(slot, running.lease)
        batch.remove(slot)
        del self._slot_of[running.request_id]
        if prompt is None or prompt.is_read:
            return
        # What nobody has looked at yet may be no numbers, and the next owner's would be spoilt by it.
        self._awake().clear_pages(freed)
        if not prompt.slots:
            self._unread.remove(prompt)
        elif was_reader:
            next_reader = batch.running[prompt.slots[0]]
            assert next_reader is not None
            batch.written[prompt.slots[0]] = prompt.num_read
            self._pages.hand_over(prompt, next_reader.lease)

    def _fail(self, slot: int) -> Event:
        """End a request whose logits are not numbers; nothing of it may stay in the store."""
        running = self._batch.running[slot]
        assert running is not None
        lease = running.lease
        if lease.prompt is not None:
            self._pages.forget(lease.prompt)
        own = [page for page in lease.pages if self._pages.pool.is_last_reference(page)]
        self._awake().clear_pages(own)
        self._leave(slot)
        step, first = int(self._batch.step[slot]), int(self._batch.block_start[slot])
        return RequestFailed(
            running.request_id,
            f"the model's logits are not finite at step {step}, in the block that begins at position {first} "
            f"(prompt of {len(running.request.prompt_ids)} tokens, seed {running.request.seed}); "
            "look for NaN or infinity in the weights",
        )

    # -- weights and memory ------------------------------------------------------------------------

    def load_weights(
        self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Decode with these weights from now on.

        Names are those of `LanguageModel.named_parameters`. A tensor of the engine's own dtype and device is
        shared, not copied: whoever changes it in place afterwards calls this again, which then costs
        nothing. Prompts read with the weights before are forgotten.
        """
        self._refuse_unfinished("load_weights")
        given = dict(weights)
        own = dict(self.model.named_parameters())
        for name in sorted({*given, *own}):
            if name not in own or name not in given:
                problem = "is not in the model" if name in given else "is missing"
                raise UserError(f"weights: {name} {problem}; give the model's named_parameters()")
            if given[name].shape != own[name].shape:
                raise UserError(
                    f"weights: {name} has shape {tuple(given[name].shape)}, the model "
                    f"{tuple(own[name].shape)}; give weights of the same config"
                )
        places = [parameter.data_ptr() for parameter in own.values()]
        for name, parameter in own.items():
            new = given[name].detach()
            if new.dtype == parameter.dtype and new.device == parameter.device:
                parameter.data = new
            else:
                parameter.data.copy_(new)
        if self._padded is not None and places != [parameter.data_ptr() for parameter in own.values()]:
            self._padded.forget()
        self.weight_version = version
        self._pages.forget_unused()

    def sleep(self) -> None:
        """Give the memory of keys and values back; `wake` takes it again."""
        self._refuse_unfinished("sleep")
        self._store = self._padded = None

    def wake(self) -> None:
        """Take the budget's memory, measured now if it is a fraction; nothing happens to an engine awake."""
        if self._store is not None:
            return
        model, page_size = self.model, self.config.page_size
        self._memory = memory = self._plan_memory()
        self._store = KVStore(
            model.config, memory.num_pages, page_size, model.dtype, model.device, memory.limits
        )
        self._pages = PageTable(memory.num_pages, page_size)
        if memory.max_padded_tokens > 0:
            num_inputs = max_inputs(self.config, model.config, memory.limits)
            self._padded = PaddedForwards(model, self._store, memory, num_inputs)

    def _plan_memory(self) -> MemoryPlan:
        return MemoryPlan.of(self.config, self.model.config, self.model.dtype, self.model.device)

    def _awake(self) -> KVStore:
        if self._store is None:
            raise RuntimeError("the engine sleeps; call wake() first")
        return self._store

    def _refuse_unfinished(self, what: str) -> None:
        if self.num_unfinished:
            raise RuntimeError(
                f"{what}: {self.num_unfinished} requests are not finished; finish or abort them"
            )

    # -- refusals ----------------------------------------------------------------------------------

    def _check_ids(self, request: Request) -> None:
        vocab_size = self.model.config.vocab_size
        too_large = request.prompt_ids >= vocab_size
        if too_large.any():
            index = int(np.argmax(too_large))
            raise ValueError(
                f"prompt_ids[{index}]: {request.prompt_ids[index]} is outside the vocabulary of "
                f"{vocab_size}; use this model's tokenizer"
            )

    def _check_size(self, partition: Partition) -> None:
        length, memory = partition.sequence_length, self._memory
        figures = f"a prompt of {partition.prompt_length} and {partition.response_length} new tokens"
        longest = self.model.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"max_tokens: {figures} pass the model's {longest} positions; ask for fewer")
        num_pages = self._pages.num_pages_for(length)
        if num_pages > memory.num_pages:
            raise ValueError(
                f"max_tokens: {figures} need {num_pages} pages of {self.config.page_size}; the engine's "
                f"memory of {memory.budget:,} bytes has {memory.num_pages}; ask for fewer, or give it more"
            )
        if 2 * partition.block_size > memory.max_forward_tokens:
            raise ValueError(
                f"rule.block_size: {partition.block_size} needs forwards of {2 * partition.block_size} "
                f"tokens; the engine's are limited to {memory.max_forward_tokens}; raise max_forward_tokens "
                "or memory"
            )
