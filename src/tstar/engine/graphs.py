"""Forwards in few fixed shapes: a GPU records each shape once and repeats it.

A short forward on a GPU is a thousand kernel launches that each take longer to ask for than to run. So its
rows are padded to a shape (`model/attention/padded.py`), what differs is copied into one vector that stays
in its place, and the forward of that shape is a CUDA graph: one launch. On a CPU there is nothing to record,
and the same function is called; that is how its tests run anywhere.

A graph holds addresses: of the weights, of the store, of the vector and of where the hidden states go.
Whoever moves the weights calls `forget`; the store lives and dies with the engine's memory, and the graphs
with it. Nothing of one graph is needed after it has run but the hidden states, which lie outside, so all of
them compute in the same memory.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tstar.engine.memory import MemoryPlan
from tstar.model.attention.padded import PaddedAttention, PaddedShape, choose_shape, pad_rows
from tstar.model.attention.store import KVStore, StoreRows
from tstar.model.transformer import LanguageModel

WORTH_RECORDING = 2
"""How often a shape has to come before it is recorded, which costs as much as two forwards and more."""


class PaddedForwards:
    """The forwards that one engine repeats."""

    def __init__(self, model: LanguageModel, store: KVStore, memory: MemoryPlan, max_inputs: int) -> None:
        device = store.keys.device
        self._model, self._store, self._memory = model, store, memory
        self._inputs = torch.zeros(max_inputs, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(
            memory.max_padded_tokens, model.config.hidden_size, dtype=model.dtype, device=device
        )
        self._is_gpu = device.type == "cuda"
        self.num_runs = 0
        """Forwards that were run in a fixed shape."""
        self.forget()

    @property
    def num_shapes(self) -> int:
        """Shapes that are recorded, or on a CPU run."""
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Memory of the device that recorded forwards have taken."""
        return self._num_bytes

    def forget(self) -> None:
        """Drop what is recorded: the weights are elsewhere."""
        self._graphs: dict[PaddedShape, torch.cuda.CUDAGraph | None] = {}
        self._num_seen: Counter[PaddedShape] = Counter()
        self._num_bytes = 0
        if self._is_gpu:
            self._stream = torch.cuda.Stream(self._store.keys.device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def run(
        self,
        token_ids: Int64[np.ndarray, " tokens"],
        rows: StoreRows,
        reads: Int64[np.ndarray, " reads"],
    ) -> Float[Tensor, "reads hidden"] | None:
        """The hidden states that are read; None where a forward of the rows' own sizes serves better."""
        shape = choose_shape(self._store, rows, self._memory.max_padded_tokens)
        if shape is None or not self._is_worth_it(shape):
            return None
        inputs, places = pad_rows(self._store, rows, token_ids, shape)
        self._inputs[: shape.num_inputs].copy_(torch.from_numpy(inputs))
        if shape not in self._graphs:
            self._graphs[shape] = self._record(shape) if self._is_gpu else None
        graph = self._graphs[shape]
        if graph is None:
            self._compute(shape)
        else:
            graph.replay()
        self.num_runs += 1
        return self._hidden.index_select(0, torch.from_numpy(places[reads]).to(self._hidden.device))

    def _is_worth_it(self, shape: PaddedShape) -> bool:
        if shape in self._graphs:
            return True
        self._num_seen[shape] += 1
        return self._num_seen[shape] >= WORTH_RECORDING and self._num_bytes < self._memory.graph_bytes

    def _compute(self, shape: PaddedShape) -> None:
        """The forward that the vector describes; nothing in it may ask the device for anything."""
        attention = PaddedAttention(self._store, shape, self._inputs[: shape.num_inputs])
        self._hidden[: shape.num_tokens].copy_(self._model(attention.token_ids, attention))

    def _record(self, shape: PaddedShape) -> torch.cuda.CUDAGraph:
        """A graph of `_compute`, which is run once before: libraries make their workspaces at first use. Both
        compute what the vector holds now, so writing keys and values twice changes nothing."""
        device = self._store.keys.device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._compute(shape)
        torch.cuda.current_stream(device).wait_stream(self._stream)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process (data loaders, reward workers) may go on meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            self._compute(shape)
        self._num_bytes += max(0, free - torch.cuda.mem_get_info(device)[0])
        return graph
