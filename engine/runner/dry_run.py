"""Measures the memory that steps take: the largest steps that the scheduler may plan are run once, at start.

The steps run over a pool of one block that all tables repeat, so the largest batch and the longest
context need no more KV memory than that. It warms everything up as well: buffers, thread pools, kernels that are
compiled at their first launch.
"""

import contextlib
import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.decoder import Decoder
from engine.runner.model_runner import ModelRunner
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from engine.types.step_inputs import StepInputs
from engine.types.windows import WindowTable
from tandem.process.host_memory import return_freed_memory
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.kv_layout import KVLayout
from tandem.values.sampling import SamplingParams

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_HOST_BYTES = 16 << 20
_HOST_BYTES_EACH = 64 << 10
"""Host memory that serving needs but a few steps do not show, in all and for each running request: requests, tables and
events, malloc's fragmentation, and the kernels that oneDNN compiles for batches of other sizes. Measured on a full
pool for some hundred steps (tests: test_memory_budget).
"""
_WIDE_SAMPLING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    top_k=50,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    num_logprobs=20,
    seed=1,
)
"""Sampling parameters that use every feature, so that each of its tensors is allocated."""


class PeakMemory:
    """Growth of this process's memory, or of the device's, since `start`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> bool:
        """Begin to measure; False where the system does not let a process reset its own peak."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            # Reserved, not allocated: the private memory pool of graphs is in the former only.
            self._before = torch.cuda.memory_reserved(self._device)
            return True
        return_freed_memory()  # reuse of pages that malloc retains would not show
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)  # proc(5): the peak becomes the present size
        except OSError:
            return False
        self._before = _status_bytes("VmRSS")
        return self._before > 0

    def growth_bytes(self) -> int:
        """Peak of memory use since `start`, beyond the use at that time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return max(0, torch.cuda.max_memory_reserved(self._device) - self._before)
        return max(0, _status_bytes("VmHWM") - self._before)


def measure_workspace_bytes(
    model: Decoder,
    layout: KVLayout,
    *,
    max_batched_tokens: int,
    prefill_chunk_tokens: int,
    max_running_requests: int,
    max_context: int,
    max_pool_tokens: int,
    max_draft_rows: int = 0,
    announce: Callable[[StepInputs], None] | None = None,
) -> int | None:
    """Memory that steps take beside weights and KV: the peak over the largest steps and, on a CPU, an allowance for
    what serving takes besides.

    `max_draft_rows`: drafts that a step may verify beside its requests. `announce`: see ModelRunner. None where the
    system cannot tell.
    """
    cache = PagedKVCache(layout, num_blocks=1, device=model.device)
    runner = ModelRunner(model, cache, announce=announce)
    peak = PeakMemory(model.device)
    if not peak.start():
        return None
    max_context = min(max_context, max(1, max_pool_tokens))
    max_rows = max_running_requests + max_draft_rows
    prefill = _prefill_spans(max_batched_tokens, prefill_chunk_tokens, max_rows, max_context)
    rows = min(max_rows, max_batched_tokens)
    for spans in (prefill, *_decode_steps(rows, max_context, max_pool_tokens, compiles=model.device.type == "cuda")):
        runner.launch(_batch(layout, spans)).tokens()
    if max_draft_rows and rows > max_running_requests:
        # Rows after drafts are penalised by other tensors than as many requests.
        drafts = _drafts(max_running_requests, rows - max_running_requests)
        length = max(1, min(max_context, max_pool_tokens // max_running_requests) - max(drafts))
        spans = [(length - 1, 1)] * max_running_requests
        runner.launch(_batch(layout, spans, drafts)).tokens()
    if layout.tp_size == 1:
        # The same graphs as will be recorded over the real pool: they keep their memory.
        runner.record_graphs(max_rows=max_rows, max_tokens=max_batched_tokens, max_length=max_context)
    growth_bytes = peak.growth_bytes()
    del runner
    release_unused_memory(model)
    if model.device.type == "cuda":
        return growth_bytes
    return growth_bytes + _HOST_BYTES + max_rows * _HOST_BYTES_EACH


def release_unused_memory(model: Decoder) -> None:
    """Free memory left by dry runs, which the pool can use: steps as large as the largest may never come."""
    model.backend.trim()
    return_freed_memory()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


def _decode_steps(rows: int, max_context: int, pool_tokens: int, *, compiles: bool) -> list[list[tuple[int, int]]]:
    """Spans of decoding steps, each with every row on the widest sampling path and as long as a pool could hold them
    all.

    Where kernels are compiled at their first launch, smaller batches as well, and one long sequence among short ones:
    their keys are split differently, and a client's token would have to wait for the compiler.
    """
    sizes = {rows} | ({1 << i for i in range(rows.bit_length())} if compiles else set())
    alike = [[(min(max_context, max(1, pool_tokens // size)) - 1, 1)] * size for size in sorted(sizes, reverse=True)]
    if not compiles:
        return alike
    longest = min(max_context, max(1, pool_tokens - rows)) - 1
    return alike + [[(longest, 1), *[(0, 1)] * (size - 1)] for size in sorted(sizes) if size > 1]


def _prefill_spans(max_tokens: int, chunk_tokens: int, max_rows: int, max_context: int) -> list[tuple[int, int]]:
    """Start and length of each row's share: one whole chunk that ends the longest context, all other rows decoding."""
    chunk_tokens = min(chunk_tokens, max_context, max_tokens)
    num_others = min(max_rows - 1, max_tokens - chunk_tokens)
    return [(max_context - chunk_tokens, chunk_tokens), *[(0, 1)] * num_others]


def _drafts(num_requests: int, num_drafts: int) -> list[int]:
    """Number of drafts of each request, as even as possible."""
    return [num_drafts // num_requests + (i < num_drafts % num_requests) for i in range(num_requests)]


def _batch(layout: KVLayout, spans: list[tuple[int, int]], drafts: Sequence[int] | None = None) -> Batch:
    """`drafts`: number of drafts of each request; None: no drafts."""
    num_windows = len(layout.groups) - 1
    items = []
    for number, (start, count) in enumerate(spans):
        num_drafts = 0 if drafts is None else drafts[number]
        tokens = array("i", [0]) * (start + count)
        num_blocks = -(-(len(tokens) + num_drafts) // layout.block_size)
        request = Request(
            request_id=RequestId(f"dry-run-{number}"),
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            params=_WIDE_SAMPLING,
            hash_root=BlockHash(b""),
            block_table=BlockTable([BlockId(0)] * num_blocks),
            windows=WindowTable(num_windows, first=num_blocks) if num_windows else None,
        )
        items.append(BatchItem(request, start, count, samples=True, drafts=(0,) * num_drafts))
    return Batch(items=tuple(items))


def _status_bytes(field: str) -> int:
    with contextlib.suppress(OSError):
        found = re.search(rf"^{field}:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return 0
