"""Owners of both hubs with a counted block pool and a pretend engine whose KV is a function of the tokens."""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc.aio

from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import SharedPool
from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.events import BlocksBound
from kv_transfer.protocol.messages import FirstToken, PrefillJob
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.regions.local import LocalReceivingRegion, LocalSendingRegion
from kv_transfer.session.peer import LocalWorker, Route
from kv_transfer.session.receiver_hub import ReceiverHub
from kv_transfer.session.receiver_link import Dialer
from kv_transfer.session.sender_hub import SenderHub
from kv_transfer.transports.interface import KVReceiver, KVSender
from tandem.errors import RequestTooLarge, ServingError, Unavailable
from tandem.rpc.cluster_grpc import CLIENT_OPTIONS, SERVER_OPTIONS
from tandem.telemetry.tracing import Tracer
from tandem.values.ids import BlockHash, BlockId, Incarnation, RequestId, TransferId, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import PhaseTimes, SampledToken
from tandem.values.sampling import SamplingParams

LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4)
BLOCK = LAYOUT.block_size
WAIT_S = 20.0
SETTINGS = TransferSettings(chunk_bytes=3 * LAYOUT.block_bytes, sweep_s=0.02, reroute_s=5.0)


def kv_bytes(tokens: tuple[int, ...], layer: int) -> bytes:
    """What one block of these tokens holds in one layer."""
    return random.Random(repr((tokens, layer))).randbytes(LAYOUT.layer_block_bytes)


