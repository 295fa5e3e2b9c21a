"""The pinned prefixes that this router knows of, and which worker holds each. Pure.

A pin lives on one worker: the one that computed the prompt when it was first used, since every other worker can fetch
the prefix from there. Each later use renews it there; only when that worker is gone, leaving, or reports that it does
not hold the prefix, is the pin made anew wherever the prompt was computed now. Workers end pins by their own clocks, so
a pin that a router forgets leaks nothing: it is just not renewed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from router.types.requests import PinRequest
from router.types.session_events import WorkerPort
from router.types.worker_view import WorkerKey
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinTold

_SWEEP_S = 1.0
"""Period of sweeps for expired pins: a sweep is linear in the number of pins."""
_SPARE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PinSite:
    """A live worker that may hold pins."""

    port: WorkerPort
    block_size: int
    is_leaving: bool


@dataclass(slots=True, kw_only=True)
class PinRecord:
    """One pin as this router knows it."""

    worker: WorkerKey
    ends_s: float
    num_tokens: int
    last_block: BlockHash
    outcome: PinOutcome | None = None
    """The worker's report; None until it has reported."""


class PinRegistry:
    """All pins of one router."""

    def __init__(
        self, *, find: Callable[[WorkerKey], PinSite | None], clock: Callable[[], float], max_pins: int = 4096
    ) -> None:
        """`find`: returns a worker, or None when that process is gone."""
        self._find = find
        self._clock = clock
        self._max_pins = max_pins
        # The least recently used first.
        self._records: dict[PinKey, PinRecord] = {}
        self._swept_s = -_SWEEP_S
        self._expected: dict[PinKey, Callable[[PinOutcome], None]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def used(self, tenant: str, wishes: Sequence[PinRequest], computed: WorkerKey, names: Sequence[BlockHash]) -> None:
        """Make or renew the pins that a prompt requests, after a worker has computed it."""
        for wish in wishes:
            num_names = wish.num_tokens // HASH_BLOCK_TOKENS
            if num_names:
                name = wish.name or f"{wish.ttl_s:g}s:{names[num_names - 1].hex()}"
                self._use(PinKey(tenant, name), wish, computed, names)

    def _use(self, key: PinKey, wish: PinRequest, computed: WorkerKey, names: Sequence[BlockHash]) -> None:
        now_s = self._clock()
        ends_s = now_s + wish.ttl_s if wish.find_end_s is None else wish.find_end_s()
        if ends_s is None:
            return
        record = self._records.pop(key, None)
        worker, site = computed, None
        if record is not None and record.outcome in (None, PinOutcome.HELD) and record.ends_s > now_s:
            site = self._find(record.worker)
        if record is not None and site is not None and not site.is_leaving:
            worker = record.worker
        else:
            site = self._find(computed)
        if site is None or ends_s <= now_s:
            return
        num_blocks = wish.num_tokens // site.block_size
        if not num_blocks:
            return
        last = names[num_blocks * (site.block_size // HASH_BLOCK_TOKENS) - 1]
        self._make_room(now_s)
        outcome = record.outcome if record is not None and record.worker == worker else None
        num_tokens = num_blocks * site.block_size
        self._records[key] = PinRecord(
            worker=worker, ends_s=ends_s, num_tokens=num_tokens, last_block=last, outcome=outcome
        )
        site.port.pin(PinOrder(key=key, last_block=last, ttl_s=ends_s - now_s))

    def _make_room(self, now_s: float) -> None:
        if len(self._records) < self._max_pins:
            return
        if now_s - self._swept_s >= _SWEEP_S:
            self._swept_s = now_s
            self._records = {key: record for key, record in self._records.items() if record.ends_s > now_s}
        if len(self._records) < self._max_pins:
            return
        by_tenant: dict[str, deque[PinKey]] = {}
        for key in self._records:
            by_tenant.setdefault(key.tenant, deque()).append(key)
        # Evict from the tenant with the most pins, and a few more than needed, so that not every new pin evicts.
        for _ in range(1 + self._max_pins // _SPARE):
            del self._records[max(by_tenant.values(), key=len).popleft()]

    def release(self, tenant: str, name: str) -> None:
        """End a pin, and unpin its blocks at the worker."""
        record = self._records.pop(key := PinKey(tenant, name), None)
        if record is not None and (site := self._find(record.worker)) is not None:
            site.port.unpin(key)

    def prolong(self, tenant: str, name: str, ends_s: float) -> None:
        """Change when a pin ends. No-op for one that no worker holds: its next use makes it."""
        record, left_s = self._records.get(key := PinKey(tenant, name)), ends_s - self._clock()
        if record is None or left_s <= 0.0 or (site := self._find(record.worker)) is None:
            return
        record.ends_s = ends_s
        site.port.pin(PinOrder(key=key, last_block=record.last_block, ttl_s=left_s))

    def adopt(self, key: PinKey, record: PinRecord) -> bool:
        """Add another process's record of a pin unless there is one; return whether it was added."""
        if key in self._records:
            return False
        self._make_room(self._clock())
        self._records[key] = record
        return True

    def expect(self, tenant: str, name: str, on_outcome: Callable[[PinOutcome], None]) -> None:
        """Call `on_outcome` once, with the outcome that a worker reports for the pin."""
        self._expected[PinKey(tenant, name)] = on_outcome

    def expect_no_more(self, tenant: str, name: str) -> None:
        """Drop the callback of `expect`."""
        self._expected.pop(PinKey(tenant, name), None)

    def on_outcome(self, worker: WorkerKey, report: PinTold) -> None:
        """Record a worker's report about a pin."""
        record = self._records.get(report.key)
        if record is not None and record.worker == worker:
            record.outcome = report.outcome
            record.num_tokens = report.num_tokens
            if (expected := self._expected.pop(report.key, None)) is not None:
                expected(report.outcome)

    def left(self, worker: WorkerKey) -> None:
        """Forget the pins of a worker that left: its cache is gone."""
        for key in [key for key, record in self._records.items() if record.worker == worker]:
            del self._records[key]

    def of_tenant(self, tenant: str) -> Iterator[tuple[str, PinRecord, float]]:
        """Return the tenant's unexpired pins, most recently used first: name, record, seconds left."""
        now_s = self._clock()
        for key, record in reversed(self._records.items()):
            if key.tenant == tenant and record.ends_s > now_s:
                yield key.name, record, record.ends_s - now_s

    def find(self, tenant: str, name: str) -> PinRecord | None:
        record = self._records.get(PinKey(tenant, name))
        return record if record is not None and record.ends_s > self._clock() else None
