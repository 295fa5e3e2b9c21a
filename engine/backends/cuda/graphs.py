"""Steps as CUDA graphs, captured at start and replayed from then on: one for each padded number of sequences that only
decode, another where their lengths are unequal, and one for each padded number of rows of steps that compute a chunk
of a prompt as well.

A graph holds addresses and launch sizes, not values: a step's arrays are copied into buffers that all graphs read, the
rest of a padded step has length 0 and writes nothing. Replaying costs one call where the eager step makes hundreds.
Intermediate results of all graphs lie in one memory pool, their results in one buffer of each kind: graphs run one
after another, and each writes whatever it reads there. So any number of them takes the memory of the largest.
Life cycle: `capture()` once, before serving, largest step first, since the first shapes the pool; then `logits()` for
every step.

Steps with chunks are recorded up to as many rows as a GPU computes in the time in which a host could launch their
kernels: beyond, room for what a step does not have costs more than the launches. Which rows belong to whom is for the
attention kernels to find: every row may be a sequence's only one, and every two rows a sequence.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.cuda.attention import CudaAttention, CudaAttentionPlan, DeviceStep, StepLayout, upload
from engine.kernels.triton.flash_decode import DecodeCut, are_uneven
from engine.model.backend import RecordableModel
from engine.model.spec import ModelSpec
from engine.types.step_inputs import StepInputs

_WARM_UPS = 2
"""Runs before a capture: the first compiles kernels, the second finds every library initialised."""
_MAX_CHUNK_ROWS = 1024
_HIDDEN_PRODUCTS = 64_000_000_000
"""Rows times a layer's weights that a GPU multiplies in the time in which a host launches the layer's kernels. On an
H200, with 218 million weights a layer, recorded steps of 256 rows took 0.9 of the time of others, of 512 rows 1.07."""
_MAX_IDLE_PROGRAMS = 1 << 14
"""Programs of a layer's decode attention, most of them idle, beside chunks: they take some five microseconds."""


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
    """Buffers that all graphs share: as large as the largest step needs, smaller ones use their beginnings."""

    words: Tensor  # int32 [table_begin of the largest]
    tables: Tensor  # int32 [sequences of the largest, max_blocks]
    logits: Tensor  # float32 [largest batch, vocab_size]
    hidden: Tensor  # [most rows, hidden_size]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Graph:
    """The graph of one size; its tensors are the beginnings of the shared ones."""

    layout: StepLayout
    cut: DecodeCut
    words: Tensor  # int32 [table_begin]
    step: DeviceStep
    """Views of `words`, and the tables."""
    result: Tensor
    """Of every row: logits, or hidden states before the final norm where the step has chunks."""
    replay: Callable[[], None]


