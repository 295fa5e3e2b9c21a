"""What paging, caching and continuous batching gain: our own engine against itself without them.

Each baseline runs the same requests as the engine proper, turn by turn in the same process, on a small random model
whose weights still exceed the second-level caches; a gain is the median over turns of the ratio of the two.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from bench.engine_bench import policies
from bench.engine_bench.policies import Served, mixed_asks, serve
from bench.engine_bench.rig import assemble_from
from bench.make_model import cached_model
from bench.report import Row, figure
from bench.shapes import SHAPES
from engine.assembly import EngineParts
from engine.request import Batch, BatchItem, BlockTable, Request
from engine.scheduler import Scheduler
from tandem.ids import BlockHash, BlockId, RequestId
from tandem.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Sizes of the comparisons."""

    shape: str = "0.04b"
    num_blocks: int = 1024
    max_model_len: int = 1024
    max_rows: int = 128
    batch_size: int = 16
    """Of closed batches, and rows of the engine that they are compared with."""
    num_asks: int = 160
    mean_tokens: int = 48
    max_tokens: int = 512
    contexts: tuple[int, ...] = (128, 512, 896)
    """For the engine without a KV cache."""
    steps: int = 4
    turns: int = 2

    @property
    def num_slots(self) -> int:
        """Sequences that the same memory holds when each gets room for the longest."""
        return self.num_blocks * 16 // self.max_model_len


