"""The gain from paging, caching and continuous batching: our engine against itself without them.

Each baseline runs the same requests as the full engine, one after the other in the same process, on the reference
model, whose weights exceed every cache. Lengths are log-normal with half the means of ShareGPT's conversations (161 and
338 tokens: Kwon et al., "Efficient memory management for large language model serving with PagedAttention", SOSP 2023),
and the longest sequence is half of the 2,048 tokens that earlier servers reserved: the same proportions in a quarter of
the time. Where memory is compared, it holds four sequences of the maximum length.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from engine.assembly import EngineParts
from engine.scheduler.scheduler import Scheduler
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench.engine import policies
from tandem_bench.engine.policies import Ask, Lengths, Policy, Served, arriving, serve
from tandem_bench.engine.rig import assemble_from
from tandem_bench.make_model import cached_model
from tandem_bench.report import Row, figure
from tandem_bench.shapes import REFERENCE, SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Sizes of the comparisons."""

    shape: str = REFERENCE
    lengths: Lengths = field(default_factory=partial(Lengths, mean_prompt=80, mean_answer=169, most=1024))
    num_blocks: int = 640
    num_slots: int = 4
    """Sequences of maximum length that the memory holds, where memory is compared."""
    max_rows: int = 64
    batch_size: int = 16
    """Size of closed batches, and rows of the engine that they are compared with."""
    num_asks: int = 64
    load: float = 0.75
    """Arrival rate as a share of what the engine could serve."""
    contexts: tuple[int, ...] = (128, 512, 2048)
    """Context lengths for the engine without a KV cache."""
    crowd: tuple[int, int] = (16, 512)
    """Number of sequences, and the context of each."""
    steps: int = 4
    turns: int = 1

    @property
    def slot_blocks(self) -> int:
        """Number of blocks of the pool where memory is compared."""
        return self.num_slots * -(-self.lengths.most // 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Engine with its workload."""

    parts: EngineParts
    bench: Bench

    def asks(self, turn: int) -> tuple[Ask, ...]:
        """Return a turn's requests, the same for all."""
        rng = Random(f"bench:mixed:{turn}")
        return self.bench.lengths.draw(rng, self.bench.num_asks, self.parts.model.vocab_size)

    def serve(
        self,
        asks: Sequence[Ask],
        policy: Policy,
        *,
        max_rows: int,
        num_blocks: int | None = None,
        reserved_tokens: int | None = None,
    ) -> Served:
        """Serve the requests on a new scheduler, so that nothing is cached."""
        config = replace(
            self.parts.config,
            max_running_requests=max_rows,
            num_blocks=num_blocks or self.parts.config.num_blocks,
        )
        scheduler = Scheduler(config, self.parts.hasher)
        return serve(scheduler, self.parts.runner, asks, policy, reserved_tokens=reserved_tokens)


def rows(
    names: Sequence[str],
    note: Callable[[str], None],
    *,
    bench: Bench | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Measure the named baselines; `settings` of the engine section apply to both sides. Raises ConfigError."""
    bench = bench or Bench()
    model = cached_model(SHAPES[bench.shape], note=note)
    parts = assemble_from(
        {
            "model.path": str(model),
            "model.dtype": "bfloat16",
            "model.max_model_len": max(bench.lengths.most, max(bench.contexts) + bench.steps),
            "engine.device": "cpu",
            "engine.num_blocks": bench.num_blocks,
            "engine.max_running_requests": bench.max_rows,
            **(settings or {}),
        }
    )
    found: list[Row] = []
    for name in names:
        note(f"baseline {name}")
        found += _BASELINES[name](Stand(parts=parts, bench=bench))
    return found


def _no_kv_cache(stand: Stand) -> list[Row]:
    """Compare reading the cache with computing everything again for each new token."""
    bench = stand.bench
    num_sequences, crowd_context = bench.crowd
    found = []
    for context, count, label in (
        *((context, 1, f"{context}") for context in bench.contexts),
        (crowd_context, num_sequences, f"{num_sequences}x{crowd_context}"),
    ):
        gains = []
        for turn in range(max(2, bench.turns)):
            cached_s = _generate_s(stand, context, count, turn, recompute=False)
            recomputed_s = _generate_s(stand, context, count, turn, recompute=True)
            gains.append(recomputed_s / cached_s)
        unit = f"times: {count} sequences at {context} tokens, cached against recomputed"
        found.append(figure(f"baseline.no-kv-cache.{label}.gain", median(gains), unit))
    return found


def _generate_s(stand: Stand, context: int, count: int, seed: int, *, recompute: bool) -> float:
    """Return the seconds per step after a context, driven without the scheduler, which always uses the cache."""
    parts, steps = stand.parts, stand.bench.steps
    rng = Random(f"bench:baseline:{seed}")
    requests = [_sequence(rng, parts, number, context, context + steps) for number in range(count)]

    def step(together: Sequence[Request], start: int) -> None:
        items = [BatchItem(request, start, request.num_tokens - start, True) for request in together]
        sampled = parts.runner.launch(Batch(items=tuple(items))).tokens()
        for request, token in zip(together, sampled, strict=True):
            request.token_ids.append(0 if token is None else token.token_id)

    for request in requests:
        step([request], 0)  # the prompt, in both cases
    started_s = perf_counter()
    for number in range(steps - 1):
        if recompute:
            # One after the other: enough rows for the best rate, with no more memory than the other side has.
            for request in requests:
                step([request], 0)
        else:
            step(requests, context + number)
    return (perf_counter() - started_s) / (steps - 1)


def _sequence(rng: Random, parts: EngineParts, number: int, context: int, length: int) -> Request:
    """Build a prompt on blocks of its own."""
    num_blocks = -(-length // parts.layout.block_size)
    return Request(
        request_id=RequestId(f"baseline-{number}"),
        token_ids=array("i", [rng.randrange(parts.model.vocab_size) for _ in range(context)]),
        num_prompt_tokens=context,
        params=SamplingParams(temperature=0.0, ignore_eos=True),
        hash_root=BlockHash(b""),
        block_table=BlockTable([BlockId(number * num_blocks + i) for i in range(num_blocks)]),
    )


def _contiguous_kv(stand: Stand) -> list[Row]:
    """Use the same memory as slots of maximum length: few sequences fit, and most of each slot stays empty."""
    bench = stand.bench
    paged, slots = _compare(
        bench,
        lambda turn: _as_meant(stand, turn),
        lambda turn: stand.serve(
            stand.asks(turn), policies.continuous, max_rows=bench.num_slots, reserved_tokens=bench.lengths.most
        ),
    )
    return [*_gain_rows("contiguous-kv", bench, paged, slots), *_memory_rows("contiguous-kv", paged, slots)]


def _static_batching(stand: Stand) -> list[Row]:
    """Use closed batches: finished rows stay empty until the batch's longest answer is complete."""
    bench = stand.bench
    ours, theirs = _compare(
        bench,
        lambda turn: stand.serve(stand.asks(turn), policies.continuous, max_rows=bench.batch_size),
        lambda turn: stand.serve(stand.asks(turn), policies.closed(bench.batch_size), max_rows=bench.batch_size),
    )
    return [*_gain_rows("static-batching", bench, ours, theirs), *_under_load(stand, ours)]


def _under_load(stand: Stand, known: Sequence[Served]) -> list[Row]:
    """Measure latencies where requests arrive one by one, at a rate that the engine can serve."""
    bench, asks = stand.bench, stand.asks(0)
    per_s = bench.load * len(asks) / median(seen.wall_s for seen in known)

    def run(policy: Policy) -> Callable[[int], Served]:
        return lambda turn: stand.serve(
            arriving(Random(f"bench:arrivals:{turn}"), stand.asks(turn), per_s), policy, max_rows=bench.batch_size
        )

    ours, theirs = _compare(bench, run(policies.continuous), run(policies.closed(bench.batch_size)))
    label = f"baseline.static-batching.{per_s:.2g}_per_s"
    unit = f"{len(asks)} requests, {per_s:.2g} arriving in a second"
    return [
        *_latency_rows(
            f"{label}.ttft",
            "s until a first token, mean",
            unit,
            [seen.first_s for seen in ours],
            [seen.first_s for seen in theirs],
        ),
        *_latency_rows(
            f"{label}.per_token",
            "s per token of a request, mean",
            unit,
            [seen.s_per_token for seen in ours],
            [seen.s_per_token for seen in theirs],
        ),
    ]


def _latency_rows(label: str, what: str, workload: str, ours: Sequence[float], theirs: Sequence[float]) -> list[Row]:
    gain = median(other / own for own, other in zip(ours, theirs, strict=True))
    return [
        figure(f"{label}.gain", gain, f"times: {workload}"),
        figure(f"{label}.ours", median(ours), what),
        figure(f"{label}.theirs", median(theirs), what),
    ]


def _padded_batches(stand: Stand) -> list[Row]:
    """Combine all baselines: closed, rectangular batches in slots of maximum length."""
    bench = stand.bench
    ours, theirs = _compare(
        bench,
        lambda turn: _as_meant(stand, turn),
        lambda turn: stand.serve(
            stand.asks(turn),
            policies.padded(bench.num_slots),
            max_rows=bench.num_slots,
            reserved_tokens=bench.lengths.most,
        ),
    )
    return _gain_rows("padded-batches", bench, ours, theirs)


def _as_meant(stand: Stand, turn: int) -> Served:
    """Serve with the full engine, in the memory of the slots."""
    bench = stand.bench
    return stand.serve(stand.asks(turn), policies.continuous, max_rows=bench.max_rows, num_blocks=bench.slot_blocks)


def _compare(
    bench: Bench, ours: Callable[[int], Served], theirs: Callable[[int], Served]
) -> tuple[list[Served], list[Served]]:
    """Alternate both sides, so that both see the same machine conditions."""
    turns = [(ours(turn), theirs(turn)) for turn in range(bench.turns)]
    return [own for own, _ in turns], [other for _, other in turns]


def _gain_rows(name: str, bench: Bench, ours: Sequence[Served], theirs: Sequence[Served]) -> list[Row]:
    gain = median(own.tokens_per_s / other.tokens_per_s for own, other in zip(ours, theirs, strict=True))
    return [
        figure(f"baseline.{name}.gain", gain, f"times: {bench.num_asks} requests of mixed length"),
        figure(f"baseline.{name}.ours", median(seen.tokens_per_s for seen in ours), "useful tokens/s"),
        figure(f"baseline.{name}.theirs", median(seen.tokens_per_s for seen in theirs), "useful tokens/s"),
    ]


def _memory_rows(name: str, paged: Sequence[Served], slots: Sequence[Served]) -> list[Row]:
    return [
        figure(f"baseline.{name}.rows_paged", max(seen.most_rows for seen in paged), "sequences at once"),
        figure(f"baseline.{name}.rows", max(seen.most_rows for seen in slots), "sequences at once"),
        figure(f"baseline.{name}.use_paged", 100 * median(seen.kv_use for seen in paged), "% of KV memory used"),
        figure(f"baseline.{name}.use", 100 * median(seen.kv_use for seen in slots), "% of KV memory used"),
        figure(f"baseline.{name}.preemptions_paged", max(seen.num_preemptions for seen in paged), "requests"),
    ]


_BASELINES: Mapping[str, Callable[[Stand], list[Row]]] = {
    "no-kv-cache": _no_kv_cache,
    "contiguous-kv": _contiguous_kv,
    "static-batching": _static_batching,
    "padded-batches": _padded_batches,
}
