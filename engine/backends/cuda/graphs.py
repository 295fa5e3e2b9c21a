"""Decoding steps as CUDA graphs: one for each padded batch size, captured at start and replayed from then on.

A graph holds addresses and launch sizes, not values: a step's arrays are copied into buffers that all graphs read, the
rest of a padded batch has length 0 and writes nothing. Replaying costs one call where the eager step makes hundreds.
Intermediate results of all graphs lie in one memory pool, their logits in one buffer: graphs run one after another,
and each writes whatever it reads there. So any number of them takes the memory of the largest.
Life cycle: `capture()` once, before serving, largest batch first, since the first shapes the pool; then `logits()` for
every step that only decodes.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.cuda.attention import CudaAttention, CudaAttentionPlan, StepLayout, upload
from engine.model.backend import RecordableModel
from engine.types.step_inputs import StepInputs

_WARM_UPS = 2
"""Runs before a capture: the first compiles kernels, the second finds every library initialised."""


class Recorder(Protocol):
    """Records work once; the result is a call that repeats it on the same memory."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`, which must not wait for the device, and must write its results to existing memory."""
        ...


class CudaRecorder:
    """Captures CUDA graphs into one memory pool, on one stream: memory and a library's workspace belong to a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        present = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads to the device must neither enter the graph nor invalidate it.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        present.wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buffers:
    """Buffers that all graphs share: as large as the largest batch needs, smaller ones use their beginnings."""

    words: Tensor  # int32 [table_begin of the largest]
    tables: Tensor  # int32 [largest, max_blocks]
    logits: Tensor  # float32 [largest, vocab_size]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Graph:
    """The graph of one batch size; its tensors are the beginnings of the shared ones."""

    layout: StepLayout
    words: Tensor  # int32 [table_begin]
    tables: Tensor  # int32 [batch, max_blocks]
    token_ids: Tensor  # int64 [batch], within `words`
    logits: Tensor  # float32 [batch, vocab_size]
    replay: Callable[[], None]


class DecodeGraphs:
    """Graphs of one model over one cache. Used by one thread, the engine's."""

    def __init__(
        self,
        model: RecordableModel,
        attention: CudaAttention,
        recorder: Recorder,
        *,
        batch_sizes: Sequence[int],
        max_length: int,
        block_size: int,
    ) -> None:
        """`max_length`: tokens of the longest sequence."""
        self._model = model
        self._attention = attention
        self._recorder = recorder
        self._batch_sizes = sorted(batch_sizes)
        self._max_length = max_length
        self._max_blocks = -(-max_length // block_size)
        self._graphs: dict[int, _Graph] = {}

    def capture(self) -> None:
        """Record every batch size. The recorded runs write no cache block."""
        gc.collect()  # an earlier engine's graphs must not be destroyed during a capture
        buffers = self._make_buffers()
        for batch in reversed(self._batch_sizes):
            self._graphs[batch] = self._capture_batch(batch, buffers)

    def logits(self, inputs: StepInputs, token_ids: Tensor, rows: Tensor | None) -> Tensor | None:
        """See StepGraphs. Waits for nothing.

        Serves only steps of single rows, at most as many as the largest batch, within the tables' width.
        """
        count = len(inputs.starts)
        place = bisect_left(self._batch_sizes, count)
        fits = count == inputs.num_single and inputs.tables.shape[1] <= self._max_blocks
        if not fits or place == len(self._batch_sizes):
            return None
        graph = self._graphs.get(self._batch_sizes[place])
        if graph is None:
            return None
        words, tables = upload(inputs, graph.layout, self._model.device)
        graph.words.copy_(words)
        graph.tables[:count, : tables.shape[1]].copy_(tables)
        graph.token_ids[:count].copy_(token_ids)
        graph.replay()
        return graph.logits[:count] if rows is None else graph.logits.index_select(0, rows)

    def _make_buffers(self) -> _Buffers:
        largest, device = self._batch_sizes[-1], self._model.device
        words = StepLayout(num_rows=largest, num_seqs=largest).table_begin
        return _Buffers(
            words=torch.zeros(words, dtype=torch.int32, device=device),
            tables=torch.zeros(largest, self._max_blocks, dtype=torch.int32, device=device),
            logits=torch.zeros(largest, self._model.config.vocab_size, dtype=torch.float32, device=device),
        )

    def _capture_batch(self, batch: int, buffers: _Buffers) -> _Graph:
        layout = StepLayout(num_rows=batch, num_seqs=batch)
        words = buffers.words[: layout.table_begin].zero_()
        step = layout.views(words, buffers.tables[:batch])
        step.slots.fill_(-1)
        logits = buffers.logits[:batch]

        def work() -> None:
            plan = CudaAttentionPlan(self._attention, step, num_single=batch, max_length=self._max_length)
            logits.copy_(self._model.logits(self._model.forward(step.token_ids, plan, None)))

        replay = self._recorder.record(work)
        return _Graph(
            layout=layout, words=words, tables=step.tables, token_ids=step.token_ids, logits=logits, replay=replay
        )


def graph_batch_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes 1, 2, 4, multiples of 8 up to 64, then of 32, up to `largest`: few graphs, little padding."""
    sizes = {1, 2, 4, *range(8, min(largest, 64) + 1, 8), *range(96, largest + 1, 32), largest}
    return tuple(sorted(size for size in sizes if size <= largest))
