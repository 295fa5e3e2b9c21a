"""Reads the figures that a planner needs from the text of one router's `/metrics`. Pure.

Requests, answers, first tokens and errors are counts since the router started; queues, workers and their backlog are
present values. Every router reports the same about workers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.planner.histogram import Histogram
from cluster.planner.values import Sizes
from tandem.errors import Code
from tandem.values.roles import WorkerRole

_PROMPTS = "vllm:request_prompt_tokens"
_ANSWERS = "vllm:request_generation_tokens"
_FIRST = "vllm:time_to_first_token_seconds"
_QUERIED = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_FAILURES = "tandem_request_failures_total"
_REJECTIONS = "tandem_rejections_total"
_QUEUE = "tandem_queue_tokens"
_BACKLOG = "tandem_worker_backlog_tokens"
_WORKERS = "tandem_workers"
_STEPS = "tandem_worker_step"
_POOL = "vllm:cache_config_info"
_BLOCKS = "tandem_worker_kv_blocks"
_PINNED = "tandem_worker_pinned_blocks"
_TO_DECODE = "tandem_queue_tokens whom no reader helps"
_READ = (
    _PROMPTS, _ANSWERS, _FIRST, _QUERIED, _HITS, _FAILURES, _REJECTIONS, _QUEUE, _BACKLOG, _WORKERS, _STEPS, _POOL,
    _BLOCKS, _PINNED,
)  # fmt: skip
_OURS = {Code.INTERNAL.value, Code.UNAVAILABLE.value, Code.DEADLINE_EXCEEDED.value, Code.RESOURCE_EXHAUSTED.value}
"""Failures that more workers might have prevented; the others are the client's."""
_OF_LIMITS = {"concurrent_requests", "requests_per_minute", "tokens_per_minute", "draining"}
"""Reasons for rejecting a request that more workers would not change."""
_FOR_READERS = {"prefill", "both"}
"""Resources that queued requests wait for and that more prefill workers would provide."""
_LARGEST = float(1 << 63)
"""Upper bound of credible values: anything above it, below 0 or not a number is not used for planning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Steps of one kind on one worker since it started."""

    steps: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFigures:
    """Metrics of one router at one moment."""

    prompts: Histogram
    answers: Histogram
    first_tokens: Histogram
    queried_tokens: float = 0.0
    hit_tokens: float = 0.0
    num_lost: float = 0.0
    """Requests without an answer that are not the client's fault."""
    queued_tokens: float = 0.0
    """Tokens of queued prompts that wait for prefill and not for room to decode."""
    total_queued_tokens: float = 0.0
    """Tokens of all queued prompts, whatever they wait for."""
    taken_kv: Mapping[str, float] = field(default_factory=dict)
    """Share of each decode worker's KV that is in use; pinned blocks that can be freed do not count."""
    backlog_tokens: Mapping[str, float] = field(default_factory=dict)
    """Backlog in tokens by worker."""
    live: Sizes = field(default_factory=lambda: Sizes(prefill=0, decode=0))
    steps: Mapping[tuple[str, str, str], StepCounts] = field(default_factory=dict)
    """Steps by worker, its role, and kind of step."""
    decode_kv_tokens: int | None = None
    """KV tokens in the smallest pool of a decode worker; None: unknown."""

    def has_restarted(self, earlier: "RouterFigures") -> bool:
        """Return whether this router or one of its processes has restarted since."""
        pairs = (
            (self.prompts, earlier.prompts),
            (self.answers, earlier.answers),
            (self.first_tokens, earlier.first_tokens),
        )
        return self.num_lost < earlier.num_lost or any(now.fell_below(before) for now, before in pairs)


