"""A block pool in one region per rank, with the interface of `handoff_fakes.Pool`."""

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import grpc.aio

from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import SharedPool
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.regions.interface import ReceivingRegion, SendingRegion
from kv_transfer.session.peer import LocalWorker
from kv_transfer.session.receiver_hub import ReceiverHub
from kv_transfer.session.receiver_link import Dialer
from kv_transfer.session.sender_hub import SenderHub
from tandem.rpc.cluster_grpc import CLIENT_OPTIONS, SERVER_OPTIONS
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.kv_layout import KVLayout
from tests.support.kv_transfer.handoff_fakes import BLOCK, SETTINGS, DecodeOwner, Pool, Prefill, PrefillOwner

HEADS, LAYERS, HEAD_DIM = 4, 3, 8
_HEAD_BYTES = BLOCK * HEAD_DIM * 4


def ranked_layout(tp: int, *, num_regions: int | None = None, heads: int = HEADS) -> KVLayout:
    """The layout of a worker of so many ranks, each with a region of its own unless `num_regions` says otherwise."""
    return KVLayout(
        model_fingerprint="m",
        dtype="float32",
        num_layers=LAYERS,
        num_kv_heads=heads,
        head_dim=HEAD_DIM,
        block_size=BLOCK,
        tp_size=tp,
        num_regions=tp if num_regions is None else num_regions,
    )


def head_bytes(tokens: tuple[int, ...], layer: int, kv: int, head: int) -> bytes:
    """What one block of these tokens holds of one head of K or V in one layer."""
    return random.Random(repr((tokens, layer, kv, head))).randbytes(_HEAD_BYTES)


class RankedPool(Pool):
    """Memory that this process can see, so that tests can look at it, but that transports are not told how to map."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, is_mappable: bool = False) -> None:
        super().__init__(num_blocks)
        self.layout = layout
        size = num_blocks * layout.region_block_bytes
        self.memories = [SharedPool(size) for _ in range(layout.num_regions)]
        self.regions = [
            KVRegion.from_buffer(memory.buffer, layout, fd=memory.fd if is_mappable else None)
            for memory in self.memories
        ]

    def write(self, block, tokens: tuple[int, ...]) -> None:
        for view, expected in self._heads(block, tokens):
            view[:] = expected

    def holds(self, block, tokens: tuple[int, ...]) -> bool:
        return all(view == expected for view, expected in self._heads(block, tokens))

    def _heads(self, block, tokens):
        """(memory, right content) of every head that a rank holds, by counting through the ranks."""
        layout = self.layout
        local, replicas = layout.num_local_kv_heads, max(1, layout.tp_size // layout.num_kv_heads)
        for rank in range(layout.tp_size):
            region, place = divmod(rank, layout.ranks_per_region)
            for layer in range(layout.num_layers):
                at = ((place * layout.num_layers + layer) * self.num_blocks + block) * layout.layer_block_bytes
                for kv in range(2):
                    for index in range(local):
                        begin = at + (kv * local + index) * _HEAD_BYTES
                        head = rank // replicas * local + index
                        view = self.regions[region].buffer[begin : begin + _HEAD_BYTES]
                        yield view, head_bytes(tokens, layer, kv, head)


@dataclass(frozen=True, kw_only=True)
class RankedPair:
    """A prefill and a decode worker whose pools are in regions."""

    hub: ReceiverHub
    decode: DecodeOwner
    prefill: Prefill


async def open_pair(
    stack: AsyncExitStack,
    pools: tuple[RankedPool, RankedPool],
    sending: Sequence[SendingRegion],
    receiving: Sequence[ReceivingRegion],
    settings: TransferSettings = SETTINGS,
) -> RankedPair:
    """Open both workers over real gRPC; `pools` are the prefill worker's and the decode worker's."""
    here, there = pools
    prefill = await open_prefill(stack, here, sending, settings)
    options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    decode = DecodeOwner(there)
    hub = await stack.enter_async_context(
        ReceiverHub(
            _local("d", 22, there),
            owner=decode,
            regions=receiving,
            dialer=Dialer(open_channel=lambda address: grpc.aio.insecure_channel(address, options=options)),
            settings=settings,
        )
    )
    return RankedPair(hub=hub, decode=decode, prefill=prefill)


async def open_prefill(
    stack: AsyncExitStack,
    pool: RankedPool,
    sending: Sequence[SendingRegion],
    settings: TransferSettings = SETTINGS,
    *,
    incarnation: int = 11,
) -> Prefill:
    """Open a prefill worker over real gRPC."""
    owner = PrefillOwner(pool)
    hub = await stack.enter_async_context(
        SenderHub(_local("p", incarnation, pool), owner=owner, regions=sending, settings=settings)
    )
    owner.hub = hub
    server = grpc.aio.server(options=SERVER_OPTIONS)
    hub.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, None)
    return Prefill(owner, hub, server, port, incarnation)


def _local(name: str, incarnation: int, pool: RankedPool) -> LocalWorker:
    return LocalWorker(
        worker_id=WorkerId(name),
        incarnation=Incarnation(incarnation),
        layout=pool.layout,
        num_blocks=pool.num_blocks,
    )


SMALL_CHUNKS = replace(SETTINGS, chunk_bytes=2 * LAYERS * 2 * _HEAD_BYTES)
"""Several chunks in each lane."""
