"""Both hubs of one worker on its gRPC server, with the fetches in either direction."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from engine.distributed.ranks.ranks import RegionLink
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.regions.interface import SendingRegion
from kv_transfer.regions.local import LocalReceivingRegion, LocalSendingRegion
from kv_transfer.regions.remote import RemoteRegion, open_region
from kv_transfer.regions.wire import RegionEnds
from kv_transfer.session.peer import LocalWorker
from kv_transfer.session.receiver_attempt import ReceiverOwner
from kv_transfer.session.receiver_hub import ReceiverHub
from kv_transfer.session.receiver_link import Dialer
from kv_transfer.session.sender_hub import SenderHub
from kv_transfer.session.stats import TransferStats
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from kv_transfer.transports.tcp.settings import PLAIN, TcpSettings
from tandem.rpc.cluster_grpc import ClusterAuth, ClusterChannels
from tandem.telemetry.tracing import NoTracer, Tracer
from tandem.v1 import session_pb2 as pb
from tandem.values.worker_identity import WorkerIdentity
from worker.engine_host import EngineHost
from worker.kv_exchange.fetch import FetchStats
from worker.kv_exchange.fetcher import Fetcher
from worker.kv_exchange.lender import Lender
from worker.kv_exchange.migration_target import MigrationTarget
from worker.kv_exchange.owners import IncomingTransfers, OutgoingTransfers, PromptOwner

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The parts of a worker that move KV; usable as long as the stack that they were opened on."""

    sender_hub: SenderHub
    receiver_hub: ReceiverHub
    fetcher: Fetcher
    lender: Lender
    migration_target: MigrationTarget
    transports: tuple[str, ...]
    """Transports that the worker can send with, best first."""

    def report(self) -> pb.TransferReport:
        """Counts since start, and current gauges."""
        lender = self.lender
        return transfer_report(
            self.sender_hub,
            self.receiver_hub,
            self.fetcher.stats,
            inherited=self.migration_target.report(),
            num_loans=lender.num_loans,
            num_lent_tokens=lender.num_lent_tokens,
        )

    async def finish(self) -> None:
        """Accept no new prompts and wait for the current ones; the cache is still lent."""
        await self.sender_hub.finish_prompts()

    async def drain(self) -> None:
        """Accept no new work, and wait until no transfer is left in either direction."""
        # In this order: until the last prompt has left, another fetch may begin for one.
        await self.sender_hub.drain()
        await self.receiver_hub.drain()


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricPlan:
    """Parameters of a worker's Fabric."""

    identity: WorkerIdentity
    host: EngineHost
    region: KVRegion
    """The pool, or rank 0's part of it."""
    transport: str
    """A name of kv_transfer's catalogue, or `auto`."""
    settings: TransferSettings
    auth: ClusterAuth
    spawn: Spawn
    channels: ClusterChannels = field(default_factory=lambda: ClusterChannels(None))
    """Reach other workers."""
    prompts: PromptOwner | None = None
    """Computes prompts for other workers; None on a decode worker."""
    handoffs: ReceiverOwner | None = None
    """Receives prompts computed by other workers; None on a prefill worker."""
    tracer: Tracer = field(default_factory=NoTracer)
    in_process: MemoryFabric | None = None
    """Connects workers that live in one process."""
    isolated_network: bool = False
    """Whether only this cluster can reach the network between its workers."""
    tcp: TcpSettings = PLAIN
    rank_links: dict[int, RegionLink] = field(default_factory=dict)
    """Connections to the other ranks' regions, which are taken out; empty where all ranks' KV is in `region`."""


