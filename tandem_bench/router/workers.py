"""A registry of invented workers with random load, on ports without connections."""

from collections.abc import Iterator
from random import Random

from router.types.session_events import (
    AttemptReader,
    DeliverScores,
    MigrationPlan,
    PrefillRoute,
    PromptScoringOrder,
    SubmitOrder,
)
from router.types.worker_view import PrefixChange, WorkerInfo, WorkerKey, WorkerLoad
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.values.ids import BlockHash, Incarnation, RequestId, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.prefix_pin import PinKey, PinOrder
from tandem.values.roles import WorkerRole

LAYOUT = KVLayout(model_fingerprint="m", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
NUM_BLOCKS = 10_000


class NoPort:
    """Accepts all calls of a WorkerPort and does nothing."""

    def submit(self, order: SubmitOrder, reader: AttemptReader) -> None: ...

    def adopt(self, request_id: RequestId, attempt: int, *, num_shown: int, reader: AttemptReader) -> None: ...

    def reroute(self, request_id: RequestId, attempt: int, prefill: PrefillRoute | None) -> None: ...

    def cancel(self, request_id: RequestId, attempt: int) -> None: ...

    def score_prompt(self, order: PromptScoringOrder, deliver: DeliverScores) -> None: ...

    def migrate(self, share: MigrationPlan, *, within_s: float, prefill_tokens_per_s: float) -> None: ...

    def end_migration(self) -> None: ...

    def pin(self, order: PinOrder) -> None: ...

    def unpin(self, key: PinKey) -> None: ...

    def resync(self) -> None: ...


def names(rng: Random, count: int) -> list[BlockHash]:
    """Return names of blocks that no other worker has."""
    return [BlockHash(rng.randbytes(16)) for _ in range(count)]


def stored(blocks: list[BlockHash]) -> PrefixChange:
    """Return a snapshot of just these blocks."""
    return PrefixChange(first_sequence=0, snapshot=True, changes=tuple((name, True) for name in blocks))


def info(role: WorkerRole, number: int) -> WorkerInfo:
    return WorkerInfo(
        key=WorkerKey(WorkerId(f"{role.value}-{number}"), Incarnation(1)),
        role=role,
        model_name="m",
        max_model_len=1 << 20,
        num_blocks=NUM_BLOCKS,
        layout=LAYOUT,
        handoff_address=f"{role.value}-{number}:1",
        transports=frozenset({"tcp"}),
    )


def load(rng: Random) -> WorkerLoad:
    """Return the load report of a busy worker."""
    return WorkerLoad(
        num_running=rng.randrange(64),
        num_waiting=rng.randrange(4),
        backlog_tokens=rng.randrange(20_000),
        num_free_blocks=rng.randrange(1_000, NUM_BLOCKS),
        prefill_tokens_per_s=rng.uniform(8_000, 12_000),
        decode_step_s=rng.uniform(0.01, 0.02),
        kv_bytes_per_s=rng.uniform(5e9, 1e10),
    )


def registry(rng: Random, *, num_each: int) -> WorkerRegistry:
    """Build a registry of equally many prefill and decode workers, with empty caches and load reports."""
    found = WorkerRegistry(prefix_map=PrefixMap(), clock=lambda: 0.0)
    for one in infos(num_each):
        found.joined(one, NoPort())
        found.prefix_changed(one.key, stored([]))
        found.load_changed(one.key, load(rng))
    return found


def infos(num_each: int) -> Iterator[WorkerInfo]:
    for role in WorkerRole:
        for number in range(num_each):
            yield info(role, number)