def rows(
    names: Sequence[str],
    note: Callable[[str], None],
    *,
    bench: Bench | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Figures of the named baselines; `settings` of the engine section hold for both sides. Raises ConfigError."""
    bench = bench or Bench()
    model = cached_model(SHAPES[bench.shape], note=note)
    parts = assemble_from(
        {
            "model.path": str(model),
            "model.dtype": "bfloat16",
            "model.max_model_len": bench.max_model_len,
            "engine.device": "cpu",
            "engine.num_blocks": bench.num_blocks,
            "engine.max_running_requests": bench.max_rows,
            **(settings or {}),
        }
    )
    found: list[Row] = []
    for name in names:
        note(f"baseline {name}")
        found += _BASELINES[name](parts, bench)
    return found


def _no_kv_cache(parts: EngineParts, bench: Bench) -> list[Row]:
    """One sequence; each new token either reads the cache or computes everything before it again."""
    found = []
    for context in bench.contexts:
        gains = []
        for turn in range(bench.turns):
            cached_s = _generate_s(parts, context, bench.steps, turn, recompute=False)
            recomputed_s = _generate_s(parts, context, bench.steps, turn, recompute=True)
            gains.append(recomputed_s / cached_s)
        unit = f"times: one sequence at {context} tokens, cached against recomputed"
        found.append(figure(f"baseline.no-kv-cache.{context}.gain", median(gains), unit))
    return found


def _generate_s(parts: EngineParts, context: int, steps: int, seed: int, *, recompute: bool) -> float:
    """Seconds per token after a context, driven past the scheduler: it knows no such thing as forgetting."""
    rng = Random(f"bench:baseline:{seed}")
    length = context + steps
    tokens = array("i", [rng.randrange(parts.model.vocab_size) for _ in range(context)])
    request = Request(
        request_id=RequestId("baseline"),
        token_ids=tokens,
        num_prompt_tokens=context,
        params=SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True),
        hash_root=BlockHash(b""),
        block_table=BlockTable([BlockId(i) for i in range(-(-length // parts.layout.block_size))]),
    )

    def step(start: int) -> None:
        item = BatchItem(request=request, start=start, num_tokens=len(tokens) - start, samples=True)
        tokens.append(parts.runner.execute(Batch(items=(item,)))[0].token_id)

    step(0)  # the prompt, for both
    started_s = perf_counter()
    for _ in range(steps - 1):
        step(0 if recompute else len(tokens) - 1)
    return (perf_counter() - started_s) / (steps - 1)


def _contiguous_kv(parts: EngineParts, bench: Bench) -> list[Row]:
    """The same pool as slots of the longest length: few sequences fit, and most of each slot stays empty."""
    paged, slots = _compare(
        bench,
        lambda turn: _serve(parts, bench, policies.continuous, turn, max_rows=bench.max_rows),
        lambda turn: _serve(
            parts, bench, policies.continuous, turn, max_rows=bench.num_slots, reserved_tokens=bench.max_model_len
        ),
    )
    pool = f"{bench.num_blocks * 16} tokens of pool, {bench.num_asks} mixed requests"
    return [
        *_gain_rows("contiguous-kv", paged, slots, pool),
        figure("baseline.contiguous-kv.rows_paged", max(seen.most_rows for seen in paged), "sequences at once"),
        figure("baseline.contiguous-kv.rows", max(seen.most_rows for seen in slots), "sequences at once"),
        figure("baseline.contiguous-kv.use_paged", 100 * median(seen.kv_use for seen in paged), "% of KV memory used"),
        figure("baseline.contiguous-kv.use", 100 * median(seen.kv_use for seen in slots), "% of KV memory used"),
    ]


def _static_batching(parts: EngineParts, bench: Bench) -> list[Row]:
    """Closed batches: finished rows stay empty until the batch's longest answer is over."""
    ours, theirs = _compare(
        bench,
        lambda turn: _serve(parts, bench, policies.continuous, turn, max_rows=bench.batch_size),
        lambda turn: _serve(parts, bench, _closed(policies.static, bench), turn, max_rows=bench.batch_size),
    )
    return _gain_rows("static-batching", ours, theirs, f"{bench.batch_size} rows, {bench.num_asks} mixed requests")


def _padded_batches(parts: EngineParts, bench: Bench) -> list[Row]:
    """Closed, rectangular batches: every row as long as the longest, in the prompt and in the answer."""
    ours, theirs = _compare(
        bench,
        lambda turn: _serve(parts, bench, policies.continuous, turn, max_rows=bench.batch_size),
        lambda turn: _serve(parts, bench, _closed(policies.padded, bench), turn, max_rows=bench.batch_size),
    )
    return _gain_rows("padded-batches", ours, theirs, f"{bench.batch_size} rows, {bench.num_asks} mixed requests")


_Asks = Sequence[policies.Ask]
_Policy = Callable[[_Asks], list[list[policies.Ask]]]


def _closed(policy: Callable[[_Asks, int], list[list[policies.Ask]]], bench: Bench) -> _Policy:
    return lambda asks: policy(asks, bench.batch_size)


def _serve(
    parts: EngineParts,
    bench: Bench,
    policy: _Policy,
    turn: int,
    *,
    max_rows: int,
    reserved_tokens: int | None = None,
) -> Served:
    """A turn's requests under a policy, on a scheduler of its own, so that no cache is left from before."""
    asks = mixed_asks(
        Random(f"bench:mixed:{turn}"),
        bench.num_asks,
        vocab_size=parts.model.vocab_size,
        prompt_tokens=(16, 128),
        mean_tokens=bench.mean_tokens,
        max_tokens=bench.max_tokens,
    )
    scheduler = Scheduler(replace(parts.config, max_running_requests=max_rows), parts.hasher)
    served = serve(scheduler, parts.runner, policy(asks), reserved_tokens=reserved_tokens)
    return replace(served, useful_tokens=sum(ask.num_tokens for ask in asks))


def _compare(
    bench: Bench, ours: Callable[[int], Served], theirs: Callable[[int], Served]
) -> tuple[list[Served], list[Served]]:
    """Turn by turn, so that both meet the same weather."""
    turns = [(ours(turn), theirs(turn)) for turn in range(bench.turns)]
    return [own for own, _ in turns], [other for _, other in turns]


def _gain_rows(name: str, ours: Sequence[Served], theirs: Sequence[Served], workload: str) -> list[Row]:
    gain = median(own.tokens_per_s / other.tokens_per_s for own, other in zip(ours, theirs, strict=True))
    return [
        figure(f"baseline.{name}.gain", gain, f"times: {workload}"),
        figure(f"baseline.{name}.ours", median(seen.tokens_per_s for seen in ours), "useful tokens/s"),
        figure(f"baseline.{name}.theirs", median(seen.tokens_per_s for seen in theirs), "useful tokens/s"),
    ]


_BASELINES: Mapping[str, Callable[[EngineParts, Bench], list[Row]]] = {
    "no-kv-cache": _no_kv_cache,
    "contiguous-kv": _contiguous_kv,
    "static-batching": _static_batching,
    "padded-batches": _padded_batches,
}
