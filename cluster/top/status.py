"""The status of a cluster as its routers report it (`GET /status/snapshot`), for `tandem top`. Pure.

Several routers may serve one cluster: their counts are added; the latest report of each worker counts; of latencies the
worst is shown, as quantiles cannot be added.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Self

from router.status.snapshot.merge import natural

MAX_HANDOFFS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Worker of either pool."""

    id: str
    role: str
    state: str
    report: int
    blocks: int
    used_blocks: int
    running: int
    waiting: int
    backlog_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    kv_bytes_per_s: float
    sending: int
    receiving: int

    @property
    def used_share(self) -> float:
        """Share of its KV blocks in use."""
        return self.used_blocks / self.blocks if self.blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """Prompt that one worker computes for another."""

    source: str
    target: str
    tokens: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates over the last seconds, and latencies of the last minute; None where there were none."""

    generation_tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    refused_per_s: float
    failed_per_s: float
    handoffs_per_s: float
    moved_bytes_per_s: float
    cached_share: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None


_OF_WORKERS = frozenset({"handoffs_per_s", "moved_bytes_per_s"})
"""Rates about workers, which every router reports alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """Status reported by one router, or merged from several."""

    model: str
    processes: int
    not_ready: str | None
    running: int
    waiting: int
    queued: int
    queued_tokens: int
    oldest_s: float
    workers: tuple[Worker, ...]
    num_handoffs: int
    handoffs: tuple[HandOff, ...]
    rates: Rates

    @classmethod
    def read(cls, data: Any) -> Self:
        """Parse the JSON status. Raises LookupError, TypeError or ValueError if it is invalid."""
        return cls(
            model=str(data["model"]["name"]),
            processes=int(data["processes"]),
            not_ready=None if data["not_ready"] is None else str(data["not_ready"]),
            running=int(data["requests"]["running"]),
            waiting=int(data["requests"]["waiting"]),
            queued=int(data["queue"]["requests"]),
            queued_tokens=int(data["queue"]["tokens"]),
            oldest_s=float(data["queue"]["oldest_s"]),
            workers=tuple(_worker(worker) for pool in data["pools"] for worker in pool["workers"]),
            num_handoffs=int(data["handoffs"]["in_flight"]),
            handoffs=tuple(_handoff(handoff) for handoff in data["handoffs"]["shown"]),
            rates=_rates(data["recent"]),
        )


def _worker(data: Mapping[str, Any]) -> Worker:
    texts: dict[str, Any] = {name: str(data[name]) for name in ("id", "role", "state")}
    measured: dict[str, Any] = {
        name: float(data[name]) for name in ("prefill_tokens_per_s", "decode_step_s", "kv_bytes_per_s")
    }
    counted: dict[str, Any] = {f.name: int(data[f.name]) for f in fields(Worker) if f.name not in texts | measured}
    return Worker(**texts, **measured, **counted)


def _handoff(data: Mapping[str, Any]) -> HandOff:
    source, target = str(data["source"]), str(data["target"])
    return HandOff(source=source, target=target, tokens=int(data["tokens"]), age_s=float(data["age_s"]))


def _rates(data: Mapping[str, Any]) -> Rates:
    def number(name: str) -> Any:
        return None if data[name] is None and _may_lack(name) else float(data[name])

    return Rates(**{field.name: number(field.name) for field in fields(Rates)})


def _may_lack(name: str) -> bool:
    return name == "cached_share" or name.endswith("_ms")


def merge_statuses(statuses: Sequence[ClusterStatus]) -> ClusterStatus:
    """Merge the statuses of all routers that answered; there is at least one."""
    workers: dict[str, Worker] = {}
    for worker in (worker for status in statuses for worker in status.workers):
        if worker.id not in workers or workers[worker.id].report < worker.report:
            workers[worker.id] = worker
    handoffs = sorted((one for status in statuses for one in status.handoffs), key=lambda one: -one.age_s)
    return replace(
        statuses[0],
        processes=sum(status.processes for status in statuses),
        not_ready=next((status.not_ready for status in statuses if status.not_ready), None),
        running=sum(status.running for status in statuses),
        waiting=sum(status.waiting for status in statuses),
        queued=sum(status.queued for status in statuses),
        queued_tokens=sum(status.queued_tokens for status in statuses),
        oldest_s=max(status.oldest_s for status in statuses),
        workers=tuple(workers.values()),
        num_handoffs=sum(status.num_handoffs for status in statuses),
        handoffs=tuple(handoffs[:MAX_HANDOFFS]),
        rates=_merge_rates([status.rates for status in statuses]),
    )


def _merge_rates(rates: Sequence[Rates]) -> Rates:
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(Rates)):
        known = [value for rate in rates if (value := getattr(rate, name)) is not None]
        if _may_lack(name):
            found[name] = max(known, default=None)
        else:
            found[name] = max(known) if name in _OF_WORKERS else sum(known)
    shares = [(rate.cached_share, rate.prompt_tokens_per_s) for rate in rates if rate.cached_share is not None]
    if weight := sum(tokens for _, tokens in shares):
        found["cached_share"] = sum(share * tokens for share, tokens in shares) / weight
    return Rates(**found)


class SortOrder(Enum):
    """Key by which workers are sorted, and its direction."""

    NAME = "name"
    KV = "KV use"
    RUNNING = "running"
    WAITING = "waiting"
    BACKLOG = "backlog"

    def following(self) -> "SortOrder":
        """Return the next order, cyclically."""
        orders = list(SortOrder)
        return orders[(orders.index(self) + 1) % len(orders)]


_KEYS: Mapping[SortOrder, Callable[[Worker], float]] = {
    SortOrder.NAME: lambda _: 0.0,
    SortOrder.KV: lambda worker: -worker.used_share,
    SortOrder.RUNNING: lambda worker: -worker.running,
    SortOrder.WAITING: lambda worker: -worker.waiting,
    SortOrder.BACKLOG: lambda worker: -worker.backlog_tokens,
}


def in_order(workers: Sequence[Worker], order: SortOrder, *, reverse: bool) -> list[Worker]:
    """Sort the busiest first, and equal ones by name (`decode-10` after `decode-9`)."""
    key = _KEYS[order]
    return sorted(workers, key=lambda worker: (key(worker), natural(worker.id)), reverse=reverse)