class Pool:
    """A counted block pool over real shared memory."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = SharedPool(num_blocks * LAYOUT.block_bytes)
        self.region = KVRegion.from_buffer(self.memory.buffer, LAYOUT, fd=self.memory.fd)
        self.free: deque[BlockId] = deque(BlockId(b) for b in range(num_blocks))
        self.num_blocks = num_blocks

    def allocate(self, count: int) -> tuple[BlockId, ...]:
        if count > len(self.free):
            raise Unavailable("pool is full", retry_after_s=0.1)
        return tuple(self.free.popleft() for _ in range(count))

    def give(self, blocks: tuple[BlockId, ...]) -> None:
        assert not set(blocks) & set(self.free), "freed twice"
        self.free.extend(blocks)

    def layer(self, block: BlockId, layer: int) -> memoryview:
        start = (layer * self.num_blocks + block) * LAYOUT.layer_block_bytes
        return self.region.buffer[start : start + LAYOUT.layer_block_bytes]

    def write(self, block: BlockId, tokens: tuple[int, ...]) -> None:
        for layer in range(LAYOUT.num_layers):
            self.layer(block, layer)[:] = kv_bytes(tokens, layer)

    def holds(self, block: BlockId, tokens: tuple[int, ...]) -> bool:
        return all(self.layer(block, layer) == kv_bytes(tokens, layer) for layer in range(LAYOUT.num_layers))


@dataclass
class Record:
    """What the decode worker's owner heard about one hand-off."""

    job: PrefillJob
    bound: list[BlockId] = field(default_factory=list)
    landed: list[BlockId] = field(default_factory=list)
    tokens: list[FirstToken] = field(default_factory=list)
    committed: CommitInfo | None = None
    errors: list[ServingError] = field(default_factory=list)
    over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class DecodeOwner:
    """The decode worker's side."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.records: dict[TransferId, Record] = {}
        self.quarantined: set[BlockId] = set()
        self.on_failed: Callable[[TransferId], None] = lambda _transfer_id: None
        self.bind_gate = asyncio.Event()
        self.bind_gate.set()

    async def bind(self, transfer_id: TransferId, num_blocks: int) -> BlocksBound:
        await self.bind_gate.wait()
        blocks = self.pool.allocate(num_blocks)
        self.records[transfer_id].bound += blocks
        return BlocksBound(blocks=tuple(blocks))

    def first_token(self, transfer_id: TransferId, first_token: FirstToken) -> None:
        self._note(transfer_id).tokens.append(first_token)

    async def commit(self, transfer_id: TransferId, info: CommitInfo) -> None:
        record = self._note(transfer_id)
        assert not record.over, "committed after its end"
        record.committed = info
        record.over = True
        blocks = (*record.landed, *info.blocks)
        first = record.job.held_tokens // BLOCK
        for index, block in enumerate(blocks):
            tokens = record.job.token_ids[: (first + index + 1) * BLOCK]
            assert self.pool.holds(block, tokens), f"block {index} holds other bytes"
        assert (first + len(blocks)) * BLOCK >= len(record.job.token_ids)
        self.pool.give(blocks)

    def failed(self, transfer_id: TransferId, landed: tuple[BlockId, ...], error: ServingError) -> None:
        record = self._note(transfer_id)
        assert not record.over, "failed after its end"
        first = record.job.held_tokens // BLOCK + len(record.landed)
        for index, block in enumerate(landed):
            assert self.pool.holds(block, record.job.token_ids[: (first + index + 1) * BLOCK])
        record.landed += landed
        record.errors.append(error)
        self.on_failed(transfer_id)

    def expired(self, transfer_id: TransferId) -> None:
        self.end(transfer_id)

    def quarantine(self, _transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        self.quarantined |= set(blocks)

    def released(self, _transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        self.quarantined -= set(blocks)
        self.pool.give(blocks)

    def end(self, transfer_id: TransferId) -> None:
        """Cancelled: what had landed goes too."""
        record = self._note(transfer_id)
        if not record.over:
            record.over = True
            self.pool.give(tuple(record.landed))

    def _note(self, transfer_id: TransferId) -> Record:
        record = self.records[transfer_id]
        record.changed.set()
        return record

    async def until(self, transfer_id: TransferId, condition: Callable[[Record], object]) -> Record:
        """Wait for news that satisfies `condition`."""
        record = self.records[transfer_id]
        async with asyncio.timeout(WAIT_S):
            while not condition(record):
                record.changed.clear()
                await record.changed.wait()
        return record


class PrefillOwner:
    """The prefill worker's side: a task per job that "computes" `chunk` tokens at a time."""

    def __init__(self, pool: Pool, *, chunk: int = 8, vocab: int = 1000) -> None:
        self.pool = pool
        self.hub: SenderHub | None = None
        self.chunk = chunk
        self.vocab = vocab
        self.tasks: dict[TransferId, asyncio.Task[None]] = {}
        self.blocks: dict[TransferId, tuple[BlockId, ...]] = {}
        self.jobs: list[PrefillJob] = []
        self.aborted: dict[TransferId, asyncio.Event] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.gate_after_tokens = 0

    async def submit(self, job: PrefillJob) -> None:
        count = -(-len(job.token_ids) // BLOCK)
        if count > self.pool.num_blocks:
            raise RequestTooLarge("larger than the pool")
        self.jobs.append(job)
        self.aborted[job.transfer_id] = asyncio.Event()
        self.blocks[job.transfer_id] = self.pool.allocate(count)
        self.tasks[job.transfer_id] = asyncio.create_task(self._compute(job))

    def abort(self, transfer_id: TransferId) -> None:
        self.tasks[transfer_id].cancel()
        self.aborted[transfer_id].set()

    def release(self, transfer_id: TransferId) -> None:
        self.pool.give(self.blocks.pop(transfer_id))

    async def _compute(self, job: PrefillJob) -> None:
        hub, blocks = self.hub, self.blocks[job.transfer_id]
        hub.scheduled(job.transfer_id, 0.25)
        for end in range(self.chunk, len(job.token_ids) + self.chunk, self.chunk):
            if end > self.gate_after_tokens:
                await self.gate.wait()
            done = min(end, len(job.token_ids))
            for index in range((end - self.chunk) // BLOCK, -(-done // BLOCK)):
                self.pool.write(blocks[index], job.token_ids[: (index + 1) * BLOCK])
            hub.progress(job.transfer_id, done, blocks)
            await asyncio.sleep(0)
        if not job.resume:
            token = SampledToken(token_id=sum(job.token_ids) % self.vocab)
            hub.first_token(job.transfer_id, token, cached_tokens=0)
        hub.finished(job.transfer_id, blocks, cached_tokens=4, times=PhaseTimes(prefill_s=0.5))


def make_job(name: str, num_tokens: int, **overrides: object) -> PrefillJob:
    fields = {
        "transfer_id": TransferId(name),
        "request_id": RequestId(f"r-{name}"),
        "token_ids": tuple(random.Random(name).randrange(1000) for _ in range(num_tokens)),
        "num_prompt_tokens": num_tokens,
        "held_tokens": 0,
        "sampling": SamplingParams(),
        "hash_root": BlockHash(bytes(16)),
    }
    return PrefillJob(**{**fields, **overrides})


class Prefill:
    """A prefill worker: hub, owner and a real server."""

    def __init__(self, owner: PrefillOwner, hub: SenderHub, server: grpc.aio.Server, port: int, incarnation: int):
        self.owner, self.hub, self.server = owner, hub, server
        self.address = f"127.0.0.1:{port}"
        self.incarnation = Incarnation(incarnation)

    def route(self, attempt: int) -> Route:
        return Route(worker_id=WorkerId("p"), incarnation=self.incarnation, address=self.address, attempt=attempt)


@asynccontextmanager
async def prefill_worker(
    senders: Callable[[KVRegion], tuple[KVSender, ...]],
    *,
    pool: Pool,
    incarnation: int = 11,
    layout: KVLayout = LAYOUT,
    settings: TransferSettings = SETTINGS,
    port: int = 0,
    tracer: Tracer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Prefill]:
    owner = PrefillOwner(pool)
    local = LocalWorker(
        worker_id=WorkerId("p"),
        incarnation=Incarnation(incarnation),
        layout=layout,
        num_blocks=pool.num_blocks,
    )
    regions = (LocalSendingRegion(replace(pool.region, layout=layout), senders(pool.region)),)
    async with SenderHub(local, owner=owner, regions=regions, settings=settings, tracer=tracer, clock=clock) as hub:
        owner.hub = hub
        server = grpc.aio.server(options=SERVER_OPTIONS)
        hub.register(server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield Prefill(owner, hub, server, bound, incarnation)
        finally:
            await server.stop(None)


@asynccontextmanager
async def decode_worker(
    receivers: Callable[[KVRegion], tuple[KVReceiver, ...]],
    *,
    pool: Pool,
    incarnation: int = 22,
    settings: TransferSettings = SETTINGS,
    tracer: Tracer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[ReceiverHub, DecodeOwner]]:
    owner = DecodeOwner(pool)
    local = LocalWorker(
        worker_id=WorkerId("d"),
        incarnation=Incarnation(incarnation),
        layout=LAYOUT,
        num_blocks=pool.num_blocks,
    )
    options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    dialer = Dialer(open_channel=lambda address: grpc.aio.insecure_channel(address, options=options))
    async with AsyncExitStack() as stack:
        regions = (LocalReceivingRegion(pool.region, receivers(pool.region)),)
        hub = await stack.enter_async_context(
            ReceiverHub(
                local, owner=owner, regions=regions, dialer=dialer, settings=settings, tracer=tracer, clock=clock
            )
        )
        yield hub, owner


def begin(hub: ReceiverHub, owner: DecodeOwner, job: PrefillJob, route: Route) -> TransferId:
    """Start a hand-off and keep a record of it."""
    owner.records[job.transfer_id] = Record(job=job)
    hub.start(job, route)
    return job.transfer_id
