"""Metrics of workers' engines, from their reports; rates are computed by the reader."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.metrics.instruments import cumulative
from router.types.worker_view import DraftSourceTotals, EngineWorkReport, WorkerSnapshot
from tandem.values.step_sizes import DRAFT_PLACES, STEP_SIZES

_WORKER = ("worker", "role")
_STEPS: Mapping[str, tuple[str, str]] = {
    "steps": (
        "tandem_worker_steps",
        "Engine steps by kind: `prefill` steps compute prompt tokens, `decode` steps one token per request, and drafts",
    ),
    "seconds": ("tandem_worker_step_seconds", "Time spent in engine steps; its rate is the engine's utilization"),
    "tokens": ("tandem_worker_step_tokens", "Tokens computed in engine steps, drafts included"),
    "requests": (
        "tandem_worker_step_requests",
        "Requests in engine steps, summed over steps; divided by steps, the mean batch size",
    ),
    "draft_tokens": ("tandem_worker_step_draft_tokens", "Draft tokens verified in engine steps"),
    "accepted_tokens": (
        "tandem_worker_step_accepted_tokens",
        "Draft tokens that were right; divided by draft tokens, the acceptance rate",
    ),
}
_LAST_PLACE = DRAFT_PLACES - 1
_PLACES = (*map(str, range(_LAST_PLACE)), f"{_LAST_PLACE}+")
"""Label of each place in a draft."""
_UNKNOWN_SOURCE = "unknown"
_SIZES = dict(enumerate(map(floatToGoString, STEP_SIZES)))
_MEMORY: Mapping[str, str] = {"resident_bytes": "resident", "weights_bytes": "weights", "kv_bytes": "kv_pool"}


def _without_sources(work: EngineWorkReport) -> tuple[DraftSourceTotals, ...]:
    """The drafts of a worker whose version does not tell their sources; none where nothing was drafted."""
    steps = (work.prefill, work.decode)
    tokens, accepted = sum(one.draft_tokens for one in steps), sum(one.accepted_tokens for one in steps)
    if not tokens:
        return ()
    unknown = _UNKNOWN_SOURCE
    return (DraftSourceTotals(source=unknown, drafts=0, draft_tokens=(tokens,), accepted_tokens=(accepted,)),)


class WorkMetrics(Collector):
    """Exports workers' last reports; a worker that left is not exported."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._shown: list[tuple[tuple[str, str], EngineWorkReport]] = []
        self._pools: list[tuple[str, int, int]] = []

    def update(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Replace the reports to export."""
        self._shown = [
            ((snapshot.info.key.worker_id, snapshot.info.role.value), snapshot.load.work)
            for snapshot in snapshots
            if snapshot.load.work is not None
        ]
        self._pools = [
            (snapshot.info.key.worker_id, snapshot.info.num_blocks, snapshot.info.layout.block_size)
            for snapshot in snapshots
        ]

    def collect(self) -> Iterable[Metric]:
        for field, (name, text) in _STEPS.items():
            steps = CounterMetricFamily(name, text, labels=(*_WORKER, "kind"))
            for labels, work in self._shown:
                steps.add_metric((*labels, "prefill"), getattr(work.prefill, field))
                steps.add_metric((*labels, "decode"), getattr(work.decode, field))
            yield steps
        memory = GaugeMetricFamily(
            "tandem_worker_memory_bytes",
            "Memory: resident set of the worker's first process; weights and KV pool of all ranks",
            labels=(*_WORKER, "kind"),
        )
        flops = GaugeMetricFamily(
            "tandem_worker_flops_per_token",
            "Floating-point operations per token in the layers' matrix products",
            labels=_WORKER,
        )
        preempted = CounterMetricFamily(
            "vllm:num_preemptions", "Requests preempted for lack of KV blocks", labels=("model_name", "engine")
        )
        for labels, work in self._shown:
            for field, kind in _MEMORY.items():
                memory.add_metric((*labels, kind), getattr(work, field))
            flops.add_metric(labels, work.flops_per_token)
            preempted.add_metric((self._model, labels[0]), work.preemptions)
        yield from (memory, flops, preempted, *self._speculation(), self._sizes(), self._config())

    def _speculation(self) -> Iterable[Metric]:
        """Drafts by source, under vLLM's names and, by place in the draft, under ours."""
        engine = ("model_name", "engine", "source")
        drafts = CounterMetricFamily("vllm:spec_decode_num_drafts", "Drafts verified", labels=engine)
        drafted = CounterMetricFamily("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", labels=engine)
        right = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right", labels=engine
        )
        right_at = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            f"Draft tokens accepted, by position in the draft, from 0; `{_PLACES[-1]}`: all further ones",
            labels=(*engine, "position"),
        )
        rate = GaugeMetricFamily(
            "vllm:spec_decode_draft_acceptance_rate",
            "Share of verified draft tokens that were accepted, since the worker's start",
            labels=engine,
        )
        own = tuple(
            CounterMetricFamily(name, text, labels=(*_WORKER, "source", "position"))
            for name, text in (
                ("tandem_worker_draft_tokens", "Draft tokens verified, by source and position"),
                ("tandem_worker_draft_accepted_tokens", "Draft tokens accepted, by source and position"),
            )
        )
        for labels, work in self._shown:
            for one in work.drafts or _without_sources(work):
                names = (self._model, labels[0], one.source)
                num_tokens, num_right = sum(one.draft_tokens), sum(one.accepted_tokens)
                if one.source != _UNKNOWN_SOURCE:
                    drafts.add_metric(names, one.drafts)
                drafted.add_metric(names, num_tokens)
                right.add_metric(names, num_right)
                if num_tokens:
                    rate.add_metric(names, num_right / num_tokens)
                places = () if one.source == _UNKNOWN_SOURCE else _PLACES
                for place, tokens, accepted in zip(places, one.draft_tokens, one.accepted_tokens, strict=False):
                    if tokens:
                        right_at.add_metric((*names, place), accepted)
                        own[0].add_metric((*labels, one.source, place), tokens)
                        own[1].add_metric((*labels, one.source, place), accepted)
        yield from (drafts, drafted, right, right_at, rate, *own)

    def _sizes(self) -> Metric:
        text = "Tokens of each step of a worker's engine"
        sizes = HistogramMetricFamily("vllm:iteration_tokens_total", text, labels=("model_name", "engine"))
        for labels, work in self._shown:
            if work.step_sizes:
                num_tokens = work.prefill.tokens + work.decode.tokens
                sizes.add_metric((self._model, labels[0]), cumulative(work.step_sizes, _SIZES), num_tokens)
        return sizes

    def _config(self) -> Metric:
        names = ("model_name", "engine", "block_size", "num_gpu_blocks")
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Block size and number of KV blocks of each worker as labels; always 1",
            labels=names,
        )
        for worker, num_blocks, block_size in self._pools:
            info.add_metric((self._model, worker, str(block_size), str(num_blocks)), 1.0)
        return info