def read_figures(text: str) -> RouterFigures:
    """Parse the text format. ValueError for metrics that no router of ours serves."""
    buckets: dict[str, dict[float, float]] = {_PROMPTS: {}, _ANSWERS: {}, _FIRST: {}}
    sums: dict[str, float] = {}
    backlog: dict[str, float] = {}
    roles: dict[str, str] = {}
    kv_tokens: dict[str, int] = {}
    blocks: dict[str, dict[str, float]] = {}
    live = {"prefill": 0, "decode": 0}
    steps: dict[tuple[str, str, str], dict[str, float]] = {}
    try:
        for name, labels, value in ((sample.name, sample.labels, sample.value) for sample in _samples(text)):
            base = name.removesuffix("_bucket")
            if base in buckets:
                buckets[base][inf if labels["le"] == "+Inf" else float(labels["le"])] = value
            elif (what := _step_field(name)) is not None:
                steps.setdefault((labels["worker"], labels["role"], labels["kind"]), {})[what] = value
            elif name == _BACKLOG:
                backlog[labels["worker"]] = value
                roles[labels["worker"]] = labels["role"]
            elif name == _POOL:
                tokens = int(labels["block_size"]) * int(labels["num_gpu_blocks"])
                kv_tokens[labels["engine"]] = int(_sane(name, tokens))
            elif (state := _state_of_blocks(name, labels)) is not None:
                blocks.setdefault(labels["worker"], {})[state] = value
            elif name == _WORKERS and labels["state"] == "live" and labels["role"] in live:
                live[labels["role"]] = int(value)
            elif (key := _key(name, labels)) is not None:
                sums[key] = sums.get(key, 0.0) + value
    except KeyError as error:
        raise ValueError(f"a metric lacks its label {error}") from None
    if not all(buckets.values()):
        raise ValueError("histograms of requests are missing: not a router of this version")
    made = {name: Histogram.from_cumulative(found, sums.get(f"{name}_sum", 0.0)) for name, found in buckets.items()}
    return RouterFigures(
        prompts=made[_PROMPTS],
        answers=made[_ANSWERS],
        first_tokens=made[_FIRST],
        queried_tokens=sums.get(_QUERIED, 0.0),
        hit_tokens=sums.get(_HITS, 0.0),
        num_lost=max(0.0, sums.get(_FAILURES, 0.0) - sums.get(_REJECTIONS, 0.0)),
        queued_tokens=sums.get(_QUEUE, 0.0),
        total_queued_tokens=sums.get(_QUEUE, 0.0) + sums.get(_TO_DECODE, 0.0),
        taken_kv={worker: _taken(states) for worker, states in blocks.items()},
        backlog_tokens=backlog,
        live=Sizes(prefill=live["prefill"], decode=live["decode"]),
        steps={key: StepCounts(**counts) for key, counts in steps.items()},
        decode_kv_tokens=_smallest_of_decode(kv_tokens, roles),
    )


def _smallest_of_decode(kv_tokens: Mapping[str, int], roles: Mapping[str, str]) -> int | None:
    pools = (tokens for worker, tokens in kv_tokens.items() if roles.get(worker) == WorkerRole.DECODE.value)
    return min(pools, default=None)


def _samples(text: str) -> Iterator[Sample]:
    # A planner needs only a few of a router's metrics, and parsing is what costs time.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_READ))
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            _sane(sample.name, sample.value)
            yield sample


def _sane(name: str, value: float) -> float:
    if not 0.0 <= value <= _LARGEST:  # not a number is neither
        raise ValueError(f"{name} is {value:g}")
    return value


def _key(name: str, labels: Mapping[str, str]) -> str | None:
    """Return the key under which a plain number is added up; None if it is not."""
    if name == _FAILURES and labels["code"] not in _OURS:
        return None
    if name == _REJECTIONS and labels["reason"] not in _OF_LIMITS:
        return None
    if name == _QUEUE and labels.get("lacks", "prefill") not in _FOR_READERS:
        return _TO_DECODE
    return name


def _state_of_blocks(name: str, labels: Mapping[str, str]) -> str | None:
    """Return the state of a decode worker's KV blocks that a sample counts; None for other samples."""
    if name not in (_BLOCKS, _PINNED) or labels["role"] != WorkerRole.DECODE.value:
        return None
    return labels["state"] if name == _BLOCKS else _PINNED


def _taken(blocks: Mapping[str, float]) -> float:
    """Return the share of a pool's blocks that sequences use."""
    used = blocks.get("used", 0.0)
    total = blocks.get("free", 0.0) + used
    return max(0.0, used - blocks.get(_PINNED, 0.0)) / total if total > 0.0 else 0.0


def _step_field(name: str) -> str | None:
    if name == f"{_STEPS}s_total":
        return "steps"
    what = name.removeprefix(f"{_STEPS}_").removesuffix("_total")
    return what if what in ("seconds", "tokens", "requests") and name == f"{_STEPS}_{what}_total" else None
