"""Every metric of the router, in its own registry: nothing is global, so tests and processes may hold several.

Names under `vllm:` mean what they mean in vLLM (buckets too), so that existing dashboards work; `tandem_` names are
ours. The servers measure requests through `router.api.request_meter`; `RouterMetrics` is dispatch's observer as well.
Label values are our own, never a client's text.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.dispatch.choices.retry import RetryReason
from router.metrics.ended_requests import EndedRequest, EndedRequests
from router.metrics.engine_work import WorkMetrics
from router.metrics.instruments import LabelledCounter, LocalHistogram, SingleValue
from router.metrics.latency_slices import SliceMetrics
from router.metrics.quantiles import FINE_BOUNDS_S
from router.metrics.request_outcomes import GenAiMetrics, RequestVerdict, judge_request
from router.metrics.stream_writers import StreamWriterMetrics
from router.metrics.tenants import TenantLabels, UsageMetrics
from router.metrics.worker_reports import (
    AdapterLoadMetrics,
    PinMetrics,
    PublishMetrics,
    TierMetrics,
    TransferMetrics,
)
from router.placement.worker_selection import PlacementReason
from router.tenants.usage import TenantUsage
from router.types.worker_view import WorkerSnapshot
from tandem.config.telemetry import ObjectivesConfig
from tandem.errors import Code
from tandem.values.outputs import FinishReason
from tandem.values.roles import WorkerRole

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_E2E = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(scale * 10**power) for power in range(6) for scale in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_TRANSFER = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LABELS = ("model_name", "engine")
_ENGINE = "router"
_FOLDED_TOGETHER = 64
"""Observations of a histogram that are sorted into its buckets together."""
_DECIDING = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class PlacementMetrics:
    """A `router.placement.decision_log.PlacementObserver` that also exports the size of the prefix map."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = LabelledCounter(
            "tandem_placement_decisions",
            "Placed choices, by where the prompt is computed and by how a cached prefix influenced that",
            ("reason", "affinity"),
        )
        self._seconds = LocalHistogram("tandem_placement_seconds", "Time to decide one placement", _DECIDING, {})
        self._cached = LabelledCounter(
            "tandem_placement_cached_tokens",
            "Prompt tokens that placement predicted to be cached on the chosen worker, and those that were",
            ("kind",),
        )
        for collector in (self._decisions, self._seconds, self._cached):
            registry.register(collector)
        self._blocks = Gauge("tandem_prefix_map_blocks", "Block names in the prefix map", registry=registry)
        self._approximate = Gauge(
            "tandem_prefix_map_approximate_workers",
            "Workers whose prefix cache is only partly known",
            registry=registry,
        )

    def decided(self, *, reason: str, affinity: str, seconds: float) -> None:
        """Count a placed choice; values of PlacementReason and Affinity."""
        self._decisions.values[reason, affinity] += 1.0
        self._seconds.observe(seconds)
        if len(self._seconds.pending) >= _FOLDED_TOGETHER:
            self._seconds.fold()

    def compared(self, *, predicted_tokens: int, actual_tokens: int) -> None:
        """Compare predicted and actual cached tokens, known once the first token of a placed choice arrives."""
        self._cached.values[("predicted",)] += predicted_tokens
        self._cached.values[("actual",)] += actual_tokens

    def prefix_map(self, *, num_blocks: int, num_approximate: int) -> None:
        """Set the number of block names over all workers, and of workers whose blocks are not all known."""
        self._blocks.set(num_blocks)
        self._approximate.set(num_approximate)


_I = TypeVar("_I", bound=Collector)


class _Aging(Protocol):
    """A request that has not ended."""

    @property
    def age_s(self) -> float: ...


