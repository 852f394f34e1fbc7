"""In which order a policy would have decoded a given text: steps for responses that came without any.

The text is fixed; step by step the model says how sure it is of every masked position, the unmask policy
chooses, and the chosen positions take the text's tokens. For greedy decoding under the same weights and the
same policy this finds the order in which the text was decoded; for sampled text it is a surrogate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64

from tstar.engine import Request
from tstar.model.attention import prepare
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition
from tstar.unmask import PolicyColumns, choose


@dataclass(eq=False)
class Followed:
    """A response on its way."""

    request: Request
    response_ids: Int64[np.ndarray, " response"]
    partition: Partition
    unmask_step: Int64[np.ndarray, " response"]
    """-1 where it is still masked."""
    log_probs: Float32[np.ndarray, " response"]
    step: int = 0
    block_step: int = 0

    @classmethod
    def of(cls, request: Request, response_ids: Int64[np.ndarray, " response"]) -> Followed:
        length = len(response_ids)
        partition = request.rule.cut(len(request.prompt_ids), length)
        steps = np.full(length, -1, dtype=np.int64)
        return cls(request, response_ids, partition, steps, np.zeros(length, dtype=np.float32))

    @property
    def is_done(self) -> bool:
        return bool((self.unmask_step >= 0).all())

    def block(self) -> slice:
        """The first one that has masks, as indices into the response."""
        first = int(np.argmin(self.unmask_step >= 0))
        return next(block for block in self.partition.response_slices if first < block.stop)

    def text(self, stop: int, mask_token_id: int) -> Int64[np.ndarray, " text"]:
        """Prompt and response up to an index, as they stand."""
        is_known = self.unmask_step[:stop] >= 0
        return np.concatenate(
            [self.request.prompt_ids, np.where(is_known, self.response_ids[:stop], mask_token_id)]
        )

    def finalise(
        self, places: Int64[np.ndarray, " chosen"], log_probs: Float32[np.ndarray, " chosen"]
    ) -> None:
        block = self.block()
        self.unmask_step[places] = self.step
        self.log_probs[places] = log_probs
        self.step += 1
        self.block_step = 0 if (self.unmask_step[block] >= 0).all() else self.block_step + 1


@torch.no_grad()
def follow(
    model: LanguageModel, requests: Sequence[Request], responses: Sequence[Int64[np.ndarray, " response"]]
) -> list[Followed]:
    """Steps and log-probs of every response; each step is one forward over all of them, without a cache."""
    followed = [Followed.of(q, ids) for q, ids in zip(requests, responses, strict=True)]
    while active := [each for each in followed if not each.is_done]:
        _step(model, active)
    return followed


def _step(model: LanguageModel, active: Sequence[Followed]) -> None:
    mask_token_id = model.config.mask_token_id
    assert mask_token_id is not None
    blocks = [each.block() for each in active]
    texts = [each.text(b.stop, mask_token_id) for each, b in zip(active, blocks, strict=True)]
    layout = PackedLayout.clean(
        [each.partition.resized(b.stop) for each, b in zip(active, blocks, strict=True)]
    )
    starts = np.cumsum([0, *map(len, texts)])[:-1]
    masked = [b.start + np.flatnonzero(e.unmask_step[b] < 0) for e, b in zip(active, blocks, strict=True)]
    read = np.concatenate(
        [s + len(e.request.prompt_ids) + m for s, e, m in zip(starts, active, masked, strict=True)]
    )
    counts = [len(places) for places in masked]
    device = model.device
    hidden = model(
        torch.from_numpy(np.concatenate(texts)).to(device),
        prepare(layout, device),
        torch.from_numpy(read).to(device),
    )
    temperatures = np.repeat([e.request.sampling.scoring_temperature for e in active], counts)
    targets = np.concatenate([e.response_ids[m] for e, m in zip(active, masked, strict=True)])
    own, best, entropy = _distribution(
        model, hidden, torch.from_numpy(temperatures), torch.from_numpy(targets)
    )
    width = max(b.stop - b.start for b in blocks)
    is_masked = np.zeros((len(active), width), dtype=np.bool_)
    for row, (block, places) in enumerate(zip(blocks, masked, strict=True)):
        is_masked[row, places - block.start] = True
    policies = [each.request.sampling.unmask for each in active]
    by_sampled = np.repeat([p.confidence == "sampled" for p in policies], counts)
    table = np.zeros((2, len(active), width))
    table[:, is_masked] = np.where(by_sampled, own, best), entropy
    block_steps = np.array([each.block_step for each in active], dtype=np.int64)
    noise = np.zeros(is_masked.shape)  # nobody knows the server's own: "random" comes out left to right
    chosen = choose(PolicyColumns.of(policies), is_masked, block_steps, table[0], table[1], noise)
    log_probs = np.zeros(is_masked.shape, dtype=np.float32)
    log_probs[is_masked] = own
    for row, (each, block) in enumerate(zip(active, blocks, strict=True)):
        places = np.flatnonzero(chosen[row])
        each.finalise(block.start + places, log_probs[row, places])


def _distribution(
    model: LanguageModel, hidden: torch.Tensor, temperatures: torch.Tensor, targets: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every position: the log-probs of its text and of its likeliest token, and its entropy."""
    logits = F.linear(hidden, model.output_weight).double()
    logits[:, model.config.mask_token_id] = -torch.inf
    log_probs = torch.log_softmax(logits / temperatures.to(logits.device)[:, None], dim=-1)
    own = log_probs.gather(1, targets.to(logits.device)[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs.nan_to_num(neginf=0.0)).sum(dim=-1)
    found = torch.stack([own, log_probs.max(dim=-1).values, entropy]).cpu().numpy()
    return found[0], found[1], found[2]
