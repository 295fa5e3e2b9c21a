"""Phases of the time to first token, and latencies by kind of request.

Everything here is counted once per request, when it ends, except two instants of its first tokens: nothing is done for
every token. The label values are our own: buckets of lengths, yes or no, and tenants as in `TenantLabels`.
"""

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct
from prometheus_client.registry import CollectorRegistry

from router.metrics.adapters import AdapterLabels
from router.metrics.instruments import LabelledCounter, LabelledHistogram
from router.metrics.tenants import TenantLabels
from router.types.requests import ChoiceFinish, RoutedRequest
from tandem.values.outputs import CachedTokens, FinishReason

_LENGTHS = (128, 512, 2048, 8192, 32768, 131072)
_LENGTH_NAMES = ("128", "512", "2k", "8k", "32k", "128k", "longer")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
_TENANT = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PHASE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_COMPUTED = "computed"
_UNKNOWN = "unknown"


class RequestTraits(Struct, frozen=True, kw_only=True):
    """The labels of a request, as far as they are known before it runs."""

    prompt_tokens: int
    guided: bool = False
    structured: bool = False
    """Whether it follows a grammar, so that a truncated answer is useless."""
    tenant: str = ""
    max_tokens: int = 1
    operation: str = "text_completion"
    adapter: str | None = None
    """Name of the LoRA adapter; None: the model itself."""

    @classmethod
    def from_request(cls, request: RoutedRequest) -> "RequestTraits":
        """Derive them from one request of a client."""
        sampling = request.sampling
        return cls(
            prompt_tokens=len(request.prompt_token_ids),
            guided=sampling.grammar is not None or bool(sampling.allowed_token_ids or sampling.bad_words),
            structured=sampling.grammar is not None,
            tenant=request.tenant,
            max_tokens=sampling.max_tokens,
            operation=request.operation,
            adapter=None if request.adapter is None else request.adapter.name,
        )


class FirstTokens(Struct, frozen=True, kw_only=True):
    """The instants of a request's beginning, on the router's clock; None: it did not get that far."""

    arrived_s: float
    prepared_s: float
    first_s: float
    second_s: float | None = None
    shown_s: float | None = None
    """Time at which the first token's text was passed to the server that writes it."""
    last_s: float

    def per_token_s(self, num_tokens: int) -> float | None:
        """Return the mean time per token after the first; None when there was no second one."""
        return (self.last_s - self.first_s) / (num_tokens - 1) if num_tokens > 1 else None


class SliceMetrics:
    def __init__(self, registry: CollectorRegistry, tenants: TenantLabels) -> None:
        self._tenants = tenants
        self._phases = LabelledHistogram(
            "tandem_ttft_phase_seconds",
            "Phases of the time to first token: preprocess, queue, prefill, serialize; then first_decode",
            _PHASE,
            ("phase",),
        )
        labels = ("pool", "prompt", "cached", "guided")
        self._ttft = LabelledHistogram(
            "tandem_slice_ttft_seconds", "Time to first token by kind of request", _SECONDS, labels
        )
        self._tpot = LabelledHistogram(
            "tandem_slice_time_per_output_token_seconds",
            "Mean time per token after the first, by kind of request",
            _PER_TOKEN,
            ("pool", "prompt", "output", "guided"),
        )
        self._tenant = LabelledHistogram(
            "tandem_tenant_ttft_seconds", "Time to first token by tenant", _TENANT, ("tenant",)
        )
        self._adapter_ttft = LabelledHistogram(
            "tandem_adapter_ttft_seconds", "Time to first token by LoRA adapter", _TENANT, ("adapter",)
        )
        self._adapter_time = LabelledHistogram(
            "tandem_adapter_request_seconds",
            "Time from arrival to the last token, by LoRA adapter",
            _SECONDS,
            ("adapter",),
        )
        by_adapter = (self._adapter_ttft, self._adapter_time)
        self.adapters = AdapterLabels(by_adapter)
        sources = (_COMPUTED, *CachedTokens._fields)
        self._sources = LabelledCounter(
            "tandem_prompt_tokens_by_source",
            "Prompt tokens by the source of their KV: computed, or cached in one of several places",
            ("source",),
            known=[(source,) for source in sources],
        )
        self._structured = LabelledCounter(
            "tandem_structured_answers",
            "Choices with a grammar, by how they ended: stop, or length, which leaves an incomplete structure",
            ("finished_reason",),
            known=[(reason.value,) for reason in (FinishReason.STOP, FinishReason.LENGTH)],
        )
        for collector in (
            self._phases, self._ttft, self._tpot, self._tenant, self._sources, self._structured, *by_adapter
        ):  # fmt: skip
            registry.register(collector)

    def ended(
        self, traits: RequestTraits, times: FirstTokens, finishes: Sequence[ChoiceFinish], num_tokens: int
    ) -> None:
        """Observe a request that began and has ended; `num_tokens`: of its longest choice."""
        ttft_s = times.first_s - times.arrived_s
        self._tenant.observe(ttft_s, self._tenants.label_for(traits.tenant))
        if traits.adapter is not None:
            label = self.adapters.label_for(traits.adapter)
            self._adapter_ttft.observe(ttft_s, label)
            self._adapter_time.observe(times.last_s - times.arrived_s, label)
        self._split(times, finishes)
        if not finishes:
            return
        reader = finishes[0].prefilled_by
        pool = _UNKNOWN if reader is None else reader.value
        prompt, guided = length_bucket(traits.prompt_tokens), "yes" if traits.guided else "no"
        cached = finishes[0].cached_tokens
        for finish in finishes:
            cached = min(cached, finish.cached_tokens)
        self._ttft.observe(ttft_s, pool, prompt, _cached(cached, traits.prompt_tokens), guided)
        if (each_s := times.per_token_s(num_tokens)) is not None:
            self._tpot.observe(each_s, pool, prompt, length_bucket(num_tokens), guided)
        for finish in finishes:
            self._count_sources(finish, traits.prompt_tokens)
            if traits.structured:
                self._structured.inc(finish.reason.value)

    def _split(self, times: FirstTokens, finishes: Sequence[ChoiceFinish]) -> None:
        preprocess_s = times.prepared_s - times.arrived_s
        phases: dict[tuple[str, ...], float] = {("preprocess",): preprocess_s}
        if times.second_s is not None:
            phases[("first_decode",)] = times.second_s - times.first_s
        if times.shown_s is not None:
            phases[("serialize",)] = times.shown_s - times.first_s
        if finishes:
            spent = finishes[0].times
            # Queueing in the router is counted from the arrival.
            phases[("queue",)] = max(0.0, spent.router_queue_s - preprocess_s) + spent.prefill_queue_s
            phases[("prefill",)] = spent.prefill_s
        self._phases.observe_each(phases)

    def _count_sources(self, finish: ChoiceFinish, prompt_tokens: int) -> None:
        cached = finish.times.cached
        num_cached = 0
        for source, count in zip(CachedTokens._fields, cached, strict=True):
            if count:
                self._sources.values[(source,)] += count
                num_cached += count
        self._sources.values[(_COMPUTED,)] += max(0, prompt_tokens - num_cached)


def length_bucket(num_tokens: int) -> str:
    """Return the name of the smallest bucket for so many tokens."""
    return _LENGTH_NAMES[bisect_left(_LENGTHS, num_tokens)]


def _cached(cached_tokens: int, prompt_tokens: int) -> str:
    if cached_tokens == 0:
        return "none"
    return "most" if 2 * cached_tokens >= prompt_tokens else "some"
