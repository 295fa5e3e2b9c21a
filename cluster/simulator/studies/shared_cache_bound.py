"""The upper bound for placement: all workers' memory as one cache, and no time passing.

Each prompt, in order of arrival, finds its longest prefix in one real pool and index of the whole cluster's size, and
is computed at once. No cluster of separate caches can do better except by luck.
"""

from array import array
from dataclasses import dataclass

from cluster.simulator.inputs.block_names import TraceHasher, own_name
from cluster.simulator.inputs.latency import StepLatency
from cluster.simulator.inputs.trace import Trace, TraceRequest
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.eviction import eviction_policy
from engine.types.kv_events import KVEventLog
from engine.types.request import Request
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams

_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCache:
    """Tokens of a trace that one shared cache finds."""

    num_blocks: int
    cached_tokens: tuple[int, ...]
    """Cached tokens of each request's prompt."""
    hit_rate: float
    """Share of all prompts' tokens that were cached."""

    def busy_s(self, trace: Trace, latency: StepLatency, chunk_tokens: int) -> float:
        """Return the time of one worker to compute everything that was not cached."""
        return sum(
            latency.prompt_seconds(cached, request.num_prompt_tokens, chunk_tokens)
            for request, cached in zip(trace.requests, self.cached_tokens, strict=True)
        )


def shared_cache(trace: Trace, num_blocks: int, *, eviction: str = "lru") -> SharedCache:
    """Run the trace's prompts through one cache of so many of its blocks."""
    events = KVEventLog(1)
    blocks = BlockManager(
        num_blocks=num_blocks,
        block_size=trace.block_tokens,
        hasher=TraceHasher(trace.block_tokens),
        events=events,
        policy=eviction_policy(eviction),
    )
    cached = tuple(_pass(blocks, request, number) for number, request in enumerate(trace.requests))
    return SharedCache(
        num_blocks=num_blocks, cached_tokens=cached, hit_rate=sum(cached) / max(1, trace.num_prompt_tokens)
    )


def utilised(trace: Trace, ideal: SharedCache, latency: StepLatency, *, num_workers: int, share: float) -> Trace:
    """Stretch the trace so that the ideal's work keeps `num_workers` busy for `share` of its span.

    The chunk does not matter where a step costs nothing but its tokens; elsewhere one of 2,048 tokens is assumed.
    """
    busy_s = ideal.busy_s(trace, latency, chunk_tokens=2048)
    return trace.stretched(busy_s / (num_workers * share) / trace.span_s)


def _pass(blocks: BlockManager, wanted: TraceRequest, number: int) -> int:
    num_full = wanted.num_prompt_tokens // blocks.block_size
    request = Request(
        request_id=RequestId(str(number)),
        token_ids=array("i", bytes(4 * wanted.num_prompt_tokens)),
        num_prompt_tokens=wanted.num_prompt_tokens,
        params=_PARAMS,
        hash_root=own_name(number),
        block_hashes=list(wanted.names[:num_full]),
    )
    match = blocks.match(request)
    blocks.take_prefix(request, match)
    num_cached = request.num_computed_tokens
    blocks.grow(request, blocks.allocate(match.num_missing))
    request.num_computed_tokens = request.num_tokens
    blocks.index_computed(request, match.num_blocks)
    blocks.release(request.block_table.clear())
    return num_cached
