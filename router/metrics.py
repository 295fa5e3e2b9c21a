"""Every metric of the router, in its own registry: nothing is global, so tests and processes may hold several.

Names under `vllm:` mean what they mean in vLLM (buckets too), so that existing dashboards work; `tandem_` names are
ours. The doors measure requests through `RequestMeter`; `RouterMetrics` is dispatch's observer as well.
Label values are ours alone, never a client's words.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from router.audit import current_entry
from router.board_metrics import PublishMetrics
from router.instruments import Spread, Total, Totals
from router.pin_metrics import PinMetrics
from router.placement_metrics import PlacementMetrics
from router.requests import ChoiceFinish, RoutedRequest
from router.spending import Spent
from router.status.quantiles import FINE_BOUNDS_S
from router.tenant_usage import TenantUsage
from router.tier_metrics import TierMetrics
from router.transfer_metrics import TransferMetrics
from router.worker_view import WorkerSnapshot
from tandem.errors import Code, ServingError
from tandem.tracing import Span

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
_TRANSFER = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LABELS = ("model_name", "engine")
_ENGINE = "router"
_I = TypeVar("_I", Total, Totals, Spread)


class RouterMetrics:
    """The registry and its instruments."""

    def __init__(self, model_name: str, usage: TenantUsage | None = None) -> None:
        """`usage`: where tenants' totals are kept."""
        self.usage = usage or TenantUsage()
        self.registry = CollectorRegistry()
        self._model = (model_name, _ENGINE)
        self._refresh: Callable[[], None] = _nothing
        self._collect: Callable[[], Awaitable[bytes]] | None = None
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests without a first token yet")
        self.running = self._gauge("vllm:num_requests_running", "Requests that are streaming tokens")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of started requests")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens sent to clients")
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in prefix caches")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in prefix caches")
        self.ttft = self._latency("vllm:time_to_first_token_seconds", "Arrival to first token", _TTFT)
        self.itl = self._latency("vllm:inter_token_latency_seconds", "Between two tokens of one choice", _ITL)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _E2E)
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", "Waiting in workers' queues", _E2E)
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds", "Computing the prompt", _E2E)
        self.decode_time = self._histogram("vllm:request_decode_time_seconds", "First to last token", _E2E)
        self.prompt_size = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request", _TOKENS)
        self.answer_size = self._histogram("vllm:request_generation_tokens", "Tokens per choice", _TOKENS)
        self.transfer_time = self._histogram("tandem_transfer_seconds", "KV transfer not hidden by prefill", _TRANSFER)
        self._success = self._counters("vllm:request_success", "Choices that ended well", (*_LABELS, "finished_reason"))
        self._failures = self._counters("tandem_request_failures", "Requests that failed", ("code",))
        self._http = self._counters("tandem_http_requests", "HTTP answers", ("route", "method", "status"))
        self._rpcs = Counter("tandem_grpc_requests", "gRPC answers", ("method", "code"), registry=self.registry)
        self._placements = self._counters("tandem_placements", "Where prompts were computed", ("reason",))
        self._retries = Counter(
            "tandem_dispatch_retries", "Attempts after the first", ("reason",), registry=self.registry
        )
        self._workers = Gauge("tandem_workers", "Workers by role and state", ("role", "state"), registry=self.registry)
        self._pool = self._of_worker("tandem_worker_kv_blocks", "KV blocks by state", "state")
        self._requests = self._of_worker("tandem_worker_requests", "Requests by state", "state")
        self._backlog = self._of_worker("tandem_worker_backlog_tokens", "Tokens accepted and not yet computed")
        age, text = "tandem_worker_step_age_seconds", "For how long the engine has been in the same step"
        self._step_age = self._of_worker(age, text)
        self._kv_usage = Gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", _LABELS, registry=self.registry
        )
        self._transfers, self._tiers, self._publishing = TransferMetrics(), TierMetrics(), PublishMetrics()
        self._pins = PinMetrics()
        for collector in (self._transfers, self._tiers, self._publishing, self._pins):
            self.registry.register(collector)
        self.placement = PlacementMetrics(self.registry)

    def on_render(self, refresh: Callable[[], None]) -> None:
        """`refresh` brings gauges up to date before each scrape."""
        self._refresh = refresh

    def collect_with(self, collect: Callable[[], Awaitable[bytes]]) -> None:
        """A scrape is answered with what `collect` brings, of this process and others."""
        self._collect = collect

    async def collect(self) -> bytes:
        """What a scrape is answered with."""
        return self.render() if self._collect is None else await self._collect()

    def render(self) -> bytes:
        """The text exposition format."""
        self._refresh()
        return generate_latest(self.registry)

    def http_answered(self, route: str, method: str, status: int) -> None:
        """`route` is the route's pattern, never the path that was asked for."""
        self._http.inc(route, method, str(status))

    def rpc_answered(self, method: str, code: str) -> None:
        """`code` is a name of grpc.StatusCode."""
        self._rpcs.labels(method, code).inc()

    def succeeded(self, reason: str) -> None:
        """One choice ended with `reason`."""
        self._success.inc(*self._model, reason)

    def failed(self, code: Code) -> None:
        """One request ended without an answer."""
        self._failures.inc(code.value)

    @property
    def num_succeeded(self) -> float:
        """Choices that ended well."""
        return self._success.sum()

    @property
    def num_failed(self) -> float:
        """Requests that failed; those that clients gave up are not among them."""
        return self._failures.sum(without=Code.CANCELLED.value)

    def placed(self, mode: str) -> None:
        """Dispatch sent an attempt to workers (`router.observer.DispatchObserver`); a value of PlacementReason."""
        self._placements.inc(mode)

    def retried(self, reason: str) -> None:
        """Dispatch tries again; a value of RetryReason."""
        self._retries.labels(reason).inc()

    def workers(self, role: str, state: str, count: int) -> None:
        """How many workers of a role are in a state, such as (`decode`, `healthy`)."""
        self._workers.labels(role, state).set(count)

    def worker_loads(self, snapshots: Sequence[WorkerSnapshot]) -> None:
        """What each live worker last said of itself; one that left is no longer shown."""
        self._pool.clear()
        self._requests.clear()
        self._kv_usage.clear()
        self._step_age.clear()
        self._backlog.clear()
        self._transfers.show(snapshots)
        self._tiers.show(snapshots)
        self._pins.show(snapshots)
        self._publishing.show(tuple(snapshots))
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
            self._backlog.labels(*worker).set(load.backlog_tokens)
            self._requests.labels(*worker, "running").set(load.num_running)
            self._requests.labels(*worker, "waiting").set(load.num_waiting)
            self._kv_usage.labels(self._model[0], info.key.worker_id).set(used / info.num_blocks)

    def _of_worker(self, name: str, text: str, *more: str) -> Gauge:
        return Gauge(name, text, ("worker", "role", *more), registry=self.registry)

    def _counter(self, name: str, text: str) -> Total:
        return self._registered(Total(name, text, CounterMetricFamily, dict(zip(_LABELS, self._model, strict=True))))

    def _counters(self, name: str, text: str, labels: Sequence[str]) -> Totals:
        return self._registered(Totals(name, text, labels))

    def _gauge(self, name: str, text: str) -> Total:
        return self._registered(Total(name, text, GaugeMetricFamily, dict(zip(_LABELS, self._model, strict=True))))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *, finer: Sequence[float] = ()) -> Spread:
        return self._registered(Spread(name, text, buckets, dict(zip(_LABELS, self._model, strict=True)), finer=finer))

    def _latency(self, name: str, text: str, buckets: tuple[float, ...]) -> Spread:
        """One whose quantiles the status shows."""
        return self._histogram(name, text, buckets, finer=FINE_BOUNDS_S)

    def _registered(self, instrument: _I) -> _I:
        self.registry.register(instrument)
        return instrument