async def open_fabric(stack: AsyncExitStack, server: Any, plan: FabricPlan) -> Fabric:
    """Open both hubs on `stack` and register them with `server`, which does not serve yet.

    Raises ConfigError when a forced transport cannot work here, OSError when its port cannot be listened on.
    """
    identity, region = plan.identity, plan.region
    # KV is received on the host that serves the control channel: a peer that reaches one reaches the other.
    kv_host = identity.address.rpartition(":")[0].strip("[]")
    senders = open_senders(
        region,
        choice=plan.transport,
        fabric=plan.in_process,
        isolated_network=plan.isolated_network,
        tcp=plan.tcp,
    )
    receivers = open_receivers(
        region,
        choice=plan.transport,
        host=kv_host,
        fabric=plan.in_process,
        isolated_network=plan.isolated_network,
        tcp=plan.tcp,
    )
    local = LocalWorker(
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        layout=region.layout,
        num_blocks=region.num_blocks,
    )
    name = f"{identity.worker_id}/{identity.incarnation}"
    fetcher = Fetcher(plan.host, name=name, spawn=plan.spawn, tracer=plan.tracer)
    lender = Lender(plan.host)
    others = await _other_regions(stack, plan, kv_host)
    receiver_hub = ReceiverHub(
        local,
        owner=IncomingTransfers(fetcher, plan.handoffs),
        regions=(LocalReceivingRegion(region, receivers), *others),
        dialer=Dialer(open_channel=plan.channels.open, metadata=plan.auth.client_metadata()),
        settings=plan.settings,
        tracer=plan.tracer,
    )
    departures = OutgoingTransfers(lender, plan.prompts, fetcher)
    sending: tuple[SendingRegion, ...] = (LocalSendingRegion(region, senders), *others)
    sender_hub = SenderHub(local, owner=departures, regions=sending, settings=plan.settings, tracer=plan.tracer)
    fetcher.hub = await stack.enter_async_context(receiver_hub)
    lender.hub = await stack.enter_async_context(sender_hub)
    sender_hub.on_unwanted = departures.on_unwanted
    sender_hub.register(server)
    return Fabric(
        sender_hub=sender_hub,
        receiver_hub=receiver_hub,
        fetcher=fetcher,
        lender=lender,
        migration_target=MigrationTarget(plan.host, fetcher, spawn=plan.spawn),
        transports=sending[0].transports,
    )


async def _other_regions(stack: AsyncExitStack, plan: FabricPlan, kv_host: str) -> list[RemoteRegion]:
    """Open the ends of the regions of the other ranks, in order of ranks. Raises ConfigError."""
    tls = plan.tcp.tls
    ends = RegionEnds(
        transport=plan.transport,
        host=kv_host,
        isolated_network=plan.isolated_network,
        tcp_streams=plan.tcp.streams,
        tls=None if tls is None else tls.files,
    )
    regions = []
    for rank in sorted(plan.rank_links):
        link = plan.rank_links.pop(rank)
        region = await open_region(link.sock, ends, f"rank {rank}", plan.spawn, on_cut=link.on_cut)
        stack.push_async_callback(region.aclose)
        regions.append(region)
    return regions


def transfer_report(
    sender_hub: SenderHub,
    receiver_hub: ReceiverHub,
    fetches: FetchStats,
    *,
    num_loans: int,
    num_lent_tokens: int,
    inherited: Sequence[pb.MigratedBlocks] = (),
) -> pb.TransferReport:
    """Counts since start, and current gauges."""
    return pb.TransferReport(
        sent=_side(sender_hub.stats),
        received=_side(receiver_hub.stats),
        fetches_started=fetches.started,
        fetches_completed=fetches.completed,
        fetches_failed=fetches.failed,
        fetches_declined=fetches.declined,
        fetched_tokens=fetches.num_tokens,
        lent_tokens=num_lent_tokens,
        pinned_blocks=sender_hub.num_pinned_blocks,
        leased_blocks=receiver_hub.num_leased_blocks,
        quarantined_blocks=receiver_hub.stats.quarantined_blocks,
        loans=num_loans,
        inherited=inherited,
    )


def _side(stats: TransferStats) -> pb.TransferSide:
    ended = [
        pb.TransferEnds(
            fetch=key.is_fetch,
            transport=key.transport,
            outcome=key.outcome.value,
            count=totals.count,
            num_bytes=totals.num_bytes,
            seconds=totals.seconds,
            chunks=totals.chunks,
            damaged_chunks=totals.nacks,
        )
        for key, totals in stats.ended.items()
    ]
    return pb.TransferSide(
        started=stats.started,
        ended=ended,
        bad_messages=stats.bad_messages,
        live=stats.live,
        bytes_per_s=stats.bytes_per_s,
    )