class RouterMetrics:
    """The router's registry and its instruments."""

    def __init__(
        self, model_name: str, usage: TenantUsage | None = None, objectives: ObjectivesConfig | None = None
    ) -> None:
        """`usage`: keeps tenants' totals. `objectives`: the latencies that make a request count as goodput."""
        self.usage = usage or TenantUsage()
        self._objectives = objectives or ObjectivesConfig()
        self.registry = CollectorRegistry()
        self.ended = self._registered(EndedRequests(self._observe_ended))
        self._model = (model_name, _ENGINE)
        self._histograms: list[LocalHistogram] = []
        self._refresh: Callable[[], None] = _nothing
        self._collect: Callable[[], Awaitable[bytes]] = self._alone
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests without a first token yet")
        self.running = self._gauge("vllm:num_requests_running", "Requests that are streaming tokens")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of started requests")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens sent to clients")
        self.writers = self._registered(StreamWriterMetrics(self.generation_tokens))
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in prefix caches")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in prefix caches")
        self.ttft = self._latency("vllm:time_to_first_token_seconds", "Time from arrival to the first token", _TTFT)
        self.itl = self._latency("vllm:inter_token_latency_seconds", "Time between two tokens of one choice", _ITL)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token", _E2E)
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", "Time in workers' queues", _E2E)
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds", "Time to compute the prompt", _E2E)
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "Time from the first to the last token", _E2E
        )
        self.inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "Prefill and decode time of a request", _E2E
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token after the first, by request", _ITL
        )
        self.max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens of requests", _TOKENS)
        self.num_choices = self._histogram("vllm:request_params_n", "n of requests", _CHOICES)
        self.longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest choice", _TOKENS
        )
        self.prompt_size = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request", _TOKENS)
        self.answer_size = self._histogram("vllm:request_generation_tokens", "Tokens per choice", _TOKENS)
        self.transfer_time = self._histogram(
            "tandem_transfer_seconds", "KV transfer time that does not overlap with prefill", _TRANSFER
        )
        self._add_outcomes()
        self._add_workers()
        self._transfers, self._tiers, self._publishing = TransferMetrics(), TierMetrics(), PublishMetrics()
        self._pins, self._work, self._adapters = PinMetrics(), WorkMetrics(model_name), AdapterLoadMetrics()
        self.tenants = TenantLabels()
        self.usage.label = self.tenants.label
        shown = (self._transfers, self._tiers, self._publishing, self._pins, self._work, self._adapters)
        for collector in (*shown, UsageMetrics(self.usage, self.tenants)):
            self.registry.register(collector)
        self.placement = PlacementMetrics(self.registry)
        self.slices = SliceMetrics(self.registry, self.tenants)
        self.genai = GenAiMetrics(self.registry, model_name)
        self._open: dict[_Aging, None] = {}
        oldest = Gauge("tandem_oldest_request_seconds", "Age of the oldest unfinished request", registry=self.registry)
        oldest.set_function(lambda: max((meter.age_s for meter in islice(self._open, 1)), default=0.0))

    def _add_outcomes(self) -> None:
        """Add outcomes of requests, calls and attempts."""
        self._success = self._counters(
            "vllm:request_success",
            "Choices that ended successfully",
            (*_LABELS, "finished_reason"),
            known=[(*self._model, reason.value) for reason in (FinishReason.STOP, FinishReason.LENGTH)],
        )
        self._failures = self._counters(
            "tandem_request_failures", "Requests that failed", ("code",), known=[(code.value,) for code in Code]
        )
        self._judged = self._counters(
            "tandem_judged_requests",
            "Requests by whether they met `telemetry.objectives`, without those that clients cancelled",
            ("verdict",),
            known=[(verdict.value,) for verdict in RequestVerdict],
        )
        self._http = self._counters(
            "tandem_http_requests", "HTTP responses by route, method and status", ("route", "method", "status")
        )
        self._rpcs = Counter(
            "tandem_grpc_requests", "gRPC calls by method and status code", ("method", "code"), registry=self.registry
        )
        self._placements = self._counters(
            "tandem_placements",
            "Placements by where the prompt is computed",
            ("reason",),
            known=[(reason.value,) for reason in PlacementReason],
        )
        self._retries = self._counters(
            "tandem_dispatch_retries",
            "Dispatch attempts after a request's first one, by reason",
            ("reason",),
            known=[(reason.value,) for reason in RetryReason],
        )

    def _add_workers(self) -> None:
        """Add the reports of workers that no collector of its own exports."""
        self._workers = Gauge("tandem_workers", "Workers by role and state", ("role", "state"), registry=self.registry)
        text = (
            "Configured number of workers; an autoscaler may run another number, but a pool of 0 is absent on purpose"
        )
        self._stated = Gauge("tandem_pool_stated_workers", text, ("role",), registry=self.registry)
        text, roles = "Workers that were lost without having been stopped", [(role.value,) for role in WorkerRole]
        self._lost = self._counters("tandem_workers_lost", text, ("role",), known=roles)
        text = "Whether the router is ready: at least one decode worker accepts requests and produces tokens"
        self._ready = Gauge("tandem_ready", text, registry=self.registry)
        text = "Decode workers that produce tokens and can be paired with a prefill worker"
        self._pairs = Gauge("tandem_ready_pairs", text, registry=self.registry)
        self._gauges_of_workers: list[Gauge] = []
        """Blank before each scrape, so that none keeps what a worker that left has reported."""
        self._pool = self._of_worker("tandem_worker_kv_blocks", "KV blocks by state", "state")
        self._requests = self._of_worker("tandem_worker_requests", "Requests by state", "state")
        self._backlog = self._of_worker(
            "tandem_worker_backlog_tokens", "Tokens accepted by the worker and not yet computed"
        )
        age, text = "tandem_worker_step_age_seconds", "How long the engine has been in its current step"
        self._step_age = self._of_worker(age, text)
        version, text = "tandem_worker_protocol_version", "Protocol version of the session with the worker"
        self._versions = self._of_worker(version, text)
        direct, text = "tandem_worker_session_direct", "Whether the worker's session has a connection of its own"
        self._direct = self._of_worker(direct, text)
        usage, text = "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1"
        self._kv_usage = self._blank_gauge(usage, text, _LABELS)

    def on_render(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` before each scrape, to bring gauges up to date."""
        self._refresh = refresh

    def collect_with(self, collect: Callable[[], Awaitable[bytes]]) -> None:
        """Answer scrapes with the result of `collect`, which covers this process and others."""
        self._collect = collect

    async def collect(self) -> bytes:
        """Return the answer to a scrape. It takes milliseconds: see `router.http.admin.operations.SharedScrape`."""
        return await self._collect()

    async def _alone(self) -> bytes:
        return self.render()

    def render(self) -> bytes:
        """Render the text exposition format."""
        self._refresh()
        return generate_latest(self.registry)

    def http_answered(self, route: str, method: str, status: int) -> None:
        """Count an HTTP answer; `route` is the route's pattern, never the requested path."""
        self._http.values[route, method, str(status)] += 1.0

    def rpc_answered(self, method: str, code: str) -> None:
        """Count a gRPC answer; `code` is a name of grpc.StatusCode."""
        self._rpcs.labels(method, code).inc()

    def succeeded(self, reason: str) -> None:
        """Count a choice that ended with `reason`."""
        self._success.values[*self._model, reason] += 1.0

    def failed(self, code: Code) -> None:
        """Count a request that ended with an error."""
        self._failures.inc(code.value)

    def _observe_ended(self, request: EndedRequest) -> None:
        """Add a request to the instruments, as a whole and by its choices, whose phase times are the workers' own."""
        for finish, num_tokens in zip(request.finishes, request.sizes, strict=True):
            spent = finish.times
            self.answer_size.observe(num_tokens)
            self.queue_time.observe(spent.prefill_queue_s + spent.decode_queue_s)
            self.prefill_time.observe(spent.prefill_s)
            self.transfer_time.observe(spent.transfer_s)
            decode_s = spent.transfer_s + spent.decode_queue_s + spent.decode_s
            self.decode_time.observe(decode_s)
            self.inference_time.observe(spent.prefill_s + decode_s)
        ttft_s = per_token_s = None
        if (times := request.times) is not None:
            ttft_s, per_token_s = times.first_s - times.arrived_s, times.per_token_s(request.num_tokens)
            self.slices.ended(request.traits, times, request.finishes, request.num_tokens)
            self.longest.observe(request.num_tokens)
            if per_token_s is not None:
                self.per_token.observe(per_token_s)
        verdict = judge_request(self._objectives, request.code, ttft_s=ttft_s, per_token_s=per_token_s)
        if verdict is not None:
            self._judged.values[(verdict.value,)] += 1.0
        self.genai.ended(
            request.traits.operation, request.seconds, request.code, ttft_s=ttft_s, per_token_s=per_token_s
        )

    @property
    def num_succeeded(self) -> float:
        """Choices that ended successfully."""
        return self._success.sum()

    @property
    def num_failed(self) -> float:
        """Requests that failed, without those that clients cancelled."""
        return self._failures.sum(without=Code.CANCELLED.value)

    def placed(self, mode: str) -> None:
        """Count an attempt that dispatch sent to workers; `mode` is a value of PlacementReason."""
        self._placements.values[(mode,)] += 1.0

    def retried(self, reason: str) -> None:
        """Count a retry of dispatch; a value of RetryReason."""
        self._retries.inc(reason)

    def workers(self, role: str, state: str, count: int) -> None:
        """Set how many workers of a role are in a state, such as (`decode`, `live`)."""
        self._workers.labels(role, state).set(count)

    def workers_lost(self, role: str, total: int) -> None:
        """Set how many workers of a role were lost without a drain since this router started."""
        self._lost.set_total(role, total=total)

    def stated_workers(self, role: str, count: int) -> None:
        """Set how many workers of a role the configuration names."""
        self._stated.labels(role).set(count)

    def ready(self, is_ready: bool, *, num_paired: int) -> None:
        """Set whether the router is ready, and how many decode workers can pair with a prefill worker."""
        self._ready.set(is_ready)
        self._pairs.set(num_paired)

    def worker_loads(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """Set each live worker's last reports; one that left is no longer exported."""
        for gauge in self._gauges_of_workers:
            gauge.clear()
        self._transfers.update(snapshots)
        self._tiers.update(snapshots)
        self._pins.update(snapshots)
        self._adapters.update(snapshots)
        self._work.update(snapshots)
        self._publishing.update(tuple(snapshots))
        for snapshot in snapshots:
            info, load = snapshot.info, snapshot.load
            worker = (info.key.worker_id, info.role.value)
            used = info.num_blocks - load.num_free_blocks
            for state, count in (
                ("free", load.num_free_blocks),
                ("used", used),
                ("quarantined", load.num_quarantined_blocks),
            ):
                self._pool.labels(*worker, state).set(count)
            self._step_age.labels(*worker).set(load.step_age_s)
            self._versions.labels(*worker).set(info.protocol_version)
            self._direct.labels(*worker).set(info.is_direct)
            self._backlog.labels(*worker).set(load.backlog_tokens)
            self._requests.labels(*worker, "running").set(load.num_running)
            self._requests.labels(*worker, "waiting").set(load.num_waiting - load.num_reserved)
            self._requests.labels(*worker, "reserved").set(load.num_reserved)
            self._kv_usage.labels(self._model[0], info.key.worker_id).set(used / info.num_blocks)

    def _of_worker(self, name: str, text: str, *more: str) -> Gauge:
        return self._blank_gauge(name, text, ("worker", "role", *more))

    def _blank_gauge(self, name: str, text: str, labels: Sequence[str]) -> Gauge:
        gauge = Gauge(name, text, labels, registry=self.registry)
        self._gauges_of_workers.append(gauge)
        return gauge

    def _counter(self, name: str, text: str) -> SingleValue:
        return self._registered(
            SingleValue(name, text, CounterMetricFamily, dict(zip(_LABELS, self._model, strict=True)))
        )

    def _counters(
        self, name: str, text: str, labels: Sequence[str], *, known: Iterable[tuple[str, ...]] = ()
    ) -> LabelledCounter:
        return self._registered(LabelledCounter(name, text, labels, known=known))

    def opened(self, meter: _Aging) -> None:
        self._open[meter] = None

    def closed(self, meter: _Aging) -> None:
        self._open.pop(meter, None)
        # Every request has an observation there.
        if len(self.num_choices.pending) >= _FOLDED_TOGETHER:
            for histogram in self._histograms:
                histogram.fold()

    def on_load(self) -> None:
        """Handle a load report, of which workers send several each second: keeps the pending observations few."""
        if len(self.itl.pending) >= _FOLDED_TOGETHER:
            self.itl.fold()

    def _gauge(self, name: str, text: str) -> SingleValue:
        return self._registered(
            SingleValue(name, text, GaugeMetricFamily, dict(zip(_LABELS, self._model, strict=True)))
        )

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *, finer: Sequence[float] = ()
    ) -> LocalHistogram:
        labels = dict(zip(_LABELS, self._model, strict=True))
        histogram = self._registered(LocalHistogram(name, text, buckets, labels, finer=finer))
        self._histograms.append(histogram)
        return histogram

    def _latency(self, name: str, text: str, buckets: tuple[float, ...]) -> LocalHistogram:
        """Make a histogram whose quantiles the status shows."""
        return self._histogram(name, text, buckets, finer=FINE_BOUNDS_S)

    def _registered(self, instrument: _I) -> _I:
        self.registry.register(instrument)
        return instrument


def _nothing() -> None:
    """Do nothing: the default of `on_render`."""