def _nothing() -> None:
    """Until somebody refreshes gauges."""


class RequestMeter:
    """One request's measurements; a context manager around its stream."""

    def __init__(
        self,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        *,
        prompt_tokens: int,
        choices: int,
        span: Span | None = None,
        tenant: str = "",
    ) -> None:
        """`span`: of the request; ends with it. `tenant`: whose totals it counts for."""
        self._metrics = metrics
        self._tenant = tenant
        self._span = span
        self._finishes: list[ChoiceFinish] = []
        self._clock = clock
        self._prompt_tokens = prompt_tokens
        self._start = clock()
        self._last: list[float | None] = [None] * choices
        self._counts = [0] * choices
        self._began = False

    @classmethod
    def of(cls, request: RoutedRequest, metrics: RouterMetrics, clock: Callable[[], float]) -> Self:
        """Of one request of a client."""
        return cls(
            metrics,
            clock,
            prompt_tokens=len(request.prompt_token_ids),
            choices=request.num_choices,
            span=request.span,
            tenant=request.tenant,
        )

    def __enter__(self) -> Self:
        self._metrics.waiting.inc()
        self._metrics.prompt_tokens.inc(self._prompt_tokens)
        self._metrics.prompt_size.observe(self._prompt_tokens)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        (self._metrics.running if self._began else self._metrics.waiting).dec()
        if (entry := current_entry()) is not None:
            entry.prompt_tokens += self._prompt_tokens
            entry.completion_tokens += sum(self._counts)
        code = _code_of(error)
        if code is not None:
            self._metrics.failed(code)
        if self._began or self._finishes:
            self._metrics.usage.add(self._tenant, self._spent())
        if self._span is not None:
            self._end_span(self._span, code)

    def tokens(self, choice: int, count: int) -> None:
        """`count` tokens of one choice arrived together."""
        if count == 0:
            return
        now = self._clock()
        if not self._began:
            self._began = True
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._metrics.ttft.observe(now - self._start)
            if self._span is not None:
                self._span.event("first_token", now)
        if (last := self._last[choice]) is not None:
            self._metrics.itl.observe((now - last) / count, count)
        self._last[choice] = now
        self._counts[choice] += count
        self._metrics.generation_tokens.value += count

    def choice_finished(self, choice: int, finish: ChoiceFinish) -> None:
        """One choice ended; its phase times are the workers' own."""
        metrics, times = self._metrics, finish.times
        self._finishes.append(finish)
        metrics.succeeded(finish.reason.value)
        metrics.answer_size.observe(self._counts[choice])
        metrics.prefix_queries.inc(self._prompt_tokens)
        metrics.prefix_hits.inc(finish.cached_tokens)
        metrics.queue_time.observe(times.prefill_queue_s + times.decode_queue_s)
        metrics.prefill_time.observe(times.prefill_s)
        metrics.transfer_time.observe(times.transfer_s)
        metrics.decode_time.observe(times.transfer_s + times.decode_queue_s + times.decode_s)

    def succeeded(self) -> None:
        """All choices ended."""
        self._metrics.e2e.observe(self._clock() - self._start)

    def _spent(self) -> Spent:
        """By choices that have ended; of the others the tokens alone are known."""
        whole = Spent(
            requests=1,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._least_cached(),
            completion_tokens=sum(self._counts),
        )
        for finish in self._finishes:
            whole = whole.with_choice(
                finish.times, computed_tokens=finish.computed_tokens, needed_tokens=finish.needed_tokens
            )
        return whole

    def _least_cached(self) -> int:
        return min((finish.cached_tokens for finish in self._finishes), default=0)

    def _end_span(self, span: Span, code: Code | None) -> None:
        span.attributes.update(
            {
                "gen_ai.usage.input_tokens": self._prompt_tokens,
                "gen_ai.usage.output_tokens": sum(self._counts),
                "gen_ai.usage.cache_read.input_tokens": self._least_cached(),
                "gen_ai.response.finish_reasons": tuple(finish.reason.value for finish in self._finishes),
            }
        )
        if code is not None:
            span.attributes["error.type"] = code.value
            span.fail(code.value)
        span.end(self._clock())


def _code_of(error: BaseException | None) -> Code | None:
    if isinstance(error, ServingError):
        return error.code
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return Code.CANCELLED
    return None if error is None else Code.INTERNAL