class CudaStepGraphs:
    """Graphs of one model over one cache. Used by one thread, the engine's."""

    def __init__(
        self,
        model: RecordableModel,
        attention: CudaAttention,
        recorder: Recorder,
        *,
        batch_sizes: Sequence[int],
        chunk_sizes: Sequence[int] = (),
        max_length: int,
        block_size: int,
    ) -> None:
        """`batch_sizes`: sequences of steps that only decode. `chunk_sizes`: rows of steps that compute several of one
        sequence. `max_length`: tokens of the longest sequence.
        """
        self._model = model
        self._attention = attention
        self._recorder = recorder
        self._batch_sizes = sorted(batch_sizes)
        self._chunk_sizes = sorted(chunk_sizes)
        self._max_length = max_length
        self._max_blocks = -(-max_length // block_size)
        self._batches: dict[int, _Graph] = {}
        self._uneven: dict[int, _Graph] = {}
        """Of those sizes at which sequences of unequal lengths are attended to in another way."""
        self._chunks: dict[int, _Graph] = {}

    def capture(self) -> None:
        """Record every size. The recorded runs write no cache block."""
        gc.collect()  # an earlier engine's graphs must not be destroyed during a capture
        layouts = {rows: self._chunk_layout(rows) for rows in reversed(self._chunk_sizes)}
        batches = {
            batch: StepLayout(num_rows=batch, num_single=batch, num_several=0) for batch in reversed(self._batch_sizes)
        }
        buffers = self._make_buffers([*layouts.values(), *batches.values()])
        for rows, layout in layouts.items():
            self._chunks[rows] = self._capture_chunks(layout, buffers)
        for batch, layout in batches.items():
            if self._attention.fixed_keys:
                self._batches[batch] = self._capture_batch(layout, buffers, self._cut_by_length(batch))
                continue
            if batch > 1:
                self._uneven[batch] = self._capture_batch(layout, buffers, self._attention.cut_by_length())
            cut = self._attention.cut_evenly(batch, self._max_length)
            self._batches[batch] = self._capture_batch(layout, buffers, cut)

    def logits(self, inputs: StepInputs, token_ids: Tensor, rows: Tensor | None) -> Tensor | None:
        """See StepGraphs. Waits for nothing.

        Serves steps of single rows, at most as many as the largest batch, and those with chunks, of at most as many
        rows as the largest of them; all within the tables' width.
        """
        only_decodes = len(inputs.starts) == inputs.num_single
        graph = self._graph_of(inputs, only_decodes)
        if graph is None:
            return None
        count = len(inputs.token_ids)
        self._load(inputs, graph)
        graph.step.token_ids[:count].copy_(token_ids)
        graph.replay()
        wanted = graph.result[:count] if rows is None else graph.result.index_select(0, rows)
        return wanted if only_decodes else self._model.logits(wanted)

    def _graph_of(self, inputs: StepInputs, only_decodes: bool) -> _Graph | None:
        """The smallest graph that has room for a step."""
        lengths = inputs.lengths[: inputs.num_single]
        sizes, graphs = self._chunk_sizes, self._chunks
        if only_decodes:
            sizes, graphs = self._batch_sizes, self._uneven if self._uneven and are_uneven(lengths) else self._batches
        place = bisect_left(sizes, len(inputs.token_ids))
        if inputs.tables.shape[1] > self._max_blocks or place == len(sizes):
            return None
        graph = graphs.get(sizes[place])
        if graph is None or not graph.layout.holds(inputs):
            return None
        return graph if self._attention.further_runs(lengths) <= graph.cut.further_runs else None

    def _load(self, inputs: StepInputs, graph: _Graph) -> None:
        """Copy a step's arrays into the graph's buffers."""
        words, tables = upload(inputs, graph.layout, self._model.device)
        graph.words.copy_(words)
        singles, width = inputs.num_single, tables.shape[1]
        graph.step.tables[:singles, :width].copy_(tables[:singles])
        if len(tables) > singles:
            begin = graph.layout.num_single
            graph.step.tables[begin : begin + len(tables) - singles, :width].copy_(tables[singles:])

    def _chunk_layout(self, rows: int) -> StepLayout:
        """Room for every combination of sequences with one row and with several, up to the largest batch of both, but
        not for more idle programs than are worth their time.
        """
        most = self._batch_sizes[-1]
        return StepLayout(
            num_rows=rows,
            num_single=min(rows, most, max(1, _MAX_IDLE_PROGRAMS // self._attention.spec.config.num_kv_heads)),
            num_several=min(rows // 2, most),
        )

    def _cut_by_length(self, batch: int) -> DecodeCut:
        further_runs = self._attention.most_further_runs(batch, self._max_length)
        return self._attention.cut_by_length(batch, further_runs=further_runs)

    def _make_buffers(self, layouts: Sequence[StepLayout]) -> _Buffers:
        config, device = self._model.config, self._model.device
        words = max(layout.table_begin for layout in layouts)
        sequences = max(layout.num_single + layout.num_several for layout in layouts)
        return _Buffers(
            words=torch.zeros(words, dtype=torch.int32, device=device),
            tables=torch.zeros(sequences, self._max_blocks, dtype=torch.int32, device=device),
            logits=torch.zeros(self._batch_sizes[-1], config.vocab_size, dtype=torch.float32, device=device),
            hidden=torch.zeros(
                max(self._chunk_sizes, default=0), config.hidden_size, dtype=self._attention.dtype, device=device
            ),
        )

    def _capture_batch(self, layout: StepLayout, buffers: _Buffers, cut: DecodeCut) -> _Graph:
        words, step = self._blank_step(layout, buffers)
        logits = buffers.logits[: layout.num_rows]

        def work() -> None:
            plan = CudaAttentionPlan(self._attention, step, cut)
            logits.copy_(self._model.logits(self._model.forward(step.token_ids, plan, None)))

        replay = self._recorder.record(work)
        return _Graph(layout=layout, cut=cut, words=words, step=step, result=logits, replay=replay)

    def _capture_chunks(self, layout: StepLayout, buffers: _Buffers) -> _Graph:
        words, step = self._blank_step(layout, buffers)
        hidden = buffers.hidden[: layout.num_rows]
        cut = self._cut_by_length(layout.num_single)

        def work() -> None:
            plan = CudaAttentionPlan(self._attention, step, cut, has_spare_rows=True)
            hidden.copy_(self._model.forward(step.token_ids, plan, None))

        replay = self._recorder.record(work)
        return _Graph(layout=layout, cut=cut, words=words, step=step, result=hidden, replay=replay)

    def _blank_step(self, layout: StepLayout, buffers: _Buffers) -> tuple[Tensor, DeviceStep]:
        """A step without sequences, all of it padding."""
        words = buffers.words[: layout.table_begin].zero_()
        step = layout.views(words, buffers.tables[: layout.num_single + layout.num_several])
        step.slots.fill_(-1)
        return words, step


def graph_batch_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes 1, 2, 4, multiples of 8 up to 64, then of 32, up to `largest`: few graphs, little padding."""
    sizes = {1, 2, 4, *range(8, min(largest, 64) + 1, 8), *range(96, largest + 1, 32), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def graph_chunk_sizes(largest: int, spec: ModelSpec) -> tuple[int, ...]:
    """Numbers of rows of steps with chunks, up to `largest`, as far as a model's layers are launched more slowly than
    they are computed: few graphs, since each delays the start.
    """
    heads = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    weights = spec.hidden_size * (heads + 3 * spec.layers[0].active_size)
    largest = min(largest, max(32, min(_MAX_CHUNK_ROWS, _HIDDEN_PRODUCTS // weights)))
    sizes = {32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, largest}
    return tuple(sorted(size for size in sizes if size <= largest))
