"""Decoding steps as CUDA graphs: one for each padded batch size, captured at start, replayed ever after.

A graph holds addresses and launch sizes, not values: a step's arrays are copied into the graph's own buffers, the rest
of a padded batch has length 0 and writes nothing. Replaying costs one call where the eager step makes hundreds.
Life cycle: `capture()` once, before serving, largest batch first, since graphs share one memory pool and the first
shapes it; then `logits()` for every step that is nothing but decoding.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.cuda_attention import CudaAttention, CudaAttentionPlan, StepLayout, upload
from engine.models.decoder import Decoder
from engine.step_inputs import StepInputs

_WARM_UPS = 2
"""Runs before a capture: the first compiles kernels, the second finds every library initialised."""


class Recorder(Protocol):
    """Records work once, and gives a call that repeats it on the same memory."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`work` must not synchronise. The tensor returned is overwritten by each repetition."""
        ...


class CudaRecorder:
    """Captures CUDA graphs into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Recorder."""
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = work()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Graph:
    layout: StepLayout
    words: Tensor  # int32 [table_begin]
    tables: Tensor  # int32 [batch, max_blocks]
    token_ids: Tensor  # int64 [batch], within `words`
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """Graphs of one model over one cache. Used by one thread, the engine's."""

    def __init__(
        self,
        model: Decoder,
        attention: CudaAttention,
        recorder: Recorder,
        *,
        batch_sizes: Sequence[int],
        max_length: int,
        block_size: int,
    ) -> None:
        """`max_length`: of any sequence, in tokens."""
        self._model = model
        self._attention = attention
        self._recorder = recorder
        self._batch_sizes = sorted(batch_sizes)
        self._max_length = max_length
        self._max_blocks = -(-max_length // block_size)
        self._graphs: dict[int, _Graph] = {}

    def capture(self) -> None:
        """Record every batch size. What it computes meanwhile is nobody's: no cache block is written."""
        for batch in reversed(self._batch_sizes):
            self._graphs[batch] = self._captured(batch)

    def logits(self, inputs: StepInputs, token_ids: Tensor, rows: Tensor | None) -> Tensor | None:
        """See StepGraphs. Waits for nothing.

        A graph serves steps of single rows only, as many as the largest batch at most, within the tables' width.
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
        logits = graph.replay()
        return logits[:count] if rows is None else logits.index_select(0, rows)

    def _captured(self, batch: int) -> _Graph:
        device = self._model.device
        layout = StepLayout(num_rows=batch, num_seqs=batch)
        words = torch.zeros(layout.table_begin, dtype=torch.int32, device=device)
        tables = torch.zeros(batch, self._max_blocks, dtype=torch.int32, device=device)
        step = layout.views(words, tables)
        step.slots.fill_(-1)

        def work() -> Tensor:
            plan = CudaAttentionPlan(self._attention, step, num_single=batch, max_length=self._max_length)
            return self._model.logits(self._model.forward(step.token_ids, plan, None))

        replay = self._recorder.record(work)
        return _Graph(layout=layout, words=words, tables=tables, token_ids=step.token_ids, replay=replay)


def graph_batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to 64, then of 32: few graphs, and little padding."""
    sizes = {1, 2, 4, *range(8, min(largest, 64) + 1, 8), *range(96, largest + 1, 32), largest}
    return tuple(sorted(size for size in sizes if size <= largest))
