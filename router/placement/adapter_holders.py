"""Which workers have a LoRA adapter loaded, and how long the others would take to load it. Pure.

A worker's load report says what it has loaded. What this router has sent it since counts, too, until a report can show
it: otherwise each of the first requests for an adapter would make another worker load it.
"""

from router.types.worker_view import WorkerKey
from router.workers.columns import ClusterView
from tandem.adapter_files import Adapter

_REPORTED_AFTER_S = 2.0
"""Time from the end of a load until it is certain that a report shows it."""


class AdapterHolders:
    """Adapters that this router's requests have made workers load."""

    def __init__(self, *, bytes_per_s: float) -> None:
        """`bytes_per_s`: the rate at which workers are assumed to load adapters."""
        self._bytes_per_s = bytes_per_s
        self._expected_until_s: dict[tuple[str, WorkerKey], float] = {}

    def sent(self, adapter: Adapter, worker: WorkerKey, now_s: float) -> None:
        """Record that a request for an adapter was sent to a worker, which loads it unless it has it."""
        self._forget_late(now_s)
        self._expected_until_s[adapter.digest, worker] = now_s + self._load_s(adapter) + _REPORTED_AFTER_S

    def load_ms(self, adapter: Adapter, view: ClusterView, now_s: float) -> list[float]:
        """Return the time that each worker would take to load an adapter, by slot; 0 where it is loaded, or will be
        for an earlier request."""
        found = [0.0] * view.num_slots
        load_ms, digest = 1e3 * self._load_s(adapter), adapter.digest
        for pool in (view.decode, view.prefill):
            for info, load, slot in zip(pool.members.infos, pool.loads, pool.members.slot_list, strict=True):
                if digest not in load.resident_adapters and not self._is_expected(digest, info.key, now_s):
                    found[slot] = load_ms
        return found

    def _load_s(self, adapter: Adapter) -> float:
        return adapter.num_bytes / self._bytes_per_s

    def _is_expected(self, digest: str, worker: WorkerKey, now_s: float) -> bool:
        return self._expected_until_s.get((digest, worker), now_s) > now_s

    def _forget_late(self, now_s: float) -> None:
        """Forget expectations that are over, whenever there might be many."""
        if len(self._expected_until_s) >= 1024:
            self._expected_until_s = {key: until for key, until in self._expected_until_s.items() if until > now_s}
